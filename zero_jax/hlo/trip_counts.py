"""How often a loop of a compiled program runs its body."""

import operator
import re
from collections.abc import Iterator
from typing import TypeAlias

from zero_jax.hlo.hlo_text import Computation, Instruction, Program

_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_ARITHMETIC |= {key.upper(): getattr(operator, key) for key in ("lt", "le", "gt", "ge", "eq", "ne")}
# What is known of a value before running: an integer, a tuple of such, None for the rest.
_Value: TypeAlias = "int | tuple[_Value, ...] | None"


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a while loop, None if they depend on data or exceed 10 000 unannounced.

    XLA writes the count beside the loop where it found it, as JSON, escaped JSON or {n=5}. If not,
    the loop is run here on what is known of its state: counters that start at a constant and move
    by constants.
    """
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.config):
        return int(known[1])
    body, condition = loop.called
    state = _evaluate(program, computation.name, loop.operands[0], ())
    for trips in range(10_000):
        go_on = _evaluate(program, condition, "", (state,))
        if not go_on:
            return None if go_on is None else trips
        state = _evaluate(program, body, "", (state,))
    return None


def _evaluate(
    program: Program, computation: str, name: str, arguments: tuple[_Value, ...]
) -> _Value:
    """An instruction's value (the root's if `name` is ""), if constants and arguments settle it."""
    inside = program.computations[computation]
    i = inside.instructions[name or inside.root]
    if not re.match(r"\(|(pred|[su]\d+)\[\]", i.shape):
        return None  # only integers count; this also keeps the search out of the arithmetic

    def operands() -> Iterator[_Value]:
        return (_evaluate(program, computation, operand, arguments) for operand in i.operands)

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
            return _evaluate(program, i.called[0], "", tuple(operands()))
        case "add" | "subtract" | "compare":
            values = [value for value in operands() if isinstance(value, int)]
            apply = _ARITHMETIC[i.attributes.get("direction", i.opcode)]
            return apply(*values) if len(values) == 2 else None
    return None
