"""Memory, FLOPs and communication of a compiled program, read from its optimized HLO text.

The program is for CPU, for GPU, or compiled ahead of time without a GPU. For Ψ parameters, data
parallelism and stages 1 and 2 send 2Ψ elements per device; stage 3 sends 2Ψ by all-gather and Ψ by
reduce-scatter. `collectives` defines the unit.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import jax
from jax.stages import Compiled

from zero_jax.hlo import liveness
from zero_jax.hlo.collectives import Collective, of_program
from zero_jax.hlo.collectives import collectives as collectives
from zero_jax.hlo.flops import Flops
from zero_jax.hlo.hlo_text import Program, parse
from zero_jax.sharding.mesh import MODEL
from zero_jax.sharding.paths import Padded


@dataclass(frozen=True)
class Overlap:
    """Bytes of overlapped and of exposed communication.

    Attributes:
      concurrent: Bytes sent while matrix products are scheduled concurrently.
      exposed: Bytes that the device waits for.
    """

    concurrent: int
    exposed: int

    @property
    def fraction(self) -> float:
        """Fraction of the bytes that is overlapped; 1.0 if nothing is sent."""
        both = self.concurrent + self.exposed
        return self.concurrent / both if both else 1.0


@dataclass(frozen=True)
class Audit:
    """Communication, FLOPs and memory of one device in one run of a compiled program.

    Attributes:
      collectives: The collectives, in program order.
      argument_bytes: Bytes of arguments.
      output_bytes: Bytes of outputs.
      alias_bytes: Bytes of outputs that reuse donated arguments.
      temp_bytes: Bytes of temporaries.
      host_bytes: Bytes of arguments, outputs and temporaries in host memory.
      peak: The largest set of temporaries that are live at once.
      flops: FLOPs of matrix products; None if a loop around one has an unknown trip count.
      uncounted: Library calls whose FLOPs are not counted.
      program: The parsed HLO text.
    """

    collectives: tuple[Collective, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_bytes: int
    peak: liveness.Peak
    flops: int | None
    uncounted: tuple[str, ...]
    program: Program = field(repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes that the program needs; outputs in donated arguments are counted once."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def fragmentation(self) -> float:
        """Temporary memory over the largest set that is live at once; 1.0 is no fragmentation.

        It is below 1.0 if XLA shares buffers in ways that `liveness` does not model.
        """
        return self.temp_bytes / self.peak.bytes if self.peak.bytes else 1.0

    @property
    def sent_elements(self) -> dict[str, int]:
        """Elements sent per device and step, by kind of collective.

        Raises:
            ValueError: If the trip count of a loop around a collective is unknown.
        """
        kinds = {c.kind: 0 for c in self.collectives}
        return {k: sum(c.sent_elements for c in self.collectives if c.kind == k) for k in kinds}

    def elements_along(self, axis: str) -> int:
        """Returns the elements sent per device and step along one mesh axis.

        A collective over several axes counts for each of them.

        Args:
            axis: Name of the mesh axis.
        """
        return sum(c.sent_elements for c in self.collectives if axis in c.axis.split("+"))

    def elements_per_param(self, num_params: int, model_parallel: int = 1) -> float:
        """Returns the elements sent over Ψ / MP: 2 at stages 0 to 2, 3 at stage 3.

        Args:
            num_params: Number of parameters, Ψ.
            model_parallel: Tensor-parallel degree, MP. Above 1, collectives along `model` alone are
                left out.
        """
        sent = (c.sent_elements for c in self.collectives if model_parallel == 1 or c.axis != MODEL)
        return sum(sent) / num_params * model_parallel

    def as_dict(self) -> dict[str, object]:
        """Returns the bytes as plain data, for JSON."""
        names = ("argument", "output", "alias", "temp", "host", "total")
        return {
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in names},
            "fragmentation": self.fragmentation,
            "largest_temporaries": [asdict(t) for t in self.peak.temporaries[:10]],
        }

    def overlap(self, *, layers_only: bool = False) -> Overlap:
        """Returns the bytes sent, split into overlapped and exposed communication.

        Args:
            layers_only: If True, counts only collectives in loops over layers.
        """
        sent = {True: 0, False: 0}
        for c in self.collectives:
            if c.in_layers or not layers_only:
                sent[c.concurrent] += c.sent_bytes
        return Overlap(sent[True], sent[False])


def audit(compiled: Compiled, mesh: Mapping[str, int] | None = None) -> Audit:
    """Summarises the communication, FLOPs and memory of a compiled function on one device.

    Args:
        compiled: A compiled function: `step.lower(...).compile()`.
        mesh: Sizes of the mesh axes by name, as `dict(mesh.shape)`; see `collectives`.

    Raises:
        ValueError: If it is not compiled, no memory is reported, or the text cannot be read.
    """
    if not hasattr(compiled, "memory_analysis"):
        raise ValueError(
            f"`compiled` is a {type(compiled).__name__}: pass the compiled program, "
            "step.lower(params, opt_state, batch).compile()"
        )
    sizes = memory_sizes(compiled)
    return of_text(compiled.as_text() or "", sizes, mesh)


def memory_sizes(compiled: Compiled) -> dict[str, int]:
    """Returns the bytes of a program by the fields of `Audit`; raises if none are reported."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("this backend has no memory_analysis(): use `collectives` instead")
    kinds = ("argument", "output", "alias", "temp")
    device, host = (
        {kind: int(getattr(memory, f"{place}{kind}_size_in_bytes")) for kind in kinds}
        for place in ("", "host_")
    )
    sizes = {**device, "host": host["argument"] + host["temp"] + host["output"] - host["alias"]}
    return {f"{kind}_bytes": size for kind, size in sizes.items()}


def of_text(text: str, sizes: Mapping[str, int], mesh: Mapping[str, int] | None) -> Audit:
    """Returns the audit of a program's text and its `memory_sizes`."""
    program = parse(text)
    flops = Flops(program)
    try:
        count = flops.total()
    except ValueError:
        count = None
    return Audit(
        collectives=of_program(program, mesh),
        peak=liveness.peak(program),
        flops=count,
        uncounted=flops.uncounted(),
        program=program,
        **sizes,
    )


def format_table(report: Audit) -> str:
    """Formats the collectives, most elements sent first; "?" marks an unknown trip count."""
    line = "{:<18} {:<8} {:>12} {:>6} {:>6} {:>14}  {}"
    title = line.format("kind", "dtype", "elements", "group", "runs", "elements sent", "from")
    rows = []
    for c in report.collectives:
        unknown = c.runs is None and c.group_size > 1
        sent = math.inf if unknown else c.sent_elements
        runs = ("<=" if c.conditional else "") + str("?" if c.runs is None else c.runs)
        cells = (c.kind, c.dtype, c.elements, c.group_size, runs, "?" if unknown else sent)
        rows.append((-sent, line.format(*cells, c.op_name[-48:] or c.name)))
    return "\n".join([title, *(row for _, row in sorted(rows))])


def assert_communication(
    compiled: Compiled | Audit,
    elements_per_param: float | Mapping[str, float],
    *,
    num_params: int | None = None,
    rel: float = 0.01,
) -> None:
    """Asserts the number of elements per parameter that a compiled step sends; for tests.

    Args:
        compiled: The compiled step, or its audit (`Zero.plan(...).compiled`).
        elements_per_param: Expected elements sent over Ψ, in total or by kind of collective. By
            kind, an omitted kind must send nothing: stage 3 is
            `{"all-gather": 2, "reduce-scatter": 1}`.
        num_params: Ψ; None counts the leaves of a compiled function's first argument.
        rel: Allowed difference, relative to the expected total.

    Raises:
        AssertionError: If it sends another or an unknown amount; the message has the table.
        ValueError: If `num_params` is None and cannot be counted.
    """
    report = compiled if isinstance(compiled, Audit) else audit(compiled)
    if num_params is None:
        num_params = _count_params(compiled)
    try:
        got = {kind: sent / num_params for kind, sent in report.sent_elements.items()}
    except ValueError as error:
        raise AssertionError(f"{error}\n{format_table(report)}") from error
    if isinstance(elements_per_param, Mapping):
        want = dict(elements_per_param)
    else:
        want, got = {"all": elements_per_param}, {"all": sum(got.values())}
    slack = rel * sum(want.values())
    if any(abs(got.get(k, 0) - want.get(k, 0)) > slack for k in got | want):
        raise AssertionError(
            f"elements per parameter: sent {got}, expected {want} within {slack:g}, for "
            f"{num_params} parameters\n{format_table(report)}"
        )


def _count_params(compiled: Compiled | Audit) -> int:
    """Returns the number of elements of the first argument, without padding."""
    if isinstance(compiled, Audit) or not compiled.args_info[0]:
        raise ValueError("`num_params` is required for an audit: pass the number of parameters Ψ")
    leaves = jax.tree.leaves(compiled.args_info[0][0], is_leaf=lambda x: isinstance(x, Padded))
    return sum(math.prod(leaf.shape) for leaf in leaves)
