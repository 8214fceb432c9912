"""When each value of a traced program is in memory.

Elementwise operations are taken to be fused into what reads them, so their results are nowhere,
and prolong the life of what they read. Results of products, reductions, loops and collectives are
in memory from the operation that makes them to the last that reads them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_jax.plan.flat_program import IN_PLACE, Operation, Value

# Other views of the same bytes.
VIEWS = frozenset(
    (
        *("reshape", "squeeze", "expand_dims", "copy", "copy_p", "optimization_barrier", "pcast"),
        *("name", "stop_gradient", "bitcast_convert_type"),
    )
)
SUMS_OVER_DEVICES = frozenset(("reduce_scatter", "psum", "psum_invariant"))
# Their results are in memory; what they read is fused into them.
REDUCTIONS = frozenset(
    (
        "gather",
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("argmax", "argmin"),
    )
)
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
# Their operands and results are in memory; everything not named here or above is fused.
SOLID = (
    SUMS_OVER_DEVICES
    | IN_PLACE
    | PRODUCTS
    | frozenset(
        (
            *("scan", "while", "cond", "all_gather"),
            *("all_to_all", "ppermute", "sort", "cumsum", "device_put"),
            *("rng_bit_generator", "top_k", "pallas_call", "ffi_call"),
        )
    )
)

# The first and the last time at which something reads a value.
Times = dict[Value, tuple[int, int]]


@dataclass(frozen=True)
class Span:
    """A value in memory, from `start` to `stop` (both included); operation i runs at time 2i."""

    value: Value
    made_at: int
    start: int
    stop: int


def readers_of(operations: Sequence[Operation]) -> dict[Value, list[int]]:
    """Which operations read each value, in order."""
    readers: dict[Value, list[int]] = {}
    for at, operation in enumerate(operations):
        for value in operation.inputs:
            readers.setdefault(value, []).append(at)
    return readers


def _view_of(value: Value, operation: Operation) -> Value:
    """What an operation that only shows its operands in another way makes of one of them."""
    same = len(operation.inputs) == len(operation.outputs)
    return operation.outputs[operation.inputs.index(value) if same else 0]


def spans_of(
    operations: Sequence[Operation], results: set[Value], end: int, of_gpus: bool = False
) -> list[Span]:
    """When each value is in memory; fused values and views are not, and prolong what they read.

    Args:
      operations: in the order in which they run.
      results: what is handed on at the end; the optimizer, or the loop's own state, takes them
        as they are computed, so fused ones need no memory of their own.
      end: the time after the last operation.
      of_gpus: as of `forecast.Habits`.
    """
    readers, before = readers_of(operations), int(of_gpus)
    times: Times = {}
    stored: dict[Value, bool] = {}
    needed: dict[Value, bool] = {}
    for at in range(end - 1, -1, -1):
        operation = operations[at]
        solid = operation.name in SOLID or operation.name in REDUCTIONS
        for value in operation.outputs:
            reads = [(2 * end, 2 * end)] if value in results else []
            needed[value] = False
            for r in readers.get(value, ()):
                reader = operations[r]
                if reader.name in SOLID or reader.name in REDUCTIONS:
                    reads.append((2 * r, 2 * r))
                    needed[value] |= reader.name in SOLID
                elif reader.name in VIEWS:
                    view = _view_of(value, reader)
                    # What a loop's state takes behind a barrier is computed there.
                    now = not solid and reader.name == "optimization_barrier" and view in results
                    reads.append((2 * r, 2 * r) if now else times[view])
                    # Nothing is fused through a barrier.
                    needed[value] |= needed[view] or reader.name == "optimization_barrier"
                else:
                    made = reader.outputs
                    reads += [(times[o][0] - before,) * 2 if stored[o] else times[o] for o in made]
            times[value] = (
                min((first for first, _ in reads), default=2 * end),
                max((last for _, last in reads), default=2 * at),
            )
            stored[value] = solid or (needed[value] and operation.name not in VIEWS)
    spans = []
    # What a loop updates in place is counted as its result, unless somebody still needs the old.
    moved = {
        given
        for at, operation in enumerate(operations)
        for given, _ in operation.carried
        if times.get(given, (0, 2 * at))[1] == 2 * at
    }
    until: dict[Value, int] = {}
    if of_gpus:
        moved |= _overwritten(operations, times, stored)
        until = _computed_together(operations, times, stored)
    for at, operation in enumerate(operations):
        solid = operation.name in SOLID or operation.name in REDUCTIONS
        for value in operation.outputs:
            if stored[value] and value.bytes:
                first, last = times[value]
                start = 2 * at if solid else min(first, last) - before
                stop = last - 1 if value in moved else max(start, last, until.get(value, 0))
                if start <= stop:
                    spans.append(Span(value, at, start, stop))
    return spans


def _fused_reads(
    operations: Sequence[Operation], stored: Mapping[Value, bool], within: bool
) -> dict[Value, dict[Value, None]]:
    """What is in memory and each fused value is made of; `within` the barrier before it, if asked
    so: the same value on both sides of one counts as two."""
    reads: dict[Value, dict[Value, None]] = {}  # in order, each once
    for operation in operations:
        if operation.name in SOLID or operation.name in REDUCTIONS:
            continue
        given = operation.inputs
        own = dict.fromkeys(u for v in given for u in ([v] if stored.get(v, True) else reads[v]))
        for value in operation.outputs:
            apart = within and operation.name == "optimization_barrier"
            reads[value] = {value: None} if apart else own
    return reads


def _overwritten(
    operations: Sequence[Operation], times: Times, stored: Mapping[Value, bool]
) -> set[Value]:
    """Values in whose place fused results of their size are written, as they are read last."""
    found = set[Value]()
    for value, reads in _fused_reads(operations, stored, within=False).items():
        now = min(times[value]) - 1
        dying = (u for u in reads if u not in found and u in times and times[u][1] == now)
        if stored[value]:
            found.update(itertools.islice((u for u in dying if u.bytes == value.bytes), 1))
    return found


def _computed_together(
    operations: Sequence[Operation], times: Times, stored: Mapping[Value, bool]
) -> dict[Value, int]:
    """Until when fused results are kept that one kernel makes of the same value, of as many
    elements: the kernel runs when the last of them is needed."""
    made: dict[Value, list[Value]] = {}
    for value, reads in _fused_reads(operations, stored, within=True).items():
        if stored[value]:
            for given in reads:
                if math.prod(given.shape) == math.prod(value.shape):
                    made.setdefault(given, []).append(value)
    until: dict[Value, int] = {}
    for values in made.values():
        runs = max(min(times[value]) - 1 for value in values)
        until |= {value: max(runs, until.get(value, 0)) for value in values}
    return until
