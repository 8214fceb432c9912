"""What a compiled program sends and holds, read from its optimized HLO text.

XLA has the last word: it merges, hoists, pipelines and drops collectives. So the cost of a ZeRO
stage is counted in the program that will run, on CPU, on GPU or for a GPU that is not there. The
unit is the paper's (ZeRO, arXiv:1910.02054, section 7): an all-gather or a reduce-scatter of E
elements sends E words per device, an all-reduce, being both in a row, 2E. For Ψ parameters, data
parallelism and stages 1 and 2 send 2Ψ; stage 3 sends 2Ψ of all-gather and Ψ of reduce-scatter.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jax.stages import Compiled

from zero_jax.hlo_text import Computation, Instruction, Program, parse, product

_KINDS = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"}
_RARE_KINDS = {"collective-broadcast", "ragged-all-to-all", "send"}  # data is the first operand
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_ARITHMETIC |= {key.upper(): getattr(operator, key) for key in ("lt", "le", "gt", "ge", "eq", "ne")}
# What is known of a value before running: an integer, a tuple of such, None for the rest.
_Value: TypeAlias = "int | tuple[_Value, ...] | None"


@dataclass(frozen=True)
class Collective:
    """One collective instruction, all its operands together; see the fields."""

    kind: str  # "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
    dtype: str  # of what travels: "bf16"; "bf16,f32" where both are combined
    elements: int  # per device and run, of the full side: an all-gather's output, else operands
    bytes: int  # of those elements
    group_size: int  # devices that take part together; 2 for a permute; 1 if nothing travels
    replica_groups: str  # as XLA spells them
    runs: int | None  # per step; None if a loop around it has an unknown trip count
    name: str
    op_name: str  # what it was in the traced program, "" if XLA did not say
    conditional: bool  # in a branch: `runs` counts every branch as taken, an upper bound
    asynchronous: bool  # has a start and a done, between which the device can compute

    @property
    def scalar(self) -> bool:
        """Whether it moves a single number, such as a loss."""
        return self.elements == 1

    @property
    def words(self) -> int:
        """Words each device sends per step: runs × elements, twice that for an all-reduce.

        The paper's convention, for many devices: a ring's factor (N-1)/N is left out. Nothing is
        sent in groups of one device.

        Raises:
            ValueError: If the trip count of a loop around it is unknown.
        """
        if self.group_size == 1:
            return 0
        if self.runs is None:
            raise ValueError(
                f"{self.kind} {self.name} ({self.op_name}) is in a loop whose trip count is not in "
                "the program, so its words per step are unknown; use a loop of fixed length "
                "(jax.lax.scan), or read `elements` instead"
            )
        return self.runs * self.elements * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Audit:
    """What one device sends and holds in one run of a compiled program."""

    collectives: tuple[Collective, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the program needs; aliased outputs live in donated arguments."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def words(self) -> dict[str, int]:
        """Words sent per device and step, by kind."""
        kinds = {c.kind: 0 for c in self.collectives}
        return {k: sum(c.words for c in self.collectives if c.kind == k) for k in kinds}

    def words_per_param(self, num_params: int) -> float:
        """All words divided by Ψ = `num_params`: 2 for stages 0 to 2, 3 for stage 3."""
        return sum(self.words.values()) / num_params


def collectives(compiled: Compiled | str) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program, each with how often it runs per step.

    Follows loops (inner times outer trip count), branches, calls, fusions and asynchronous
    wrappers. A collective in a computation that is called twice is listed twice.

    Args:
        compiled: A compiled function, or its optimized HLO text.

    Returns:
        The collectives, in program order.

    Raises:
        ValueError: If the text holds an instruction or a replica group that cannot be read.

    Example:
        >>> text = '''HloModule step, num_partitions=8
        ... ENTRY %main (p: bf16[4,2]) -> bf16[32,2] {
        ...   %p = bf16[4,2]{1,0} parameter(0)
        ...   ROOT %ag = bf16[32,2]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
        ... }'''
        >>> [(c.kind, c.elements, c.group_size, c.words) for c in collectives(text)]
        [('all-gather', 64, 8, 64)]
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    program = parse(text or "")
    return tuple(_walk(program, program.entry))


def audit(compiled: Compiled) -> Audit:
    """Summarises what one device sends and holds in one run of a compiled function."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("this backend gives no memory_analysis(); call `collectives` instead")
    return Audit(
        collectives(compiled),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def format_table(report: Audit) -> str:
    """A text table of the collectives, most words first; "?" marks an unknown trip count."""
    line = "{:<18} {:<8} {:>12} {:>6} {:>6} {:>14}  {}"
    rows = []
    for c in report.collectives:
        words = c.words if c.runs is not None or c.group_size == 1 else math.inf
        runs = ("<=" if c.conditional else "") + str("?" if c.runs is None else c.runs)
        shown = "?" if words == math.inf else words
        source = c.op_name[-48:] or c.name
        cells = (c.kind, c.dtype, c.elements, c.group_size, runs, shown, source)
        rows.append((-words, line.format(*cells)))
    title = line.format("kind", "dtype", "elements", "group", "runs", "words", "from")
    return "\n".join([title, *(row for _, row in sorted(rows))])


def assert_communication(
    compiled: Compiled,
    num_params: int,
    words_per_param: float | Mapping[str, float],
    rel: float = 0.01,
) -> None:
    """Asserts how many words per parameter a compiled step sends; for tests.

    Args:
        compiled: The compiled step.
        num_params: Ψ, the number of parameters.
        words_per_param: All words divided by Ψ; or the same for each kind, where a kind left out
            must send nothing: stage 3 is `{"all-gather": 2, "reduce-scatter": 1}`.
        rel: Allowed difference, relative to the total asked for.

    Raises:
        AssertionError: If it sends anything else, or an unknown amount; shows the table.
    """
    report = audit(compiled)
    try:
        got = {kind: words / num_params for kind, words in report.words.items()}
    except ValueError as error:
        raise AssertionError(f"{error}\n{format_table(report)}") from error
    if isinstance(words_per_param, Mapping):
        want = dict(words_per_param)
    else:
        want, got = {"all": words_per_param}, {"all": sum(got.values())}
    slack = rel * sum(want.values())
    if any(abs(got.get(k, 0) - want.get(k, 0)) > slack for k in got | want):
        raise AssertionError(
            f"words per parameter: sent {got}, expected {want} to within {slack:g}, "
            f"for {num_params} parameters\n{format_table(report)}"
        )


def _walk(program: Program, name: str) -> Iterator[Collective]:
    """The collectives of one run of a computation."""
    computation = program.computations[name]
    for i in computation.instructions.values():
        kind = i.opcode.removesuffix("-start")
        if kind in _KINDS | _RARE_KINDS and i.attributes.get("is_host_transfer") != "true":
            yield _collective(program, computation, i, kind)
        elif kind == "while":
            yield from _walk_loop(program, computation, i)
        elif not kind.endswith(("-done", "-update")):
            for c in (c for called in i.called for c in _walk(program, called)):
                conditional = c.conditional or kind == "conditional"
                started = c.asynchronous or kind != i.opcode
                yield dataclasses.replace(c, conditional=conditional, asynchronous=started)


def _walk_loop(
    program: Program, computation: Computation, loop: Instruction
) -> Iterator[Collective]:
    body, condition = (loop.attributes[role].lstrip("%") for role in ("body", "condition"))
    inner = [(c, 0) for c in _walk(program, body)]
    inner += [(c, 1) for c in _walk(program, condition)]  # which has one run more
    trips = _trip_count(program, computation, loop, body, condition) if inner else None
    for c, extra in inner:
        runs = None if trips is None or c.runs is None else c.runs * (trips + extra)
        yield dataclasses.replace(c, runs=runs)


def _collective(
    program: Program, computation: Computation, i: Instruction, kind: str
) -> Collective:
    # Operands look alike everywhere; results differ between plain, start and wrapped forms.
    names = i.operands[:1] if kind in _RARE_KINDS else i.operands
    arrays = [array for name in names for array in computation.instructions[name].arrays]
    group_size, groups = _groups(program, i)
    full = group_size if kind == "all-gather" else 1
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', i.attributes.get("metadata", ""))
    # 0.10 spells blocking collectives of a GPU as start and done too.
    blocking = '"is_sync":true' in i.attributes.get("backend_config", "")
    return Collective(
        kind=kind,
        dtype=",".join(sorted({dtype for dtype, _ in arrays})),
        elements=full * sum(n for _, n in arrays),
        bytes=full * sum(n * _bits(dtype) for dtype, n in arrays) // 8,
        group_size=group_size,
        replica_groups=groups,
        runs=1,
        name=i.name,
        op_name=op_name[1] if op_name else "",
        conditional=False,
        asynchronous=kind != i.opcode and not blocking,
    )


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4, c64
    return int(digits[0]) if digits else 8  # pred


def _groups(program: Program, i: Instruction) -> tuple[int, str]:
    """Devices per group, and the groups as XLA spells them."""
    if i.opcode.startswith(("collective-permute", "send")):
        text = i.attributes.get("source_target_pairs", i.attributes.get("frontend_attributes", ""))
        pairs = re.findall(r"\{(\d+),(\d+)\}", text)
        return (1 if pairs and all(a == b for a, b in pairs) else 2), text
    text = i.attributes.get("replica_groups", "{}")
    if text == "{}":
        return program.num_devices, text
    if lists := re.findall(r"\{([\d,]+)\}", text):  # {{0,1},{2,3}}
        return max(ids.count(",") + 1 for ids in lists), text
    if iota := re.match(r"\[\d+,(\d+)\]<=", text):  # [groups,size]<=[4,2]T(1,0)
        return int(iota[1]), text
    if mesh := re.match(r"mesh\[(.*?)\].*\{(.*)\}$", text):  # mesh['a'=4,'b'=2] {'a':(2)2,'b'}
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return product([part or sizes[axis] for axis, part in axes]), text
    raise ValueError(f"cannot read the replica groups of {i.name}: {text}")


def _trip_count(
    program: Program, computation: Computation, loop: Instruction, body: str, condition: str
) -> int | None:
    """Trips of a while loop, None if they depend on data or exceed 10 000 unannounced.

    XLA writes the count beside the loop where it found it, as JSON, escaped JSON or {n=5}. If not,
    the loop is run here on what is known of its state: counters that start at a constant and move
    by constants.
    """
    config = loop.attributes.get("backend_config", "")
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", config):
        return int(known[1])
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
