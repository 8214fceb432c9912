"""Settings of a training run: read from a command line, checked, and completed.

`resolve` replaces None where that requires neither the data nor the devices. Only ranges are
checked here: names and combinations are checked where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from training import profile
from training.settings import (
    CheckpointSettings,
    DataSettings,
    LogSettings,
    OptimizerSettings,
    ProcessSettings,
    RunSettings,
)
from zero_jax.commands import command_line
from zero_jax.commands.command_line import flag
from zero_jax.commands.settings import (
    DeviceSettings,
    LoraSettings,
    ModelSettings,
    ZeroSettings,
    mesh_sizes,
    with_paper_config,
)
from zero_jax.engine.config import AUTO
from zero_jax.models.optimizers import RATES
from zero_jax.names import parse_bytes

# Settings in which the processes of one run may differ.
LOCAL = frozenset(("coordinator_address", "process_id", "output_dir", "debug"))
# Settings of one start, which a repetition of the run does not take over.
_START = frozenset(("num_processes", "supervise", "resume", "resume_step", "export_dir"))


# Fields of the last base come first, so that a run lists its settings in the order of `--help`.
@dataclasses.dataclass(frozen=True)
class Config(
    ProcessSettings,
    CheckpointSettings,
    LogSettings,
    LoraSettings,
    ZeroSettings,
    OptimizerSettings,
    DeviceSettings,
    DataSettings,
    ModelSettings,
    RunSettings,
):
    """All settings of a run."""


GROUPS = Config.__mro__[-2:0:-1]  # its bases, from RunSettings to ProcessSettings


def parse(args: Sequence[str]) -> Config:
    """Returns the settings of a command line; prints help or an error, and exits.

    Raises:
        ValueError: A number is out of range, or `--paper-config` meets what it sets.

    >>> parse(["--max-steps", "50", "--stage", "2"]).max_steps
    50
    """
    about = "Trains a transformer on text with ZeRO sharded data parallelism."
    given = command_line.parse(GROUPS, args, prog="train.py", description=about)
    config = Config(**with_paper_config(given))
    check_numbers(config)
    return config


def as_yaml(config: Config) -> str:
    """Returns the settings as a file for `--config`, without those of one start or process.

    >>> "max_steps: 50" in as_yaml(Config(max_steps=50))
    True
    """
    left_out = LOCAL | _START | {"paper_config"}  # the stage and remat that it set are in the file
    known = dataclasses.asdict(config).items()
    return yaml.safe_dump({k: v for k, v in known if v is not None and k not in left_out})


# Lower bounds of numbers; 1 for all others.
_ZERO = (
    *("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "eval_steps"),
    *("sample_tokens", "save_steps", "max_rollbacks", "check_replicas_steps", "resume_step"),
    *("lora_alpha", "max_restarts", "max_hours", "process_id", "expert_capacity_factor"),
    "stage",
)
_LEAST = {**dict.fromkeys(_ZERO, 0), "heartbeat_timeout_seconds": 0.1}
# Devices count in 32 bits; a seed has 64.
_LARGEST = 2**31 - 1
_MOST = {"seed": 2**63 - 1, "learning_rate": 1e4, "sample_tokens": 10**6, "supervise": 1024}
# The longest wait of a thread in C is 24 days: milliseconds in 32 bits.
_MOST |= {"heartbeat_timeout_seconds": 1e5, "join_timeout_seconds": 1e6}


def check_numbers(config: Config) -> None:
    """Checks each number against the range of its flag, and the sizes of `--mesh`.

    Raises:
        ValueError: A number is out of range, or a setting is empty.
    """
    for name, value in dataclasses.asdict(config).items():
        if value == "":
            raise ValueError(f"{flag(name)} is empty: give a value, or leave it out")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        least, most = _LEAST.get(name, 1), _MOST.get(name, _LARGEST)
        if not least <= value <= most:
            raise ValueError(
                f"{flag(name)} {value}: it must be at least {least} and at most {most:g}"
            )
    mesh_sizes(config.mesh)
    if config.memory_limit is not None:
        parse_bytes(config.memory_limit, "--memory-limit")


def resolve(config: Config) -> Config:
    """Returns the settings with `learning_rate` and `warmup_steps` decided.

    Raises:
        ValueError: Settings do not fit each other.

    >>> resolve(Config(max_steps=50)).warmup_steps
    5
    >>> resolve(Config(init_from="DIR", lora_rank=16)).learning_rate
    0.0002
    """
    if config.memory_limit is not None and config.stage != AUTO:
        raise ValueError(
            f"--memory-limit {config.memory_limit} requires --stage auto, and --stage is "
            f"{config.stage}: use --stage auto, or leave --memory-limit out"
        )
    if config.profile and config.max_steps < profile.LAST:
        raise ValueError(
            f"--profile traces steps {profile.FIRST} to {profile.LAST}, which "
            f"--max-steps {config.max_steps} does not reach: use --max-steps {profile.LAST} or more"
        )
    if "partitioned" in config.remat and "model" not in mesh_sizes(config.mesh):
        name = "paper_config" if config.paper_config else "remat"
        raise ValueError(
            f"{flag(name)} {getattr(config, name)} shards saved activations over a model axis, and "
            "the mesh has none: add one, for example with --mesh model=2"
        )
    warmup = config.max_steps // 10 if config.warmup_steps is None else config.warmup_steps
    if warmup >= config.max_steps:
        raise ValueError(
            f"--warmup-steps {warmup} must be below --max-steps {config.max_steps}: use fewer "
            "warmup steps"
        )
    lr = config.learning_rate
    if lr is None:  # lower for a model that is trained already
        from_scratch = RATES[config.optimizer]
        tuned = from_scratch / (100 if config.lora_rank is None else 20)
        lr = from_scratch if config.init_from is None else tuned
    return dataclasses.replace(config, warmup_steps=warmup, learning_rate=lr)


def shared(config: Config) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in LOCAL}
