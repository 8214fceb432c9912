"""The collectives of a compiled program: elements sent, runs per step, and overlapped FLOPs.

XLA merges, hoists, pipelines and removes collectives, so the cost of a ZeRO stage is counted in
the compiled program. The unit is the paper's (ZeRO, arXiv:1910.02054, section 7): an all-gather
or a reduce-scatter of E elements sends E elements per device. An all-reduce is both in a row and
sends 2E.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.stages import Compiled

from zero_jax.hlo import replica_groups
from zero_jax.hlo.flops import Flops
from zero_jax.hlo.hlo_text import Computation, Instruction, Program, parse

_PAIRWISE = {"collective-permute", "send"}
_FIRST_OPERAND = {"collective-broadcast", "ragged-all-to-all", "send"}  # holds the data
KINDS = _PAIRWISE | _FIRST_OPERAND | {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
_GROUPS = ("replica_groups", "source_target_pairs", "frontend_attributes")


@dataclass(frozen=True)
class Collective:
    """One collective instruction, with all its operands.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute".
      dtype: Dtype sent, "bf16"; "bf16,f32" if both are combined.
      elements: Elements per device and run on the full side: an all-gather's output, otherwise the
        operands.
      bytes: Bytes of those elements.
      group_size: Number of devices that take part; 2 for a permute; 1 if nothing is sent.
      axis: The mesh axis it runs along, "replica+data" for two, "?" if unknown.
      replica_groups: The groups in XLA's notation.
      runs: Runs per step; None if a loop around it has an unknown trip count.
      name: Name of the instruction.
      op_name: Its operation in the traced program, "" if XLA does not report it.
      conditional: True in a branch. `runs` then counts every branch as taken, an upper bound.
      asynchronous: True if it has a start and a done, between which the device can compute.
      overlapped_flops: FLOPs of matrix products scheduled between the two, per run.
      in_loop: True in a loop.
      in_layers: True in a loop with matrix products, such as a scan over layers.
    """

    kind: str
    dtype: str
    elements: int
    bytes: int
    group_size: int
    axis: str
    replica_groups: str
    runs: int | None
    name: str
    op_name: str
    conditional: bool
    asynchronous: bool
    overlapped_flops: int
    in_loop: bool
    in_layers: bool

    def as_dict(self) -> dict[str, object]:
        """Returns the main fields as plain data, for JSON."""
        names = ("kind", "dtype", "bytes", "axis", "runs", "asynchronous", "concurrent", "in_loop")
        return {**{name: getattr(self, name) for name in names}, "from": self.op_name}

    @property
    def concurrent(self) -> bool:
        """True if it is scheduled concurrently with matrix products, whatever their duration."""
        return self.asynchronous and self.overlapped_flops > 0

    @property
    def sent_bytes(self) -> int:
        """Bytes each device sends per step: `sent_elements` in bytes.

        Raises:
            ValueError: If the trip count of a loop around it is unknown.
        """
        return self.sent_elements * self.bytes // max(self.elements, 1)

    @property
    def scalar(self) -> bool:
        """True if it communicates a single number, such as a loss."""
        return self.elements == 1

    @property
    def sent_elements(self) -> int:
        """Elements each device sends per step: runs × elements, twice that for an all-reduce.

        This is the paper's convention for many devices: a ring's factor (N-1)/N is left out. Groups
        of one device send nothing.

        Raises:
            ValueError: If the trip count of a loop around it is unknown.
        """
        if self.group_size == 1:
            return 0
        if self.runs is None:
            raise ValueError(
                f"{self.kind} {self.name} ({self.op_name}) is in a loop without a trip count in "
                "the program, so its elements per step are unknown. Use a loop of fixed length "
                "(jax.lax.scan), or read `elements` instead"
            )
        return self.runs * self.elements * (2 if self.kind == "all-reduce" else 1)


def collectives(
    compiled: Compiled | str, mesh: Mapping[str, int] | None = None
) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled program, each with how often it runs per step.

    Follows loops (inner times outer trip count), branches, calls, fusions and asynchronous
    wrappers. A collective in a computation that is called twice is listed twice.

    Args:
        compiled: A compiled function, or its optimized HLO text.
        mesh: Sizes of the mesh's axes by name, in order, to name the axis of each collective
            where the text gives device ids only.

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
        >>> [(c.kind, c.elements, c.group_size, c.sent_elements) for c in collectives(text)]
        [('all-gather', 64, 8, 64)]
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return of_program(parse(text or ""), mesh)


def of_program(program: Program, mesh: Mapping[str, int] | None) -> tuple[Collective, ...]:
    """Returns the collectives of a parsed program."""
    flops = Flops(program)
    return tuple(
        _collective(execution, flops, mesh)
        for execution in executions(program.entry)
        if execution.instruction.kind in KINDS
        if execution.instruction.attributes.get("is_host_transfer") != "true"
    )


class Execution(NamedTuple):
    """An instruction as it is reached from the entry computation."""

    instruction: Instruction
    callers: "tuple[Execution, ...]"  # the loops, branches, fusions, starts around it, outer first
    times: int | None  # per run of the program, every branch taken; None if a trip count is unknown


def executions(
    computation: Computation, callers: tuple[Execution, ...] = (), times: int | None = 1
) -> Iterator[Execution]:
    """Lists the instructions of a run in order; a computation called twice is listed twice.

    The work of asynchronous pairs counts where it starts.
    """
    for i in computation.instructions.values():
        execution = Execution(i, callers, times)
        yield execution
        for called, trips in i.calls:
            all_times = None if times is None or trips is None else times * trips
            yield from executions(called, (*callers, execution), all_times)


def _collective(execution: Execution, flops: Flops, mesh: Mapping[str, int] | None) -> Collective:
    i = execution.instruction
    # Operands look alike everywhere; results differ between plain, start and wrapped forms.
    operands = i.inputs[:1] if i.kind in _FIRST_OPERAND else i.inputs
    arrays = [array for operand in operands for array in operand.arrays]
    text = next((i.attributes[key] for key in _GROUPS if key in i.attributes), "{}")
    try:
        groups = replica_groups.parse(text, flops.program.num_devices)
    except ValueError as error:
        raise ValueError(f"cannot read the replica groups of {i.name}: {text}") from error
    full = groups.size if i.kind == "all-gather" else 1
    around = [caller.instruction for caller in execution.callers]
    loops = [caller for caller in around if caller.kind == "while"]
    start = next((x for x in (i, *reversed(around)) if x.asynchronous), None)
    return Collective(
        kind=i.kind,
        dtype=",".join(sorted({a.dtype for a in arrays})),
        elements=full * sum(a.elements for a in arrays),
        bytes=full * sum(a.elements * a.bits for a in arrays) // 8,
        group_size=groups.size,
        axis="?" if i.kind in _PAIRWISE else groups.axis(mesh),
        replica_groups=text,
        runs=execution.times,
        name=i.name,
        op_name=i.op_name,
        conditional=any(caller.kind == "conditional" for caller in around),
        asynchronous=start is not None,
        overlapped_flops=_flops_until_done(start, flops) if start else 0,
        in_loop=bool(loops),
        in_layers=any(_has_products(loop.called[0], flops) for loop in loops),
    )


def _has_products(computation: Computation, flops: Flops) -> bool:
    """Returns whether a computation has matrix products; True if they cannot be counted."""
    try:
        return any(flops.computation(computation))
    except ValueError:
        return True


def _flops_until_done(start: Instruction, flops: Flops) -> int:
    """Returns the FLOPs scheduled between a start and its done in the same computation.

    A loop in between is left out: its products overlap the collectives inside it.
    """
    total, pending = 0, {start.name}
    instructions = list(start.computation.instructions.values())
    for i in instructions[instructions.index(start) + 1 :]:
        if not pending.isdisjoint(i.operands):
            if i.opcode.endswith("-done"):
                break
            pending.add(i.name)  # an update
        elif i.opcode != "while":
            total += flops.count(i)
    return total
