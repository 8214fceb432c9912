"""What is under way between devices beside what is computed: gathered ahead, summed afterwards."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_jax.engine import expert_all_to_all
from zero_jax.engine.loops import TOGETHER
from zero_jax.plan.flat_program import Operation, Value
from zero_jax.plan.lifespans import SOLID, readers_of
from zero_jax.releases import COLLECTIVES_AT_ONCE


@dataclass(frozen=True)
class Held:
    """A value that is alive at the worst instant.

    Attributes:
      bytes: on one device.
      term: one of `TERMS` of `forecast`.
      what: dtype and shape, "bf16[36,4,1024,4096]".
      made_by: the operation and where it stands in the traced function.
    """

    bytes: int
    term: str
    what: str
    made_by: str


@dataclass(frozen=True)
class Habits:
    """Of the compiler.

    Attributes:
      ahead: whether loops over layers gather the next one's weights while one computes; what that
        leaves at their ends is in `loop_ends`.
      bucket_bytes: the most that collectives move at once. Of a layer of more than two buckets one
        is gathered ahead by the worst instant, since later ones take the place of weights that are
        not needed any more, and as many are still to be summed as are under way at a time.
      of_gpus: whether it is that for GPUs. It computes fused results before the operation that
        needs them in memory, writes them over what they read last, and puts no reduction off.
    """

    ahead: bool = False
    bucket_bytes: float = math.inf
    of_gpus: bool = False


def gathered(layer: Sequence[Operation], habits: Habits, which: str) -> list[Held]:
    """Of the weights that a layer gathers those that are there before it begins."""
    weights = (
        o for o in layer if o.name == "all_gather" and expert_all_to_all.SCOPE not in o.context
    )
    values = [v for o in weights for v in o.outputs]
    bucket = habits.bucket_bytes
    most = math.inf if sum(v.bytes for v in values) <= TOGETHER * bucket else bucket
    there = _within(values, most) if habits.ahead else []
    return [held_as(v, "copy", f"all_gather of {which}") for v in there]


def summed(
    layer: Sequence[Operation], habits: Habits, which: str = "the layer before"
) -> list[Held]:
    """Of a layer's gradients those that are summed over devices while the next one computes."""
    waiting = [v for o in _under_way(layer, habits) for v in o.inputs]
    return [held_as(v, "buffers", f"reduce_scatter of {which}") for v in waiting]


def turned(layer: Sequence[Operation], habits: Habits) -> list[Held]:
    """Of these gradients those that XLA for GPUs lays out anew before it sums them."""
    waiting = [v for o in _under_way(layer, habits) if is_turned(o) for v in o.inputs]
    return [held_as(v, "buffers", "turned for reduce_scatter") for v in waiting]


def is_turned(operation: Operation) -> bool:
    """Whether it scatters along a later dim than the first, which has to come first in memory."""
    if operation.name != "reduce_scatter" or len(operation.inputs) != 1:
        return False
    whole, part = operation.inputs[0].shape, operation.outputs[0].shape
    same = itertools.takewhile(lambda sizes: sizes[0] == sizes[1], zip(whole, part, strict=True))
    return math.prod(size for size, _ in same) > 1


def _under_way(layer: Sequence[Operation], habits: Habits) -> list[Operation]:
    """Those of a layer's sums over devices that go on while the next one computes."""
    readers = readers_of(layer)
    waiting = [
        o
        for o in layer
        if o.name == "reduce_scatter" and not _behind_barrier(layer, o.outputs[0], readers)
    ]
    given = [v for o in waiting for v in o.inputs]
    within = set(_within(given, COLLECTIVES_AT_ONCE * habits.bucket_bytes))
    return [o for o in waiting if within.issuperset(o.inputs)]


def held_as(value: Value, term: str, made_by: str) -> Held:
    """A value as it is told of, "bf16[36,4,1024,4096]"."""
    what = f"{value.dtype}{list(value.shape)}".replace(" ", "")
    return Held(value.bytes, term, what, made_by)


def total(held: Iterable[Held]) -> int:
    """Bytes of all of them."""
    return sum(h.bytes for h in held)


def _behind_barrier(
    layer: Sequence[Operation], value: Value, readers: dict[Value, list[int]]
) -> bool:
    """Whether it goes through a barrier, on its way out of the loop."""
    reads = [layer[r] for r in readers.get(value, ())]
    return any(
        o.name == "optimization_barrier"
        or (o.name not in SOLID and any(_behind_barrier(layer, v, readers) for v in o.outputs))
        for o in reads
    )


def _within(values: Iterable[Value], most: float) -> list[Value]:
    """The first of these values, up to so many bytes."""
    found = []
    for value in values:
        most -= value.bytes
        if most >= 0:
            found.append(value)
    return found
