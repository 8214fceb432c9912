"""When each value of a traced program is in memory.

Elementwise operations are taken to be fused into what reads them, so their results are nowhere,
and prolong the life of what they read. Results of products, reductions, loops and collectives are
in memory from the operation that makes them to the last that reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_jax.plan.flat_program import Operation, Value

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
# Their operands and results are in memory; everything not named here or above is fused.
SOLID = SUMS_OVER_DEVICES | frozenset(
    (
        *("dot_general", "conv_general_dilated", "scan", "while", "cond", "all_gather"),
        *("all_to_all", "ppermute", "scatter", "scatter-add", "sort", "cumsum", "device_put"),
        *("dynamic_update_slice", "rng_bit_generator", "top_k", "pallas_call", "ffi_call"),
    )
)


@dataclass(frozen=True)
class Span:
    """A value in memory, from `start` to `stop` (operations, both included)."""

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


def spans_of(operations: Sequence[Operation], results: set[Value], end: int) -> list[Span]:
    """When each value is in memory; fused values and views are not, and prolong what they read.

    Args:
      operations: in the order in which they run.
      results: what is handed on at the end; the optimizer, or the loop's own state, takes them
        as they are computed, so fused ones need no memory of their own.
      end: the time after the last operation.
    """
    readers = readers_of(operations)
    times: dict[Value, tuple[int, int]] = {}  # first and last time something reads it
    stored: dict[Value, bool] = {}
    needed: dict[Value, bool] = {}
    for at in range(end - 1, -1, -1):
        operation = operations[at]
        solid = operation.name in SOLID or operation.name in REDUCTIONS
        for value in operation.outputs:
            reads = [(end, end)] if value in results else []
            needed[value] = False
            for r in readers.get(value, ()):
                reader = operations[r]
                if reader.name in SOLID or reader.name in REDUCTIONS:
                    reads.append((r, r))
                    needed[value] |= reader.name in SOLID
                elif reader.name in VIEWS:
                    view = _view_of(value, reader)
                    # What a loop's state takes behind a barrier is computed there.
                    now = not solid and reader.name == "optimization_barrier" and view in results
                    reads.append((r, r) if now else times[view])
                    needed[value] |= needed[view]
                else:
                    reads += [(times[o][0],) * 2 if stored[o] else times[o] for o in reader.outputs]
            times[value] = (
                min((first for first, _ in reads), default=end),
                max((last for _, last in reads), default=at),
            )
            stored[value] = solid or (needed[value] and operation.name not in VIEWS)
    spans = []
    # What a loop updates in place is counted as its result, unless somebody still needs the old.
    moved = {
        given
        for at, operation in enumerate(operations)
        for given, _ in operation.carried
        if times.get(given, (0, at))[1] == at
    }
    for at, operation in enumerate(operations):
        solid = operation.name in SOLID or operation.name in REDUCTIONS
        for value in operation.outputs:
            if stored[value] and value.bytes:
                first, last = times[value]
                # What is fused is computed when it is first read, what is not, in its turn.
                start = at if solid else min(first, last)
                stop = last - 1 if value in moved else max(start, last)
                if start <= stop:
                    spans.append(Span(value, at, start, stop))
    return spans
