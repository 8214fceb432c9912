"""Optimized HLO text as data: computations of instructions, in the order the device runs them.

`compiled.as_text()` is the only stable door to what XLA built. This reads the spellings of the
CPU and GPU backends of jax 0.10 to 0.12; what it cannot read raises instead of being left out.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}, ]')


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]

    @property
    def arrays(self) -> list[tuple[str, int]]:
        """The `(dtype, elements)` of each array in the result."""
        found = re.findall(r"(?!token|opaque)\b([a-z]\w*)\[([\d,<=]*)\]", self.shape)
        return [(dtype, product(re.findall(r"\d+", dims))) for dtype, dims in found]

    @property
    def called(self) -> list[str]:
        """Names of the computations it runs, a loop's condition and body excepted."""
        roles = (k for k in self.attributes if k in ("calls", "to_apply") or "computation" in k)
        return re.findall(r"[\w.\-]+", " ".join(self.attributes[role] for role in roles))


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which the device runs them."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str


@dataclass(frozen=True)
class Program:
    """A parsed HLO module."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Program:
    """Parses optimized HLO text; raises ValueError on an instruction it cannot read."""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    entry = name = root = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, root, instructions = header[2], "", {}
            entry = name if header[1] else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(name, instructions, root)
            name = ""
        elif name and line.strip():
            instruction, is_root = _instruction(line)
            instructions[instruction.name] = instruction
            root = instruction.name if is_root else root
    if not entry:
        raise ValueError("no ENTRY computation in the text: give what compiled.as_text() returns")
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    return Program(computations, entry, product(counts))


def _instruction(line: str) -> tuple[Instruction, bool]:
    """The instruction on a line, and whether it is the root of its computation."""
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (\S.*\(.*)", re.sub(r"/\*index=\d+\*/", "", line))
    if match is None:
        raise ValueError(f"cannot read this line of HLO text: {line[:200]}")
    shape, call, *rest = _split(match[3], " ")
    opcode, _, inside = call.rstrip(",").partition("(")
    operands = tuple(operand.split()[-1].lstrip("%") for operand in _split(inside[:-1], ","))
    attributes: dict[str, str] = {}
    key = ""
    for piece in (piece.rstrip(",") for piece in rest):
        if piece.startswith(("{", "device_ids=")):
            # A mesh is several pieces: replica_groups=mesh[...], device_ids=(...) {...}
            attributes[key] += f" {piece}"
        else:
            key, _, value = piece.partition("=")
            attributes[key] = value
    return Instruction(match[2], shape, opcode, operands, attributes), bool(match[1])


def _split(text: str, separator: str) -> list[str]:
    """Splits where `separator` stands outside brackets and quotes."""
    pieces, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] == separator and depth == 0:
            pieces.append(text[start : token.start()])
            start = token.end()
        depth += (token[0] in "([{") - (token[0] in ")]}")
    return [piece.strip() for piece in (*pieces, text[start:]) if piece.strip()]


def product(numbers: list[str]) -> int:
    """The product of decimal numbers, 1 of none."""
    return math.prod(int(n) for n in numbers)
