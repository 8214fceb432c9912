"""How often a compiled program runs each instruction, and what that costs.

Follows loops, branches, calls, fusions and asynchronous pairs, whose work counts where it starts.
`executions` lists the instructions, `trip_count` the iterations of a loop; `Totals` adds up a cost.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction

Cost: TypeAlias = tuple[float, ...]
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_ARITHMETIC |= {key.upper(): getattr(operator, key) for key in ("lt", "le", "gt", "ge", "eq", "ne")}
# A value as far as it is known before a run: an integer, a tuple of values, or None if unknown.
_Value: TypeAlias = "int | tuple[_Value, ...] | None"


class Execution(NamedTuple):
    """An instruction as it is reached from the entry computation."""

    instruction: Instruction
    callers: "tuple[Execution, ...]"  # the loops, branches, fusions, starts around it, outer first
    times: int | None  # per run of the program, every branch taken; None if a trip count is unknown


def executions(
    computation: Computation, callers: tuple[Execution, ...] = (), times: int | None = 1
) -> Iterator[Execution]:
    """Lists the instructions of a run in order; a computation called twice is listed twice."""
    for i in computation.instructions.values():
        execution = Execution(i, callers, times)
        yield execution
        for called, trips in _calls(i):
            all_times = None if times is None or trips is None else times * trips
            yield from executions(called, (*callers, execution), all_times)


class Totals:
    """Adds up a cost: loops times their trips, of a conditional the most expensive branch.

    Args:
      cost: Cost of an instruction with all that it calls, its first number the one by which
        branches are compared; None for an instruction that costs as much as what it calls.
      nothing: The cost of nothing, as many zeros.
    """

    def __init__(self, cost: Callable[[Instruction], Cost | None], nothing: Cost):
        self._cost, self._nothing = cost, nothing
        self.computation = functools.cache(self._computation)

    def _computation(self, computation: Computation) -> Cost:
        """Returns the cost of one run of a computation."""
        return self._sum((self.instruction(i), 1) for i in computation.instructions.values())

    def instruction(self, i: Instruction) -> Cost:
        """Returns the cost of one run of an instruction.

        Raises:
          ValueError: A loop with a cost has an unknown trip count.
        """
        cost = self._cost(i)
        if cost is not None:
            return cost
        inside = [(self.computation(called), times) for called, times in _calls(i)]
        if i.kind == "conditional":
            return max((cost for cost, _ in inside), default=self._nothing)
        if any(times is None and any(cost) for cost, times in inside):
            raise ValueError(
                f"the loop {i.name} has no trip count in the program, so its cost is unknown: "
                "use a loop of fixed length (jax.lax.scan)"
            )
        return self._sum((cost, times or 0) for cost, times in inside)

    def _sum(self, parts: Iterable[tuple[Cost, int]]) -> Cost:
        total = self._nothing
        for cost, times in parts:
            total = tuple(a + times * b for a, b in zip(total, cost, strict=True))
        return total


def _calls(i: Instruction) -> list[tuple[Computation, int | None]]:
    """Returns the computations that an instruction runs, and how often each."""
    if i.kind != "while":
        return [(called, 1) for called in i.called]
    trips, (body, condition) = trip_count(i), i.called
    return [(body, trips), (condition, None if trips is None else trips + 1)]


def trip_count(loop: Instruction) -> int | None:
    """Returns the trips of a while loop; None if they depend on data or exceed 10,000 unannounced.

    XLA writes the count beside the loop where it found it, as JSON, escaped JSON or {n=5}. If not,
    the loop is evaluated on the known part of its state: counters that start at a constant and
    change by constants.
    """
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.config):
        return int(known[1])
    body, condition = loop.called
    state = _evaluate(loop.inputs[0], ())
    for trips in range(10_000):
        continues = _evaluate(condition.root, (state,))
        if not continues:
            return None if continues is None else trips
        state = _evaluate(body.root, (state,))
    return None


def _evaluate(i: Instruction, arguments: tuple[_Value, ...]) -> _Value:
    """Returns an instruction's value if constants and the computation's arguments determine it."""
    if not re.match(r"\(|(pred|[su]\d+)\[\]", i.shape):
        return None  # only integers count; this also keeps the search out of the arithmetic

    def operands() -> Iterator[_Value]:
        return (_evaluate(operand, arguments) for operand in i.inputs)

    match i.opcode:
        case "constant":
            return int(i.operands[0]) if re.fullmatch(r"-?\d+", i.operands[0]) else None
        case "parameter":
            return arguments[int(i.operands[0])] if arguments else None
        case "tuple":
            return tuple(operands())
        case "get-tuple-element":
            whole = next(operands())
            return whole[int(i.attributes["index"])] if isinstance(whole, tuple) else None
        case "copy" | "bitcast" | "convert":
            return next(operands())
        case "fusion" | "call":
            return _evaluate(i.called[0].root, tuple(operands()))
        case "add" | "subtract" | "compare":
            values = [value for value in operands() if isinstance(value, int)]
            apply = _ARITHMETIC[i.attributes.get("direction", i.opcode)]
            return apply(*values) if len(values) == 2 else None
    return None
