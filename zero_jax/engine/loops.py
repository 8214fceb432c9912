"""A scan over weights: slices of their shards go into it, and are gathered in its body."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.engine.replay import How, replay
from zero_jax.engine.riders import loop as riding
from zero_jax.engine.weights import Apart, Source, Weight, follow, opened
from zero_jax.remat import layer_groups, recompute
from zero_jax.remat.policies import DEVICE
from zero_jax.tracing import jaxpr as equations


class Loop:
    """A scan over weights.

    Args:
      eqn: the scan.
      consts, carried: how many of its inputs are constants, and how many its carry.
      values: its inputs.
      riders: arrays that ride through it, see `riders.py`.
    """

    def __init__(
        self,
        eqn: jex.JaxprEqn,
        consts: int,
        carried: int,
        values: Sequence[Any],
        riders: Sequence[Any] = (),
    ):
        self.body = equations.written_out(equations.inner(eqn))
        self.params, self.consts, self.carried = eqn.params, consts, carried
        self.riders = list(riders)
        self.sliced = {
            i
            for i, x in enumerate(values)
            if i >= consts + carried and isinstance(x, Weight) and x.form.may_slice
        }
        self.slices = Apart([values[i].sliced() for i in sorted(self.sliced)])
        self.others = [x for i, x in enumerate(values) if i not in self.sliced]

    @property
    def given(self) -> list[Any]:
        """What `run` is given: inputs that are not sliced weights, arrays of those, riders."""
        return [*self.others, *self.slices.arrays, *self.riders]

    def run(self, given: Sequence[Any], how: How) -> list[Any]:
        """Its results, and the riders, given all that it reads, whole."""
        length, reverse = self.params["length"], self.params["reverse"]
        unroll, before, counts = self.params["unroll"], self.consts, (self.consts, self.carried)
        given, riders = _parted(given, len(self.riders))
        if how.policy.kind == "none":

            def step(*flat: Any) -> list[Any]:
                outs = how.evaluate(
                    self.body, self._values(flat), dataclasses.replace(how, in_loop=True)
                )
                return list(map(opened, outs))

            return riding(step, given, counts, length, reverse, unroll, riders)
        within = self._summed_within(how.bucket_bytes)
        place = how.policy.inputs if self.sliced else DEVICE
        # Groups read their layers through `stop_gradient`, which second derivatives must not do.
        grouped = how.policy.kind == "block_sqrt" and self.sliced and not how.outside
        if grouped and layer_groups.size_of(length) > 1:
            layer = self._layer(how)
            outs = layer_groups.scan(layer, given, counts, length, reverse, place, within)
            return [*outs, *riders]  # a group is run again as a whole
        places = {i: place for i in range(before, before + self.carried)}
        # No barrier is needed: forward and backward of a scan are loops of their own.
        layer = recompute.layer(self._layer(how), places, barrier=False, within=within)
        return riding(layer, given, counts, length, reverse, unroll, riders)

    def _values(self, flat: Sequence[Any]) -> list[Any]:
        """What the body is given, of the arrays that one turn has."""
        count = len(self.others)
        others, slices = iter(flat[:count]), iter(self.slices.together(flat[count:]))
        both = range(len(self.body.jaxpr.invars))
        return [next(slices) if i in self.sliced else next(others) for i in both]

    def _layer(self, how: How) -> recompute.Run:
        weights = {self.body.jaxpr.invars[i] for i in self.sliced}
        return replay(self.body, self._values, weights, how, in_loop=True)

    def _summed_within(self, bucket_bytes: float) -> list[int]:
        """Which of the arrays of a turn have gradients that are not left to the next turn."""
        if not self.sliced:
            return []
        opens = zip(sorted(self.sliced), self.slices.of([], self.slices.sources), strict=True)
        named = [(self.body.jaxpr.invars[i], x) for i, x in opens]
        own = summed_within(self.body.jaxpr, dict(named), bucket_bytes)
        starts: dict[Any, int] = {}
        at = len(self.others)
        for source in self.slices.sources:
            starts[source], at = at, at + len(source.arrays)
        return [starts[s] + i for s in own for i in range(len(s.arrays))]


def _parted(values: Sequence[Any], last: int) -> tuple[list[Any], list[Any]]:
    """All but the last few, and these."""
    at = len(values) - last
    return list(values[:at]), list(values[at:])


# A layer of so many buckets at most is gathered, and summed, while its neighbours compute.
TOGETHER = 2


def summed_within(
    jaxpr: jex.Jaxpr, weights: Mapping[jex.Var, Weight], bucket_bytes: float
) -> list[Source]:
    """Returns the leaves of a layer whose gradients are summed over devices within its iteration.

    XLA for GPUs reduce-scatters a layer's gradients while the next layer computes, so all of them
    are held unsummed until then. Gradients that fit in one bucket are sent together, when the last
    of them is computed. In a layer of more than `TOGETHER` buckets, the matrices used last are sent
    first, overlapped with the rest of the layer's own backward pass. Up to half of the layer is
    then summed before the next iteration. With two buckets this saves nothing: XLA leaves the first
    one exposed (docs/performance-tables.md).

    Args:
      jaxpr: A scanned layer.
      weights: The inputs of the layer that are slices of leaves.
      bucket_bytes: Maximum bytes per collective.

    Returns:
      The sources, for the positions given to `layer`.
    """
    forms = {var: weight.form for var, weight in weights.items()}
    sources = {weight.form.leaf: weight.source for weight in weights.values()}
    sizes = {weight.form.leaf: equations.bytes_of(var) for var, weight in weights.items()}
    ranks = {weight.form.leaf: weight.form.rank for weight in weights.values()}
    left = sum(sizes.values()) / 2
    if 2 * left <= TOGETHER * bucket_bytes:
        return []
    order: dict[int, None] = {}
    for eqn in jaxpr.eqns:
        mine = [forms[a].leaf for a in eqn.invars if equations.is_in(a, forms)]
        if mine and not follow(eqn, forms):
            order.update(dict.fromkeys(mine))
    found = []
    # Never that of the first matrix: it comes last, and would be summed in the open.
    for leaf in reversed([leaf for leaf in order if ranks[leaf] > 1][1:]):
        if sizes[leaf] <= left:
            left -= sizes[leaf]
            found.append(sources[leaf])
    return found
