"""The settings of a training run: read from a command line, checked, and filled in.

`resolve` puts a number in the place of None where that needs neither the data nor the devices. What
is checked here is only what no other part checks: names and stages are checked by those who give
them a meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro

import zero_jax
from training import profile
from training.documents import LONG
from training.flags import Basics, Data, Devices, Kept, Looks, Optimizer, Processes
from training.tokenizer import LOSS_ON
from zero_jax.names import unknown
from zero_jax.plan.options import Adapters, Options

# Settings in which the processes of one run may differ.
LOCAL = frozenset(("coordinator", "process_id", "out", "debug"))


@dataclasses.dataclass(frozen=True)
class Config(Basics, Data, Devices, Optimizer, Looks, Kept, Processes, Adapters, Options):
    """All settings of a run."""

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


T = TypeVar("T")
Group = Annotated[T, tyro.conf.arg(help="")]  # the title only, so that help fits two screens


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Trains a transformer on text with ZeRO sharded data parallelism."""

    basic: Group[Basics]
    data: Group[Data]
    device: Group[Devices]
    optimizer: Group[Optimizer]
    look: Group[Looks]
    checkpoint: Group[Kept]
    process: Group[Processes]
    adapter: Group[Adapters]
    zero: Group[Options]


def parse(args: Sequence[str]) -> Config:
    """The settings that a command line gives; prints help or what is wrong with it, and exits.

    >>> parse(["--steps", "50", "--stage", "2"]).steps
    50
    """
    groups = tyro.cli(_Groups, args=args, config=(tyro.conf.OmitArgPrefixes,))
    return Config(**{k: v for group in vars(groups).values() for k, v in vars(group).items()})


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
    "from_step": 0,
    "supervise": 1,
    "lora": 1,
    "lora_alpha": 0.0,
    "restarts": 0,
    "dead_after": 0.1,
    "join_seconds": 1.0,
    "max_hours": 0.0,
    "num_processes": 1,
    "process_id": 0,
    "capacity": 0.0,
    "memory_limit": 0.0,
}


# Counts are in 32 bits on a device; a seed in 64.
_LARGEST = 2**31 - 1
_MOST = {"seed": 2**63 - 1, "lr": 1e4, "sample_length": 10**6, "supervise": 1024}
# A thread waits for them, and C's longest wait is 24 days of milliseconds in 32 bits.
_MOST |= {"dead_after": 1e5, "join_seconds": 1e6}


AXES = ("replica", "experts", "data", "model")


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
        whole = size.isascii() and size.isdecimal() and len(size) < 10 and int(size) > 0
        if name not in AXES or not whole or name in sizes:
            raise ValueError(
                f"--mesh {given}: {part!r} is not one of replica, experts, data and model with a "
                "size of at least 1, each once: write data=4,model=2 say"
            )
        sizes[name] = int(size)
    return sizes


def flag(name: str) -> str:
    """A setting as it is written on the command line.

    >>> flag("micro_batches")
    '--micro-batches'
    """
    return "--" + name.replace("_", "-")


def check_numbers(config: Config) -> None:
    """Checks each number against the range of its flag, and the sizes of `--mesh`.

    Raises:
        ValueError: A number is out of range, or a setting is empty.
    """
    for name, given in dataclasses.asdict(config).items():
        if given == "":
            raise ValueError(f"{flag(name)} is empty: name something, or leave it out")
    for name, least in _LEAST.items():
        given, most = getattr(config, name), _MOST.get(name, _LARGEST)
        if given is not None and not least <= given <= most:
            raise ValueError(
                f"{flag(name)} {given}: it must be at least {least} and at most {most:g}"
            )
    mesh_sizes(config.mesh)


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
    >>> resolve(Config(hf="DIR", lora=16), {"adamw": 0.004}).lr
    0.0002
    """
    check_numbers(config)
    for name, known in (("loss_on", LOSS_ON), ("long", LONG)):
        if getattr(config, name) not in known:
            raise ValueError(unknown(flag(name), getattr(config, name), known, "Choose one of"))
    if config.memory_limit is not None and config.stage != "auto":
        raise ValueError(
            f"--memory-limit {config.memory_limit:g} is what --stage auto may use, and the stage "
            f"is {config.stage_and_remat().get('stage')}: take --stage auto, or leave it out"
        )
    if config.profile and config.steps < profile.LAST:
        raise ValueError(
            f"--profile with --steps {config.steps}: it traces steps {profile.FIRST} to "
            f"{profile.LAST}, take at least so many"
        )
    remat = str(config.stage_and_remat().get("remat") or "")
    if "partitioned" in remat and "model" not in mesh_sizes(config.mesh):
        asked = f"--config {config.config}" if config.config else f"--remat {remat}"
        raise ValueError(
            f"{asked} keeps activations in parts on a model axis, and the mesh has none: give "
            "--mesh model=2 say"
        )
    warmup = config.steps // 10 if config.warmup is None else config.warmup
    if warmup >= config.steps:
        raise ValueError(
            f"--warmup {warmup} must be below --steps {config.steps}: the rate falls after it"
        )
    lr = rates[config.optimizer] / _gentler(config) if config.lr is None else config.lr
    return dataclasses.replace(config, warmup=warmup, lr=lr)


def _gentler(config: Config) -> float:
    """By how much the rate of a model that knows something is below that of one that begins."""
    if config.hf is None:
        return 1.0
    return 100.0 if config.lora is None else 20.0


def shared(config: Config) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    given = {**dataclasses.asdict(config), **config.stage_and_remat()}
    return {k: v for k, v in given.items() if k not in LOCAL}
