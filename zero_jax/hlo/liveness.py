"""Which temporaries of a compiled program live at once, read from its schedule.

XLA plans memory before the program runs: it knows when each buffer is written and last read, and
packs them into one arena, whose size it reports as `temp`. The text of the program does not hold
that plan, but it holds the schedule, so the plan's input can be computed again: the largest set
of buffers that live at the same instant, each with the line of source it comes from. What the
arena is larger than that set is fragmentation (ZeRO, section 6.3: MD), 1.0 is none.

Buffers are shared as XLA shares them: bitcasts and tuples are views, a loop's state is updated in
place, a fusion that goes element by element may write over an operand that nobody reads again, and
what a loop or a branch makes for an output of the program is in that output from the start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zero_jax.hlo.hlo_text import VIEWS, Computation, Instruction, Program
from zero_jax.hlo.kernels import UPDATES, reached_in_order, updates

_IN_PLACE = UPDATES | {"all-reduce-start"}


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
        self.updated = False  # holds several values in turn: XLA gives its place to no other

    @property
    def shape(self) -> str:
        array = self.made_by.arrays[self.position]
        return f"{array.dtype}[{','.join(map(str, array.dims))}]"


_Flags: TypeAlias = "tuple[bool, ...] | None"  # for each array; None: all True
_Worst: TypeAlias = "tuple[int, tuple[_Buffer, ...]]"  # bytes and buffers at the worst instant
_Held: TypeAlias = set[tuple[str, int]]  # results of loops and branches that their caller holds


@dataclass(frozen=True)
class _Meanwhile:
    """What is different while an instruction runs from what is alive before and after it."""

    inside: tuple[_Buffer, ...] = ()  # alive at the worst instant of a loop or a branch
    own: frozenset[_Buffer] = frozenset()  # of the caller, counted among those if they end or begin
    over: Sequence[tuple[_Buffer, _Buffer]] = ()  # results, operands whose place they can take


def peak(program: Program) -> Peak:
    """The largest set of temporaries that live at once.

    Args:
        program: A scheduled program (`is_scheduled=true`), parsed.

    Returns:
        Its bytes and its members. Arguments, outputs and constants are not temporaries; what XLA
        puts into an output's memory before that is written, if it fits, is counted all the same.
    """
    size, buffers = _Liveness(program).run(program.entry, None, None)
    found = [
        Temporary(b.bytes, b.made_by.name, b.shape, b.made_by.op_name, program.source(b.made_by))
        for b in buffers
    ]
    return Peak(size, tuple(sorted(found, key=lambda t: -t.bytes)))


class _Liveness:
    """Walks computations; each is walked once or twice for each way in which it is called."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[tuple[str, _Flags, _Flags], _Worst] = {}

    def run(self, name: str, outside: _Flags, results: _Flags) -> _Worst:
        """Bytes and buffers at the worst instant of one run of a computation.

        Args:
            name: the computation.
            outside: for each array of its parameters, whether the caller holds it throughout.
            results: the same for each array of its result.
        """
        key = (name, outside, results)
        if key not in self.known:
            held, found = set[tuple[str, int]](), {("", 0)}
            while not found <= held:
                held |= found
                self.known[key], found = self._run(name, outside, results, held)
        return self.known[key]

    def _run(
        self, name: str, outside: _Flags, results: _Flags, held: _Held
    ) -> tuple[_Worst, _Held]:
        """The same if `held` is known, and what of it this run shows."""
        computation = self.program.computations[name]
        instructions = list(computation.instructions.values())
        values: dict[str, list[_Buffer]] = {}
        born: dict[_Buffer, int] = {}
        dies: dict[_Buffer, int] = {}
        meanwhile: list[_Meanwhile] = []
        for time, i in enumerate(instructions):
            operands = [values[name] for name in i.operands if name in values]
            used = () if _is_view(i) else operands  # a view reads nothing
            for buffer in (b for operand in used for b in operand):
                dies[buffer] = time
            if i.opcode == "while":
                out, special = self._loop(i, operands[0], held)
            elif i.opcode in ("call", "conditional"):
                out, special = self._branches(i, held)
            else:
                out = self._results(computation, i, operands, outside)
                special = _Meanwhile(over=self._may_overwrite(i, operands, out))
            values[i.name] = out
            meanwhile.append(special)
            for buffer in out:
                born.setdefault(buffer, 0 if i.is_parameter else time)
                dies.setdefault(buffer, time)
        for position, buffer in enumerate(values[computation.root]):
            dies[buffer] = len(instructions)
            buffer.updated |= results is not None
            if results is None or results[position]:
                buffer.outside = True  # an output, or an update of what the caller holds
        nested = [i.name for i in instructions if i.opcode in ("while", "call", "conditional")]
        found = {(n, at) for n in nested for at, b in enumerate(values[n]) if b.outside}
        return _worst(born, dies, meanwhile), found

    def _loop(
        self, i: Instruction, state: list[_Buffer], held: _Held
    ) -> tuple[list[_Buffer], _Meanwhile]:
        body, condition = i.called
        kept = self.program.computations[body].passed_on
        for position, buffer in enumerate(state):
            buffer.outside |= (i.name, position) in held
            buffer.updated |= not kept[position]
        outside = tuple(b.outside or keep for b, keep in zip(state, kept, strict=True))
        runs = [self.run(body, outside, outside), self.run(condition, None, None)]
        _, buffers = max(runs, key=lambda run: run[0])
        pairs = list(zip(state, outside, strict=True))
        out = [b if stays else _Buffer(b.bytes, b.made_by, b.position) for b, stays in pairs]
        # A part of the state is known by what the caller started it with.
        buffers = tuple(state[b.position] if b.made_by.is_parameter else b for b in buffers)
        own = {b for b, stays in (*pairs, *zip(out, outside, strict=True)) if not stays}
        return out, _Meanwhile(buffers, frozenset(own))

    def _branches(self, i: Instruction, held: _Held) -> tuple[list[_Buffer], _Meanwhile]:
        out = _new_buffers(i)
        for buffer in out:
            buffer.outside = (i.name, buffer.position) in held
        runs = [self.run(called, None, tuple(b.outside for b in out)) for called in i.called]
        return _update(out), _Meanwhile(max(runs, key=lambda run: run[0])[1], frozenset(out))

    def _results(
        self,
        computation: Computation,
        i: Instruction,
        operands: list[list[_Buffer]],
        outside: _Flags,
    ) -> list[_Buffer]:
        """The buffers of an instruction's result, those it shares with operands included.

        Of a start those come first that its done is a view of, whatever its shape.
        """
        flat = [b for operand in operands for b in operand]
        new = _new_buffers(i)
        if i.is_parameter or i.opcode == "constant":
            for buffer in new:
                buffer.outside = outside is None or not i.is_parameter or outside[buffer.position]
            return new
        if i.opcode == "get-tuple-element":
            counts = computation.instructions[i.operands[0]].element_counts
            index = int(i.attributes["index"])
            start = sum(counts[:index])
            return operands[0][start : start + counts[index]]
        if _is_view(i) or self.program.moves_argument(computation, i):
            return flat[: len(new)]
        if i.opcode in _IN_PLACE:
            return _update([*flat, *flat][: len(new)])  # 0.12 starts with ((operands), results)
        if i.opcode.endswith("-done"):
            return operands[0][: len(new)]
        if i.opcode == "copy-start":  # (destination, source, context)
            return [new[0], *flat]
        if i.opcode.endswith("-start"):  # ((operands), results, context)
            return [*self._written(i, operands, new[len(flat) :]), *flat]
        return self._written(i, operands, new)

    def _written(
        self, i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]
    ) -> list[_Buffer]:
        """New buffers, but for results that update an operand in place."""
        for position, operand in i.aliases:
            (out[position],) = _update(operands[operand])
        if i.kind == "fusion":
            for position, _, whole in updates(self.program.computations[i.called[0]]):
                buffer = operands[int(whole.operands[0])][0]
                if buffer.bytes == out[position].bytes:
                    (out[position],) = _update([buffer])
        return out

    def _may_overwrite(
        self, i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]
    ) -> list[tuple[_Buffer, _Buffer]]:
        """Pairs of a result and an operand whose place it can take, should that end here."""
        pairs: list[tuple[_Buffer, _Buffer]] = []
        if _sums_in_place(i):
            pairs = list(zip(out, (operand[0] for operand in operands), strict=True))
        elif i.opcode == "fusion":
            inside = self.program.computations[i.called[0]]
            # One result may be several arrays: a sort has keys and values.
            parts = [part.name for part in inside.results for _ in part.arrays]
            for parameter in inside.parameters:
                reached = reached_in_order(inside, parameter, i.attributes.get("kind", ""))
                (operand,) = operands[int(parameter.operands[0])]
                pairs += [
                    (b, operand) for b, part in zip(out, parts, strict=True) if part in reached
                ]
        direct = [(b, operand) for b, operand in pairs if operand.made_by.name in i.operands]
        return [(b, operand) for b, operand in direct if b.bytes == operand.bytes]


def _worst(
    born: Mapping[_Buffer, int], dies: Mapping[_Buffer, int], meanwhile: Sequence[_Meanwhile]
) -> _Worst:
    """Bytes and buffers at the worst instant of a computation, what the caller holds left out."""
    starting: dict[int, list[_Buffer]] = {}
    ending: dict[int, list[_Buffer]] = {}
    for buffer in (b for b in born if b.bytes and not b.outside):
        starting.setdefault(born[buffer], []).append(buffer)
        ending.setdefault(dies[buffer], []).append(buffer)
    alive: dict[_Buffer, None] = {}
    best: _Worst = (0, ())
    current = 0
    for time, special in enumerate(meanwhile):
        new, old = starting.get(time, []), ending.get(time, [])
        gone = {b for b in (*new, *old) if b in special.own}
        gone |= _overwriting(special.over, set(new), set(old).difference(new))
        for buffer in new:
            alive[buffer] = None
            current += buffer.bytes
        size = current + sum(b.bytes for b in special.inside) - sum(b.bytes for b in gone)
        if size > best[0]:
            best = size, (*(b for b in alive if b not in gone), *special.inside)
        for buffer in old:
            del alive[buffer]
            current -= buffer.bytes
    return best


def _overwriting(
    pairs: Iterable[tuple[_Buffer, _Buffer]], new: set[_Buffer], old: set[_Buffer]
) -> set[_Buffer]:
    """Those new buffers that take the place of an old one, each of another."""
    taken: dict[_Buffer, _Buffer] = {}
    for result, operand in pairs:
        free = result in new and operand in old and not (result.updated or operand.updated)
        if free and operand not in taken and result not in taken.values():
            taken[operand] = result
    return set(taken.values())


def _update(buffers: list[_Buffer]) -> list[_Buffer]:
    """Marks buffers that get another value."""
    for buffer in buffers:
        buffer.updated = True
    return buffers


def _sums_in_place(i: Instruction) -> bool:
    """A blocking all-reduce of a GPU; CPU devices write their sum elsewhere."""
    return i.opcode == "all-reduce" and "collective_backend_config" in i.config


def _is_view(i: Instruction) -> bool:
    return i.opcode in VIEWS or i.opcode.endswith("-update")


def _new_buffers(i: Instruction) -> list[_Buffer]:
    """One for each array of the result; what is in host memory takes no bytes of the device's."""
    return [_Buffer(0 if a.on_host else a.bytes, i, at) for at, a in enumerate(i.arrays)]
