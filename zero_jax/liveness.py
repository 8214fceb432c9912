"""Which temporaries of a compiled program live at once, read from its schedule.

XLA plans memory before the program runs: it knows when each buffer is written and last read, and
packs them into one arena, whose size it reports as `temp`. The text of the program does not hold
that plan, but it holds the schedule, so the plan's input can be computed again: the largest set
of buffers that live at the same instant, each with the line of source it comes from. What the
arena is larger than that set is fragmentation (ZeRO, section 6.3: MD), 1.0 is none.

Buffers are shared as XLA shares them: bitcasts and tuples are views, a loop's state is updated in
place, a fusion may write over an operand of the same size that nobody reads again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_jax.hlo_text import Computation, Instruction, Program

_VIEWS = ("bitcast", "opt-barrier", "add-dependency", "get-tuple-element", "tuple")
_IN_PLACE = ("all-reduce", "all-reduce-start", "dynamic-update-slice", "scatter")
_MAY_OVERWRITE = ("fusion", "copy", "all-reduce")
# The operand of these is looked through when a fusion's root is asked what it updates in place.
_SAME_PLACE = ("bitcast", "copy", "convert", "reshape")


@dataclass(frozen=True)
class Temporary:
    """One buffer; see the fields."""

    bytes: int
    name: str  # of the instruction that makes it
    shape: str
    op_name: str  # what it was in the traced program, "" if XLA did not say
    source: str  # "gpt.py:120", "" if XLA did not say


@dataclass(frozen=True)
class Peak:
    """The instant at which most bytes of temporaries are alive."""

    bytes: int
    temporaries: tuple[Temporary, ...]  # alive then, largest first


class _Buffer:
    """A buffer, told apart by identity; `position` is its place among the arrays of `made_by`."""

    def __init__(self, size: int, made_by: Instruction, position: int, outside: bool = False):
        self.bytes, self.made_by, self.position = size, made_by, position
        self.outside = outside

    @property
    def shape(self) -> str:
        return self.made_by.array_shapes[self.position]


@dataclass(frozen=True)
class _Loop:
    """What a loop needs while it runs: its state and what its body holds beside it."""

    buffers: tuple[_Buffer, ...]  # alive at the worst instant of its body
    state: frozenset[_Buffer]  # buffers of the caller that are counted among those


def peak(program: Program) -> Peak:
    """The largest set of temporaries that live at once.

    Args:
        program: A scheduled program (`is_scheduled=true`), parsed.

    Returns:
        Its bytes and its members. Arguments, outputs and constants are not temporaries.
    """
    size, buffers = _Liveness(program).run(program.entry, ())
    found = [
        Temporary(b.bytes, b.made_by.name, b.shape, b.made_by.op_name, program.source(b.made_by))
        for b in buffers
    ]
    return Peak(size, tuple(sorted(found, key=lambda t: -t.bytes)))


class _Liveness:
    """Walks computations; each is walked once for each way in which it is called."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[tuple[str, tuple[bool, ...]], tuple[int, tuple[_Buffer, ...]]] = {}

    def run(self, name: str, outside: tuple[bool, ...]) -> tuple[int, tuple[_Buffer, ...]]:
        """Bytes and buffers at the worst instant of one run of a computation.

        Args:
            name: the computation.
            outside: for each array of its parameters, whether the caller holds it throughout;
                empty if the caller holds them all.
        """
        if (name, outside) not in self.known:
            self.known[name, outside] = self._run(self.program.computations[name], outside)
        return self.known[name, outside]

    def _run(
        self, computation: Computation, outside: tuple[bool, ...]
    ) -> tuple[int, tuple[_Buffer, ...]]:
        instructions = list(computation.instructions.values())
        values: dict[str, list[_Buffer]] = {}
        born: dict[_Buffer, int] = {}
        dies: dict[_Buffer, int] = {}
        loops: dict[int, _Loop] = {}
        for time, i in enumerate(instructions):
            operands = [values[name] for name in i.operands if name in values]
            used = () if i.opcode in _VIEWS else operands  # a view reads nothing
            for buffer in (b for operand in used for b in operand):
                dies[buffer] = time
            if i.opcode == "while":
                loops[time], out = self._loop(i, operands[0])
            else:
                out = self._results(computation, i, operands, outside)
            values[i.name] = out
            for buffer in out:
                born.setdefault(buffer, time)
                dies.setdefault(buffer, time)
        for position, buffer in enumerate(values[computation.root]):
            dies[buffer] = len(instructions)
            if not outside or outside[position]:
                buffer.outside = True  # an output, or an update of what the caller holds
        counted = [b for b in born if b.bytes and not b.outside]
        return self._worst(instructions, counted, born, dies, loops)

    def _worst(
        self,
        instructions: Sequence[Instruction],
        counted: Sequence[_Buffer],
        born: dict[_Buffer, int],
        dies: dict[_Buffer, int],
        loops: dict[int, _Loop],
    ) -> tuple[int, tuple[_Buffer, ...]]:
        starting: dict[int, list[_Buffer]] = {}
        ending: dict[int, list[_Buffer]] = {}
        for buffer in counted:
            starting.setdefault(born[buffer], []).append(buffer)
            ending.setdefault(dies[buffer], []).append(buffer)
        alive: dict[_Buffer, None] = {}
        best: tuple[int, tuple[_Buffer, ...]] = (0, ())
        current = 0
        for time, i in enumerate(instructions):
            new = starting.get(time, [])
            old = [b for b in ending.get(time, []) if born[b] < time]
            inner, gone = self._inside(i, loops.get(time), new, old)
            for buffer in new:
                alive[buffer] = None
                current += buffer.bytes
            size = current - sum(b.bytes for b in gone) + sum(b.bytes for b in inner)
            if size > best[0]:
                best = size, (*(b for b in alive if b not in gone), *inner)
            for buffer in ending.get(time, []):
                del alive[buffer]
                current -= buffer.bytes
        return best

    def _inside(
        self, i: Instruction, loop: _Loop | None, new: list[_Buffer], old: list[_Buffer]
    ) -> tuple[tuple[_Buffer, ...], list[_Buffer]]:
        """What lives inside an instruction, and what of its surroundings is not there meanwhile."""
        if loop is not None:
            return loop.buffers, [*new, *(b for b in old if b in loop.state)]
        if i.opcode in ("call", "conditional"):
            runs = [self.run(called, ()) for called in i.called]
            return max(runs, key=lambda run: run[0], default=(0, ()))[1], []
        if i.opcode not in _MAY_OVERWRITE or i.attributes.get("kind") == "kCustom":
            return (), []
        overwritten, free = [], [b.bytes for b in old]
        for buffer in new:
            if buffer.bytes in free:
                free.remove(buffer.bytes)
                overwritten.append(buffer)
        return (), overwritten

    def _loop(self, i: Instruction, state: list[_Buffer]) -> tuple[_Loop, list[_Buffer]]:
        body, condition = (i.attributes[role].lstrip("%") for role in ("body", "condition"))
        kept = _unchanged(self.program.computations[body])
        outside = tuple(b.outside or keep for b, keep in zip(state, kept, strict=True))
        runs = [self.run(body, outside), self.run(condition, (True,) * len(outside))]
        _, buffers = max(runs, key=lambda run: run[0])
        pairs = list(zip(state, outside, strict=True))
        out = [b if stays else _Buffer(b.bytes, b.made_by, b.position) for b, stays in pairs]
        # A part of the state is known by what the caller started it with.
        buffers = tuple(
            state[b.position] if b.made_by.opcode == "parameter" else b for b in buffers
        )
        return _Loop(buffers, frozenset(b for b, stays in pairs if not stays)), out

    def _results(
        self,
        computation: Computation,
        i: Instruction,
        operands: list[list[_Buffer]],
        outside: tuple[bool, ...],
    ) -> list[_Buffer]:
        """The buffers of an instruction's result, those it shares with operands included."""
        flat = [b for operand in operands for b in operand]
        sizes = i.array_bytes
        if i.opcode in ("parameter", "constant"):
            flags = outside if i.opcode == "parameter" and outside else (True,) * len(sizes)
            parts = enumerate(zip(sizes, flags, strict=True))
            return [_Buffer(size, i, at, flag) for at, (size, flag) in parts]
        if i.opcode == "get-tuple-element":
            counts = computation.instructions[i.operands[0]].element_counts
            index = int(i.attributes["index"])
            start = sum(counts[:index])
            return operands[0][start : start + counts[index]]
        if i.opcode in _VIEWS or (i.opcode in _IN_PLACE and len(flat) >= len(sizes)):
            return flat[: len(sizes)]
        if i.opcode.endswith("-done"):
            return self._finished(computation, i, operands[0])
        if i.opcode.endswith("-start"):
            if i.opcode == "copy-start":  # (destination, source, context)
                return [_Buffer(sizes[0], i, 0), *flat, _Buffer(0, i, 0)]
            new = [_Buffer(size, i, at) for at, size in enumerate(sizes)]
            results = new[len(flat) :]
            return [*flat, *self._written(i, operands, results)]
        return self._written(i, operands, [_Buffer(size, i, at) for at, size in enumerate(sizes)])

    def _finished(
        self, computation: Computation, i: Instruction, started: list[_Buffer]
    ) -> list[_Buffer]:
        """A done is a view of the results in what its start (or the updates between) returned."""
        start = computation.instructions[i.operands[0]]
        while start.opcode.endswith("-update"):
            start = computation.instructions[start.operands[0]]
        if len(started) == len(i.array_bytes) or start.opcode == "copy-start":
            return started[: len(i.array_bytes)]
        passed = sum(
            len(computation.instructions[operand].array_bytes) for operand in start.operands
        )
        return started[passed : passed + len(i.array_bytes)]

    def _written(
        self, i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]
    ) -> list[_Buffer]:
        """New buffers, but for the results of a fusion that updates an operand in place."""
        if not i.opcode.startswith("fusion"):
            return out
        inside = self.program.computations[i.called[0]].instructions
        root = inside[self.program.computations[i.called[0]].root]
        parts = [root] if root.opcode != "tuple" else [inside[name] for name in root.operands]
        for position, part in enumerate(parts):
            part = _through(inside, part)
            if part.opcode not in ("dynamic-update-slice", "scatter"):
                continue
            updated = _through(inside, inside[part.operands[0]])
            if updated.opcode == "parameter":
                (buffer,) = operands[int(updated.operands[0])]
                if buffer.bytes == out[position].bytes:
                    out[position] = buffer
        return out


def _through(inside: Mapping[str, Instruction], i: Instruction) -> Instruction:
    while i.opcode in _SAME_PLACE:
        i = inside[i.operands[0]]
    return i


def _unchanged(body: Computation) -> tuple[bool, ...]:
    """For each array of a loop's state, whether the body passes it on untouched."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return (False,) * len(root.array_bytes)
    flags = []
    for position, name in enumerate(root.operands):
        part = body.instructions[name]
        same = part.opcode == "get-tuple-element" and int(part.attributes["index"]) == position
        source = body.instructions[part.operands[0]] if same else part
        flags += [same and source.opcode == "parameter"] * len(part.array_bytes)
    return tuple(flags)
