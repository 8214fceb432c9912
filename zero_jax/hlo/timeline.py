"""Times of collectives and of waiting: the schedule, played through.

Matrix products take their time, other instructions none. There is one interconnect: a collective
starts when those before it have ended. It ends when its bytes are sent, and where the program needs
its result earlier, the device waits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from zero_jax.hlo.collectives import only_starts
from zero_jax.hlo.execution_counts import trip_count
from zero_jax.hlo.hlo_text import Computation, Instruction, Program


class Transfer(NamedTuple):
    """Load of the interconnect by one run of a collective."""

    seconds: float
    bytes: float


@dataclasses.dataclass
class Clock:
    """Progress of the device and of the interconnect."""

    now: float = 0.0  # seconds of products and of waiting so far
    free: float = 0.0  # when all that was started is sent
    waited: float = 0.0
    communication_seconds: float = 0.0
    communication_bytes: float = 0.0

    @property
    def behind(self) -> float:
        """Seconds for which the interconnect is busy from now on."""
        return max(0.0, self.free - self.now)

    def send(self, transfer: Transfer) -> float:
        """Starts a transfer; returns when it ends."""
        self.free = max(self.now, self.free) + transfer.seconds
        self.communication_seconds += transfer.seconds
        self.communication_bytes += transfer.bytes
        return self.free

    def wait(self, end: float) -> None:
        """Lets the device wait until then."""
        self.waited += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def repeat(self, before: "Clock", times: int) -> None:
        """Repeats all that has happened since `before`."""
        self.free += times * (self.now - before.now)
        for name in ("now", "waited", "communication_seconds", "communication_bytes"):
            now = getattr(self, name)
            setattr(self, name, now + times * (now - getattr(before, name)))


class Timeline:
    """Plays a program.

    Args:
      program: A scheduled program, parsed.
      products: Seconds of the matrix products of one instruction.
      transfers: Transfers of the collectives, by their names.

    Attributes:
      clock: The clock at the end of the program.
      delays: Seconds by which the last run of each collective could have started earlier, when its
        operands were computed or received, by its name.
    """

    def __init__(
        self,
        program: Program,
        products: Callable[[Instruction], float],
        transfers: Mapping[str, Transfer],
    ):
        self._products, self.transfers = products, transfers
        self.clock, self.delays = Clock(), dict[str, float]()
        self._play(program.entry)

    def _play(self, computation: Computation, *, waits: bool = True) -> float:
        """Plays a computation, in which the device waits or not; returns when all is sent."""
        ends: dict[str, float] = {}  # of operations that were started
        begin, ready_at = self.clock.now, dict[str, float]()
        for i in computation.instructions.values():
            ready = max((ready_at.get(name, begin) for name in i.operands), default=begin)
            before = self.clock.now
            if i.continues:
                end = max((ends[name] for name in i.operands if name in ends), default=before)
            else:
                end = self._one(i, ready)
            blocks = i.opcode.endswith("-done") if i.continues else not only_starts(i)
            if blocks and waits:
                self.clock.wait(end)
            else:
                ends[i.name] = end
            ready_at[i.name] = ready if end <= before else max(ready, end)
        return max(ends.values(), default=self.clock.now)

    def _one(self, i: Instruction, ready: float) -> float:
        """Plays an instruction; returns when all that it sends is sent."""
        if i.name in self.transfers:
            self.delays[i.name] = max(self.clock.now, self.clock.free) - ready
            return self.clock.send(self.transfers[i.name])
        match i.kind:
            case "while":
                self._loop(i.called[0], trip_count(i) or 0)
            case "conditional":
                self._most_expensive(i.called)
            case "call" | "async":
                return max(self._play(called, waits=not only_starts(i)) for called in i.called)
            case _:
                self.clock.now += self._products(i)
        return self.clock.now

    def _loop(self, body: Computation, trips: int) -> None:
        for remaining in reversed(range(trips)):
            before = dataclasses.replace(self.clock)
            self._play(body)
            if math.isclose(self.clock.behind, before.behind, abs_tol=1e-12):
                self.clock.repeat(before, remaining)  # all others are like this one
                return

    def _most_expensive(self, branches: Sequence[Computation]) -> None:
        before, ends = self.clock, []
        for branch in branches:
            self.clock = dataclasses.replace(before)
            self._play(branch)
            ends.append(self.clock)
        self.clock = max(ends, key=lambda clock: clock.now)
