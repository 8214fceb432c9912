"""ZeRO 3 beside pipelines on the same devices: memory, communication, idle time.

    python benchmarks/paper/pipelines.py --model 1t --devices 1024 --pipeline 64 --micro-batches 128

A pipeline has p stages, one a device, and m micro-batches of b rows; interleaved, a device has v
chunks of layers. N devices are N/p pipelines, with m·b·N/p rows a step; ZeRO 3 gives each device
m·b/p of them, at once or as m/p micro-batches. Time is counted in passes of one micro-batch through
the layers of a device: F forward, B for gradients of inputs, W for gradients of weights, one each
(2 where B and W are one pass), so the work of a device is 3m. Nothing is recomputed.

The step of ZeRO 3 is longer below a certain interconnect bandwidth: steps are
max(C, bytes / bandwidth) + idle, with C seconds of matrix products at half of the device's peak.
`tests/paper/test_paper.py` simulates GPipe, 1F1B and ZB-H1. GB is 1e9 bytes.
Sources: those of the schedules below; ZeRO (arXiv:1910.02054), sections 3.2, 5 and 7.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence
from fractions import Fraction

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.paper import tables
from zero_jax.hlo.targets import TARGETS, Target, target
from zero_jax.models import families
from zero_jax.models.gpt_config import GPTConfig
from zero_jax.plan.tables import table

_BYTES = 2  # of a parameter, gradient or activation in 16 bits
_WORK = 3  # F, B and W of a micro-batch
_EFFICIENCY = 0.5  # of the peak
_SHARE = Fraction(1, 10)  # of a step that may idle


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One schedule in closed form.

    Attributes:
      name: from its paper.
      stages, micro_batches: p and m.
      idle: passes for which a device idles in a step.
      in_flight: most activations a device holds, in those of one micro-batch on one stage.
      changes: requirements on the model and its training.
      chunks: v.
      late: most updates by which a gradient is stale.
      versions: most copies of its weights that a device keeps.
      rounds: times in a step that copies of a stage communicate.
      zero: ZeRO stage over those copies.
    """

    name: str
    stages: int
    micro_batches: int
    idle: Fraction
    in_flight: Fraction
    changes: str
    chunks: int = 1
    late: int = 0
    versions: int = 1
    rounds: int = 1
    zero: int = 0

    @property
    def idle_share(self) -> Fraction:
        """Idle over all time of a step; Megatron's papers divide by the work alone."""
        return self.idle / (self.idle + _WORK * self.micro_batches)

    @property
    def hops(self) -> int:
        """Most outputs and gradients of a micro-batch that a device sends; fewer at both ends."""
        return 0 if self.stages == 1 else 2 * self.chunks - (self.stages == 2)

    def state_bytes(self, psi: float, devices: int) -> float:
        """Model states of Ψ/p parameters on a device, and their older versions."""
        states = tables.model_states(psi, devices // self.stages, self.zero, mp=self.stages)
        return states + (self.versions - 1) * _BYTES * psi / self.stages

    def parameter_elements(self, psi: float, devices: int) -> float:
        """Elements that a device sends to copies of its stage in a step: 2Ψ/p, ZeRO 3 3Ψ/p."""
        shared = devices > self.stages
        return shared * tables.ELEMENTS_SENT[self.zero] * self.rounds * psi / self.stages


def schedules(p: int, m: int, v: int = 2) -> dict[str, Schedule]:
    """Returns the schedules of p stages and m micro-batches by name, interleaved with v chunks.

    Interleaved 1F1B ("interleaved") takes m a multiple of p. For m < p (ZB-H2: m < 2p-1), which the
    papers leave out, the zero-bubble schedules idle for 2p-1-m passes.
    """
    replace = dataclasses.replace
    # GPipe (arXiv:1811.06965), section 2.3: (p-1)/(m+p-1) of the step is idle, all m are held.
    layers = "layers in stages of equal time"
    gpipe = Schedule("GPipe", p, m, Fraction(_WORK * (p - 1)), Fraction(m), layers)
    # PipeDream-Flush (arXiv:2006.09503); arXiv:2104.04473, section 2.2.1: idles as GPipe does.
    # ZeRO 2 and 3 would communicate in every micro-batch.
    one = replace(gpipe, name="1F1B", in_flight=Fraction(min(p, m)))
    one_zero = replace(one, name="1F1B, ZeRO 1", zero=1)
    # arXiv:2104.04473, section 2.2.2; activations: arXiv:2205.05198, section 4.2.3.
    held, layers = min(Fraction(m), p + Fraction(p - 1, v)), "layers in p·v chunks of equal time"
    woven = replace(one, name=f"interleaved, v={v}", idle=gpipe.idle / v, chunks=v)
    woven = replace(woven, in_flight=held, changes=layers)
    # Zero Bubble (arXiv:2401.10241), table 2: (p-1)(F + B - W) for ZB-H1 and (p-1)(F + B - 2W) for
    # ZB-H2 are idle, where neither F nor B is shorter than W. ZB-H2 counts from a device's own
    # first to its own last pass; before a global norm it idles as ZB-H1 does.
    zb_h1 = replace(one, name="ZB-H1", idle=Fraction(max(p - 1, 2 * p - 1 - m)))
    zb_h1 = replace(zb_h1, changes="stages; backward in two passes, B and W")
    zb_h2 = replace(one, name="ZB-H2", idle=Fraction(max(0, 2 * p - 1 - m)))
    zb_h2 = replace(zb_h2, in_flight=Fraction(min(m, 2 * p - 1)))
    zb_h2 = replace(zb_h2, changes="as ZB-H1; an update that waits for no other stage")
    # PipeDream (arXiv:1806.03377), sections 3.3 and 3.4: an update after every micro-batch; device
    # i, from 0, keeps p-i versions of its weights.
    stale = replace(one, name="PipeDream", idle=Fraction(0), in_flight=Fraction(p), rounds=m)
    stale = replace(stale, late=p - 1, versions=p)
    stale = replace(stale, changes="stages; an optimizer that tolerates late gradients")
    made = (gpipe, one, one_zero, woven, zb_h1, zb_h2, stale)
    return {schedule.name.partition(", v=")[0]: schedule for schedule in made}


def fewest(name: str, p: int, v: int = 2) -> int:
    """Returns the fewest micro-batches of a schedule with at most a tenth of idle time."""
    step = p if name == "interleaved" else 1
    counts = itertools.count(step, step)
    return next(m for m in counts if schedules(p, m, v)[name].idle_share <= _SHARE)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model, N devices, and the batch and pipelines on them."""

    config: families.Config
    seq: int
    device: Target
    devices: int
    stages: int
    micro_batches: int
    chunks: int = 2
    rows: int = 1

    def __post_init__(self) -> None:
        n, p, m, v = self.devices, self.stages, self.micro_batches, self.chunks
        if p < 2 or n < p or n % p:
            raise ValueError(f"--pipeline {p} must be at least 2 and divide --devices {n}")
        if m < 1 or m % p:
            raise ValueError(f"--micro-batches {m} must be a multiple of --pipeline {p}")
        if not 1 <= v <= self.config.layers // p:
            raise ValueError(f"--chunks {v}: {p} stages have {self.config.layers} layers in all")
        if min(self.rows, self.seq) < 1:
            raise ValueError(f"{self.rows} rows of {self.seq} tokens: give at least 1 of each")
        if not self.device.memory_bytes:
            raise ValueError(f"--target {self.device.name} comes without figures: take h100")

    @property
    def psi(self) -> int:
        """Ψ, the number of parameters."""
        return families.num_params(self.config)

    @property
    def seconds(self) -> float:
        """Seconds of matrix products in a step on each device."""
        tokens = self.seq * self.rows * self.micro_batches / self.stages
        flops = families.flops_per_token(self.config, self.seq) * tokens
        return flops / (_EFFICIENCY * self.device.flops)

    def held_bytes(self, in_flight: Fraction) -> float:
        """Bytes of activations, about 12 values of the width for each layer and token."""
        size = (self.config.layers, self.config.width, self.seq, self.rows)
        return float(in_flight) * tables.activations(*size) / self.stages


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, in bytes per device; docs/pipelines.md explains the columns."""

    schedule: Schedule
    states: float
    parameter_bytes: float
    activation_bytes: float
    least_rows: int
    wire: float | None = None


def compare(setting: Setting) -> list[Row]:
    """Returns ZeRO 3 at once, ZeRO 3 in micro-batches if that differs, then the pipelines."""
    n, p, m, v = setting.devices, setting.stages, setting.micro_batches, setting.chunks
    rows: list[Row] = []
    for parts in sorted({1, m // p}):
        name = "ZeRO 3" if parts == 1 else f"ZeRO 3, {parts} micro-batches"
        zero = Schedule(name, 1, m, Fraction(0), Fraction(m, parts), "nothing")
        rows.append(_row(setting, dataclasses.replace(zero, rounds=parts, zero=3), n))
    for name, schedule in schedules(p, m, v).items():
        rows.append(_row(setting, schedule, fewest(name, p, v) * n // p, rows[0]))
    return rows


def _row(s: Setting, schedule: Schedule, least: int, zero: Row | None = None) -> Row:
    states = schedule.state_bytes(s.psi, s.devices)
    parameters = _BYTES * schedule.parameter_elements(s.psi, s.devices)
    outputs = s.micro_batches * s.rows * s.seq * s.config.width
    between = float(_BYTES * schedule.hops * outputs)
    row = Row(schedule, states, parameters, between, least * s.rows)
    if zero is None:
        return row
    idle = float(schedule.idle / (_WORK * s.micro_batches)) * s.seconds
    wire = shorter_below(zero.parameter_bytes, parameters + between, s.seconds, idle)
    return dataclasses.replace(row, wire=wire)


def shorter_below(zero_bytes: float, sent: float, seconds: float, idle: float) -> float:
    """Returns the bandwidth below which a pipeline's step is shorter than that of ZeRO 3.

    The steps are max(C, sent / bandwidth) + idle and max(C, zero_bytes / bandwidth).
    """
    if zero_bytes <= sent:
        return 0.0
    equal = zero_bytes / (seconds + idle)  # if the pipeline's communication overlaps entirely
    return equal if sent <= equal * seconds else (zero_bytes - sent) / idle


def format_table(s: Setting) -> str:
    """Returns the rows as a table, and the setting they are for."""
    header = "|states GB|in flight|models|held GB|idle|weights GB|between GB|rows for 10%|late"
    header += "|versions|below GB/s|requires"
    rows, device = [header.split("|"), *(_cells(row, s) for row in compare(s))], s.device
    pipelines, each = s.devices // s.stages, s.micro_batches * s.rows // s.stages
    notes = [
        f"- batch: {pipelines * s.micro_batches * s.rows} rows of {s.seq}; {pipelines} pipelines "
        f"of {s.stages} with {s.micro_batches} micro-batches of {s.rows}, or {each} per device",
        f"- products: {s.seconds:.2f} s a step at {_EFFICIENCY:.0%} of {device.flops / 1e12:g} "
        f"TFLOP/s; memory of a device: {device.memory_bytes / 1e9:g} GB",
        "- interconnect: a ring of all devices has "
        f"{device.ring_wire(s.devices, device.host_devices) / 1e9:g} GB/s per device, through "
        f"hosts of {device.host_devices}; a single device {device.slow_wire / 1e9:g} GB/s to other "
        "hosts",
        f"- layers: {_shared(s.config.layers, s.stages, 'stages')}; interleaved, "
        + _shared(s.config.layers, s.stages * s.chunks, "chunks"),
    ]
    return "\n".join([table(rows, "<" + ">" * 11 + "<"), "", *notes])


def _cells(row: Row, s: Setting) -> list[object]:
    made, in_flight = row.schedule, float(row.schedule.in_flight)
    wire = "-" if row.wire is None else f"{row.wire / 1e9:.1f}" if row.wire else "never"
    sizes = (s.held_bytes(made.in_flight), row.parameter_bytes, row.activation_bytes)
    held, weights, between = (f"{size / 1e9:.2f}" for size in sizes)
    cells = [made.name, f"{row.states / 1e9:.2f}", f"{in_flight:g}", f"{in_flight / s.stages:.3g}"]
    cells += [held, f"{float(made.idle_share):.1%}", weights, between]
    return [*cells, row.least_rows, made.late, made.versions, wire, made.changes]


def _shared(layers: int, parts: int, name: str) -> str:
    """Layers of each part, and the idle time where they are not equal."""
    most = -(-layers // parts)
    if layers % parts == 0:
        return f"{parts} {name} of {most}"
    waits = 1 - layers / (parts * most)
    return f"{parts} {name} of {most - 1} or {most}, for which {waits:.0%} more idle, not counted"


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="7.5b", help="one of " + ", ".join(families.PRESETS))
    add("--devices", type=int, default=64, help="N")
    add("--pipeline", type=int, default=8, help="p, stages of a pipeline")
    add("--micro-batches", type=int, default=32, help="m of a pipeline, a multiple of p")
    add("--chunks", type=int, default=2, help="v of a device, interleaved")
    add("--batch-per-device", type=int, help="rows; by default micro-batches have one row")
    add("--seq", type=int, help="tokens of a row; 1024, or the most that the model takes")
    add("--target", default="h100", help="one of " + ", ".join(TARGETS))
    parsed = parser.parse_args(args)
    try:
        setting = _setting(parsed)
        shape = f"{setting.config.layers} x {setting.config.width}, {setting.psi / 1e9:.1f}B"
        print(f"{parsed.model} ({shape}) on {setting.devices} {setting.device.name}")
        print(format_table(setting))
    except ValueError as error:
        parser.error(str(error))


def _setting(parsed: argparse.Namespace) -> Setting:
    config, p, m = families.preset(parsed.model), parsed.pipeline, parsed.micro_batches
    seq = min(1024, config.seq) if parsed.seq is None else parsed.seq
    if isinstance(config, GPTConfig):
        config = dataclasses.replace(config, seq=seq)  # its positions are parameters
    elif seq > config.seq:
        raise ValueError(f"--seq {seq}: the model takes rows of at most {config.seq} tokens")
    rows = m if parsed.batch_per_device is None else parsed.batch_per_device * p
    if m < 1 or rows % m:
        raise ValueError(f"{rows} rows of a pipeline must be a multiple of --micro-batches {m}")
    device, n = target(parsed.target), parsed.devices
    return Setting(config, seq, device, n, p, m, parsed.chunks, rows // m)


if __name__ == "__main__":
    main()
