"""Buffers of a program: which values are in memory, and when.

XLA fuses elementwise operations into the operations that read them, so their results have no buffer
and prolong the life of their operands. Results of products, reductions, loops and collectives have
one, from the operation that computes them to the last that reads them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_jax.plan.operations import IN_PLACE, Operation, Value

# Other views of the same bytes.
VIEWS = frozenset(
    (
        *("reshape", "squeeze", "expand_dims", "copy", "copy_p", "optimization_barrier", "pcast"),
        *("name", "stop_gradient", "bitcast_convert_type"),
    )
)
SUMS_OVER_DEVICES = frozenset(("reduce_scatter", "psum", "psum_invariant"))
# Their results have a buffer; their operands are fused into them.
REDUCTIONS = frozenset(
    (
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("argmax", "argmin", "gather"),
    )
)
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
# Their operands and results have buffers. Every operation not named here or above is fused.
KERNELS = (
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
_UNFUSED = KERNELS | REDUCTIONS


@dataclass(frozen=True)
class Buffer:
    """A value in memory from `start` to `stop`, both included; operation i runs at time 2i."""

    value: Value
    made_at: int
    start: int
    stop: int


def readers_of(operations: Sequence[Operation]) -> Mapping[Value, list[int]]:
    """Returns the operations that read each value, in order."""
    readers = defaultdict[Value, list[int]](list)
    for at, operation in enumerate(operations):
        for value in operation.inputs:
            readers[value].append(at)
    return readers


class Lifetimes:
    """Times at which values are in memory, of operations in the order in which they run.

    Args:
      operations: The operations.
      results: Values that are returned. The optimizer, or the state of the loop, takes them when
        they are computed, so fused ones need no buffer.
      on_gpu: See `temporaries.Schedule`.
    """

    def __init__(self, operations: Sequence[Operation], results: set[Value], on_gpu: bool):
        self._operations, self._results, self._on_gpu = operations, results, on_gpu
        self._readers = readers_of(operations)
        # The first and the last time at which each value is read.
        self._first: dict[Value, int] = {}
        self._last: dict[Value, int] = {}
        self._stored: dict[Value, bool] = {}  # whether it has a buffer
        self._needed: dict[Value, bool] = {}  # whether a kernel reads it
        for at in range(len(operations) - 1, -1, -1):
            for value in operations[at].outputs:
                self._settle(value, at)

    def _settle(self, value: Value, at: int) -> None:
        operation, end = self._operations[at], 2 * len(self._operations)
        computed = operation.name in _UNFUSED
        reads = [(end, end)] if value in self._results else []
        needed = False
        for r in self._readers[value]:
            reader = self._operations[r]
            if reader.name in _UNFUSED:
                reads.append((2 * r, 2 * r))
                needed |= reader.name in KERNELS
            elif reader.name in VIEWS:
                same = len(reader.inputs) == len(reader.outputs)
                view = reader.outputs[reader.inputs.index(value) if same else 0]
                barrier = reader.name == "optimization_barrier"
                # A loop's state behind a barrier is computed there; nothing is fused through one.
                now = barrier and not computed and view in self._results
                reads.append((2 * r, 2 * r) if now else (self._first[view], self._last[view]))
                needed |= barrier or self._needed[view]
            else:
                for fused in reader.outputs:
                    times = self._first[fused], self._last[fused]
                    reads.append((self._runs(fused),) * 2 if self._stored[fused] else times)
        self._first[value] = min((first for first, _ in reads), default=end)
        self._last[value] = max((last for _, last in reads), default=2 * at)
        self._needed[value] = needed
        self._stored[value] = computed or (needed and operation.name not in VIEWS)

    def _runs(self, value: Value) -> int:
        """Returns when a fused value is computed: on a GPU before the operation that reads it."""
        return min(self._first[value], self._last[value]) - self._on_gpu

    def buffers(self) -> list[Buffer]:
        """Returns all buffers."""
        replaced = self._overwritten() if self._on_gpu else set[Value]()
        until = self._computed_together() if self._on_gpu else {}
        for at, operation in enumerate(self._operations):
            # State updated in place is counted as the result, unless the old one is read later.
            old = (old for old, _ in operation.in_place)
            replaced.update(value for value in old if self._last.get(value, 2 * at) == 2 * at)
        buffers = []
        for at, operation in enumerate(self._operations):
            computed = operation.name in _UNFUSED
            for value in operation.outputs:
                if self._stored[value] and value.bytes:
                    start, last = 2 * at if computed else self._runs(value), self._last[value]
                    stop = max(start, last, until.get(value, 0))
                    stop = last - 1 if value in replaced else stop
                    if start <= stop:
                        buffers.append(Buffer(value, at, start, stop))
        return buffers

    def _fused(self, *, through_barriers: bool) -> Iterator[tuple[Value, Iterable[Value]]]:
        """Yields fused values that have a buffer, with the buffers that they are computed from."""
        operands: dict[Value, Iterable[Value]] = {}
        for operation in self._operations:
            if operation.name in _UNFUSED:
                continue
            read = ([v] if self._stored.get(v, True) else operands[v] for v in operation.inputs)
            mine = dict.fromkeys(itertools.chain.from_iterable(read))  # in order, each once
            apart = operation.name == "optimization_barrier" and not through_barriers
            for value in operation.outputs:
                operands[value] = [value] if apart else mine
                if self._stored[value]:
                    yield value, operands[value]

    def _overwritten(self) -> set[Value]:
        """Returns values in whose buffer a fused result of their size is written."""
        found = set[Value]()
        for value, operands in self._fused(through_barriers=True):
            alike = (u for u in operands if u not in found and u.bytes == value.bytes)
            dying = (u for u in alike if self._last.get(u) == self._runs(value))
            found.update(itertools.islice(dying, 1))
        return found

    def _computed_together(self) -> dict[Value, int]:
        """Returns until when fused results live that one kernel computes of the same value.

        They have as many elements, and the kernel runs when the last of them is needed.
        """
        kernels = defaultdict[Value, list[Value]](list)
        for value, operands in self._fused(through_barriers=False):
            for operand in operands:
                if math.prod(operand.shape) == math.prod(value.shape):
                    kernels[operand].append(value)
        until: dict[Value, int] = {}
        for values in kernels.values():
            runs = max(map(self._runs, values))
            until |= {value: max(runs, until.get(value, 0)) for value in values}
        return until
