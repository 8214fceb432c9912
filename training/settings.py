"""Settings of a training run that `python -m zero_jax.plan` does not have, in groups.

The others are in `zero_jax.commands.settings`. None means that other settings decide.
"""

import dataclasses
from typing import Literal

from zero_jax.commands.command_line import setting


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Steps and folders."""

    max_steps: int = setting(600, "Number of optimizer steps.")
    output_dir: str | None = setting(
        None, "Folder of the run (default: the next free runs/NNN).", metavar="FOLDER"
    )
    export_dir: str | None = setting(
        None, "Write the final transformers model, adapters merged.", metavar="FOLDER"
    )
    lora_init_from: str | None = setting(
        None, "PEFT adapters to start from, of the rank in --lora-rank.", metavar="FOLDER"
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
    long_documents: Literal["truncate", "drop", "error"] = setting("truncate", "Long documents")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Learning rate and seed."""

    learning_rate: float | None = setting(
        None,
        "Peak learning rate (default: by --optimizer and --init-from).",
        alias="--lr",
        unit="none",
    )
    warmup_steps: int | None = setting(
        None, "Linear warmup before cosine decay (default: a tenth)."
    )
    weight_decay: float = setting(0.1, "Weight decay of matrices.", unit="none")
    max_grad_norm: float = setting(
        1.0, "Maximum global gradient norm; 0 for no clipping.", unit="none"
    )
    seed: int = setting(0, "Seed of parameters, data order and samples.", unit="none")


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Evaluation, logs and debugging."""

    eval_steps: int = setting(200, "Steps between evaluations; 0 for one at the end.")
    max_eval_batches: int = setting(64, "Batches per evaluation; the final one uses all.")
    sample_tokens: int = setting(256, "Tokens to generate at the end; 0 for none.")
    check_replicas_steps: int = setting(0, "Steps between comparisons of replicas; 0: none.")
    wandb_project: str | None = setting(
        None, "Weights & Biases project (requires pip install wandb).", metavar="NAME"
    )
    profile: bool = setting(False, "Trace steps 10 to 12 into the run's folder.")
    debug: bool = setting(False, "Show tracebacks of errors.")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints and resuming."""

    save_steps: int = setting(200, "Steps between checkpoints; 0 for none at all.")
    save_total_limit: int = setting(3, "Number of latest checkpoints to keep.", unit="checkpoints")
    keep_every_steps: int | None = setting(
        None, "Also keep checkpoints at multiples of this (default: none)."
    )
    resume: bool = setting(True, "Raise an error if --output-dir has checkpoints.")
    resume_step: int | None = setting(
        None, "Checkpoint step to resume from (default: the latest).", unit="steps"
    )
    max_rollbacks: int = setting(
        0, "Maximum rollbacks after non-finite gradients.", unit="rollbacks"
    )
    max_hours: float | None = setting(
        None, "Hours after which to save and exit (default: no limit)."
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
        None, "Rank of this process, from 0 (default: the launcher's).", unit="rank"
    )
    join_timeout_seconds: float = setting(300.0, "Timeout for all processes to join.")
    supervise: int | None = setting(
        None, "Processes to start here, and to restart on failure.", unit="processes"
    )
    max_restarts: int = setting(10, "Maximum restarts by --supervise.", unit="restarts")
    heartbeat_timeout_seconds: float = setting(
        60.0, "Silence after which a process counts as dead."
    )
