"""Superlinear scaling of ZeRO: more devices free memory, so the batch of a model replica grows.

    python benchmarks/paper/scaling.py --model 60b --devices 64,128,256,400 --device v100-32gb

Model states shrink with N, the number of model replicas, so at stages 1 to 3 the largest batch b of
a replica grows with N, while it sends 2Ψ/MP elements a step to other replicas (3Ψ/MP at stage 3). A
step takes b·(compute + communication over MP) + communication over N. Throughput per device rises
where b grows by more than the ring's (N-1)/N: 7/6 from N = 4 to 8, at any compute efficiency.
Source: ZeRO (arXiv:1910.02054), sections 7, 8 and 10.3; a block's working memory is eq. 2 of
Korthikanti et al. (arXiv:2205.05198). The assumptions are printed. GB is 1e9 bytes.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.paper import tables
from zero_jax.hlo.targets import TARGETS, Target, target
from zero_jax.models import gpt_config
from zero_jax.models.gpt_config import GPTConfig

EFFICIENCY = 0.5  # of the device's peak
RESERVE = 0.1  # of its memory, for CUDA, NCCL, fixed buffers and fragments
# Unsharded blocks during a step, which table 1 leaves out: gradients, at stage 3 parameters too.
_UNSHARDED_BLOCKS = (0, 0, 1, 2)
# Figure 3, 60B: layers, width, MP, stage and device; batch of each model replica by devices.
FIGURE_3 = (132, 6144, 16, 2, "v100-32gb")
FIGURE_3_BATCHES = {64: 16, 128: 48, 256: 48, 400: 64}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A GPT and how it is trained, except the number of devices.

    Attributes:
      config: of the model.
      device: from `targets.target`.
      stage: 0 to 3.
      model_parallel: MP.
      max_batch: most rows of a replica; None for as many as fit.
    """

    config: GPTConfig
    device: Target
    stage: int = 2
    model_parallel: int = 16
    max_batch: int | None = None

    @property
    def psi(self) -> int:
        """Ψ, the number of parameters."""
        return gpt_config.num_params(self.config)

    def flops(self, batch: int, recomputed: bool = False) -> int:
        """FLOPs of a replica's step; recomputing the blocks, not the head, is a fourth pass."""
        c = self.config
        fourth = c.layers * (2 * 12 * c.width**2 + 4 * c.width * c.seq) if recomputed else 0
        return batch * c.seq * (gpt_config.flops_per_token(c, c.seq) + fourth)

    def saved_bytes(self, batch: int) -> float:
        """Checkpointed inputs of all blocks, 1/MP of them on each device (P_a)."""
        c = self.config
        return tables.checkpoints(c.layers, c.width, c.seq, batch, self.model_parallel)

    def work_bytes(self, batch: int) -> float:
        """Memory of one block or the logits, the larger, and the unsharded blocks of the stage.

        A block keeps T·D·(10 + 24/MP + 5·heads·T/(D·MP)) bytes a row for its backward pass, and
        2·T·D more for the gradient of its output; logits are kept in fp16 and fp32, 6·T·V/MP.
        """
        d, t, mp = self.config.width, self.config.seq, self.model_parallel
        block = t * (d * (12 + 24 / mp) + 5 * self.config.heads * t / mp)
        unsharded = _UNSHARDED_BLOCKS[self.stage] * 2 * 12 * d * d / mp
        return unsharded + batch * max(block, 6 * t * self.config.vocab / mp)

    @property
    def model_wire(self) -> float:
        """Bytes/s a device sends to its model-parallel peers."""
        return self.device.ring_wire(self.model_parallel, self.device.host_devices)


@dataclasses.dataclass(frozen=True)
class Point:
    """The prediction for one number of devices.

    Attributes:
      batch: rows of the largest batch of one model replica that fits; 0 if none does, and then
        seconds and FLOP/s are 0.
      memory_bound: whether memory limits the batch, not `max_batch`.
      states_bytes, saved_bytes, work_bytes: on each device, beside the reserve.
      compute_seconds, data_seconds, model_seconds: of one step; communication over N and MP.
    """

    setting: Setting
    devices: int
    batch: int
    memory_bound: bool
    states_bytes: float
    saved_bytes: float
    work_bytes: float
    compute_seconds: float
    data_seconds: float
    model_seconds: float

    @property
    def shards(self) -> int:
        """N, the number of model replicas."""
        return self.devices // self.setting.model_parallel

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.data_seconds + self.model_seconds

    @property
    def total_flops(self) -> float:
        """Model FLOP/s of all devices together, without recomputation."""
        flops = self.shards * self.setting.flops(self.batch)
        return flops / self.step_seconds if self.batch else 0.0

    @property
    def flops_per_device(self) -> float:
        return self.total_flops / self.devices


def predict(setting: Setting, counts: Sequence[int]) -> list[Point]:
    """Predicts batch, time and throughput for each number of devices.

    Raises:
      ValueError: a count is no multiple of MP, or the device has no figures.
    """
    device, mp = setting.device, setting.model_parallel
    if not (device.memory_bytes and device.slow_wire):
        raise ValueError(f"--device {device.name} has no memory and interconnect: take v100-32gb")
    if mp < 1 or any(count < 1 or count % mp for count in counts):
        given = ",".join(map(str, counts))
        raise ValueError(f"--devices {given}: give multiples of --model-parallel {mp}, at least 1")
    return [_point(setting, count) for count in counts]


def _point(setting: Setting, devices: int) -> Point:
    config, device, mp = setting.config, setting.device, setting.model_parallel
    shards = devices // mp
    states = tables.model_states(setting.psi, shards, setting.stage, mp=mp)
    fixed = setting.work_bytes(0)
    free = device.memory_bytes * (1 - RESERVE) - states - fixed
    fits = max(0, int(free // (setting.saved_bytes(1) + setting.work_bytes(1) - fixed)))
    batch = fits if setting.max_batch is None else min(fits, setting.max_batch)
    data = tables.ELEMENTS_SENT[setting.stage] * setting.psi / mp if batch else 0
    peers = config.layers * tables.block_elements(config.width, config.seq, batch, True)
    data_wire = device.ring_wire(shards, max(1, device.host_devices // mp))
    return Point(
        *(setting, devices, batch, batch == fits),
        *(states, setting.saved_bytes(batch), setting.work_bytes(batch)),
        compute_seconds=setting.flops(batch, True) / mp / (EFFICIENCY * device.flops),
        data_seconds=2 * data * (1 - 1 / shards) / data_wire,
        model_seconds=2 * peers * (1 - 1 / mp) / setting.model_wire,
    )


def assumptions(setting: Setting) -> list[str]:
    """Returns the assumptions of a prediction, a line each, with the numbers filled in."""
    device, mp, memory = setting.device, setting.model_parallel, setting.device.memory_bytes / 1e9
    return [
        f"memory: states of stage {setting.stage} over MP {mp}; every block's input in fp16, over "
        f"{mp}; one block or the logits at work; {RESERVE * memory:.1f} of {memory:.1f} GB "
        "for all else",
        f"compute: {EFFICIENCY:.0%} of {device.flops / 1e12:g} TFLOP/s at any batch; 8 "
        "FLOPs per parameter and token take time, 6 count: recomputation does not",
        "model wire: 13 D·T words a row and block if MP > 1, at "
        f"{setting.model_wire / 1e9:g} GB/s a device",
        f"data wire: {tables.ELEMENTS_SENT[setting.stage]}Ψ/MP words a step, at "
        f"{device.slow_wire / 1e9:g} GB/s a device between hosts of {device.host_devices}",
        "wires: fp16, rings, no latency, no overlap; one micro-batch a step; a free update",
    ]


def format_scaling(points: Sequence[Point]) -> str:
    """Returns a table, beside the batches of figure 3 for its setting.

    The last column is throughput over perfect scaling from the first point that fits.
    """
    base = next((point.flops_per_device for point in points if point.batch), 0.0)
    header = "devices|N|states GB|saved GB|work GB|batch|paper|step s|compute s|data s|model s"
    header += "|TFLOP/s each|PFLOP/s all|of linear"
    lines = [tables.indented([header.split("|"), *(_row(point, base) for point in points)]), ""]
    lines += [f"- {line}" for line in assumptions(points[0].setting)]
    if not all(point.batch for point in points):
        lines.append("- batch 0: not a row fits; take more devices, a higher stage or more MP")
    return "\n".join(lines)


def _row(p: Point, base: float) -> list[object]:
    s = p.setting
    c, how = s.config, (s.model_parallel, s.stage, s.device.name)
    in_figure_3 = (c.layers, c.width, *how) == FIGURE_3
    sizes = (p.states_bytes, p.saved_bytes, p.work_bytes)
    row: list[object] = [p.devices, p.shards, *(f"{size / 1e9:.2f}" for size in sizes)]
    batch = f"{p.batch}{'' if p.memory_bound else ' (cap)'}"
    row += [batch, FIGURE_3_BATCHES.get(p.devices, "-") if in_figure_3 else "-"]
    if not p.batch:
        return [*row, *"-------"]
    seconds = (p.step_seconds, p.compute_seconds, p.data_seconds, p.model_seconds)
    speeds = f"{p.flops_per_device / 1e12:.1f}", f"{p.total_flops / 1e15:.2f}"
    row += [*(f"{x:.2f}" for x in seconds), *speeds]
    return [*row, f"{p.flops_per_device / base:.3f}"]


def plot_scaling(points: Sequence[Point], path: str | pathlib.Path) -> None:
    """Draws predicted FLOP/s of all devices, the line of perfect scaling, and the assumptions.

    Raises:
      ValueError: nothing fits.
    """
    from matplotlib.figure import Figure  # the table needs no matplotlib

    shown = sorted((p for p in points if p.batch), key=lambda p: p.devices)
    if not shown:
        tried = ", ".join(str(p.devices) for p in points)
        raise ValueError(f"nothing to draw: no row fits on {tried} devices; take more devices")
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    counts, totals = [p.devices for p in shown], [p.total_flops / 1e15 for p in shown]
    setting, perfect = shown[0].setting, [totals[0] * count / counts[0] for count in counts]
    axes.plot(counts, totals, "o-", label="predicted")
    axes.plot(counts, perfect, "--", color="#555555", label=f"perfect, from {counts[0]} devices")
    for p, total, line in zip(shown, totals, perfect, strict=True):
        note = f"batch {p.batch}\n{total / line:.3f} of perfect"
        axes.annotate(note, (p.devices, total), (9, -20), textcoords="offset points", fontsize=9)
    title = f"{setting.psi / 1e9:.3g}B parameters, stage {setting.stage}, {setting.device.name}"
    axes.set(xlabel="devices", ylabel="model PFLOP/s of all devices", title=title, xticks=counts)
    axes.set(xlim=(0, 1.25 * counts[-1]), ylim=(0, 1.1 * totals[-1]))
    axes.legend(frameon=False, loc="upper left")
    figure.supxlabel("\n".join(assumptions(setting)), fontsize=7, x=0.02, ha="left")
    figure.savefig(path)


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table, and draws the picture with --plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="60b", help="one of " + ", ".join(gpt_config.PRESETS))
    add("--devices", default="64,128,256,400", help="numbers of devices, separated by commas")
    add("--device", default="v100-32gb", help="one of " + ", ".join(TARGETS))
    add("--stage", type=int, default=2, choices=range(4))
    add("--model-parallel", type=int, default=16, help="MP, 16 in the paper")
    add("--seq", type=int, default=1024, help="tokens of a row")
    add("--plot", help="file for the picture")
    parsed = parser.parse_args(args)
    try:
        config = gpt_config.preset(parsed.model, vocab=50304, seq=parsed.seq)
        setting = Setting(config, target(parsed.device), parsed.stage, parsed.model_parallel)
        points = predict(setting, [int(count) for count in parsed.devices.split(",")])
        print(format_scaling(points))
        if parsed.plot:
            plot_scaling(points, parsed.plot)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
