"""Why ZeRO scales superlinearly: more devices free memory, which lets each replica's batch grow.

Model states shrink with N, so at stages 1 to 3 the largest batch b of a model replica grows with
N, while the words it sends to other replicas stay 2Ψ/MP a step (3Ψ/MP at stage 3). A step takes
b·(compute + model wire) + data wire; throughput per device therefore rises where b grows by more
than the ring's (N-1)/N, 7/6 from N = 4 to 8, whatever share of the peak the products reach.
Source: ZeRO (arXiv:1910.02054), sections 7, 8 and 10.3; a block's working memory is eq. 2 of
Korthikanti et al. (arXiv:2205.05198). `assumptions` spells out the rest. GB is 1e9 bytes.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_jax.hlo.targets import Target
from zero_jax.plan import paper, pictures

# Blocks held whole during a step, which table 1 leaves out: gradients, at stage 3 parameters too.
_WHOLE_BLOCKS = (0, 0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A GPT and how it is trained, all but the number of devices.

    Attributes:
      layers, width, seq, vocab: L, D, T and V of the model.
      device: from `targets.target`.
      stage: 0 to 3.
      model_parallel: MP.
      partition_activations: P_a, each device keeps 1/MP of the saved activations.
      heads: of the attention; None for one per 128 of width.
      efficiency: fraction of the device's peak that the computation reaches.
      reserve: fraction of its memory left to CUDA, NCCL, fixed buffers and fragments.
      max_batch: cap on the rows of a replica; None leaves it to memory alone.
    """

    layers: int
    width: int
    seq: int
    vocab: int
    device: Target
    stage: int = 2
    model_parallel: int = 16
    partition_activations: bool = True
    heads: int | None = None
    efficiency: float = 0.5
    reserve: float = 0.1
    max_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "seq", "vocab", "model_parallel", "heads", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}, but it must be at least 1.")
        paper.words(self.stage)  # complains of a stage that is none
        if not (0 < self.efficiency <= 1 and 0 <= self.reserve < 1):
            raise ValueError(
                f"efficiency={self.efficiency} and reserve={self.reserve}, but they are fractions "
                "of a device's peak and memory: keep them between 0 and 1, at 0.5 and 0.1 say."
            )
        if not (self.device.memory_bytes and self.device.flops > 0 and self.device.slow_wire > 0):
            raise ValueError(
                f"{self.device.name!r} comes without the memory, FLOP/s and wires that are needed; "
                "take an accelerator, 'v100-32gb' say."
            )

    @property
    def psi(self) -> int:
        """Parameters: (V+T)·D + L·(12·D² + 13·D) + 2·D."""
        d = self.width
        return (self.vocab + self.seq) * d + self.layers * (12 * d * d + 13 * d) + 2 * d

    def flops(self, batch: int, recomputed: bool = False) -> int:
        """FLOPs of a replica's step: 6 per token and parameter that multiplies, and attention.

        Recomputing the blocks, not the head, is a fourth pass over them: 8 instead of 6.
        """
        d, passes = self.width, 4 if recomputed else 3
        block = passes * (2 * 12 * d * d + 4 * d * self.seq)
        return batch * self.seq * (self.layers * block + 6 * self.vocab * d)

    def saved_bytes(self, batch: int) -> float:
        """Checkpointed inputs of all blocks, on each device."""
        split = self.model_parallel if self.partition_activations else 1
        return paper.checkpoints(self.layers, self.width, self.seq, batch, split)

    def work_bytes(self, batch: int) -> float:
        """A block or the logits at work, whichever is more, and what stages 2 and 3 hold whole.

        A block keeps T·D·(10 + 24/MP + 5·heads·T/(D·MP)) bytes a row for its backward pass, and
        2·T·D more for the gradient of its output; logits are kept in fp16 and fp32, 6·T·V/MP.
        """
        d, t, mp = self.width, self.seq, self.model_parallel
        heads = self.heads or max(1, d // 128)
        block = t * (d * (12 + 24 / mp) + 5 * heads * t / mp)
        whole = _WHOLE_BLOCKS[self.stage] * 2 * 12 * d * d / mp
        return whole + batch * max(block, 6 * t * self.vocab / mp)

    def block_words(self, batch: int) -> int:
        """Words a device sends in a step to its model-parallel peers, for each block."""
        return paper.block_words(self.width, self.seq, batch, self.partition_activations)

    @property
    def model_wire(self) -> float:
        """Bytes/s a device sends to its model-parallel peers."""
        return self.device.ring_wire(self.model_parallel, self.device.host_devices)


@dataclasses.dataclass(frozen=True)
class Point:
    """What is predicted for one number of devices.

    Attributes:
      batch: rows of the largest batch of one model replica that fits; 0 if not even one does,
        and then seconds and FLOP/s are 0.
      memory_bound: memory limits the batch, not a cap.
      states_bytes, activation_bytes, work_bytes: on each device, beside the reserve.
      compute_seconds, data_wire_seconds, model_wire_seconds: of one step.
    """

    setting: Setting
    devices: int
    batch: int
    memory_bound: bool
    states_bytes: float
    activation_bytes: float
    work_bytes: float
    compute_seconds: float
    data_wire_seconds: float
    model_wire_seconds: float

    @property
    def shards(self) -> int:
        """N, the number of model replicas."""
        return self.devices // self.setting.model_parallel

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.data_wire_seconds + self.model_wire_seconds

    @property
    def total_flops(self) -> float:
        """Model FLOP/s of all devices together; recomputation is not counted."""
        flops = self.shards * self.setting.flops(self.batch)
        return flops / self.step_seconds if self.batch else 0.0

    @property
    def flops_per_device(self) -> float:
        return self.total_flops / self.devices


def scaling(
    layers: int,
    width: int,
    seq: int,
    vocab: int,
    device: Target,
    devices: Sequence[int],
    stage: int = 2,
    model_parallel: int = 16,
    partition_activations: bool = True,
    **others: Any,
) -> tuple[Point, ...]:
    """Predicts batch, time and throughput of a GPT on each number of `devices`.

    The arguments are the fields of `Setting`, `others` being those from `heads` on.

    Raises:
      ValueError: no devices, or not a multiple of MP; a value out of range; no figures of a device.

    >>> from zero_jax.hlo.targets import target
    >>> few, many = scaling(132, 6144, 1024, 50304, target("v100-32gb"), [64, 128])
    >>> many.batch > few.batch, many.total_flops > 2 * few.total_flops
    (True, True)
    """
    how = (stage, model_parallel, partition_activations)
    setting = Setting(layers, width, seq, vocab, device, *how, **others)
    bad = [count for count in devices if count < 1 or count % model_parallel]
    if bad or not devices:
        raise ValueError(
            f"devices={list(devices)}, but a model replica takes model_parallel={model_parallel} "
            f"devices: give multiples of it, {model_parallel} or {8 * model_parallel} say."
        )
    return tuple(_point(setting, count) for count in devices)


def assumptions(setting: Setting) -> tuple[str, ...]:
    """What a prediction rests on, a line each, with the numbers filled in.

    >>> from zero_jax.hlo.targets import target
    >>> assumptions(Setting(132, 6144, 1024, 50304, target("v100-32gb")))[2]
    'model wire: 13 D·T words a row and block if MP > 1, at 150 GB/s a device'
    """
    device, mp, p_a = setting.device, setting.model_parallel, setting.partition_activations
    reserve, memory = setting.reserve * device.memory_bytes / 1e9, device.memory_bytes / 1e9
    return (
        f"memory: states of stage {setting.stage} over MP {mp}; every block's input in fp16, over "
        f"{mp if p_a else 1}; one block or the logits at work; {reserve:.1f} of {memory:.1f} GB "
        "for all else",
        f"compute: {setting.efficiency:.0%} of {device.flops / 1e12:g} TFLOP/s at any batch; 8 "
        "FLOPs per parameter and token take time, 6 count: recomputation does not",
        f"model wire: {12 + p_a} D·T words a row and block if MP > 1, at "
        f"{setting.model_wire / 1e9:g} GB/s a device",
        f"data wire: {paper.words(setting.stage)}Ψ/MP words a step, at {device.slow_wire / 1e9:g} "
        f"GB/s a device between hosts of {device.host_devices}",
        "wires: fp16, rings, no latency, no overlap; one micro-batch a step; a free update",
    )


def format_scaling(points: Sequence[Point]) -> str:
    """The points as a table, beside the batches of the paper's figure 3 where it has them.

    The last column is throughput over perfect scaling from the first point that fits.
    """
    base = next((point.flops_per_device for point in points if point.batch), 0.0)
    header = "devices|N|states GB|saved GB|work GB|batch|paper|step s|compute s|data s|model s"
    header += "|TFLOP/s each|PFLOP/s all|of linear"
    lines = [paper.shown([header.split("|"), *(_row(point, base) for point in points)]), ""]
    lines += [f"- {line}" for line in assumptions(points[0].setting)]
    if not all(point.batch for point in points):
        lines.append("- batch 0: not a row fits; take more devices, a higher stage or more MP")
    return "\n".join(lines)


def plot_scaling(points: Sequence[Point], path: str | Path) -> None:
    """Draws the predicted FLOP/s of all devices, the line of perfect scaling, and `assumptions`.

    Raises:
      ValueError: nothing fits, or matplotlib is not installed.
    """
    shown = sorted((p for p in points if p.batch), key=lambda p: p.devices)
    if not shown:
        tried = ", ".join(str(p.devices) for p in points)
        raise ValueError(f"nothing to draw: no row fits on {tried} devices; take more devices.")
    drawn = pictures.figure(8, 5.5)
    axes = drawn.add_subplot()
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
    drawn.supxlabel("\n".join(assumptions(setting)), fontsize=7, x=0.02, ha="left")
    drawn.savefig(path)


def _point(setting: Setting, devices: int) -> Point:
    device, mp, shards = setting.device, setting.model_parallel, devices // setting.model_parallel
    states = paper.model_states(setting.psi, shards, setting.stage, model_parallel=mp)
    fixed = setting.work_bytes(0)
    free = device.memory_bytes * (1 - setting.reserve) - states - fixed
    fits = max(0, int(free // (setting.saved_bytes(1) + setting.work_bytes(1) - fixed)))
    batch = fits if setting.max_batch is None else min(fits, setting.max_batch)
    compute = setting.flops(batch, recomputed=True) / mp
    data_words = paper.words(setting.stage) * setting.psi / mp if batch else 0
    model_words = setting.layers * setting.block_words(batch)
    data_wire = device.ring_wire(shards, max(1, device.host_devices // mp))
    return Point(
        *(setting, devices, batch, batch == fits),
        *(states, setting.saved_bytes(batch), setting.work_bytes(batch)),
        compute_seconds=compute / (setting.efficiency * device.flops),
        data_wire_seconds=2 * data_words * (1 - 1 / shards) / data_wire,
        model_wire_seconds=2 * model_words * (1 - 1 / mp) / setting.model_wire,
    )


def _row(point: Point, base: float) -> list[object]:
    s = point.setting
    same = (s.layers, s.width, s.model_parallel, s.stage, s.device.name) == paper.SCALING_SETTING
    published = paper.SCALING_BATCHES.get(point.devices, "-") if same else "-"
    sizes = (point.states_bytes, point.activation_bytes, point.work_bytes)
    row = [point.devices, point.shards, *(f"{size / 1e9:.2f}" for size in sizes)]
    row += [f"{point.batch}{'' if point.memory_bound else ' (cap)'}", published]
    if not point.batch:
        return [*row, *"-------"]
    wires = (point.data_wire_seconds, point.model_wire_seconds)
    row += [f"{x:.2f}" for x in (point.step_seconds, point.compute_seconds, *wires)]
    row += [f"{point.flops_per_device / 1e12:.1f}", f"{point.total_flops / 1e15:.2f}"]
    return [*row, f"{point.flops_per_device / base:.3f}"]
