"""Optimized HLO text as data: computations of instructions, in the order the device runs them.

`compiled.as_text()` is the only stable interface to the program that XLA built. The parser knows
the spellings of the CPU and GPU backends of jax 0.10 to 0.12, and raises an error on other text.
"""

import functools
import math
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

_ARRAY = re.compile(r"(?!token|opaque)\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\}|)")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}, ]')
# Their result is memory of an operand.
VIEWS = frozenset(("bitcast", "opt-barrier", "add-dependency", "get-tuple-element", "tuple"))
_SCALAR_CALLS = frozenset(
    ("reduce", "all-reduce", "reduce-scatter", "scatter", "sort", "reduce-window")
)
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_ARITHMETIC |= {key.upper(): getattr(operator, key) for key in ("lt", "le", "gt", "ge", "eq", "ne")}
# A value as far as it is known before a run: an integer, a tuple of values, or None if unknown.
_Value: TypeAlias = "int | tuple[_Value, ...] | None"
_LIBRARY = f"{pathlib.Path(__file__).parents[1]}/"


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


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of HLO text: `%name = shape opcode(operands), attributes`.

    `operands` are names, the number of a parameter, or the value of a constant.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    is_root: bool
    computation: "Computation" = field(repr=False)

    @property
    def inputs(self) -> "list[Instruction]":
        """The instructions that its operands name."""
        known = self.computation.instructions
        return [known[name] for name in self.operands if name in known]

    @property
    def users(self) -> "list[Instruction]":
        """The instructions that read its result."""
        return [i for i in self.computation.instructions.values() if self.name in i.operands]

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        found = _ARRAY.findall(self.shape)
        return tuple(
            Array(dtype, tuple(map(int, re.findall(r"\d+", dims))), "S(5)" in layout)
            for dtype, dims, layout in found
        )

    @property
    def elements(self) -> int:
        """Elements of the whole result."""
        return sum(array.elements for array in self.arrays)

    @property
    def bytes(self) -> int:
        """Bytes of the whole result."""
        return sum(array.bytes for array in self.arrays)

    def element(self, index: int) -> slice:
        """Returns the positions of the arrays of one element of its tuple."""
        counts = [len(_ARRAY.findall(part)) for part in _split(self.shape[1:-1], ",")]
        start = sum(counts[:index])
        return slice(start, start + counts[index])

    @functools.cached_property
    def kind(self) -> str:
        """The operation, the same for an instruction that blocks and for one that only starts."""
        return self.opcode.removesuffix("-start")

    @property
    def continues(self) -> bool:
        """True if it only continues or ends an operation that another instruction started."""
        return self.opcode.endswith(("-update", "-done"))

    @property
    def asynchronous(self) -> bool:
        """True if it runs concurrently with the instructions after it.

        JAX 0.10 marks blocking collectives of a GPU as starts too.
        """
        return self.kind != self.opcode and '"is_sync":true' not in self.config

    @property
    def config(self) -> str:
        """The backend's notes."""
        return self.attributes.get("backend_config", "")

    @property
    def target(self) -> str:
        """The function that a custom call calls; "" for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def op_name(self) -> str:
        """Its operation in the traced program; "" if XLA does not report it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @functools.cached_property
    def called(self) -> "list[Computation]":
        """The computations that it runs: a loop's body and condition, branches, a fusion's inside.

        None if it continues an operation, or calls a function of scalars.
        """
        if self.continues or self.kind in _SCALAR_CALLS:
            return []
        roles = ["body", "condition"] if self.kind == "while" else []
        roles += (k for k in self.attributes if k in ("calls", "to_apply") or "computation" in k)
        names = re.findall(r"[\w.\-]+", " ".join(self.attributes[role] for role in roles))
        return [self.computation.program[name] for name in names]

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None if they depend on data or exceed 10,000 unannounced.

        XLA writes the count beside the loop where it found it, as JSON, escaped JSON or {n=5}. If
        not (with some of its passes off), the loop is evaluated on the known part of its state:
        counters that start at a constant and change by constants.
        """
        if known := re.search(r"known_trip_count\W+n\W+(\d+)", self.config):
            return int(known[1])
        body, condition = self.called
        state = _evaluate(self.inputs[0], ())
        for trips in range(10_000):
            continues = _evaluate(condition.root, (state,))
            if not continues:
                return None if continues is None else trips
            state = _evaluate(body.root, (state,))
        return None

    @property
    def calls(self) -> "list[tuple[Computation, int | None]]":
        """The computations that it runs, and how often each; None if the trip count is unknown."""
        if self.kind != "while":
            return [(called, 1) for called in self.called]
        (body, condition), trips = self.called, self.trip_count
        return [(body, trips), (condition, None if trips is None else trips + 1)]


def _evaluate(i: Instruction, arguments: "tuple[_Value, ...]") -> "_Value":
    """Returns an instruction's value if constants and the computation's arguments determine it."""
    if not re.match(r"\(|(pred|[su]\d+)\[\]", i.shape):
        return None  # only integers count; this also keeps the search out of the arithmetic

    def operands() -> "Iterator[_Value]":
        return (_evaluate(operand, arguments) for operand in i.inputs)

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
            return _evaluate(i.called[0].root, tuple(operands()))
        case "add" | "subtract" | "compare":
            values = [value for value in operands() if isinstance(value, int)]
            apply = _ARITHMETIC[i.attributes.get("direction", i.opcode)]
            return apply(*values) if len(values) == 2 else None
    return None


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in the order in which the device runs them."""

    name: str
    instructions: dict[str, Instruction]
    program: "dict[str, Computation]" = field(repr=False)  # all computations, by name

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that makes its result."""
        return next(i for i in self.instructions.values() if i.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        """Its parameters, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.operands[0]))

    @property
    def results(self) -> list[Instruction]:
        """The instructions that make its result: the elements of a tuple, else the root."""
        return self.root.inputs if self.root.opcode == "tuple" else [self.root]


@dataclass(frozen=True, eq=False)
class Program:
    """A parsed HLO module."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int
    frames: Mapping[int, tuple[str, int]]  # by id: file and line, id of the caller (0: none)
    donated: frozenset[int]  # arguments whose memory an output reuses

    def source(self, instruction: Instruction) -> str:
        """Returns the source line of an instruction, "models/gpt.py:120"; "" if XLA has none.

        The innermost line outside installed packages and this library, else the innermost.
        """
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes.get("metadata", ""))
        at = int(found[1]) if found else 0
        lines: list[str] = []
        while at in self.frames and len(lines) < len(self.frames):
            line, at = self.frames[at]
            lines.append(line)
        own = (line for line in lines if not _is_library(line))
        folder_and_file = re.split(r"[/\\]", next(own, lines[0] if lines else ""))[-2:]
        return "/".join(folder_and_file)


def _is_library(file: str) -> bool:
    """Returns whether a file is part of an installed package or of this library, but no model."""
    ours = file.startswith(_LIBRARY) and not file.startswith(f"{_LIBRARY}models/")
    return ours or "-packages" in file or file.startswith("<frozen ")


def parse(text: str) -> Program:
    """Parses optimized HLO text; raises ValueError on an instruction it cannot read."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = Computation(header[2], {}, computations)
            computations[current.name] = current
            entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current and line.strip():
            instruction = _instruction(line, current)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation: pass the result of compiled.as_text()")
    head = text.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    donated = frozenset(map(int, re.findall(r": \((\d+), \{\}, (?:may|must)-alias\)", head)))
    return Program(computations, entry, math.prod(map(int, counts)), _frames(text), donated)


def _frames(text: str) -> dict[int, tuple[str, int]]:
    """Returns the tables of source lines at the head of a module; {} if there are none."""
    head = text.partition("\n%")[0].partition("\nENTRY ")[0]
    named = head.partition("\nFileNames\n")[2].partition("\n\n")[0]
    files = dict(re.findall(r'(\d+) "(.*)"', named))
    places = re.findall(r"(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", head)
    lines = {key: f"{files[file]}:{line}" for key, file, line in places}
    frames = re.findall(r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", head)
    # XLA prints the parent plus one, so that a frame without one names itself or 1.
    return {int(key): (lines[place], int(parent) - 1) for key, place, parent in frames}


def _instruction(line: str, computation: Computation) -> Instruction:
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
    return Instruction(match[2], shape, opcode, operands, attributes, bool(match[1]), computation)


def _split(text: str, separator: str) -> list[str]:
    """Splits at each `separator` outside brackets and quotes."""
    pieces, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] == separator and depth == 0:
            pieces.append(text[start : token.start()])
            start = token.end()
        depth += (token[0] in "([{") - (token[0] in ")]}")
    return [piece.strip() for piece in (*pieces, text[start:]) if piece.strip()]
