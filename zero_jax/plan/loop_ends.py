"""What is there at the ends of loops over layers, which XLA for GPUs runs into what stands there.

A loop that gathers the next layer's weights while one computes has its first gather before it, and
its last turn after it. So weights of the last layer are there for its backward pass while the last
product of the loss runs; and while the gradient of what the first layer reads is cast and sent, the
first layer's own gradients are still under way, with what the loop kept from the forward pass, and
the gradients of the layer before: the larger of these while it is cast, both while it is sent. A
loop over micro-batches has by its end gathered what the next one reads first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_jax.plan import under_way
from zero_jax.plan.flat_program import Operation, Value
from zero_jax.plan.lifespans import PRODUCTS, Span
from zero_jax.plan.under_way import Habits, Held, held_as, total

# How a gradient leaves its device: that of a leaf, and that of rows looked up in one.
_SENDS = frozenset(("reduce_scatter", "all_to_all"))


@dataclass(frozen=True)
class Loops:
    """The loops over layers of a program.

    Attributes:
      operations: of the program, in the order in which they run.
      at: which of them are such loops.
      backward: the first operation of the backward pass.
    """

    operations: Sequence[Operation]
    at: Sequence[int]
    backward: int

    @property
    def last_forward(self) -> int | None:
        """What stands between it and the backward pass is the loss."""
        return max((at for at in self.at if at < self.backward), default=None)

    @property
    def first_backward(self) -> int | None:
        return min((at for at in self.at if at >= self.backward), default=None)


class LoopEnds:
    """What is beside a program's own values at a time; operation i runs at time 2i.

    Args:
      loops: those over layers.
      spans: when each value is in memory.
      weights: values that are parameters, or made of them without computing.
      habits: of the compiler.
      repeats: whether it is one micro-batch of several.
    """

    def __init__(
        self,
        loops: Loops,
        spans: Sequence[Span],
        weights: set[Value],
        habits: Habits,
        repeats: bool = False,
    ) -> None:
        self.loops, self.habits = loops, habits
        self.beside: dict[int, list[Held]] = {}
        self._gathered_again()
        if loops.first_backward is not None:
            last = max(loops.at)
            # Its own last turn stands after a loop that gathers a turn ahead.
            if self._gathered(loops.operations[last].inside, "itself"):
                self._last_turn(last, spans, weights)
                if repeats:
                    self._gathered_for_the_next()

    def at(self, time: int) -> list[Held]:
        """What is there at a time."""
        return self.beside.get(time, [])

    def _put(self, times: Iterable[int], held: list[Held]) -> None:
        for time in times:
            self.beside[time] = self.at(time) + held

    def _gathered(self, operations: Sequence[Operation], which: str) -> list[Held]:
        return under_way.gathered(operations, self.habits, which)

    def _gathered_again(self) -> None:
        """Weights of the last layer, once nothing is left of the loss but its last product."""
        loss, layers = self.loops.last_forward, self.loops.first_backward
        if loss is None or layers is None:
            return
        operations = self.loops.operations
        hides = [at for at in range(loss + 1, layers) if _computes(operations[at])]
        if hides:
            again = self._gathered(operations[layers].inside, "the last layer")
            self._put(range(2 * hides[-1], 2 * layers), again)

    def _last_turn(self, loop: int, spans: Sequence[Span], weights: set[Value]) -> None:
        operations = self.loops.operations
        sends = [at for at, o in enumerate(operations) if at > loop and o.name in _SENDS]
        reads, inside = set(operations[loop].inputs) - weights, operations[loop].inside
        kept = [s.value for s in spans if s.stop == 2 * loop and s.value in reads]
        saved = [held_as(value, "saved", "read by the first layer") for value in kept]
        own = under_way.summed(inside, self.habits, "the first layer")
        before = under_way.summed(inside, self.habits, "the second layer")
        for time in range(2 * loop + 1, 2 * max(sends, default=loop) + 1):
            casts = time % 2 == 1  # into the dtype in which it is sent: two copies of it are there
            self._put([time], own + (max(saved, before, key=total) if casts else saved + before))

    def _gathered_for_the_next(self) -> None:
        """Leaves that are read before its layers, and its first layer."""
        operations, which = self.loops.operations, "the next micro-batch"
        first, last = min(self.loops.at), max(self.loops.at)
        own = self._gathered(operations[:first], which)
        own += self._gathered(operations[first].inside, which)
        self._put(range(2 * last + 1, 2 * len(operations) + 1), own)


def _computes(operation: Operation) -> bool:
    """Whether a gather can hide behind it."""
    return bool(operation.bodies) or operation.name in PRODUCTS
