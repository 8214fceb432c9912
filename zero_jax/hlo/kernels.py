"""What one kernel reads and writes: how many bytes, in which order, in whose place.

A kernel is an instruction, or a fusion with all that is in it; what stands inside a fusion touches
no memory, but says which part of each operand is read.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction, Program

# These show their operand in another shape, dtype or order.
_RESHAPES = frozenset(("bitcast", "copy", "convert", "reshape"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# These read an operand in another order than they write their result.
_REORDERS = frozenset(
    (
        *("broadcast", "concatenate", "convolution", "copy", "custom-call", "dot", "fusion"),
        *("dynamic-slice", "dynamic-update-slice", "gather", "pad", "reduce", "reduce-window"),
        *("reshape", "reverse", "scatter", "select-and-scatter", "slice", "sort", "transpose"),
    )
)
# What a kernel updates in place, by the name of the output that this makes.
_Updates: TypeAlias = Mapping[str, Instruction]


def traffic_bytes(program: Program, computation: Computation, i: Instruction) -> int:
    """Bytes that a kernel reads from and writes to device memory.

    Its operands and results; but of an operand that it only slices the slices, and of one that it
    updates in place the update, which a scatter reads before too.
    """
    if i.kind == "fusion":
        inside = program.computations[i.called[0]]
        outputs, made = inside.results, _in_place(inside)
        read = [_demand(inside, given.name, made) for given in inside.parameters]
    else:
        inside, outputs = computation, [i]
        made = {i.name: i} if i.opcode in UPDATES and len(i.arrays) == 1 else {}
        read = [_read_by(inside, i, at, made) for at in range(len(i.operands))]
    values, reads = computation.instructions, dict(zip(i.operands, read, strict=True))
    traffic = sum(_bytes(values[name], n) for name, n in reads.items() if name in values)
    if i.opcode == "copy-start":
        return 2 * traffic  # its result holds the operand too
    written = (_changed(inside, made.get(part.name)) for part in outputs)
    return traffic + sum(_bytes(part, n) for part, n in zip(outputs, written, strict=True))


def _demand(inside: Computation, value: str, made: _Updates) -> float:
    """Elements of a value that the rest of a fusion reads, infinite for all."""
    elements = math.inf if value in (part.name for part in inside.results) else 0.0
    for user in (i for i in inside.instructions.values() if value in i.operands):
        if user.opcode in _RESHAPES:
            elements += _demand(inside, user.name, made)
        else:
            ats = (at for at, name in enumerate(user.operands) if name == value)
            elements += sum(_read_by(inside, user, at, made) for at in ats)
    return elements


def _read_by(inside: Computation, user: Instruction, at: int, made: _Updates) -> float:
    """Elements that an instruction reads of one operand, infinite for all."""
    if at == 0 and user.opcode in _SLICES:
        return sum(array.elements for array in user.arrays)
    if at == 0 and user in made.values():
        return _changed(inside, user) if user.opcode == "scatter" else 0
    return math.inf


def _in_place(inside: Computation) -> _Updates:
    """The updates that a fusion makes in the buffer of a parameter."""
    found = {}
    for position, update, whole in updates(inside):
        part = inside.results[position]
        users = [i for i in inside.instructions.values() if update.name in i.operands]
        if len(users) < 2 and whole.bytes == part.bytes:  # nobody else reads the whole
            found[part.name] = update
    return found


def _changed(inside: Computation, update: Instruction | None) -> float:
    """Elements that an update writes, infinite (all) where there is none."""
    if update is None:
        return math.inf
    name = update.operands[1 if update.opcode == "dynamic-update-slice" else -1]
    return sum(array.elements for array in inside.instructions[name].arrays)


def _bytes(value: Instruction, elements: float) -> int:
    """Bytes of so many of its elements, at most of all."""
    return int(min([value.bytes, *(elements * array.bits / 8 for array in value.arrays)]))


def updates(inside: Computation) -> list[tuple[int, Instruction, Instruction]]:
    """Results that a fusion makes of a parameter in place: position, the update, the parameter."""
    ends = [(position, _behind(inside, part)) for position, part in enumerate(inside.results)]
    found = [(at, end) for at, end in ends if end.opcode in UPDATES]
    wholes = [(at, i, _behind(inside, inside.instructions[i.operands[0]])) for at, i in found]
    return [(at, i, whole) for at, i, whole in wholes if whole.is_parameter]


def _behind(inside: Computation, i: Instruction) -> Instruction:
    """What an instruction shows in another shape or dtype, itself if it computes."""
    while i.opcode in _RESHAPES:
        i = inside.instructions[i.operands[0]]
    return i


def reached_in_order(inside: Computation, parameter: Instruction, kind: str) -> set[str]:
    """What a fusion makes of a parameter element by element; empty if it is read otherwise too."""
    reached = {parameter.name}
    for i in inside.instructions.values():
        if reached.isdisjoint(i.operands) or (kind == "kInput" and i.opcode == "reduce"):
            continue  # a reduction's kernel reads all of its input before it writes the rest
        if i.opcode in _REORDERS:
            return set()
        reached.add(i.name)
    return reached
