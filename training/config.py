"""The settings of a training run, and its command line: each is written once, here, with its help.

None means "whatever suits the others"; `resolve` puts a number in its place where that needs
neither the data nor the devices. What is checked here is only what no other part checks: names
and stages are checked by those who give them a meaning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import zero_jax
from training import profile
from zero_jax.plan.options import Options

# Settings in which the processes of one run may differ.
LOCAL = frozenset(("coordinator", "process_id", "out", "debug"))


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Trains a GPT on text, with the model states partitioned over the devices by ZeRO."""

    config: str | None = None
    """A configuration of the ZeRO paper, which decides stage and remat: c1, c2, c3, c4, c5 or
    zero-100b; c2, c4, c5 and zero-100b need a model axis in --mesh."""
    devices: int | None = None
    """Devices of the whole run on a machine without GPUs, where they are slices of the CPU,
    shared out evenly to the processes; those of --mesh, or 4, unless given. GPUs are always all
    used."""
    mesh: str | None = None
    """Sizes of the mesh's axes, as data=4,model=2: replica (copies of the partitioned states), data
    (what they are partitioned over) and model (tensor parallelism); all devices are on data unless
    given."""

    model: str = "nano"
    """Preset of models.gpt: nano, 124m, 1.5b and so on to 1t."""
    seq: int = 64
    """Tokens of a sequence; short ones teach a small model most in a short time."""
    vocab: int | None = None
    """Number of token ids; 256 for text, which is read byte by byte, and the preset's for token
    files, unless given."""
    data: str | None = None
    """A text file, a folder of text files, or token ids in a .bin (uint16), .u32.bin (uint32) or
    .npy file. English text that comes with Python unless given. The last tenth is held out."""

    steps: int = 600
    """Updates of the parameters."""
    batch: int = 16
    """Sequences in a global batch: a multiple of devices x micro-batches."""
    optimizer: str = "adamw"
    """adamw, sgd, lion, adafactor, lamb or muon."""
    lr: float | None = None
    """Peak learning rate; one that suits the optimizer unless given."""
    warmup: int | None = None
    """Steps in which the rate rises from 0, before it falls as a cosine to a tenth; a tenth of
    all steps unless given."""
    weight_decay: float = 0.1
    """Decay per step and unit of learning rate; of matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient, beyond which it is scaled down; 0 never clips."""
    seed: int = 0
    """Seed of initial values, order of the data and sample."""

    out: str | None = None
    """Folder for config.json, metrics.jsonl, TensorBoard files and loss.png; the next free one of
    runs/001, runs/002 and so on unless given."""
    eval_every: int = 200
    """Steps between looks at held-out text; 0 looks at the end only."""
    eval_batches: int = 64
    """Most held-out batches of such a look; the one at the end takes in all."""
    checkpoint_every: int = 200
    """Steps between checkpoints, in `checkpoints` of --out, from which the same command goes on;
    one is made at the end too, and when the run is stopped. 0 makes none."""
    rollbacks: int = 0
    """How often to go back to the last checkpoint, past the batches since, when gradients are not
    finite too often in a row; 0 ends the run."""
    check_replicas_every: int = 0
    """Steps between comparisons of what several devices hold alike, by the bit; 0 for never."""
    keep: int = 3
    """How many of the latest checkpoints stay."""
    keep_every: int | None = None
    """Steps whose multiples stay for ever; none unless given."""
    fresh: bool = False
    """Refuse to go on from checkpoints in --out."""
    supervise: int | None = None
    """Start so many processes here, and start them again from the last checkpoint when some fail;
    one process drives all GPUs of a machine."""
    restarts: int = 10
    """How often at most --supervise starts them again."""
    dead_after: float = 60.0
    """Seconds without a sign of life after which a process counts as dead, and the run ends."""
    max_hours: float | None = None
    """Save and end after so many hours; no end unless given."""
    profile: bool = False
    """Write a trace of steps 10 to 12 of this start to `profile` in --out, for TensorBoard, XProf
    or Perfetto."""
    sample_length: int = 256
    """Tokens of the sample that is shown at the end; 0 for none. It needs the whole model on one
    device."""

    coordinator: str | None = None
    """host:port of process 0, with --num-processes and --process-id; SLURM and OpenMPI need none
    of the three."""
    num_processes: int | None = None
    """How many processes take part."""
    process_id: int | None = None
    """Rank of this one, from 0."""
    debug: bool = False
    """Show where an error came from."""

    def stage_and_remat(self) -> Mapping[str, Any]:
        """What is partitioned and what is kept: as given, or as the named configuration says.

        Raises:
            ValueError: No configuration has that name, or it was given beside --stage or --remat.

        >>> dict(Config(config="c1").stage_and_remat())
        {'stage': 1, 'remat': 'block'}
        """
        if self.config is None:
            return super().stage_and_remat()
        if self.stage is not None or self.remat is not None:
            raise ValueError(
                f"--config {self.config} decides --stage and --remat: leave those out, or --config"
            )
        return zero_jax.configuration(self.config)


_LEAST = {
    "devices": 1,
    "seq": 1,
    "vocab": 1,
    "steps": 1,
    "batch": 1,
    "micro_batches": 1,
    "lr": 0.0,
    "warmup": 0,
    "weight_decay": 0.0,
    "clip": 0.0,
    "seed": 0,
    "eval_every": 0,
    "eval_batches": 1,
    "sample_length": 0,
    "checkpoint_every": 0,
    "rollbacks": 0,
    "check_replicas_every": 0,
    "keep": 1,
    "keep_every": 1,
    "supervise": 1,
    "restarts": 0,
    "dead_after": 0.1,
    "max_hours": 0.0,
    "num_processes": 1,
    "process_id": 0,
}


AXES = ("replica", "data", "model")


def mesh_sizes(given: str | None) -> dict[str, int]:
    """The sizes of axes that --mesh names.

    Raises:
        ValueError: It is not a list of axis=size.

    >>> mesh_sizes("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    sizes = {}
    for part in (given or "").split(",") if given is not None else ():
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdigit() or int(size) < 1 or name in sizes:
            raise ValueError(
                f"--mesh {given}: {part!r} is not one of replica, data and model with a size of at "
                "least 1, each once: write data=4,model=2 say"
            )
        sizes[name] = int(size)
    return sizes


def flag(name: str) -> str:
    """A setting as it is written on the command line.

    >>> flag("micro_batches")
    '--micro-batches'
    """
    return "--" + name.replace("_", "-")


def resolve(config: Config, rates: Mapping[str, float]) -> Config:
    """Checks the numbers and fills in the rate and the warm-up.

    Args:
        config: The settings as given.
        rates: A learning rate for each optimizer's name.

    Returns:
        The settings with `lr` and `warmup` decided.

    Raises:
        ValueError: A number is out of range, with its flag and the range.

    >>> resolve(Config(steps=50), {"adamw": 0.01}).warmup
    5
    """
    for name, least in _LEAST.items():
        given = getattr(config, name)
        if given is not None and not (least <= given < math.inf):
            raise ValueError(f"{flag(name)} {given}: it must be at least {least}, and finite")
    if config.profile and config.steps < profile.LAST:
        raise ValueError(
            f"--profile with --steps {config.steps}: it traces steps {profile.FIRST} to "
            f"{profile.LAST}, take at least so many"
        )
    warmup = config.steps // 10 if config.warmup is None else config.warmup
    if warmup >= config.steps:
        raise ValueError(
            f"--warmup {warmup} must be below --steps {config.steps}: the rate falls after it"
        )
    lr = rates[config.optimizer] if config.lr is None else config.lr
    return dataclasses.replace(config, warmup=warmup, lr=lr)


def shared(config: Config) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    given = {**dataclasses.asdict(config), **config.stage_and_remat()}
    return {k: v for k, v in given.items() if k not in LOCAL}
