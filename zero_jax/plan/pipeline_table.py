"""ZeRO 3 beside pipelines on the same devices with the same batch: memory, wires, idle time.

All have N devices and m·b·N/p rows a step: pipelines of p stages go through m micro-batches of b
rows, ZeRO 3 gives each device m·b/p rows, at once or as m/p micro-batches of b. The wire from which
on a pipeline is no longer shorter assumes the best of both: what is sent takes no time until it
takes longer than the products, which reach half of the device's peak, and idle time covers nothing.
A step is then max(C, bytes / wire) + idle, with C seconds of products. Nothing is recomputed. GB is
1e9 bytes. Sources: `zero_jax.plan.pipelines`; ZeRO (arXiv:1910.02054), sections 3.2, 5 and 7.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction

from zero_jax.hlo.targets import Target
from zero_jax.plan import paper, pipelines
from zero_jax.plan.memory import words_per_param
from zero_jax.plan.pipelines import WORD_BYTES, Schedule
from zero_jax.plan.tables import table

_EFFICIENCY = 0.5  # of the peak, as in `zero_jax.plan.scaling`
_SHARE = Fraction(1, 10)  # of a step that may idle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its devices and its batch.

    Attributes:
      psi: Ψ, parameters.
      layers, width, seq: L, D and the tokens of a row.
      flops_per_token: of forward and backward.
      device: from `targets.target`.
      devices: N.
      stages, micro_batches, chunks: p, m and v of the pipelines.
      rows: b, of a micro-batch.
    """

    psi: int
    layers: int
    width: int
    seq: int
    flops_per_token: int
    device: Target
    devices: int
    stages: int
    micro_batches: int
    chunks: int = 2
    rows: int = 1

    def __post_init__(self) -> None:
        p, m, v = self.stages, self.micro_batches, self.chunks
        for name in ("devices", "stages", "micro_batches", "chunks", "rows", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if p < 2 or self.devices % p:
            raise ValueError(
                f"stages={p} on devices={self.devices}: a pipeline has 2 or more, and they must "
                "divide the devices; take 8 of 64 say."
            )
        if m % p:
            raise ValueError(
                f"micro_batches={m} on stages={p}: ZeRO shares their rows out among {p} devices; "
                f"take a multiple, {p * -(-m // p)} say."
            )
        if p * v > self.layers:
            raise ValueError(
                f"stages={p} of chunks={v} are more than the {self.layers} layers: take less."
            )
        if not (self.device.memory_bytes and self.device.flops > 0):
            raise ValueError(
                f"{self.device.name!r} comes without memory and FLOP/s; take h100 say."
            )

    @property
    def replicas(self) -> int:
        """Pipelines, N/p."""
        return self.devices // self.stages

    @property
    def seconds(self) -> float:
        """Of products in a step, on each device, however they are shared out."""
        tokens = self.seq * self.rows * self.micro_batches / self.stages
        return self.flops_per_token * tokens / (_EFFICIENCY * self.device.flops)

    @property
    def stage_bytes(self) -> float:
        """Activations of a micro-batch on one stage: about 12 values of the width a layer."""
        return paper.activations(self.layers, self.width, self.seq, self.rows) / self.stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train it.

    Attributes:
      name: of the way.
      states: bytes of model states on the device that has most.
      in_flight: activations there, in those of a micro-batch on a stage.
      held: the same in bytes.
      idle: part of the step.
      parameter_bytes, activation_bytes: what a device sends in a step.
      least_rows: of the smallest batch of which a tenth of the step idles, or less.
      late: updates by which a gradient is late.
      versions: of its weights, on the device that has most.
      wire: bytes/s a device, below which the step is shorter than ZeRO 3's; None for ZeRO 3
        itself, 0 for never.
      changes: what it asks for.
    """

    name: str
    states: float
    in_flight: float
    held: float
    idle: float
    parameter_bytes: float
    activation_bytes: float
    least_rows: int
    changes: str
    late: int = 0
    versions: int = 1
    wire: float | None = None


def compare(setting: Setting) -> tuple[Row, ...]:
    """ZeRO 3, at once and as micro-batches if that is something else, then the pipelines."""
    parts = setting.micro_batches // setting.stages
    at_once = zero_3(setting, 1)
    zeros = (at_once, zero_3(setting, parts)) if parts > 1 else (at_once,)
    return (*zeros, *(_pipeline(setting, at_once, *made) for made in _schedules(setting)))


def zero_3(setting: Setting, micro_batches: int) -> Row:
    """ZeRO 3 alone: 16Ψ/N bytes, and 3Ψ words in each of its micro-batches."""
    in_flight = setting.micro_batches / micro_batches
    words = words_per_param(3, micro_batches) * setting.psi
    return Row(
        name="ZeRO 3" if micro_batches == 1 else f"ZeRO 3, {micro_batches} micro-batches",
        states=paper.model_states(setting.psi, setting.devices, 3),
        in_flight=in_flight,
        held=in_flight * setting.stage_bytes,
        idle=0.0,
        parameter_bytes=WORD_BYTES * words,
        activation_bytes=0.0,
        least_rows=setting.devices * setting.rows,
        changes="nothing",
    )


def shorter_below(zero_bytes: float, sent: float, seconds: float, idle: float) -> float:
    """The wire below which max(C, sent / wire) + idle is less than max(C, zero_bytes / wire).

    >>> shorter_below(zero_bytes=300, sent=100, seconds=2, idle=0)  # ZeRO starts to wait
    150.0
    >>> shorter_below(300, 100, seconds=2, idle=1), shorter_below(300, 100, seconds=2, idle=8)
    (100.0, 25.0)
    >>> shorter_below(zero_bytes=100, sent=100, seconds=2, idle=0)
    0.0
    """
    if zero_bytes <= sent:
        return 0.0
    covered = zero_bytes / (seconds + idle)  # what the pipeline sends is short enough there
    return covered if sent <= covered * seconds else (zero_bytes - sent) / idle


def format_table(setting: Setting) -> str:
    """The rows as a table, and what they rest on."""
    header = "|states GB|in flight|models|held GB|idle|weights GB|between GB|rows for 10%|late"
    header += "|versions|below GB/s|asks for"
    align = "<" + ">" * 11 + "<"
    rows = [_cells(row, setting.stages) for row in compare(setting)]
    return "\n".join([table([header.split("|"), *rows], align), "", *_notes(setting)])


def _schedules(setting: Setting) -> list[tuple[Callable[[int], Schedule], int]]:
    """How each is made of a number of micro-batches, and in which steps that grows."""
    p, v = setting.stages, setting.chunks
    return [
        (lambda m: pipelines.gpipe(p, m), 1),
        (lambda m: pipelines.one_f_one_b(p, m), 1),
        (lambda m: pipelines.one_f_one_b(p, m, zero=1), 1),
        (lambda m: pipelines.interleaved(p, m, v), p),
        (lambda m: pipelines.zb_h1(p, m), 1),
        (lambda m: pipelines.zb_h2(p, m), 1),
        (lambda m: pipelines.pipedream(p, m), 1),
    ]


def _pipeline(setting: Setting, zero: Row, make: Callable[[int], Schedule], step: int) -> Row:
    schedule, replicas = make(setting.micro_batches), setting.replicas
    values = setting.rows * setting.seq * setting.width
    parameters = WORD_BYTES * schedule.parameter_words(setting.psi, replicas)
    between = WORD_BYTES * schedule.activation_words(values)
    idle = float(schedule.idle_of_work) * setting.seconds
    sent = parameters + between
    return Row(
        name=schedule.name,
        states=schedule.state_bytes(setting.psi, replicas),
        in_flight=float(schedule.in_flight),
        held=float(schedule.in_flight) * setting.stage_bytes,
        idle=float(schedule.idle_share),
        parameter_bytes=parameters,
        activation_bytes=between,
        least_rows=pipelines.fewest(make, step, _SHARE) * setting.rows * replicas,
        late=schedule.late,
        versions=schedule.versions,
        wire=shorter_below(zero.parameter_bytes, sent, setting.seconds, idle),
        changes=schedule.changes,
    )


def _cells(row: Row, stages: int) -> list[str]:
    wire = "-" if row.wire is None else f"{row.wire / 1e9:.1f}" if row.wire else "never"
    return [
        row.name,
        f"{row.states / 1e9:.2f}",
        f"{row.in_flight:g}",
        f"{row.in_flight / stages:.3g}",
        f"{row.held / 1e9:.2f}",
        f"{row.idle:.1%}",
        f"{row.parameter_bytes / 1e9:.2f}",
        f"{row.activation_bytes / 1e9:.2f}",
        f"{row.least_rows}",
        f"{row.late}",
        f"{row.versions}",
        wire,
        row.changes,
    ]


def _notes(s: Setting) -> list[str]:
    each, device = s.micro_batches * s.rows // s.stages, s.device
    return [
        f"- batch: {s.replicas * s.micro_batches * s.rows} rows of {s.seq}; {s.replicas} pipelines "
        f"of {s.stages} with {s.micro_batches} micro-batches of {s.rows}, or {each} a device",
        f"- products: {s.seconds:.2f} s a step at {_EFFICIENCY:.0%} of {device.flops / 1e12:g} "
        f"TFLOP/s; memory of a device: {device.memory_bytes / 1e9:g} GB",
        f"- wire: a ring of all has {device.ring_wire(s.devices, device.host_devices) / 1e9:g} "
        f"GB/s a device, through hosts of {device.host_devices}; a device alone "
        f"{device.slow_wire / 1e9:g} GB/s to other hosts",
        f"- layers: {_shared(s.layers, s.stages, 'stages')}; interleaved, "
        + _shared(s.layers, s.stages * s.chunks, "chunks"),
    ]


def _shared(layers: int, parts: int, name: str) -> str:
    """How many layers each has, and what the longest makes the others wait."""
    most = -(-layers // parts)
    if layers % parts == 0:
        return f"{parts} {name} of {most}"
    waits = 1 - layers / (parts * most)
    return f"{parts} {name} of {most - 1} or {most}, for which {waits:.0%} more idle, not counted"
