"""Temporaries of a compiled program that are live at once, read from its schedule.

XLA plans memory before the program runs: it knows when each buffer is written and last read, and
packs them into one arena, whose size it reports as `temp`. The text of the program does not contain
that plan, but it contains the schedule. So the plan's input can be computed again: the largest set
of buffers that are live at the same instant, each with its source line. The rest of the arena is
fragmentation (ZeRO, section 6.3: MD); a ratio of 1.0 is none.

Buffers are shared as XLA shares them. Bitcasts and tuples are views. A loop updates its state in
place. An elementwise fusion may write over an operand that nothing reads again. A result of a loop
or a branch that is an output of the program is in that output from the start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zero_jax.hlo.hlo_text import VIEWS, Computation, Instruction, Program
from zero_jax.hlo.kernels import UPDATES, elementwise_results, updates

_IN_PLACE = UPDATES | {"all-reduce-start"}
_NESTED = ("while", "call", "conditional")


@dataclass(frozen=True)
class Temporary:
    """One buffer; `op_name` and `source` are "" if XLA does not report them."""

    bytes: int
    name: str  # of the instruction that writes it
    shape: str
    op_name: str  # its operation in the traced program
    source: str  # "gpt.py:120"


@dataclass(frozen=True)
class Peak:
    """The instant with the most bytes of live temporaries."""

    bytes: int
    temporaries: tuple[Temporary, ...]  # live then, largest first


class _Buffer:
    """A buffer of device memory, compared by identity; `position` is that among its arrays."""

    def __init__(self, made_by: Instruction, position: int):
        array = made_by.arrays[position]
        self.bytes = 0 if array.on_host else array.bytes
        self.made_by, self.position = made_by, position
        self.outside = False  # the caller holds it, or it is an argument, a constant or an output
        self.updated = False  # it has several values in turn: XLA does not reuse its memory

    def temporary(self, program: Program) -> Temporary:
        array = self.made_by.arrays[self.position]
        shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
        source = program.source(self.made_by)
        return Temporary(self.bytes, self.made_by.name, shape, self.made_by.op_name, source)


_Flags: TypeAlias = "tuple[bool, ...] | None"  # for each array; None: all True
_Worst: TypeAlias = "tuple[int, tuple[_Buffer, ...]]"  # bytes and buffers at the worst instant
_Pairs: TypeAlias = "Sequence[tuple[_Buffer, _Buffer]]"  # results, operands that they can overwrite
_Held: TypeAlias = set[tuple[str, int]]  # results of loops and branches that their caller holds


@dataclass(frozen=True)
class _Meanwhile:
    """Differences from the live buffers before and after, while an instruction runs."""

    inside: tuple[_Buffer, ...] = ()  # live at the worst instant of a loop or a branch
    own: frozenset[_Buffer] = frozenset()  # of the caller, counted inside if they end or begin
    overwritten: _Pairs = ()


def peak(program: Program) -> Peak:
    """Returns the largest set of temporaries that are live at once.

    Arguments, outputs and constants are not temporaries. Temporaries that XLA puts into an output's
    memory before that is written are counted nevertheless.

    Args:
      program: A scheduled program (`is_scheduled=true`), parsed.
    """
    size, buffers = _Liveness(program).run(program.entry, None, None)
    temporaries = sorted((b.temporary(program) for b in buffers), key=lambda t: -t.bytes)
    return Peak(size, tuple(temporaries))


class _Liveness:
    """Walks computations, once or twice for each combination of flags of its callers."""

    def __init__(self, program: Program):
        self.moved = _moved_arguments(program)
        self.known: dict[tuple[Computation, _Flags, _Flags], _Worst] = {}

    def run(self, computation: Computation, outside: _Flags, results: _Flags) -> _Worst:
        """Returns bytes and buffers at the worst instant of one run of a computation.

        Args:
          computation: The computation.
          outside: For each array of its parameters, True if the caller holds it throughout.
          results: The same for each array of its result.
        """
        key = (computation, outside, results)
        if key not in self.known:
            held, found = set[tuple[str, int]](), {("", 0)}
            while not found <= held:
                held |= found
                self.known[key], found = self._run(computation, outside, results, held)
        return self.known[key]

    def _run(
        self, computation: Computation, outside: _Flags, results: _Flags, held: _Held
    ) -> tuple[_Worst, _Held]:
        """Returns the same for a given `held`, and the part of it that this run shows."""
        instructions = list(computation.instructions.values())
        values: dict[Instruction, list[_Buffer]] = {}
        born: dict[_Buffer, int] = {}
        dies: dict[_Buffer, int] = {}
        meanwhile: list[_Meanwhile] = []
        for time, i in enumerate(instructions):
            operands = [values[operand] for operand in i.inputs]
            used = () if _is_view(i) else operands  # a view reads nothing
            for buffer in (b for operand in used for b in operand):
                dies[buffer] = time
            if i.opcode == "while":
                out, special = self._loop(i, operands[0], held)
            elif i.opcode in _NESTED:
                out, special = self._branches(i, held)
            else:
                out = self._results(i, operands, outside)
                special = _Meanwhile(overwritten=_may_overwrite(i, operands, out))
            values[i] = out
            meanwhile.append(special)
            for buffer in out:
                born.setdefault(buffer, 0 if i.opcode == "parameter" else time)
                dies.setdefault(buffer, time)
        for position, buffer in enumerate(values[computation.root]):
            dies[buffer] = len(instructions)
            buffer.updated |= results is not None
            if results is None or results[position]:
                buffer.outside = True  # an output, or an update of a buffer of the caller
        nested = [i for i in instructions if i.opcode in _NESTED]
        found = {(i.name, at) for i in nested for at, b in enumerate(values[i]) if b.outside}
        return _worst(born, dies, meanwhile), found

    def _loop(
        self, i: Instruction, state: list[_Buffer], held: _Held
    ) -> tuple[list[_Buffer], _Meanwhile]:
        body, condition = i.called
        kept = _passed_on(body)
        for position, buffer in enumerate(state):
            buffer.outside |= (i.name, position) in held
            buffer.updated |= not kept[position]
        outside = tuple(b.outside or keep for b, keep in zip(state, kept, strict=True))
        runs = [self.run(body, outside, outside), self.run(condition, None, None)]
        _, buffers = max(runs, key=lambda run: run[0])
        pairs = list(zip(state, outside, strict=True))
        out = [b if stays else _Buffer(b.made_by, b.position) for b, stays in pairs]
        # A part of the state is known by what the caller started it with.
        buffers = tuple(
            state[b.position] if b.made_by.opcode == "parameter" else b for b in buffers
        )
        own = {b for b, stays in (*pairs, *zip(out, outside, strict=True)) if not stays}
        return out, _Meanwhile(buffers, frozenset(own))

    def _branches(self, i: Instruction, held: _Held) -> tuple[list[_Buffer], _Meanwhile]:
        out = _new_buffers(i)
        for buffer in out:
            buffer.outside = (i.name, buffer.position) in held
        runs = [self.run(called, None, tuple(b.outside for b in out)) for called in i.called]
        return _update(out), _Meanwhile(max(runs, key=lambda run: run[0])[1], frozenset(out))

    def _results(
        self, i: Instruction, operands: list[list[_Buffer]], outside: _Flags
    ) -> list[_Buffer]:
        """Returns the buffers of an instruction's result, including those shared with operands.

        Of a start the buffers come first that its done is a view of, whatever its shape.
        """
        flat = [b for operand in operands for b in operand]
        new = _new_buffers(i)
        if i.opcode in ("parameter", "constant"):
            for buffer in new:
                held = i.opcode == "constant" or outside is None or outside[buffer.position]
                buffer.outside = held
            return new
        if i.opcode == "get-tuple-element":
            counts, index = i.inputs[0].element_counts, int(i.attributes["index"])
            start = sum(counts[:index])
            return flat[start : start + counts[index]]
        if _is_view(i) or i in self.moved:
            return flat[: len(new)]
        if i.opcode in _IN_PLACE:
            return _update([*flat, *flat][: len(new)])  # 0.12 starts with ((operands), results)
        if i.opcode.endswith("-done"):
            return operands[0][: len(new)]
        if i.opcode == "copy-start":  # (destination, source, context)
            return [new[0], *flat]
        if i.opcode.endswith("-start"):  # ((operands), results, context)
            return [*_written(i, operands, new[len(flat) :]), *flat]
        return _written(i, operands, new)


def _moved_arguments(program: Program) -> set[Instruction]:
    """Returns the copies of donated arguments that nothing else reads.

    Until the output is written the argument's own memory is free then, as if it had moved.
    """
    step = program.entry.instructions.values()
    copies = [i for i in step if i.opcode == "copy" and i.inputs[0].opcode == "parameter"]
    return {
        i
        for i in copies
        if int(i.inputs[0].operands[0]) in program.donated
        if sum(i.operands[0] in other.operands for other in step) == 1
    }


def _passed_on(body: Computation) -> tuple[bool, ...]:
    """Returns for each array of a loop's state if the body returns it unchanged."""
    flags: list[bool] = []
    for position, part in enumerate(body.results):
        same = part.opcode == "get-tuple-element" and int(part.attributes["index"]) == position
        unchanged = same and part.inputs[0].opcode == "parameter"
        flags += [unchanged] * len(part.arrays)
    return tuple(flags)


def _written(i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]) -> list[_Buffer]:
    """Returns new buffers, except for results that update an operand in place."""
    for position, operand in i.aliases:
        (out[position],) = _update(operands[operand])
    if i.kind == "fusion":
        for position, _, parameter in updates(i.called[0]):
            buffer = operands[int(parameter.operands[0])][0]
            if buffer.bytes == out[position].bytes:
                (out[position],) = _update([buffer])
    return out


def _may_overwrite(i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]) -> _Pairs:
    """Returns pairs of a result and an operand whose memory it can reuse if that ends here."""
    pairs: list[tuple[_Buffer, _Buffer]] = []
    if i.opcode == "all-reduce" and "collective_backend_config" in i.config:
        # A blocking all-reduce of a GPU; CPUs write their sum elsewhere.
        pairs = list(zip(out, (operand[0] for operand in operands), strict=True))
    elif i.opcode == "fusion":
        (inside,) = i.called
        # One result may be several arrays: a sort has keys and values.
        parts = [part for part in inside.results for _ in part.arrays]
        for parameter, (operand,) in zip(inside.parameters, operands, strict=True):
            reached = elementwise_results(parameter, i.attributes.get("kind", ""))
            pairs += [(b, operand) for b, part in zip(out, parts, strict=True) if part in reached]
    return [
        (b, operand)
        for b, operand in pairs
        if operand.made_by.name in i.operands and b.bytes == operand.bytes
    ]


def _worst(
    born: Mapping[_Buffer, int], dies: Mapping[_Buffer, int], meanwhile: Sequence[_Meanwhile]
) -> _Worst:
    """Returns bytes and buffers at the worst instant, without those that the caller holds."""
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
        gone |= _overwriting(special.overwritten, set(new), set(old).difference(new))
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
    """Returns the new buffers that take the memory of an old one, each of another."""
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


def _is_view(i: Instruction) -> bool:
    return i.opcode in VIEWS or i.opcode.endswith("-update")


def _new_buffers(i: Instruction) -> list[_Buffer]:
    return [_Buffer(i, position) for position in range(len(i.arrays))]
