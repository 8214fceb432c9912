"""Layers that are not scanned, as layers with explicit passes, or in groups of these."""

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays
from zero_jax.engine.layer_block import Block, stopped
from zero_jax.engine.layers import ExplicitLayers, LayerNode, heads_of
from zero_jax.engine.lazy_param import LazyParam, Operands, Param, full
from zero_jax.engine.lifetimes import Positions
from zero_jax.engine.replay import BLOCK, How, replay
from zero_jax.remat import recompute
from zero_jax.remat.policies import can_move
from zero_jax.tracing import jaxpr as equations

# Remat policies of unrolled layers that run without explicit passes, and why.
NOT_PREFETCHED = {"block_sqrt": "run in groups", "none": "not prefetched: nothing is recomputed"}


@dataclasses.dataclass(frozen=True)
class UnrolledLayers:
    """Layers that follow on each other in a program.

    Attributes:
      env: Values of variables before the layers; `run` adds those of the results.
      stretch: Makes a jaxpr of equations.
      fixed: The inputs of the program, which exist during the whole step.
      how: How equations are run.
    """

    env: dict[jex.Var, Any]
    stretch: equations.Stretches
    fixed: Container[jex.Var]
    how: How

    def run(self, layers: Sequence[Sequence[int]], heads: Sequence[Param] = ()) -> list[Any]:
        """Runs layers, each given by its equations.

        Args:
          layers: The equations of each.
          heads: Parameters that are last used after the layers.

        Returns:
          The gathered heads.
        """
        bodies = [self.stretch(layer) for layer in layers]
        last = self.stretch.last_read
        made = [v for body in bodies for v in body.jaxpr.outvars]
        results = [v for v in made if last[v] > layers[-1][-1]]
        moves = [self._inputs(body, layer) for body, layer in zip(bodies, layers, strict=True)]
        outs = _explicit(bodies, self.env, results, moves, heads, self.how)
        self.env.update(zip(results, outs, strict=False))
        return outs[len(results) :]

    def run_in_groups(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs groups of about √L layers, for `block_sqrt`; see `scans.LayerScan`."""
        size = round(math.sqrt(len(layers)))
        for start in range(0, len(layers), size):
            self._group(layers[start : start + size])

    def _group(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs layers, which are run again as a whole, and then each by itself."""
        body = self.stretch([at for layer in layers for at in layer])
        operands = Operands([self.env[v] for v in body.jaxpr.invars])
        plain = [v for v in body.jaxpr.invars if not isinstance(self.env[v], LazyParam)]
        own = self._inputs(body, layers[-1])
        places = {i: self.how.policy.inputs for i, v in enumerate(plain) if v in own}
        starts = [sum(map(len, layers[:i])) for i in range(len(layers))]
        inner = [range(a, a + len(layer)) for a, layer in zip(starts, layers, strict=True)]

        def run(flat: Sequence[Any], *_: Any) -> list[Any]:
            # The backward pass of a group's last layer follows directly on its forward pass.
            inside = dataclasses.replace(self.how, policy=BLOCK)
            positions = Positions([inner], inner[0][0])
            return self.how.evaluate(body, operands.rebuilt(flat), inside, positions)

        outs = recompute.layer(run, places, barrier=True)(*operands.flat)
        self.env.update(zip(body.jaxpr.outvars, outs, strict=True))

    def _inputs(self, body: jex.ClosedJaxpr, layer: Sequence[int]) -> set[jex.Var]:
        """Returns inputs that no later layer reads: they are saved where the policy says."""
        return {
            v
            for v in body.jaxpr.invars
            if v not in self.fixed and can_move(v.aval) and self.stretch.last_read[v] <= layer[-1]
        }


def _explicit(
    bodies: Sequence[jex.ClosedJaxpr],
    env: Mapping[jex.Var, Any],
    results: Sequence[jex.Var],
    moves: Sequence[Container[jex.Var]],
    heads: Sequence[Param],
    how: How,
) -> list[Any]:
    """Runs layers with the passes of `layers.py`.

    Args:
      bodies: The layers.
      env: The values of their inputs.
      results: Results that are read after the last layer.
      moves: The inputs of each layer that are saved where the remat policy says.
      heads: Parameters that are last used after the layers.
      how: How equations are run.

    Returns:
      The results, then the gathered heads.
    """
    numbers: dict[jex.Var, int] = {}
    links: list[LayerNode] = []
    shards: list[Any] = []
    parts = [[v for v in body.jaxpr.invars if isinstance(env.get(v), LazyParam)] for body in bodies]
    reads = [
        [v for v in body.jaxpr.invars if v not in own]
        for body, own in zip(bodies, parts, strict=True)
    ]
    readers = collections.Counter(v for own in reads for v in own)
    for body, weights, inputs, own in zip(bodies, parts, reads, moves, strict=True):
        operands = Operands([env[v] for v in weights])
        count, makes = len(operands.params), body.jaxpr.outvars
        values = _values_of(body, weights, operands)
        block = Block(
            run=replay(body, values, {*weights}, how, in_loop=False, midway=True),
            params=operands.params,
            places={count + k: how.policy.inputs for k, v in enumerate(inputs) if v in own},
            stopped=stopped(operands),
            remote={k for k, x in enumerate(operands.params) if not x.local},
        )
        for v in (*inputs, *makes):
            numbers.setdefault(v, len(numbers))
        links.append(
            LayerNode(
                block=block,
                reads=[numbers[v] for v in inputs],
                types=[v.aval for v in inputs],
                makes=[numbers[v] for v in makes],
                floats=list(map(equations.is_float, makes)),
                ordered=[numbers[v] for v in inputs if readers[v] == 1],
                saves=range(len(inputs)),
                group=len(links),
            )
        )
        shards.append([list(param.arrays) for param in operands.params])
    made = {v for body in bodies for v in body.jaxpr.outvars}
    given = [v for v in dict.fromkeys(v for own in reads for v in own) if v not in made]
    names = [numbers[v] for v in given], [numbers[v] for v in results]
    layers = ExplicitLayers(links, heads_of(heads), *names, how)
    shards.append([list(param.arrays) for param in heads])
    return layers.run([env[v] for v in given], shards)


def _values_of(
    body: jex.ClosedJaxpr, weights: Sequence[jex.Var], operands: Operands
) -> Callable[[Arrays], list[Any]]:
    """Returns a function from the arguments of a layer to the operands of its body."""
    count = len(operands.params)

    def values(args: Arrays) -> list[Any]:
        params, rest = iter(operands.of([], list(map(full, args[:count])))), iter(args[count:])
        return [next(params if v in weights else rest) for v in body.jaxpr.invars]

    return values
