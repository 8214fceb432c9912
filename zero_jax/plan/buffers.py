"""Buffers of a step: which values are in memory, and when.

XLA fuses elementwise operations into the operations that read them, so their results have no buffer
and prolong the life of their operands. Results of products, reductions, loops and collectives have
one, from the operation that computes them to the last that reads them. A value from outside of a
loop is read until the loop ends.

XLA for GPUs computes fused results before the operation that reads them, all of one kernel at once,
and writes them over operands that are read last. It sums gradients over devices meanwhile.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zero_jax.plan.operations import IN_PLACE, LOOP, LOOP_END, VIEWS, LinearStep, Operation, Value
from zero_jax.tracing import jaxpr as jaxprs

SUMS_OVER_DEVICES = {"reduce_scatter", "psum", "psum_invariant"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
# Their operands and results have buffers.
KERNELS = SUMS_OVER_DEVICES | IN_PLACE | _PRODUCTS | {"all_gather", "all_to_all", "ppermute"}
KERNELS |= {"sort", "cumsum", "top_k", "device_put", "rng_bit_generator"}
KERNELS |= {"pallas_call", "ffi_call"}
# Their results have a buffer; their operands are fused into them. Every operation not named here,
# above or among views is fused.
_REDUCTIONS = jaxprs.REDUCTIONS | {"reduce", "argmax", "argmin", "gather", "cond", LOOP, LOOP_END}
_UNFUSED = KERNELS | _REDUCTIONS
# XLA for CPUs computes these once, not in every operation that reads them.
_EXPENSIVE = {"exp", "log", "tanh", "logistic", "erf", "pow", "div", "sqrt", "rsqrt"}
# XLA for GPUs writes the result of a product as this.
_EPILOGUES = {"convert_element_type", "add", "add_any"}
_BARRIER = "optimization_barrier"


class Buffer(NamedTuple):
    """A value in memory from `start` to `stop`, both included; operation i runs at time 2i."""

    value: Value
    made_at: int
    start: int
    stop: int


def readers_of(operations: Sequence[Operation]) -> Mapping[Value, list[int]]:
    """Returns the operations that read each value, in order."""
    readers = defaultdict[Value, list[int]](list)
    for at, operation in enumerate(operations):
        for value in dict.fromkeys(operation.inputs):
            readers[value].append(at)
    return readers


class Lifetimes:
    """Times at which values are in memory. Fused results of the step need no buffer."""

    def __init__(self, step: LinearStep, on_gpu: bool):
        self._operations = _with_epilogues(step) if on_gpu else step.operations
        self._results, self._on_gpu = {*step.results}, on_gpu
        self._readers, self._loops = readers_of(self._operations), _loops(self._operations)
        self._viewed: dict[Value, Value] = {}  # what each view is a view of
        for operation in self._operations:
            if operation.name in VIEWS:
                self._viewed |= {new: self._viewed.get(old, old) for old, new in operation.shared}
        # The first and the last time at which each value is read.
        self._first: dict[Value, int] = {}
        self._last: dict[Value, int] = {}
        self._required: dict[Value, int] = {}  # when a barrier requires it
        self._stored: dict[Value, bool] = {}  # whether it has a buffer
        self._needed: dict[Value, bool] = {}  # whether a kernel reads it
        for at in range(len(self._operations) - 1, -1, -1):
            for value in self._operations[at].outputs:
                self._settle(value, at)

    def _settle(self, value: Value, at: int) -> None:
        name, end = self._operations[at].name, 2 * len(self._operations)
        computed, readers = name in _UNFUSED, self._readers[value]
        reads = [(end, end)] if value in self._results else []
        required = [end if readers or name != _BARRIER else 2 * at]
        needed = not self._on_gpu and name in _EXPENSIVE and len(readers) > 1
        for r in readers:
            reader = self._operations[r]
            crossed = [start for start, _ in self._loops[r] if start > at]
            # Nothing but constants is fused into a loop.
            if crossed and not computed and self._operations[at].inputs:
                needed = True
                reads.append((2 * min(crossed),) * 2)
            if reader.name in _UNFUSED:
                reads.append((2 * r, 2 * r))
                needed |= reader.name in KERNELS | {LOOP, LOOP_END}
                continue
            is_view = reader.name in VIEWS
            views = [new for old, new in reader.shared if old is value]
            for made in views if is_view else reader.outputs:
                required.append(self._required[made])
                times = self._first[made], self._last[made]
                fused = not is_view and self._stored[made]
                reads.append((self._runs(made),) * 2 if fused else times)
                needed |= is_view and self._needed[made]
            if reader.name == _BARRIER and not computed:  # nothing is fused through one
                needed = True
                reads.append((2 * at, 2 * at))
        self._first[value] = min((first for first, _ in reads), default=2 * at)
        last = max((last for _, last in reads), default=2 * at)
        # A value from outside of a loop is read in every iteration.
        around = self._loops[last // 2] if last < end else ()
        self._last[value] = max([last, *(2 * stop for start, stop in around if start > at)])
        self._required[value], self._needed[value] = min(required), needed
        self._stored[value] = computed or (needed and name not in VIEWS)

    def _runs(self, value: Value) -> int:
        """Returns when a fused value is computed: on a GPU before the operation that reads it."""
        return min(self._first[value], self._last[value]) - self._on_gpu

    def buffers(self) -> list[Buffer]:
        """Returns all buffers."""
        replaced = self._replaced()
        until = self._computed_together() | self._summed_until() if self._on_gpu else {}
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

    def _replaced(self) -> set[Value]:
        """Returns values that the last operation to read them overwrites with its result."""
        found = set[Value]()
        for value, operands in self._fused(through_barriers=True):
            alike = (u for u in operands if u not in found and u.bytes == value.bytes)
            dying = (u for u in alike if self._last.get(u) == self._runs(value))
            found.update(itertools.islice(dying, 1))
        for at, operation in enumerate(self._operations):
            if operation.name not in VIEWS:
                shared = [self._viewed.get(old, old) for old, _ in operation.shared]
                found.update(old for old in shared if self._last.get(old, 2 * at) == 2 * at)
        return found

    def _fused(self, *, through_barriers: bool) -> Iterator[tuple[Value, Iterable[Value]]]:
        """Yields fused values that have a buffer, with the buffers that they are computed from."""
        operands: dict[Value, Iterable[Value]] = {}
        for operation in self._operations:
            if operation.name in _UNFUSED:
                continue
            read = ([v] if self._stored.get(v, True) else operands[v] for v in operation.inputs)
            mine = dict.fromkeys(itertools.chain.from_iterable(read))  # in order, each once
            apart = operation.name == _BARRIER and not through_barriers
            for value in operation.outputs:
                operands[value] = [value] if apart else mine
                if self._stored[value]:
                    yield value, operands[value]

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

    def _summed_until(self) -> dict[Value, int]:
        """Returns until when gradients live that are being summed over devices.

        A sum ends where a barrier requires its result. Those after the last barrier end together.
        """
        until, last, end = dict[Value, int](), 0, 2 * len(self._operations)
        for at in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[at]
            if operation.name in (_BARRIER, LOOP, LOOP_END):
                last = 0
            elif operation.name in ("reduce_scatter", "all_to_all"):
                last = last or 2 * at
            if operation.name == "reduce_scatter":
                required, full = self._required[operation.outputs[0]], operation.inputs[0]
                until[self._viewed.get(full, full)] = required if required < end else last
        return until


def _with_epilogues(step: LinearStep) -> list[Operation]:
    """Returns the operations with casts and sums of products as part of these."""
    operations, readers = list(step.operations), readers_of(step.operations)
    made_at = {value: at for at, o in enumerate(operations) for value in o.outputs}
    for at, product in enumerate(step.operations):
        result, reads = product.outputs[0], readers[product.outputs[0]]
        if product.name not in _PRODUCTS or result in step.results or len(reads) != 1:
            continue
        epilogue = step.operations[reads[0]]
        out, others = epilogue.outputs[0], [v for v in epilogue.inputs if v is not result]
        known = all(made_at.get(value, -1) < at for value in others)
        if epilogue.name in _EPILOGUES and known and out.bytes <= result.bytes:
            # A sum is written over the other operand.
            shared = [(value, out) for value in others if value.bytes == out.bytes]
            inputs = [*product.inputs, *others]
            operations[at] = Operation(product.name, product.context, inputs, [out], shared)
            operations[reads[0]] = Operation(epilogue.name, epilogue.context, [], [])
    return operations


def _loops(operations: Sequence[Operation]) -> list[tuple[tuple[int, int], ...]]:
    """Returns for each operation where the loops around it start and stop."""
    starts, around = list[int](), list[tuple[tuple[int, int], ...]]([()] * len(operations))
    for at, operation in enumerate(operations):
        if operation.name == LOOP:
            starts.append(at)
        elif operation.name == LOOP_END:
            start = starts.pop()
            for inside in range(start + 1, at):
                around[inside] += ((start, at),)
    return around
