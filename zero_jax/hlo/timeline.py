"""When collectives are under way and what the device waits for: the schedule, played through.

Matrix products take their time, everything else none. There is one wire: a collective begins when
those before it have ended, ends when its bytes are through, and where the program needs what it
brings, the device waits for the rest of it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zero_jax.hlo.hlo_text import Computation, Instruction, Program
from zero_jax.hlo.traffic import only_starts
from zero_jax.hlo.trip_counts import trip_count


class Wire(NamedTuple):
    """What one run of a collective takes of the wire."""

    seconds: float
    bytes: float


class Run(NamedTuple):
    """The last run of a collective on the wire, in seconds; see the fields."""

    could: float  # when what it sends was there, but for what only moves it in memory
    began: float
    took: float


@dataclasses.dataclass
class Clock:
    """Where the device and the wire are; see the fields."""

    now: float = 0.0  # seconds of products and of waiting so far
    free: float = 0.0  # when the wire is through with all that was given to it
    waited: float = 0.0
    communication_seconds: float = 0.0
    communication_bytes: float = 0.0

    @property
    def behind(self) -> float:
        """How long the wire goes on from now with what it has."""
        return max(0.0, self.free - self.now)

    def send(self, wire: Wire) -> float:
        """Gives the wire something; returns when it is through."""
        self.free = max(self.now, self.free) + wire.seconds
        self.communication_seconds += wire.seconds
        self.communication_bytes += wire.bytes
        return self.free

    def wait(self, end: float) -> None:
        """The device goes on when that time has come."""
        self.waited += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def repeat(self, before: "Clock", times: int) -> None:
        """All that has happened since, so many times more."""
        self.free += times * (self.now - before.now)
        for name in ("now", "waited", "communication_seconds", "communication_bytes"):
            now = getattr(self, name)
            setattr(self, name, now + times * (now - getattr(before, name)))


class Timeline:
    """Plays a program; `clock` is then that of its end, and `runs` has every collective by name.

    Args:
      program: a scheduled program, parsed.
      products: seconds of the matrix products of one instruction.
      wires: of each collective by its name.
    """

    def __init__(
        self,
        program: Program,
        products: Callable[[Computation, Instruction], float],
        wires: Mapping[str, Wire],
    ):
        self._program, self._products, self._wires = program, products, wires
        self.clock, self.runs = Clock(), dict[str, Run]()
        self._play(program.entry)

    def _play(self, name: str, *, waits: bool = True) -> float:
        """Plays a computation, in which the device waits or not; returns when all is sent."""
        computation = self._program.computations[name]
        ends: dict[str, float] = {}  # of what is under way
        start, there = self.clock.now, dict[str, float]()  # when results could have been there
        for i in computation.instructions.values():
            could = max((there.get(o, start) for o in i.operands), default=start)
            before = self.clock.now
            if i.goes_on:
                end = max((ends[o] for o in i.operands if o in ends), default=self.clock.now)
            else:
                end = self._one(computation, i, could)
            if (i.opcode.endswith("-done") if i.goes_on else not only_starts(i)) and waits:
                self.clock.wait(end)
            else:
                ends[i.name] = end
            there[i.name] = could if end <= before else max(could, end)
        return max(ends.values(), default=self.clock.now)

    def _one(self, computation: Computation, i: Instruction, could: float) -> float:
        """Plays an instruction; returns when what it sends is through."""
        if i.name in self._wires:
            wire = self._wires[i.name]
            began = max(self.clock.now, self.clock.free)
            self.runs[i.name] = Run(could, began, wire.seconds)
            return self.clock.send(wire)
        match i.kind:
            case "while":
                self._loop(i.called[0], trip_count(self._program, computation, i) or 0)
            case "conditional":
                self._dearest(i.called)
            case "call" | "async":
                return max(self._play(name, waits=not only_starts(i)) for name in i.called)
            case _:
                self.clock.now += self._products(computation, i)
        return self.clock.now

    def _loop(self, body: str, trips: int) -> None:
        while trips:
            before = dataclasses.replace(self.clock)
            self._play(body)
            trips -= 1
            if math.isclose(self.clock.behind, before.behind, abs_tol=1e-12):
                self.clock.repeat(before, trips)  # all others are like this one
                return

    def _dearest(self, branches: list[str]) -> None:
        before, ends = self.clock, []
        for name in branches:
            self.clock = dataclasses.replace(before)
            self._play(name)
            ends.append(self.clock)
        self.clock = max(ends, key=lambda clock: clock.now)
