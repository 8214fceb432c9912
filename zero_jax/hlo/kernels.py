"""Memory traffic of one kernel: bytes read and written, their order, and updates in place.

A kernel is an instruction, or a fusion with all that is inside. The instructions inside a fusion
access no memory, but determine the part of each operand that is read.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction

# Their result is their operand in another shape, dtype or order.
_RESHAPES = frozenset(("bitcast", "copy", "convert", "reshape"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# They read an operand in another order than they write their result.
_REORDERS = frozenset(
    (
        *("broadcast", "concatenate", "convolution", "copy", "custom-call", "dot", "fusion"),
        *("dynamic-slice", "dynamic-update-slice", "gather", "pad", "reduce", "reduce-window"),
        *("reshape", "reverse", "scatter", "select-and-scatter", "slice", "sort", "transpose"),
    )
)
# The updates of a kernel in place, by the output that each makes.
_Updates: TypeAlias = Mapping[Instruction, Instruction]


def traffic_bytes(i: Instruction) -> int:
    """Returns the bytes that a kernel reads from and writes to device memory.

    Its operands and results. Of an operand that it only slices, the slices count; of an operand
    that it updates in place, the update, which a scatter reads before too.
    """
    if i.kind == "fusion":
        outputs, made = i.called[0].results, _in_place(i.called[0])
        read = [_demand(parameter, made) for parameter in i.called[0].parameters]
    else:
        outputs = [i]
        made = {i: i} if i.opcode in UPDATES and len(i.arrays) == 1 else {}
        read = [_read_by(i, at, made) for at in range(len(i.inputs))]
    reads = dict(zip(i.inputs, read, strict=True))
    traffic = sum(_bytes(value, elements) for value, elements in reads.items())
    if i.opcode == "copy-start":
        return 2 * traffic  # its result holds the operand too
    return traffic + sum(
        _bytes(output, _changed(made[output]) if output in made else math.inf) for output in outputs
    )


def _demand(value: Instruction, made: _Updates) -> float:
    """Returns the elements of a value that the rest of a fusion reads, infinite for all."""
    elements = math.inf if value in value.computation.results else 0.0
    for user in value.users:
        if user.opcode in _RESHAPES:
            elements += _demand(user, made)
        else:
            ats = (at for at, name in enumerate(user.operands) if name == value.name)
            elements += sum(_read_by(user, at, made) for at in ats)
    return elements


def _read_by(user: Instruction, at: int, made: _Updates) -> float:
    """Returns the elements that an instruction reads of one operand, infinite for all."""
    if at == 0 and user.opcode in _SLICES:
        return user.elements
    if at == 0 and user in made.values():
        return _changed(user) if user.opcode == "scatter" else 0
    return math.inf


def _in_place(inside: Computation) -> _Updates:
    """Returns the updates that a fusion makes in the buffer of a parameter."""
    return {
        inside.results[position]: update
        for position, update, parameter in updates(inside)
        # Nothing else reads the updated array.
        if len(update.users) < 2 and parameter.bytes == inside.results[position].bytes
    }


def _changed(update: Instruction) -> int:
    """Returns the elements that an update writes."""
    return update.inputs[1 if update.opcode == "dynamic-update-slice" else -1].elements


def _bytes(value: Instruction, elements: float) -> int:
    """Returns the bytes of that many elements of a value, at most of all."""
    return int(min([value.bytes, *(elements * array.bits / 8 for array in value.arrays)]))


def updates(inside: Computation) -> list[tuple[int, Instruction, Instruction]]:
    """Returns position, update and parameter of each result that a fusion makes in place."""
    found = []
    for position, result in enumerate(inside.results):
        update = _unreshaped(result)
        if update.opcode in UPDATES:
            updated = _unreshaped(update.inputs[0])
            if updated.opcode == "parameter":
                found.append((position, update, updated))
    return found


def _unreshaped(i: Instruction) -> Instruction:
    """Returns the instruction that a chain of reshapes and casts starts from."""
    while i.opcode in _RESHAPES:
        i = i.inputs[0]
    return i


def elementwise_results(parameter: Instruction, kind: str) -> set[Instruction]:
    """Returns the values that a fusion of a kind makes of a parameter element by element.

    Empty if the fusion also reads the parameter in another order.
    """
    reached = {parameter}
    for i in parameter.computation.instructions.values():
        if reached.isdisjoint(i.inputs) or (kind == "kInput" and i.opcode == "reduce"):
            continue  # a reduction's kernel reads all of its input before it writes the rest
        if i.opcode in _REORDERS:
            return set()
        reached.add(i)
    return reached
