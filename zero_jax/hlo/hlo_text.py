"""Optimized HLO text as data: computations of instructions, in the order the device runs them.

`compiled.as_text()` is the only stable door to what XLA built. This reads the spellings of the
CPU and GPU backends of jax 0.10 to 0.12; what it cannot read raises instead of being left out.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zero_jax.hlo.source_lines import Frame, frames_of, source_of

_ARRAY = re.compile(r"(?!token|opaque)\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\}|)")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}, ]')
# These name memory that is there already.
VIEWS = frozenset(("bitcast", "opt-barrier", "add-dependency", "get-tuple-element", "tuple"))
_SCALAR_CALLS = frozenset(
    ("reduce", "all-reduce", "reduce-scatter", "scatter", "sort", "reduce-window")
)


class Array(NamedTuple):
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of one element: of bf16, f8e4m3fn, s4, c64, pred."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) if digits else 8

    @property
    def bytes(self) -> int:
        return (self.elements * self.bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        found = _ARRAY.findall(self.shape)
        return tuple(
            Array(dtype, _integers(dims), "S(5)" in layout) for dtype, dims, layout in found
        )

    @property
    def bytes(self) -> int:
        """Bytes of the whole result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def element_counts(self) -> list[int]:
        """How many arrays each element of a tuple holds; [1] for an array."""
        return _element_counts(self.shape)

    @functools.cached_property
    def kind(self) -> str:
        """What it does, whether the device waits for it or it only starts here."""
        return self.opcode.removesuffix("-start")

    @property
    def goes_on(self) -> bool:
        """Whether it only continues or ends what another instruction started."""
        return self.opcode.endswith(("-update", "-done"))

    @property
    def is_parameter(self) -> bool:
        return self.opcode == "parameter"

    @property
    def config(self) -> str:
        """What the backend notes of it."""
        return self.attributes.get("backend_config", "")

    @property
    def target(self) -> str:
        """The function that a custom call calls, "" of other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def op_name(self) -> str:
        """What it was in the traced program, "" if XLA did not say."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @functools.cached_property
    def called(self) -> list[str]:
        """Names of the computations it runs: a loop's body and condition, branches, what it fuses.

        None where it goes on with what runs already, or calls a scalar function.
        """
        if self.goes_on or self.kind in _SCALAR_CALLS:
            return []
        roles = ["body", "condition"] if self.kind == "while" else []
        roles += (k for k in self.attributes if k in ("calls", "to_apply") or "computation" in k)
        return re.findall(r"[\w.\-]+", " ".join(self.attributes[role] for role in roles))

    @property
    def aliases(self) -> list[tuple[int, int]]:
        """`(array of the result, operand)` pairs that XLA announces to be in the same memory."""
        text = self.attributes.get("output_to_operand_aliasing", "")
        found = re.findall(r"\{(\d*)\}: \((\d+), \{\}", text)
        return [(sum(self.element_counts[: int(at or 0)]), int(of)) for at, of in found]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which the device runs them."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @property
    def parameters(self) -> list[Instruction]:
        """What is given to it, in order."""
        found = [i for i in self.instructions.values() if i.is_parameter]
        return sorted(found, key=lambda i: int(i.operands[0]))

    @property
    def results(self) -> list[Instruction]:
        """What makes its result: the parts of a tuple, else the root."""
        root = self.instructions[self.root]
        return [self.instructions[n] for n in root.operands] if root.opcode == "tuple" else [root]

    @property
    def passed_on(self) -> tuple[bool, ...]:
        """For each array of its result, whether it is that of its one parameter, untouched."""
        flags = []
        for position, part in enumerate(self.results):
            same = part.opcode == "get-tuple-element" and int(part.attributes["index"]) == position
            source = self.instructions[part.operands[0]] if same else part
            flags += [same and source.is_parameter] * len(part.arrays)
        return tuple(flags)


@dataclass(frozen=True)
class Program:
    """A parsed HLO module.

    `frames` are the source lines that XLA kept, by id; `donated` the arguments whose memory an
    output takes over.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    frames: Mapping[int, Frame]
    donated: frozenset[int]

    def moves_argument(self, computation: Computation, i: Instruction) -> bool:
        """Whether it copies a donated argument that nothing else reads.

        Until the output is written the argument's own memory is free then, as if it had moved.
        """
        if i.opcode != "copy" or computation.name != self.entry:
            return False
        given = computation.instructions[i.operands[0]]
        alone = sum(given.name in j.operands for j in computation.instructions.values()) == 1
        return given.is_parameter and alone and int(given.operands[0]) in self.donated

    def source(self, instruction: Instruction) -> str:
        """Where an instruction comes from, "models/gpt.py:120"; "" if XLA did not say."""
        return source_of(instruction.attributes.get("metadata", ""), self.frames)


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
        raise ValueError("the text has no ENTRY computation: pass the result of compiled.as_text()")
    head = text.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    donated = frozenset(map(int, re.findall(r": \((\d+), \{\}, (?:may|must)-alias\)", head)))
    return Program(computations, entry, math.prod(map(int, counts)), frames_of(text), donated)


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


def _element_counts(shape: str) -> list[int]:
    if not shape.startswith("("):
        return [0 if shape.startswith(("token", "opaque")) else 1]
    inside = shape[1 : shape.rindex(")")]
    return [sum(_element_counts(part)) for part in _split(inside, ",")]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
