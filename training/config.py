"""Settings of a training run: read from a command line, checked, and completed.

None means that other settings, the data or the devices decide. Settings that
`python -m zero_jax.plan` has too are in `zero_jax.commands.settings`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from zero_jax.commands import command_line
from zero_jax.commands.command_line import flag, setting
from zero_jax.commands.settings import (
    DeviceSettings,
    LoraSettings,
    ModelSettings,
    ZeroSettings,
    with_paper_config,
)
from zero_jax.engine.config import AUTO
from zero_jax.models.optimizers import RATES

# Settings in which the processes of one run may differ.
LOCAL = frozenset(("coordinator_address", "process_id", "output_dir", "debug"))
# Settings of one start, which a repetition of the run does not take over.
_START = frozenset(("num_processes", "supervise", "resume", "resume_step", "export_dir"))
# Steps of a start that --profile traces; earlier ones compile and warm up.
FIRST_TRACED, LAST_TRACED = 10, 12


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Steps and folders."""

    max_steps: int = setting(600, "Number of optimizer steps.")
    output_dir: str | None = setting(
        None, "Folder of the run (default: the next free runs/NNN).", metavar="FOLDER"
    )
    export_dir: str | None = setting(
        None, "Export the transformers model, adapters merged.", metavar="FOLDER"
    )
    lora_init_from: str | None = setting(
        None, "PEFT adapters to start from, of the same rank.", metavar="FOLDER"
    )


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Training data."""

    data: str | None = setting(
        None, "Text, token ids, documents, or mixture a=3,b=1 (default: a sample).", metavar="FILE"
    )
    tokenizer: str | None = setting(
        None, "Tokenizer (default: that of --init-from).", metavar="FOLDER"
    )
    loss_on: Literal["assistant", "all"] = setting("assistant", "Tokens in the loss")
    long_documents: Literal["truncate", "drop", "error"] = setting(
        "truncate", "Long documents: truncate, drop, error.", metavar="RULE"
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Learning rate and seed."""

    learning_rate: float | None = setting(
        None,
        "Peak learning rate (default: by --optimizer and --init-from).",
        metavar="LR",
        alias="--lr",
        unit="none",
        least=0,
        most=1e4,
    )
    warmup_steps: int | None = setting(
        None, "Linear warmup before cosine decay (default: a tenth).", least=0
    )
    weight_decay: float = setting(0.1, "Weight decay of matrices.", unit="none", least=0)
    max_grad_norm: float = setting(
        1.0, "Maximum global gradient norm; 0 for no clipping.", unit="none", least=0
    )
    seed: int = setting(
        0, "Seed of parameters, data order and samples.", unit="none", least=0, most=2**63 - 1
    )


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Evaluation, logs and debugging."""

    eval_steps: int = setting(200, "Steps between evaluations; 0 for one at the end.", least=0)
    max_eval_batches: int = setting(64, "Batches per evaluation; the final one uses all.")
    sample_tokens: int = setting(
        256, "Tokens to generate at the end; 0 for none.", least=0, most=10**6
    )
    check_replicas_steps: int = setting(
        0, "Steps between comparisons of replicas; 0: none.", least=0
    )
    wandb_project: str | None = setting(
        None, "W&B project (requires pip install wandb).", metavar="NAME"
    )
    profile: bool = setting(False, "Trace steps 10 to 12 into the run's folder.")
    debug: bool = setting(False, "Show tracebacks of errors.")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints and resuming."""

    save_steps: int = setting(200, "Steps between checkpoints; 0 for none at all.", least=0)
    save_total_limit: int = setting(3, "Number of latest checkpoints to keep.", unit="checkpoints")
    keep_every_steps: int | None = setting(
        None, "Also keep checkpoints at multiples of this (default: none)."
    )
    resume: bool = setting(True, "Raise an error if --output-dir has checkpoints.")
    resume_step: int | None = setting(
        None, "Checkpoint step to resume from (default: the latest).", unit="steps", least=0
    )
    max_rollbacks: int = setting(
        0, "Maximum rollbacks after non-finite gradients.", unit="rollbacks", least=0
    )
    max_hours: float | None = setting(
        None, "Hours after which to save and exit (default: no limit).", least=0
    )


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
    """Multi-process and multi-node runs."""

    coordinator_address: str | None = setting(
        None, "Address of process 0 (default: from SLURM or Open MPI).", metavar="HOST:PORT"
    )
    num_processes: int | None = setting(
        None, "Number of processes (default: the launcher's, or 1)."
    )
    process_id: int | None = setting(
        None, "Rank of this process, from 0 (default: the launcher's).", unit="rank", least=0
    )
    # The longest wait of a thread in C is 24 days: milliseconds in 32 bits.
    join_timeout_seconds: float = setting(300.0, "Timeout for all processes to join.", most=1e6)
    supervise: int | None = setting(
        None, "Processes to start here, and to restart on failure.", unit="processes", most=1024
    )
    max_restarts: int = setting(10, "Maximum restarts by --supervise.", unit="restarts", least=0)
    heartbeat_timeout_seconds: float = setting(
        60.0, "Silence after which a process counts as dead.", least=0.1, most=1e5
    )


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

    >>> parse(["--max-steps", "50", "--stage", "2"]).max_steps
    50
    """
    about = "Trains a transformer on text with ZeRO sharded data parallelism."
    given = command_line.parse(GROUPS, args, prog="train.py", description=about)
    config = Config(**with_paper_config(given))
    command_line.check_values(config)
    return config


def as_yaml(config: Config) -> str:
    """Returns the settings as a file for `--config`, without those of one start or process.

    >>> "max_steps: 50" in as_yaml(Config(max_steps=50))
    True
    """
    left_out = LOCAL | _START | {"paper_config"}  # the stage and remat that it set are in the file
    known = dataclasses.asdict(config).items()
    return yaml.safe_dump({k: v for k, v in known if v is not None and k not in left_out})


def resolve(config: Config) -> Config:
    """Returns the settings with `learning_rate` and `warmup_steps` decided, if they fit each other.

    >>> resolve(Config(max_steps=50)).warmup_steps
    5
    >>> resolve(Config(init_from="DIR", lora_rank=16)).learning_rate
    0.0002
    """
    if config.memory_limit is not None and config.stage != AUTO:
        raise ValueError(
            f"--memory-limit {config.memory_limit} requires --stage auto: use it, or leave "
            "--memory-limit out"
        )
    if config.profile and config.max_steps < LAST_TRACED:
        raise ValueError(
            f"--profile traces steps {FIRST_TRACED} to {LAST_TRACED}, which "
            f"--max-steps {config.max_steps} does not reach: use --max-steps {LAST_TRACED} or more"
        )
    if "partitioned" in config.remat and "model" not in config.axes():
        name = "paper_config" if config.paper_config else "remat"
        raise ValueError(
            f"{flag(name)} {getattr(config, name)} shards saved activations over a model axis, and "
            "the mesh has none: add one, for example with --mesh model=2"
        )
    warmup = config.max_steps // 10 if config.warmup_steps is None else config.warmup_steps
    if warmup >= config.max_steps:
        raise ValueError(f"--warmup-steps {warmup} must be below --max-steps {config.max_steps}")
    lr = config.learning_rate
    if lr is None:  # lower for a model that is trained already
        part = 100 if config.lora_rank is None else 20
        lr = RATES[config.optimizer] / (1 if config.init_from is None else part)
    return dataclasses.replace(config, warmup_steps=warmup, learning_rate=lr)


def shared(config: Config) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in LOCAL}
