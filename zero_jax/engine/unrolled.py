"""Runs layers that are not scanned, as the remat policy says: one by one, in groups, as a chain."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.engine import chain
from zero_jax.engine.replay import How, replay
from zero_jax.engine.weights import Apart, Weight, whole
from zero_jax.remat import layer_groups, policies, recompute
from zero_jax.remat.activations import can_move
from zero_jax.remat.policies import Place
from zero_jax.tracing import jaxpr as equations

_BLOCK = policies.parse("block")


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Layers in a program, and what is known where they begin.

    Attributes:
      env: values of variables; extended by the layers' results.
      stretch: makes a jaxpr of equations.
      fixed: variables that are there from the beginning, and stay.
      how: how equations are run.
    """

    env: dict[jex.Var, Any]
    stretch: equations.Stretches
    fixed: set[jex.Var]
    how: How

    def run(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs layers that follow on each other, each told by its equations."""
        if self.how.policy.kind == "none":
            for layer in layers:
                self._alone(layer)
        elif self.how.policy.kind == "block_sqrt":
            for group in layer_groups.neighbours(layers):
                self._group(group)
        else:
            self._chain(layers)

    def _alone(self, layer: Sequence[int]) -> None:
        """Runs a layer that keeps all it wants but the weights."""
        body, apart = self._taken(layer)
        apart = apart if apart.free else apart.tied()
        self._made(body.jaxpr.outvars, self.how.evaluate(body, apart.values, self.how))

    def _group(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs neighbouring layers, which are run again as a whole, and then each by itself."""
        body, apart = self._taken([at for layer in layers for at in layer])
        plain = [v for v in body.jaxpr.invars if not isinstance(self.env[v], Weight)]
        places = self._places(plain, layers[-1])
        starts = [sum(map(len, layers[:i])) for i in range(len(layers))]
        inner = [range(a, a + len(layer)) for a, layer in zip(starts, layers, strict=True)]

        def run(flat: Sequence[Any], *_: Any) -> list[Any]:
            inside = dataclasses.replace(self.how, policy=_BLOCK)
            return self.how.evaluate(body, apart.together(flat), inside, runs=[inner])

        self._made(body.jaxpr.outvars, recompute.layer(run, places, barrier=True)(*apart.flat))

    def _chain(self, layers: Sequence[Sequence[int]]) -> None:
        """Runs layers that gather while the one before them computes."""
        links, shards = zip(*map(self._link, layers), strict=True)
        made = {v for link in links for v in link.makes}
        given = list(dict.fromkeys(v for link in links for v in link.reads if v not in made))
        results = [v for v in made if self.stretch.last_read[v] > layers[-1][-1]]
        run = chain.chain(links, given, results)
        self._made(results, run([self.env[v] for v in given], list(shards)))

    def _link(self, layer: Sequence[int]) -> tuple[chain.Link, list[Any]]:
        """A layer as one of a chain, and the arrays of its weights."""
        body = self.stretch(layer)
        given = body.jaxpr.invars
        weights = {v for v in given if isinstance(self.env.get(v), Weight)}
        apart = Apart([self.env[v] for v in given if v in weights])
        reads = [v for v in given if v not in weights]

        def values(flat: Sequence[Any]) -> list[Any]:
            count = len(apart.sources)
            leaves, rest = iter(apart.of([], list(map(whole, flat[:count])))), iter(flat[count:])
            return [next(leaves if v in weights else rest) for v in given]

        run = replay(body, values, weights, self.how, in_loop=False, midway=True)
        places = self._places(reads, layer)
        return chain.Link(run, apart.sources, reads, body.jaxpr.outvars, places), apart.arrays

    def _taken(self, part: Sequence[int]) -> tuple[jex.ClosedJaxpr, Apart]:
        """Equations as a jaxpr, and its inputs."""
        body = self.stretch(part)
        return body, Apart([self.env[v] for v in body.jaxpr.invars])

    def _made(self, results: Sequence[jex.Var], values: Sequence[Any]) -> None:
        self.env.update(zip(results, values, strict=True))

    def _places(self, reads: Sequence[jex.Var], layer: Sequence[int]) -> dict[int, Place]:
        """Where a layer's input is kept: what it reads and nothing after it does, by position."""
        mine = (
            v not in self.fixed and can_move(v.aval) and self.stretch.last_read[v] <= layer[-1]
            for v in reads
        )
        return {i: self.how.policy.inputs for i, own in enumerate(mine) if own}
