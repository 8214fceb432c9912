"""What a training step will hold at once, foretold from its trace: no compiler, no device.

The traced step is walked once. Elementwise operations are taken to be fused into what reads them;
results of matrix products, reductions, loops and collectives are in memory from the operation
that makes them to the last that reads them. Two habits of XLA's scheduler matter enough to be
followed: gradients that only wait to be summed over devices are computed last, and inside a loop
they are summed one iteration later, while the next layer computes, so that one layer of them is
always under way (of a layer of several buckets what is not behind a barrier, and three buckets at
most: on GPUs as many collectives are under way at a time), and at the end of each iteration two.
`loop_ends` adds what exists at the ends of loops. No number is fitted: `docs/plan-accuracy.md` has
the error against the compiled program.

What lives at the worst instant is told apart by what it is for (`Forecast.terms`); L layers,
B sequences, T tokens, D width, c bytes of the compute dtype, r of the reduce dtype:

  copy       gathered parameters: stage 0 at most cΨ (0 if c = 4), 1 and 2 cΨ, 3 those of a layer
             and of the next, gathered ahead
  gradients  of parameters: stage 0, and 1 of several micro-batches, the full cΨ, else fp32 shards
             4Ψ/N (of scanned matrices rΨ/N, if there is one micro-batch) and one layer's
  saved      from forward to backward: remat "block" L·B·T·D·c, "block_sqrt" about √L·B·T·D·c;
             "dots" the results of products, for a GPT L·B·T·9·D·c;
             "none" all that the backward pass reads
  loss       logits and their gradients, a chunk at a time
  buffers    gradients under way between devices, of one layer or two, r times its parameters
  work       what one layer computes while it runs, forward or backward

Source: ZeRO (arXiv:1910.02054), sections 3 and 6, for what there is to count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_jax.engine import expert_all_to_all
from zero_jax.plan import under_way
from zero_jax.plan.flat_program import Body, Flat, Operation, Value
from zero_jax.plan.flat_trace import device_part, flatten
from zero_jax.plan.lifespans import REDUCTIONS, SOLID, SUMS_OVER_DEVICES, Span, readers_of, spans_of
from zero_jax.plan.loop_ends import LoopEnds, Loops
from zero_jax.plan.under_way import Habits as Habits
from zero_jax.plan.under_way import Held as Held
from zero_jax.plan.under_way import held_as, total
from zero_jax.tracing.jaxpr import AnyJaxpr

NO_HABITS = Habits()  # of XLA for CPUs
TERMS = ("copy", "gradients", "saved", "loss", "buffers", "work")


@dataclass(frozen=True)
class Forecast:
    """Temporaries of one device at the worst instant of a step.

    Attributes:
      held: largest first.
      host: bytes kept in host memory from forward to backward.
    """

    held: tuple[Held, ...]
    host: int = 0

    @property
    def bytes(self) -> int:
        return sum(h.bytes for h in self.held)

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term; the sum is `bytes`."""
        return {term: sum(h.bytes for h in self.held if h.term == term) for term in TERMS}


def forecast(
    jaxpr: AnyJaxpr,
    params: int,
    given: int | None = None,
    *,
    split: Sequence[int | None] = (),
    parts: int = 1,
    habits: Habits = NO_HABITS,
) -> Forecast:
    """Foretells the temporaries of a traced training step.

    Args:
      jaxpr: the step, `jax.jit(step).trace(...).jaxpr`, with a shard_map in it.
      params: how many of the first inputs of that shard_map are parameters.
      given: how many inputs it was given; arrays that the loss closes over come before them.
      split: of each parameter, the dim that is split over `model`, or None.
      parts: MP, the size of that axis.
      habits: of the compiler.

    Raises:
      ValueError: there is no shard_map.
    """
    part = device_part(jaxpr)
    first = len(part.invars) - (given or len(part.invars))
    flat = flatten(part, [None] * first + list(split), parts)
    held = _Walk(flat, set(flat.inputs[first : first + params]), "step", habits).worst()
    return Forecast(tuple(sorted(held, key=lambda h: -h.bytes)), _in_host(flat))


class _Walk:
    """One pass over a flat program: the step, one micro-batch of it, or one iteration of a loop.

    Args:
      flat: the program.
      weights: its inputs that are parameters, or slices of them.
      level: "step" (the outermost, whose results the optimizer reads as they come), "pass" (a
        loop body that runs forward and backward), "layer", or "loss".
      habits: of the compiler.
    """

    def __init__(self, flat: Flat, weights: set[Value], level: str, habits: Habits):
        self.level, self.habits = level, habits
        self.outputs = set(flat.outputs)
        self.operations = self._scheduled(flat.operations)
        self.end = len(self.operations)
        self.weights = _copies_of(weights, self.operations)
        self.spans = spans_of(self.operations, self.outputs, self.end, habits.of_gpus)
        layers = [at for at, o in enumerate(self.operations) if self._is_layers(o)]
        backward = [at for at, o in enumerate(self.operations) if o.backward]
        self.backward = backward[0] if backward else self.end
        self.loops = Loops(self.operations, layers, self.backward)
        # After the last layer's forward and before the first backward operation stands the loss.
        self.loss = self.end if self.loops.last_forward is None else self.loops.last_forward
        self.gradients = self._only_summed()

    def _is_layers(self, operation: Operation) -> bool:
        """Whether it is a loop that slices parameters and computes, one layer at a time."""
        return not self.weights.issuperset(operation.outputs) and any(
            theirs in self.weights and len(mine.shape) < len(theirs.shape)
            for body in operation.bodies
            for mine, theirs in body.given
        )

    def _scheduled(self, operations: Sequence[Operation]) -> list[Operation]:
        """Puts last what only feeds a sum of gradients over devices, that sum, what follows it."""
        readers = readers_of(operations)
        finishes, waits = set[int](), set[int]()
        for at in range(len(operations) - 1, -1, -1):
            operation = operations[at]
            reads = [r for o in operation.outputs for r in readers.get(o, ())]
            sums = _sums(operation)
            if (sums or operation.name not in SOLID) and finishes.issuperset(reads):
                finishes.add(at)
            # What a reduction reads would have to wait with it.
            feeds = bool(reads) and self.outputs.isdisjoint(operation.outputs)
            feeds = feeds and not (self.habits.of_gpus and operation.name in REDUCTIONS)
            if (sums and at in finishes) or (feeds and waits.issuperset(reads)):
                waits.add(at)
        early, late = [], []
        after: set[Value] = set()
        for at, operation in enumerate(operations):
            if at in waits or not after.isdisjoint(operation.inputs):
                late.append(operation)
                after.update(operation.outputs)
            else:
                early.append(operation)
        return early + late

    def worst(self) -> list[Held]:
        """Everything alive at the instant when that is most."""
        change = [0] * (2 * self.end + 2)
        for span in self.spans:
            change[span.start] += span.value.bytes
            change[span.stop + 1] -= span.value.bytes
        ends = LoopEnds(self.loops, self.spans, self.weights, self.habits, self.level == "pass")
        most, worst_at, worst_inside, current = -1, 0, list[Held](), 0
        for at in range(2 * self.end + 1):
            current += change[at]
            runs = at % 2 == 0 and at < 2 * self.end
            inside = (self._inside(at // 2) if runs else []) + ends.at(at)
            if current + total(inside) > most:
                most, worst_at, worst_inside = current + total(inside), at, inside
        return self._with_others(self._alive(worst_at) + worst_inside)

    def _alive(self, time: int) -> list[Held]:
        return [self._held(span) for span in self.spans if span.start <= time <= span.stop]

    def _with_others(self, own: list[Held]) -> list[Held]:
        """And what is there of the iteration before, whose gradients are summed while this one
        computes, and of the next one, whose weights are gathered."""
        operations, habits = self.operations, self.habits
        if self.level != "layer":
            return own
        ahead = under_way.gathered(operations, habits, "the layer after")
        before = under_way.summed(operations, habits)
        # At its end gradients of this layer wait too, and nothing else of it is there.
        waits = under_way.summed(operations, habits, "this layer") if habits.ahead else []
        ends = self._alive(2 * self.end) + waits + ahead
        # Few collectives run at once, and all of a layer waits for those of its tokens: weights of
        # more than a bucket come after these.
        sends = any(expert_all_to_all.SCOPE in o.context for o in operations)
        if not sends or total(ahead) <= habits.bucket_bytes:
            own = own + ahead
        return max(own, ends, self._turned(), key=total) + before

    def _turned(self) -> list[Held]:
        """What is there while gradients are turned to be summed: these a second time, all weights
        (the next layer's take the place of those not needed any more), and of the rest what the
        first of them is made beside."""
        if not self.habits.of_gpus:
            return []
        twins = under_way.turned(self.operations, self.habits)
        made = {v for o in self.operations if under_way.is_turned(o) for v in o.inputs}
        starts = [span.start for span in self.spans if span.value in made]
        if not twins or not starts:
            return []
        weights = [span for span in self.spans if span.value in self.weights]
        at = min(starts)
        rest = [s for s in self.spans if s.start <= at <= s.stop and s.value not in self.weights]
        return [self._held(span) for span in weights + rest] + twins

    def _inside(self, at: int) -> list[Held]:
        """What lives inside a loop or a branch while it runs, at the worst instant."""
        operation = self.operations[at]
        found = []
        for body in operation.bodies:
            weights = {mine for mine, theirs in body.given if theirs in self.weights}
            level = self._level_of(operation, body, at)
            found.append(_Walk(body.flat, weights, level, self.habits).worst())
        return max(found, key=total, default=[])

    def _level_of(self, operation: Operation, body: Body, at: int) -> str:
        if self._is_layers(operation) or self.level in ("layer", "loss"):
            return "layer" if self.level != "loss" else "loss"
        if any(o.backward for o in body.flat.operations) and not operation.backward:
            return "pass"
        return "loss" if self.loss < at < self.backward else "layer"

    def _held(self, span: Span) -> Held:
        operation = self.operations[span.made_at]
        made_by = f"{operation.context}/{operation.name}".lstrip("/")
        return held_as(span.value, self._term(span), made_by)

    def _term(self, span: Span) -> str:
        if span.value in self.weights:
            return "copy"
        if span.value in self.gradients:
            return "gradients"
        if self.level in ("layer", "loss"):
            return "work" if self.level == "layer" else "loss"
        if self.loss < span.made_at < self.backward:
            return "loss"
        return "saved" if span.made_at < self.backward <= span.stop / 2 else "work"

    def _only_summed(self) -> set[Value]:
        """Values from which nothing is made but gradients: sums over devices and results."""
        found = set[Value]()
        readers = readers_of(self.operations)
        for at in range(self.end - 1, -1, -1):
            operation = self.operations[at]
            for value in operation.outputs:
                reads = [self.operations[r] for r in readers.get(value, ())]
                ends = all(
                    (o.name not in SOLID or _sums(o)) and found.issuperset(o.outputs) for o in reads
                )
                # A layer's carry is a result too; what it hands to the next is no gradient.
                if ends and (reads or self.level != "layer"):
                    found.add(value)
        return found


def _sums(operation: Operation) -> bool:
    """Whether it sums over devices, or is a loop that does nothing else, a layer at a time."""
    alone = all(o.name not in SOLID or _sums(o) for o in operation.inside)
    return operation.name in SUMS_OVER_DEVICES or (alone and any(map(_sums, operation.inside)))


def _in_host(flat: Flat) -> int:
    """Bytes put into host memory; of a loop its stack counts, not the slices it is made of."""
    found = 0
    for operation in flat.operations:
        if operation.bodies or operation.name == "device_put":
            found += sum(v.host_bytes for v in operation.outputs if v not in flat.outputs)
        found += max((_in_host(body.flat) for body in operation.bodies), default=0)
    return found


def _copies_of(weights: set[Value], operations: Sequence[Operation]) -> set[Value]:
    """The weights, and what is made of weights alone without computing: casts and gathers."""
    weights = set(weights)
    for operation in operations:
        moves = operation.name not in SOLID | REDUCTIONS or operation.name == "all_gather"
        moves = moves or (
            bool(operation.bodies) and all(_moves(b, weights) for b in operation.bodies)
        )
        if moves and operation.inputs and weights.issuperset(operation.inputs):
            weights.update(operation.outputs)
    return weights


def _moves(body: Body, weights: set[Value]) -> bool:
    """Whether a loop does nothing but cast and gather weights, a layer at a time."""
    inside = {mine for mine, theirs in body.given if theirs in weights}
    return _copies_of(inside, body.flat.operations).issuperset(body.flat.outputs)
