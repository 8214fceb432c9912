"""Scans over sharded parameters: prefetched by `layers.py`, or by `jax.lax.scan`, in groups too."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.collectives.barriers import Arrays
from zero_jax.context_parallel.cudnn import kernel_target
from zero_jax.engine.compiler import MOST_BUCKETS
from zero_jax.engine.layer_block import Block, stopped
from zero_jax.engine.layers import UNROLL, ExplicitLayers, LayerNode, heads_of
from zero_jax.engine.lazy_param import LazyParam, Operands, Param, full
from zero_jax.engine.replay import BLOCK, How, replay
from zero_jax.remat import recompute
from zero_jax.remat.policies import Remat
from zero_jax.tracing import jaxpr as equations
from zero_jax.tracing import layer_detection
from zero_jax.tracing.dataflow import HasGradient, read_inputs
from zero_jax.tracing.forms import Form

# Layers of a scan are unrolled if all of them together have at most this many equations. XLA for an
# H200 compiles 12 layers of 124m (876 equations) in 0.9 to 1.2 times the CPU time of a loop. For 24
# layers on one device it takes 2.2 times, too long (jax 0.12.0.1, remat "none").
MOST_EQUATIONS = 1700


def fallback(
    jaxpr: jex.Jaxpr, forms: Mapping[jex.Var, Form], policy: Remat, bucket_bytes: float
) -> str:
    """Returns why `jax.lax.scan` runs the layers, not the passes of `layers.py`, or "".

    Args:
      jaxpr: The body of a scan.
      forms: Its inputs that are slices of parameters.
      policy: The remat policy.
      bucket_bytes: The maximum bytes per collective.
    """
    sizes = {form.leaf: equations.bytes_of(var) for var, form in forms.items()}
    if policy.kind == "block_sqrt":
        return "run in groups"
    if layer_detection.scans_of(jaxpr, forms):
        return "not prefetched: a layer scans over parameters"
    if sum(sizes.values()) > MOST_BUCKETS * bucket_bytes:
        return f"not prefetched: a layer is larger than {MOST_BUCKETS} buckets"
    return ""


def unrolls(jaxpr: jex.Jaxpr, length: int, policy: Remat) -> bool:
    """Returns whether the layers of a scan are unrolled where the scan is differentiated.

    The backward pass of a loop reads what it needs from stacks, which XLA for GPUs fills with zeros
    and then with the values. A policy that saves more than the input of a layer pays for that.

    Args:
      jaxpr: The body of a scan without a `fallback`.
      length: The number of layers.
      policy: The remat policy.
    """
    if policy.kind in ("block", "block_sqrt") or any(place.host for place in policy.places):
        return False
    small = length * len(list(equations.nested(jaxpr))) <= MOST_EQUATIONS
    return small and kernel_target().platform == "gpu"


class LayerScan:
    """A scan over layers of sharded parameters.

    Attributes:
      operands: Inputs of `run_by_jax` and `explicit`: operands that are not sliced parameters, then
        the shards of those. Operands read in every iteration are gathered before.
      others: The number of operands that are not sliced parameters.
      sliced: Positions of the sliced parameters among all operands.

    Args:
      eqn: The scan.
      values: Its operands, arrays or parameters.
      how: How equations are run.
    """

    def __init__(self, eqn: jex.JaxprEqn, values: Sequence[Any], how: How):
        self._eqn, self._how = eqn, how
        self._body = equations.written_out(equations.inner(eqn))
        self._consts, self._carried = equations.state_of(eqn)
        first = self._consts + self._carried
        own = {
            i: x.sliced()
            for i, x in enumerate(values)
            if i >= first and isinstance(x, LazyParam) and x.form.may_slice
        }
        self.sliced, self._slices = set(own), Operands(list(own.values()))
        self._stacks = Operands([values[i] for i in own])
        others = [x for i, x in enumerate(values) if i not in own]
        self.others, self.operands = len(others), [*others, *self._slices.arrays]
        self._weights = {self._body.jaxpr.invars[i]: weight for i, weight in own.items()}

    @functools.cached_property
    def is_explicit(self) -> bool:
        """True if the passes of `layers.py` run the scan."""
        how, forms = self._how, {v: weight.form for v, weight in self._weights.items()}
        if how.in_loop or how.once is not None or not self._eqn.params["length"]:
            return False
        gathers = any(not param.free for param in self._slices.params)
        return gathers and not fallback(self._body.jaxpr, forms, how.policy, how.bucket_bytes)

    def explicit(self, operands: Arrays, heads: Sequence[Param] = ()) -> list[Any]:
        """Runs the scan with the passes of `layers.py`.

        Args:
          operands: See above, then the shards of the heads.
          heads: Parameters that are last used after the scan.

        Returns:
          The results, then the gathered heads.
        """
        layers = self._layers(heads)
        it = iter(operands[self.others :])
        groups = self._slices.params, heads
        shards = [[[next(it) for _ in param.arrays] for param in group] for group in groups]
        return layers.run(operands[: self.others], shards)

    def _layers(self, heads: Sequence[Param]) -> ExplicitLayers:
        consts, carried, jaxpr = self._consts, self._carried, self._body.jaxpr
        params = self._slices.params
        flags = zip(jaxpr.invars, read_inputs(jaxpr, differentiated=False), strict=True)
        read = {self._weights[v].param for v, flag in flags if flag and v in self._weights}

        def values(args: Arrays) -> list[Any]:
            """Returns the operands of the body, given the arguments of a layer."""
            own = list(map(full, args[: len(params)]))
            return self._merged(args[len(params) :], self._slices.of([], own))

        block = Block(
            run=replay(self._body, values, {*self._weights}, self._how, in_loop=True, midway=True),
            params=params,
            places={len(params) + consts + i: self._how.policy.inputs for i in range(carried)},
            stopped=stopped(self._slices) | {*params} - read,
            # Others are whole on every device, or unused.
            remote={i for i, x in enumerate(params) if x in read and not x.local},
        )
        inputs, carry = range(self.others), range(consts, consts + carried)
        makes = [*carry, *range(len(inputs), len(inputs) + len(jaxpr.outvars) - carried)]
        length, step = self._eqn.params["length"], -1 if self._eqn.params["reverse"] else 1
        looped = max(0, length - 2) // UNROLL * UNROLL
        link = LayerNode(
            block=block,
            reads=inputs,
            types=[v.aval for i, v in enumerate(jaxpr.invars) if i not in self.sliced],
            makes=makes,
            floats=list(map(equations.is_float, jaxpr.outvars)),
            ordered=carry,
            saves=carry,
            group=0,
        )
        return ExplicitLayers(
            links=[dataclasses.replace(link, index=i) for i in range(length)[::step]],
            heads=heads_of(heads),
            given=inputs,
            results=makes,
            how=self._how,
            loop=range(1, 1 + looped) if looped else range(0),
            unroll=self._how.unroll,
            stacks=frozenset([*inputs[consts + carried :], *makes[carried:]]),
            moved=lambda inputs, shards: self._moved(block, inputs, shards),
        )

    def _moved(self, block: Block, inputs: set[int], shards: Sequence[Sequence[bool]]) -> set[int]:
        """Returns the inputs with a gradient in each layer, given those that have one at first."""
        trained = {block.params[at] for at in block.trained(shards)[1]}
        weights = [w.param in trained and not w.form.stopped for w in self._slices.values]
        flags = self._merged([n in inputs for n in range(self.others)], weights)
        flags = HasGradient().body(self._eqn, flags)[0]
        own = [i for i in range(len(flags)) if i not in self.sliced]
        variables = self._body.jaxpr.invars
        return {n for n, i in enumerate(own) if flags[i] and equations.is_float(variables[i])}

    def _merged(self, others: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
        """Returns a list in the order of the operands."""
        a, b = iter(others), iter(slices)
        return [next(b if i in self.sliced else a) for i in range(len(self._eqn.invars))]

    def run_by_jax(self, operands: Arrays) -> list[Any]:
        """Runs `jax.lax.scan`; the body gathers the parameters of one layer, and runs again in the
        backward pass as the remat policy says. Returns the results."""
        if self._grouped:
            return self._in_groups(operands)
        layer = replay(self._body, self._values, {*self._weights}, self._how, in_loop=True)
        # No barrier is needed: forward and backward of a scan are loops of their own.
        params = self._eqn.params
        return self._scan(self._recomputed(layer), operands, params["length"], params["unroll"])

    @property
    def _grouped(self) -> bool:
        # Groups of two or three layers would save no memory. A second derivative goes through the
        # explicit passes of a group, which have no rule for it.
        many = self._eqn.params["length"] > 3 and self.sliced
        return self._how.policy.kind == "block_sqrt" and bool(many) and not self._how.outside

    def _values(self, args: Arrays) -> list[Any]:
        """Returns the operands of the body, given those of one iteration."""
        return self._merged(args[: self.others], self._slices.rebuilt(args[self.others :]))

    def _recomputed(self, run: recompute.Run) -> Any:
        own = range(self._consts, self._consts + self._carried)
        places = dict.fromkeys(own, self._how.policy.inputs) if self.sliced else {}
        return recompute.layer(run, places, barrier=False)

    def _scan(self, step: Any, operands: Arrays, length: int, unroll: int = 1) -> list[Any]:
        """Runs `jax.lax.scan` with flat operands: constants, carry and stacks in this order."""
        first = self._consts + self._carried
        fixed, carry = operands[: self._consts], list(operands[self._consts : first])

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = step(*fixed, *carry, *xs)
            return outs[: self._carried], outs[self._carried :]

        reverse = self._eqn.params["reverse"]
        xs = list(operands[first:])
        carry, ys = jax.lax.scan(body, carry, xs, length=length, reverse=reverse, unroll=unroll)
        return [*carry, *ys]

    def _in_groups(self, operands: Arrays) -> list[Any]:
        """Runs groups of about √L layers, for `block_sqrt`: a group is run again as a whole, and
        then each of its layers. So 2·√L inputs of layers are held, for one more forward pass.

        Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174).
        """
        length, first = self._eqn.params["length"], self._consts + self._carried
        size = round(math.sqrt(length))
        count = length // size
        # The last group of the sequence has the layers that are left over.
        left = length - count * size
        bounds = (left, length) if self._eqn.params["reverse"] else (0, count * size)
        fixed, xs = operands[: self._consts], operands[first:]
        carry = operands[self._consts : first]
        groups = [jax.lax.reshape(x[slice(*bounds)], (count, size, *x.shape[1:])) for x in xs]
        outs = self._scan(self._group(size), [*fixed, *carry, *groups], count)
        carry, ys = outs[: self._carried], outs[self._carried :]
        ys = [jax.lax.reshape(y, (count * size, *y.shape[2:])) for y in ys]
        if left:
            rest = slice(0, left) if bounds[0] else slice(bounds[1], length)
            outs = self._group(left)(*fixed, *carry, *(x[rest] for x in xs))
            carry, more = outs[: self._carried], outs[self._carried :]
            pairs = zip(more, ys, strict=True) if bounds[0] else zip(ys, more, strict=True)
            ys = [jax.numpy.concatenate(pair) for pair in pairs]
        return [*carry, *ys]

    def _group(self, size: int) -> Any:
        """Returns a function that runs so many layers, and again in the backward pass."""
        eqn = self._eqn.replace(params={**self._eqn.params, "length": size})
        # The backward pass of a group's last layer follows directly on its forward pass.
        inside = dataclasses.replace(self._how, policy=BLOCK, keep_last=True)

        def group(args: Arrays, *_: Any) -> list[Any]:
            stacks = self._stacks.rebuilt(args[self.others :])
            scan = LayerScan(eqn, self._merged(args[: self.others], stacks), inside)
            return scan.explicit(args) if scan.is_explicit else scan.run_by_jax(args)

        return self._recomputed(group)
