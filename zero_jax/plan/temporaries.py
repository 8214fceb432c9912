"""Peak of a training step's temporaries, predicted from its trace: no compiler, no device.

One pass lays out the step as a linear program, each loop as one iteration: forward, loss, backward.
`operations.py` reads the trace, `buffers.py` says which values are in memory and when. The
compiler's schedule adds two effects (`Schedule`): inside a loop over layers, the weights of the
next layers are gathered and the gradients of the previous ones are not summed yet; at the ends of
these loops, the first gather precedes the loop and the last sums follow it. No number is fitted:
`docs/plan-accuracy.md` has the error against the compiled program.

Terms at the peak; L layers, B sequences, T tokens, D width, c bytes of the compute dtype, r of the
reduce dtype:

  copy       gathered parameters: stage 0 at most cΨ (0 if c = 4), 1 and 2 cΨ, 3 those of a layer
             and of the next, gathered ahead
  gradients  of parameters: stage 0, and 1 of several micro-batches, the full cΨ, else fp32 shards
             4Ψ/N (of scanned matrices rΨ/N, if there is one micro-batch) and one layer's
  saved      from forward to backward: remat "block" L·B·T·D·c, "block_sqrt" about √L·B·T·D·c;
             "dots" the results of products, for a GPT L·B·T·9·D·c;
             "none" all that the backward pass reads
  loss       logits and their gradients, a chunk at a time
  buffers    gradients that are being summed over devices, of one layer or two, r times its
             parameters
  work       activations of one layer while it runs, forward or backward

Source: ZeRO (arXiv:1910.02054), sections 3 and 6, for what there is to count.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zero_jax.engine import expert_all_to_all
from zero_jax.plan.buffers import (
    KERNELS,
    PRODUCTS,
    REDUCTIONS,
    SUMS_OVER_DEVICES,
    Buffer,
    Lifetimes,
    readers_of,
)
from zero_jax.plan.operations import Operation, Program, Value, device_part, program_of
from zero_jax.releases import COLLECTIVES_AT_ONCE
from zero_jax.tracing.jaxpr import AnyJaxpr

TERMS = ("copy", "gradients", "saved", "loss", "buffers", "work")
Level = Literal["step", "micro-batch", "layer", "loss"]
# Collectives that a gradient leaves its device by: one of a leaf, or of rows looked up in it.
_SENDS = frozenset(("reduce_scatter", "all_to_all"))


@dataclass(frozen=True)
class Schedule:
    """Order in which the compiler runs a step.

    Attributes:
      layers_ahead: Layers of a loop whose weights are gathered while another one computes.
      layers_behind: Layers of a loop whose gradients are summed while another one computes.
      bucket_bytes: Maximum bytes per collective. Of a layer of more than two buckets, one is
        gathered ahead by the peak, since later ones take the place of weights that are not needed
        any more; as many are summed later as collectives run at once.
      on_gpu: True for XLA for GPUs. It computes fused results before the operation that reads them,
        all of one kernel at once, and writes them over operands that are read last.
    """

    layers_ahead: int = 0
    layers_behind: int = 1
    bucket_bytes: float = math.inf
    on_gpu: bool = False


@dataclass(frozen=True)
class Temporaries:
    """Temporaries of one device at the peak of a step.

    Attributes:
      terms: Bytes by term.
      fragmentation: Bytes by which the arena that holds them is larger.
      host: Bytes in host memory between forward and backward.
    """

    terms: dict[str, int]
    fragmentation: int = 0
    host: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.terms.values())


def temporaries(
    jaxpr: AnyJaxpr,
    params: int,
    given: int | None = None,
    *,
    split: Sequence[int | None] = (),
    parts: int = 1,
    schedule: Schedule = Schedule(),
) -> Temporaries:
    """Predicts the temporaries of a traced training step.

    Args:
      jaxpr: The step, `jax.jit(step).trace(...).jaxpr`, with a `shard_map` in it.
      params: Number of parameters; they are the first inputs of that `shard_map`.
      given: Number of all inputs; arrays that the loss closes over come before them.
      split: For each parameter the dim that is sharded over `model`, or None.
      parts: MP, the size of that axis.
      schedule: Schedule of the compiler.

    Raises:
      ValueError: There is no `shard_map`.
    """
    part = device_part(jaxpr)
    first = len(part.invars) - (given or len(part.invars))
    program = program_of(part, [None] * first + list(split), parts)
    weights, spans = set(program.inputs[first : first + params]), list[_Span]()
    _lay_out(_Part(program, weights, "step", schedule), spans, 0)
    terms = _peak(spans)
    lost = _fragmentation(spans, sum(terms.values())) if schedule.on_gpu else 0
    return Temporaries(terms, lost, _host_bytes(program))


class _Span(NamedTuple):
    """Bytes in memory from `start` to `stop`, both included."""

    term: str
    bytes: int
    start: int
    stop: int


def _lay_out(part: "_Part", spans: list[_Span], time: int) -> int:
    """Adds the buffers of a part, and of the loops inside, to one linear program.

    Args:
      part: A part of the step.
      spans: Receives its buffers.
      time: When it begins.

    Returns:
      When it ends.
    """
    times = []
    for at in range(len(part.operations)):
        begins = time
        for body in part.bodies(at):
            time = _lay_out(body, spans, time)
        times += [(begins, time), (time + 1, time + 1)]
        time += 2
    times.append((time, time))
    for term, size, start, stop in part.spans():
        spans.append(_Span(term, size, times[start][0], times[stop][1]))
    return time + 1


def _peak(spans: Sequence[_Span]) -> dict[str, int]:
    """Returns the bytes of each term at the time when all together are most."""
    changes = Counter[int]()
    for span in spans:
        changes[span.start] += span.bytes
        changes[span.stop + 1] -= span.bytes
    times = sorted(changes)
    totals = itertools.accumulate(changes[time] for time in times)
    _, peak = max(zip(totals, times, strict=True), default=(0, 0))
    alive = [span for span in spans if span.start <= peak <= span.stop]
    return {term: sum(span.bytes for span in alive if span.term == term) for term in TERMS}


def _fragmentation(spans: Sequence[_Span], peak: int) -> int:
    """Returns the bytes by which the arena of XLA for GPUs is larger than its content.

    XLA places buffers in two orders, the largest first or those that live longest first, and takes
    the smaller arena. Those below 1 % of the peak are left out: they fit in the gaps.
    """
    large = [span for span in spans if span.bytes > peak / 100]
    by_size = sorted(large, key=lambda span: (-span.bytes, span.start - span.stop, span.start))
    by_time = sorted(large, key=lambda span: (span.start - span.stop, -span.bytes, span.start))
    return min(_arena(by_size), _arena(by_time)) - sum(_peak(large).values())


def _arena(spans: Sequence[_Span]) -> int:
    """Returns the bytes of an arena; each buffer takes the smallest gap that is free in time.

    >>> _arena([_Span("", 3, 0, 1), _Span("", 2, 1, 2), _Span("", 4, 2, 3)])  # 6 at a time
    9
    """
    placed, arena = list[tuple[int, _Span]](), 0
    for span in spans:
        gaps, end = list[tuple[int, int]](), 0
        for offset, other in placed:
            if other.start <= span.stop and span.start <= other.stop:
                if offset - end >= span.bytes:
                    gaps.append((offset - end, end))
                end = max(end, offset + other.bytes)
        offset = min(gaps)[1] if gaps else end
        bisect.insort(placed, (offset, span))
        arena = max(arena, offset + span.bytes)
    return arena


class _Part:
    """A step, a micro-batch or an iteration; operation i of it runs at time 2i.

    Args:
      program: The operations.
      weights: Its inputs that are parameters, or slices of them.
      level: "step" is the outermost, whose results the optimizer reads as they are computed;
        "micro-batch" is a loop's body that runs forward and backward.
      schedule: Schedule of the compiler.
    """

    def __init__(self, program: Program, weights: set[Value], level: Level, schedule: Schedule):
        self.level, self.schedule = level, schedule
        self.operations = program.operations if schedule.on_gpu else _sums_last(program)
        self.weights = _copies_of(weights, self.operations)
        self.layers = [at for at, o in enumerate(self.operations) if self._runs_layers(o)]
        backward = (at for at, o in enumerate(self.operations) if o.backward)
        self.backward = next(backward, len(self.operations))
        self.last_forward = max((at for at in self.layers if at < self.backward), default=None)
        self.first_backward = min((at for at in self.layers if at >= self.backward), default=None)
        self.buffers = Lifetimes(self.operations, program.outputs, schedule.on_gpu).buffers()

    def _runs_layers(self, operation: Operation) -> bool:
        """Returns True for a loop that slices parameters and computes, one layer at a time."""
        return not self.weights.issuperset(operation.outputs) and any(
            outside in self.weights and len(inside.shape) < len(outside.shape)
            for body in operation.bodies
            for inside, outside in body.given
        )

    def _is_loss(self, at: int) -> bool:
        """Returns True after the last layer's forward and before the first backward operation."""
        return self.last_forward is not None and self.last_forward < at < self.backward

    def _level_inside(self, at: int) -> Level:
        operation = self.operations[at]
        if self.level in ("layer", "loss"):
            return self.level
        if at in self.layers:
            return "layer"
        if any(o.backward for o in operation.inside) and not operation.backward:
            return "micro-batch"
        return "loss" if self._is_loss(at) else "layer"

    def bodies(self, at: int) -> "list[_Part]":
        """Returns what an operation runs inside."""
        parts = []
        for body in self.operations[at].bodies:
            weights = {inside for inside, outside in body.given if outside in self.weights}
            parts.append(_Part(body, weights, self._level_inside(at), self.schedule))
        return parts

    def spans(self) -> list[_Span]:
        """Returns the buffers of the part, without those inside of loops."""
        summed = _only_summed(self.operations) if self.level != "layer" else set[Value]()
        spans = [_Span(self._term(b, summed), b.value.bytes, b.start, b.stop) for b in self.buffers]
        if self.level == "layer" and self.schedule.layers_ahead:
            end = 2 * len(self.operations)  # there its own gradients wait
            spans += _each("buffers", _waiting(self.operations, self.schedule), end, end)
        for at, operation in enumerate(self.operations):
            if operation.bodies and self._level_inside(at) == "layer":
                spans += self._beside(at)
        return spans

    def _term(self, buffer: Buffer, summed: set[Value]) -> str:
        if buffer.value in self.weights:
            return "copy"
        if buffer.value in summed:
            return "gradients"
        if self.level in ("layer", "loss"):
            return "work" if self.level == "layer" else "loss"
        if self._is_loss(buffer.made_at):
            return "loss"
        return "saved" if buffer.made_at < self.backward <= buffer.stop / 2 else "work"

    def _beside(self, at: int) -> list[_Span]:
        """Returns weights of the next layers, and gradients of the previous ones, beside a loop.

        A loop that gathers the next layer's weights has its first gather before it, and its last
        sums after it.
        """
        inside, start, stop = self.operations[at].inside, 2 * at, 2 * at
        ahead = _gathered_ahead(inside, self.schedule)
        waiting = _waiting(inside, self.schedule)
        spans = list[_Span]()
        if at == self.first_backward and self.last_forward is not None:
            # Only the last product or loop of the loss hides the gather of the last layer.
            loss = range(self.last_forward + 1, at)
            start = max((2 * i for i in loss if _hides(self.operations[i])), default=start)
        if ahead and self.backward <= at == self.layers[-1]:
            # Gradients of the first layer wait until the gradient of its input is sent. Beside them
            # are saved values, or gradients of the second layer: the larger while that gradient is
            # cast, both while it is sent.
            sends = [i for i, o in enumerate(self.operations) if i > at and o.name in _SENDS]
            stop = 2 * max(sends, default=at)
            reads = set(self.operations[at].inputs) - self.weights
            saved = [b.value.bytes for b in self.buffers if b.stop == 2 * at and b.value in reads]
            both = [("buffers", waiting), ("saved", saved)]
            less, more = sorted(both, key=lambda term: sum(term[1]))
            if sends:
                spans += _each(*more, 2 * at + 1, stop)
                for time in range(2 * at + 2, stop + 1, 2):
                    spans += _each(*less, time, time)
            if self.level == "micro-batch":
                # The next one's parameters that are read before its layers, and its first layer.
                first = self.layers[0]
                again = _gathered_ahead(self.operations[:first], self.schedule)
                again += _gathered_ahead(self.operations[first].inside, self.schedule)
                spans += _each("copy", again, 2 * at + 1, 2 * len(self.operations))
        spans += _each("copy", ahead, start, 2 * at)
        return spans + _each("buffers", waiting * self.schedule.layers_behind, 2 * at, stop)


def _each(term: str, sizes: Sequence[int], start: int, stop: int) -> list[_Span]:
    return [_Span(term, size, start, stop) for size in sizes]


def _hides(operation: Operation) -> bool:
    """Returns True if a gather can be hidden behind an operation."""
    return bool(operation.bodies) or operation.name in PRODUCTS


def _sums_last(program: Program) -> list[Operation]:
    """Returns operations as XLA for CPUs runs them: sums of gradients last, and what feeds them."""
    readers, summed = readers_of(program.operations), _only_summed(program.operations)
    delayed = set[Operation]()
    for operation in reversed(program.operations):
        reads = [program.operations[r] for v in operation.outputs for r in readers[v]]
        feeds = bool(reads) and program.outputs.isdisjoint(operation.outputs)
        sums = _is_sum(operation) and summed.issuperset(operation.outputs)
        if sums or (feeds and delayed.issuperset(reads)):
            delayed.add(operation)
    late, after = dict[Operation, None](), set[Value]()
    for operation in program.operations:
        if operation in delayed or not after.isdisjoint(operation.inputs):
            late[operation] = None
            after.update(operation.outputs)
    return [o for o in program.operations if o not in late] + list(late)


def _is_sum(operation: Operation) -> bool:
    """Returns True for a sum over devices, or a loop of nothing else, a layer at a time."""
    alone = all(o.name not in KERNELS or _is_sum(o) for o in operation.inside)
    return operation.name in SUMS_OVER_DEVICES or (alone and any(map(_is_sum, operation.inside)))


def _only_summed(operations: Sequence[Operation]) -> set[Value]:
    """Returns values of which nothing is computed but gradients: sums over devices and results."""
    found, readers = set[Value](), readers_of(operations)
    for operation in reversed(operations):
        for value in operation.outputs:
            reads = [operations[r] for r in readers[value]]
            if all(
                (o.name not in KERNELS or _is_sum(o)) and found.issuperset(o.outputs) for o in reads
            ):
                found.add(value)
    return found


def _gathered_ahead(layer: Sequence[Operation], schedule: Schedule) -> list[int]:
    """Returns the bytes of each weight that is gathered before a layer begins."""
    sends = [o for o in layer if expert_all_to_all.SCOPE in o.context]
    sizes = [v.bytes for o in layer if o.name == "all_gather" and o not in sends for v in o.outputs]
    bucket = schedule.bucket_bytes
    within = _up_to(sizes, math.inf if sum(sizes) <= 2 * bucket else bucket)
    # Few collectives run at once, and all of a layer waits for those of its tokens: weights of more
    # than a bucket come after these.
    return [] if sends and sum(within) > bucket else within * schedule.layers_ahead


def _waiting(layer: Sequence[Operation], schedule: Schedule) -> list[int]:
    """Returns the bytes of each gradient of a layer that is summed while the next one computes."""
    readers = readers_of(layer)

    def meets_barrier(value: Value) -> bool:
        """Returns True for a sum that leaves the loop through a barrier: it is not delayed."""
        reads = [layer[r] for r in readers[value]]
        return any(
            o.name == "optimization_barrier"
            or (o.name not in KERNELS and any(map(meets_barrier, o.outputs)))
            for o in reads
        )

    sums = (o for o in layer if o.name == "reduce_scatter" and not meets_barrier(o.outputs[0]))
    sizes = [v.bytes for o in sums for v in o.inputs]
    return _up_to(sizes, COLLECTIVES_AT_ONCE * schedule.bucket_bytes)


def _up_to(sizes: Sequence[int], most: float) -> list[int]:
    """Returns the first of these sizes, up to a sum."""
    totals = itertools.accumulate(sizes)
    return [size for size, total in zip(sizes, totals, strict=True) if total <= most]


def _host_bytes(program: Program) -> int:
    """Returns the bytes put into host memory; of a loop its stack, not the slices of it."""
    found = 0
    for operation in program.operations:
        if operation.bodies or operation.name == "device_put":
            moved = (v for v in operation.outputs if v.on_host and v not in program.outputs)
            found += sum(v.stored_bytes for v in moved)
        found += max(map(_host_bytes, operation.bodies), default=0)
    return found


def _copies_of(weights: set[Value], operations: Sequence[Operation]) -> set[Value]:
    """Returns the weights, and values made of weights alone by casts and gathers."""
    weights = set(weights)
    for operation in operations:
        moves = operation.name not in KERNELS | REDUCTIONS or operation.name == "all_gather"
        moves |= bool(operation.bodies) and all(_moves(b, weights) for b in operation.bodies)
        if moves and operation.inputs and weights.issuperset(operation.inputs):
            weights.update(operation.outputs)
    return weights


def _moves(body: Program, weights: set[Value]) -> bool:
    """Returns True for a loop that only casts and gathers weights, a layer at a time."""
    inside = {mine for mine, outside in body.given if outside in weights}
    return _copies_of(inside, body.operations).issuperset(body.outputs)
