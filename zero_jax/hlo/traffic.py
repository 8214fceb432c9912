"""The collectives of a compiled program: what each sends, how often, and what runs meanwhile.

XLA has the last word: it merges, hoists, pipelines and drops collectives. So the cost of a ZeRO
stage is counted in the program that will run. The unit is the paper's (ZeRO, arXiv:1910.02054,
section 7): an all-gather or a reduce-scatter of E elements sends E words per device, an all-reduce,
being both in a row, 2E.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from zero_jax.hlo import replica_groups
from zero_jax.hlo.flops import Flops
from zero_jax.hlo.hlo_text import Computation, Instruction, Program, bits, parse
from zero_jax.hlo.trip_counts import trip_count

_KINDS = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"}
_PAIRWISE = {"collective-permute", "send"}
_RARE_KINDS = {"collective-broadcast", "ragged-all-to-all", "send"}  # data is the first operand


@dataclass(frozen=True)
class Collective:
    """One collective instruction, all its operands together; see the fields."""

    kind: str  # "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
    dtype: str  # of what travels: "bf16"; "bf16,f32" where both are combined
    elements: int  # per device and run, of the full side: an all-gather's output, else operands
    bytes: int  # of those elements
    group_size: int  # devices that take part together; 2 for a permute; 1 if nothing travels
    axis: str  # the mesh axis it runs along, "replica+data" for two, "?" if nothing says
    replica_groups: str  # as XLA spells them
    runs: int | None  # per step; None if a loop around it has an unknown trip count
    name: str
    op_name: str  # what it was in the traced program, "" if XLA did not say
    conditional: bool  # in a branch: `runs` counts every branch as taken, an upper bound
    asynchronous: bool  # has a start and a done, between which the device can compute
    overlapped_flops: int  # of the matrix products scheduled between those two, each run
    in_loop: bool
    in_layers: bool  # in a loop with matrix products: the layers of a model that scans over them

    def as_dict(self) -> dict[str, Any]:
        """What matters of it as plain data, for JSON."""
        names = ("kind", "dtype", "bytes", "axis", "runs", "asynchronous", "hidden", "in_loop")
        return {**{name: getattr(self, name) for name in names}, "from": self.op_name}

    @property
    def hidden(self) -> bool:
        """Whether matrix products are scheduled while it is under way, long enough or not."""
        return self.asynchronous and self.overlapped_flops > 0

    @property
    def sent_bytes(self) -> int:
        """Bytes each device sends per step; `words` in bytes. Raises as that does."""
        return self.words * self.bytes // max(self.elements, 1)

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
        >>> [(c.kind, c.elements, c.group_size, c.words) for c in collectives(text)]
        [('all-gather', 64, 8, 64)]
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return of_program(parse(text or ""), mesh)


def of_program(program: Program, mesh: Mapping[str, int] | None) -> tuple[Collective, ...]:
    """The same, of a parsed program."""
    return tuple(_Walk(program, mesh).run(program.entry))


class _Walk:
    """Follows what a program runs, and yields the collectives on the way."""

    def __init__(self, program: Program, mesh: Mapping[str, int] | None):
        self.program, self.mesh = program, mesh
        self.flops = Flops(program)

    def run(self, name: str) -> Iterator[Collective]:
        """The collectives of one run of a computation."""
        computation = self.program.computations[name]
        for i in computation.instructions.values():
            kind = i.opcode.removesuffix("-start")
            if kind in _KINDS | _RARE_KINDS and i.attributes.get("is_host_transfer") != "true":
                yield self._collective(computation, i, kind)
            elif kind == "while":
                yield from self._loop(computation, i)
            elif not kind.endswith(("-done", "-update")):
                for c in (c for called in i.called for c in self.run(called)):
                    conditional = c.conditional or kind == "conditional"
                    started = kind != i.opcode and not c.asynchronous
                    flops = self._between(computation, i) if started else c.overlapped_flops
                    yield dataclasses.replace(
                        c,
                        conditional=conditional,
                        asynchronous=c.asynchronous or started,
                        overlapped_flops=flops,
                    )

    def _loop(self, computation: Computation, loop: Instruction) -> Iterator[Collective]:
        body, condition = (loop.attributes[role].lstrip("%") for role in ("body", "condition"))
        inner = [(c, 0) for c in self.run(body)]
        inner += [(c, 1) for c in self.run(condition)]  # which has one run more
        trips = trip_count(self.program, computation, loop) if inner else None
        computes = bool(inner) and self._computes(body)
        for c, extra in inner:
            runs = None if trips is None or c.runs is None else c.runs * (trips + extra)
            yield dataclasses.replace(c, runs=runs, in_loop=True, in_layers=c.in_layers or computes)

    def _computes(self, name: str) -> bool:
        """Whether a computation has matrix products; one that cannot be counted has."""
        try:
            return self.flops.computation(name) > 0
        except ValueError:
            return True

    def _collective(self, computation: Computation, i: Instruction, kind: str) -> Collective:
        # Operands look alike everywhere; results differ between plain, start and wrapped forms.
        names = i.operands[:1] if kind in _RARE_KINDS else i.operands
        arrays = [array for name in names for array in computation.instructions[name].arrays]
        group_size, text = _groups(self.program, i)
        full = group_size if kind == "all-gather" else 1
        # 0.10 spells blocking collectives of a GPU as start and done too.
        blocking = '"is_sync":true' in i.attributes.get("backend_config", "")
        asynchronous = kind != i.opcode and not blocking
        return Collective(
            kind=kind,
            dtype=",".join(sorted({dtype for dtype, _ in arrays})),
            elements=full * sum(n for _, n in arrays),
            bytes=full * sum(n * bits(dtype) for dtype, n in arrays) // 8,
            group_size=group_size,
            axis="?" if kind in _PAIRWISE else replica_groups.axis_of(text, self.mesh),
            replica_groups=text,
            runs=1,
            name=i.name,
            op_name=i.op_name,
            conditional=False,
            asynchronous=asynchronous,
            overlapped_flops=self._between(computation, i) if asynchronous else 0,
            in_loop=False,
            in_layers=False,
        )

    def _between(self, computation: Computation, start: Instruction) -> int:
        """FLOPs scheduled between a start and its done, which are in one computation.

        A loop in between is left out: its products cover the collectives that stand in it.
        """
        flops, under_way = 0, {start.name}
        after = False
        for i in computation.instructions.values():
            if i.name == start.name:
                after = True
            elif after and not under_way.isdisjoint(i.operands):
                if i.opcode.endswith("-done"):
                    return flops
                under_way.add(i.name)  # an update
            elif after and i.opcode != "while":
                flops += self.flops.instruction(computation, i)
        return flops


def _groups(program: Program, i: Instruction) -> tuple[int, str]:
    """Devices per group, and the groups as XLA spells them."""
    if i.opcode.startswith(("collective-permute", "send")):
        text = i.attributes.get("source_target_pairs", i.attributes.get("frontend_attributes", ""))
        pairs = re.findall(r"\{(\d+),(\d+)\}", text)
        return (1 if pairs and all(a == b for a, b in pairs) else 2), text
    text = i.attributes.get("replica_groups", "{}")
    try:
        return replica_groups.size_of(text, program.num_devices), text
    except ValueError as error:
        raise ValueError(f"cannot read the replica groups of {i.name}: {text}") from error
