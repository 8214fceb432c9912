"""What a compiled program runs: each instruction, how often, and inside what.

The one place that follows loops, branches, calls, fusions and asynchronous pairs, whose work counts
where it starts. `runs` lists all of it; `Totals` adds up what it costs.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction, Program
from zero_jax.hlo.trip_counts import trip_count

Cost: TypeAlias = tuple[float, ...]


class Run(NamedTuple):
    """An instruction where it runs; see the fields."""

    computation: Computation
    instruction: Instruction
    callers: "tuple[Run, ...]"  # the loops, branches, fusions, starts around it, outermost first
    times: int | None  # per run of the program, every branch taken; None if a trip count is unknown


def runs(program: Program) -> Iterator[Run]:
    """All that one run of a program runs, in its order; what is called twice comes twice."""

    def walk(name: str, callers: tuple[Run, ...], times: int | None) -> Iterator[Run]:
        computation = program.computations[name]
        for i in computation.instructions.values():
            run = Run(computation, i, callers, times)
            yield run
            for called, trips in _calls(program, computation, i):
                all_times = None if times is None or trips is None else times * trips
                yield from walk(called, (*callers, run), all_times)

    return walk(program.entry, (), 1)


class Totals:
    """Adds up a cost: loops times their trips, of a conditional the dearest branch.

    Args:
      program: a parsed program; each of its computations is looked at once.
      cost: of an instruction with all that it calls, its first number the one by which branches are
        compared; None for what costs as much as what it calls.
      nothing: the cost of nothing, as many zeros.
    """

    def __init__(
        self,
        program: Program,
        cost: Callable[[Computation, Instruction], Cost | None],
        nothing: Cost,
    ):
        self.program, self._cost, self._nothing = program, cost, nothing
        self.computation = functools.lru_cache(maxsize=None)(self._computation)

    def _computation(self, name: str) -> Cost:
        """Of one run of a computation."""
        computation, total = self.program.computations[name], self._nothing
        for i in computation.instructions.values():
            total = _plus(total, self.instruction(computation, i), 1)
        return total

    def instruction(self, computation: Computation, i: Instruction) -> Cost:
        """Returns the cost of one run of an instruction.

        Raises:
          ValueError: A loop with a cost has an unknown trip count.
        """
        own = self._cost(computation, i)
        if own is not None:
            return own
        inside = [(self.computation(name), n) for name, n in _calls(self.program, computation, i)]
        if i.kind == "conditional":
            return max((cost for cost, _ in inside), default=self._nothing)
        total = self._nothing
        for cost, times in inside:
            if times is None and any(cost):
                raise ValueError(
                    f"the loop {i.name} has no trip count in the program, so its cost is unknown: "
                    "use a loop of fixed length (jax.lax.scan)"
                )
            total = _plus(total, cost, times or 0)
        return total


def _calls(
    program: Program, computation: Computation, i: Instruction
) -> list[tuple[str, int | None]]:
    """The computations that an instruction runs, and how often each."""
    if i.kind != "while":
        return [(name, 1) for name in i.called]
    trips = trip_count(program, computation, i)
    body, condition = i.called
    return [(body, trips), (condition, None if trips is None else trips + 1)]


def _plus(total: Cost, more: Cost, times: int) -> Cost:
    return tuple(a + times * b for a, b in zip(total, more, strict=True))
