"""Temporaries of a compiled program that are live at once, read from its schedule.

XLA packs all buffers into one arena, whose size it reports as `temp`, by when each is written and
last read. The text of the program has no such plan, but the schedule: so the largest set of buffers
that are live at the same instant can be computed again, each with its source line. The rest of the
arena is fragmentation (ZeRO, section 6.3: MD); a ratio of 1.0 is none.

Buffers are shared as XLA shares them. Bitcasts and tuples are views. A loop updates its state in
place. An elementwise fusion may write over an operand that nothing reads again. A result of a loop
or a branch that is an output of the program is in that output from the start.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from zero_jax.hlo.hlo_text import VIEWS, Computation, Instruction, Program
from zero_jax.hlo.kernels import UPDATES, elementwise_results, updates

_IN_PLACE = UPDATES | {"all-reduce-start"}


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

    def __init__(self, made_by: Instruction, position: int, born: int, *, outside: bool = False):
        array = made_by.arrays[position]
        self.bytes = 0 if array.on_host else array.bytes
        self.made_by, self.position = made_by, position
        self.born = self.dies = born  # its first and its last instruction in the schedule
        self.outside = outside  # an argument, a constant, or in the memory of an output
        self.updated = False  # it has several values in turn: XLA does not reuse its memory

    def temporary(self, program: Program) -> Temporary:
        array = self.made_by.arrays[self.position]
        shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
        source = program.source(self.made_by)
        return Temporary(self.bytes, self.made_by.name, shape, self.made_by.op_name, source)


# An instruction with the buffers of its operands and of its result.
_Step: TypeAlias = tuple[Instruction, list[list[_Buffer]], list[_Buffer]]


def peak(program: Program) -> Peak:
    """Returns the largest set of temporaries that are live at once.

    Arguments, outputs and constants are not temporaries. Temporaries that XLA puts into an output's
    memory before that is written are counted nevertheless. The program has to be a scheduled one.
    """
    steps = _Schedule(program).steps
    known = dict.fromkeys(_joined(out for _, _, out in steps))
    buffers = [b for b in known if b.bytes and not b.outside]
    changes = [0] * (len(steps) + 1)
    for b in buffers:
        changes[b.born] += b.bytes
        changes[b.dies + 1] -= b.bytes
    shared = [_overwriting(step, time) for time, step in enumerate(steps)]
    held = zip(itertools.accumulate(changes), shared, strict=False)
    sizes = [size - sum(b.bytes for b in taken) for size, taken in held]
    worst = sizes.index(max(sizes))
    live = [b for b in buffers if b.born <= worst <= b.dies and b not in shared[worst]]
    live.sort(key=lambda b: (-b.bytes, b.born))
    return Peak(sizes[worst], tuple(b.temporary(program) for b in live))


class _Schedule:
    """All instructions in order, with the bodies of loops and branches in the place of calls."""

    def __init__(self, program: Program):
        self._program = program
        self.steps: list[_Step] = []
        # Buffers that are outside if one of the first is. Those before, in and after a loop have
        # one memory, and so have a result of a branch and that of its conditional.
        self._same: list[tuple[list[_Buffer], list[_Buffer]]] = []
        for buffer in self._walk(program.entry, None):
            buffer.outside = True
        while shares := [parts for first, parts in self._same if _spreads(first, parts)]:
            for buffer in _joined(shares):
                buffer.outside = True

    def _walk(
        self, computation: Computation, arguments: list[list[_Buffer]] | None
    ) -> list[_Buffer]:
        """Adds the instructions of a computation; returns the buffers of its result."""
        values: dict[Instruction, list[_Buffer]] = {}
        for i in computation.instructions.values():
            operands = [values[operand] for operand in i.inputs]
            if i.opcode == "parameter" and arguments is not None:
                out = arguments[int(i.operands[0])]
            elif i.opcode == "while":
                out = self._loop(i, operands[0])
            elif i.opcode in ("call", "conditional"):
                out = self._branches(i, operands)
            else:
                for buffer in [] if _is_view(i) else _joined(operands):  # a view reads nothing
                    buffer.dies = len(self.steps)
                out = self._results(i, operands)
            values[i] = out
            self.steps.append((i, operands, out))
        results = values[computation.root]
        for buffer in results:
            buffer.dies = len(self.steps) - 1
        return results

    def _loop(self, i: Instruction, state: list[_Buffer]) -> list[_Buffer]:
        body, condition = i.called
        start = len(self.steps)
        inside = [
            b if keep else _Buffer(b.made_by, b.position, start)
            for b, keep in zip(state, _passed_on(body), strict=True)
        ]
        results = self._walk(body, [inside])
        for buffer in self._walk(condition, [results]):
            buffer.outside |= buffer.made_by.computation is condition  # a single flag
        end = len(self.steps)
        out = []
        for before, during, after in zip(state, inside, results, strict=True):
            after.dies = end - 1
            result = before
            if during is not before:
                before.dies = max(before.dies, start - 1)
                result = _Buffer(before.made_by, before.position, end)
                _update([before, after])
                self._same.append(([before, result], [before, during, after, result]))
            out.append(result)
        return out

    def _branches(self, i: Instruction, operands: list[list[_Buffer]]) -> list[_Buffer]:
        # The caller holds the operands throughout.
        held = [
            [_Buffer(b.made_by, b.position, len(self.steps), outside=True) for b in operand]
            for operand in operands
        ]
        arguments = [[x] for x in held[1:]] if i.opcode == "conditional" else [held]
        pairs = zip(i.called, arguments, strict=True)
        results = [self._walk(called, each) for called, each in pairs]
        end = len(self.steps)
        for buffer in _joined(operands):
            buffer.dies = end - 1
        out = _update(_Buffer(i, at, end) for at in range(len(i.arrays)))
        for inside in results:
            _update(inside)
            self._same += [([b], [a]) for a, b in zip(inside, out, strict=True)]
        return out

    def _results(self, i: Instruction, operands: list[list[_Buffer]]) -> list[_Buffer]:
        """Returns the buffers of an instruction's result, including those shared with operands.

        Of a start the buffers come first that its done is a view of, whatever its shape.
        """
        flat, fixed = _joined(operands), i.opcode in ("parameter", "constant")
        new = [_Buffer(i, at, len(self.steps), outside=fixed) for at in range(len(i.arrays))]
        if i.opcode == "get-tuple-element":
            return flat[i.inputs[0].element(int(i.attributes["index"]))]
        if _is_view(i) or self._is_moved(i):
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

    def _is_moved(self, i: Instruction) -> bool:
        """Returns True for a copy of a donated argument that nothing else reads.

        Until the output is written the argument's own memory is free then, as if it had moved.
        """
        if i.opcode != "copy" or i.computation is not self._program.entry:
            return False
        (argument,) = i.inputs
        is_argument = argument.opcode == "parameter" and len(argument.users) == 1
        return is_argument and int(argument.operands[0]) in self._program.donated


def _passed_on(body: Computation) -> list[bool]:
    """Returns for each array of a loop's state if the body returns it unchanged."""
    flags: list[bool] = []
    for position, part in enumerate(body.results):
        same = part.opcode == "get-tuple-element" and int(part.attributes["index"]) == position
        unchanged = same and part.inputs[0].opcode == "parameter"
        flags += [unchanged] * len(part.arrays)
    return flags


def _written(i: Instruction, operands: list[list[_Buffer]], out: list[_Buffer]) -> list[_Buffer]:
    """Returns new buffers, except for results that update an operand in place."""
    aliases = i.attributes.get("output_to_operand_aliasing", "")
    for at, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}", aliases):
        position = i.element(int(at)).start if at else 0
        (out[position],) = _update(operands[int(operand)])
    if i.kind == "fusion":
        for position, _, parameter in updates(i.called[0]):
            buffer = operands[int(parameter.operands[0])][0]
            if buffer.bytes == out[position].bytes:
                (out[position],) = _update([buffer])
    return out


def _overwriting(step: _Step, time: int) -> set[_Buffer]:
    """Returns the new buffers that take the memory of an old one, each of another."""
    (i, operands, out), pairs = step, list[tuple[_Buffer, _Buffer]]()
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
    taken: dict[_Buffer, _Buffer] = {}
    for new, old in pairs:
        free = not any(b.outside or b.updated for b in (new, old)) and new.bytes == old.bytes
        ends = old.born < time == old.dies and old.made_by.name in i.operands
        if free and ends and new.born == time and old not in taken and new not in taken.values():
            taken[old] = new
    return set(taken.values())


def _spreads(first: list[_Buffer], parts: list[_Buffer]) -> bool:
    return any(b.outside for b in first) and not all(b.outside for b in parts)


def _joined(parts: Iterable[Iterable[_Buffer]]) -> list[_Buffer]:
    return list(itertools.chain.from_iterable(parts))


def _update(buffers: Iterable[_Buffer]) -> list[_Buffer]:
    """Marks buffers that get another value."""
    buffers = list(buffers)
    for buffer in buffers:
        buffer.updated = True
    return buffers


def _is_view(i: Instruction) -> bool:
    return i.opcode in VIEWS or i.opcode.endswith("-update")
