"""Every setting of a training run, with its help, in the groups in which the command line shows
them; those of ZeRO are `zero_jax.plan.options.Options`.

None means "whatever suits the others".
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Basics:
    """Model, number of steps, batch size and output folders."""

    model: str = "nano"
    """Preset, such as nano, 124m, 1t, llama-3.1-8b or qwen3-4b."""
    hf: str | None = None
    """Folder of a transformers model; replaces --model."""
    adapter: str | None = None
    """PEFT adapter folder to start from, of the rank in --lora."""
    capacity: float | None = None
    """Expert capacity factor; None is the model's own."""
    steps: int = 600
    """Number of optimizer steps."""
    batch: int = 16
    """Sequences per step: a multiple of devices x micro-batches."""
    out: str | None = None
    """Output folder of the run; None is the next free runs/NNN."""
    export: str | None = None
    """Folder for the final transformers model, adapters merged."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Training data, sequence length and tokenizer."""

    data: str | None = None
    """Text file, folder of texts, token ids (.bin, .u32.bin, .npy), documents
    (.jsonl, .parquet, .csv, .tsv, .arrow) or mixture a.jsonl=3,b.csv=1;
    None is the text of CPython's help pages."""
    seq: int = 64
    """Sequence length in tokens."""
    vocab: int | None = None
    """Vocabulary size; None is 256 for bytes, else the preset's."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="{None}|FOLDER")] = None
    """Folder of the tokenizer; None is that of --hf."""
    loss_on: Annotated[str, tyro.conf.arg(metavar="{assistant,all}")] = "assistant"
    """Conversation tokens in the loss."""
    long: Annotated[str, tyro.conf.arg(metavar="{cut,drop,refuse}")] = "cut"
    """Handling of documents above --seq; refuse is an error."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices and the mesh."""

    devices: int | None = None
    """Simulated CPU devices without GPUs; None is --mesh, or 4."""
    mesh: str | None = None
    """Mesh axes: replica, experts, data (ZeRO), model (tensor parallel), such as
    data=4,model=2. None puts all devices on data."""
    config: Annotated[str | None, tyro.conf.arg(metavar="{None,c1,c2,c3,c4,c5,zero-100b}")] = None
    """Stage and remat as in the ZeRO paper."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimizer, learning-rate schedule and seed."""

    optimizer: Annotated[str, tyro.conf.arg(metavar="{adamw,sgd,lion,adafactor,lamb,muon}")] = (
        "adamw"
    )
    """Optimizer."""
    lr: float | None = None
    """Peak learning rate; None depends on --optimizer and --hf."""
    warmup: int | None = None
    """Linear warmup steps, then cosine decay; None: steps / 10."""
    weight_decay: float = 0.1
    """Weight decay coefficient; applies to matrices only."""
    clip: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    seed: int = 0
    """Seed of initial parameters, data order and samples."""


@dataclasses.dataclass(frozen=True)
class Looks:
    """Evaluation, logging, profiling and debugging."""

    eval_every: int = 200
    """Steps between held-out evaluations; 0 is only at the end."""
    eval_batches: int = 64
    """Maximum batches of an evaluation; the final one uses all."""
    sample_length: int = 256
    """Tokens to generate at the end, on one device; 0 for none."""
    check_replicas_every: int = 0
    """Steps between bitwise comparisons of replicas; 0 is never."""
    wandb: str | None = None
    """Weights & Biases project; needs pip install wandb."""
    profile: bool = False
    """Write a trace of steps 10 to 12 to `profile` in --out."""
    debug: bool = False
    """Show the traceback of errors."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Checkpoints, resuming and rollbacks."""

    checkpoint_every: int = 200
    """Steps between checkpoints; one more at the end. 0 is none."""
    keep: int = 3
    """Number of latest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep checkpoints at multiples of this; None: none."""
    fresh: bool = False
    """Raise an error instead of resuming from --out."""
    from_step: int | None = None
    """Checkpoint step in --out to resume from; None: the latest."""
    rollbacks: int = 0
    """Maximum rollbacks after non-finite gradients; 0 for none."""
    max_hours: float | None = None
    """Hours after which to save and exit; None is no limit."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """Multi-process and multi-node runs."""

    coordinator: Annotated[str | None, tyro.conf.arg(metavar="{None}|HOST:PORT")] = None
    """Address host:port of process 0; SLURM and Open MPI set it."""
    num_processes: int | None = None
    """Number of processes; None is the launcher's, or 1."""
    process_id: int | None = None
    """Rank of this process, from 0; None is the launcher's."""
    join_seconds: float = 300.0
    """Timeout in seconds for all processes to join."""
    supervise: int | None = None
    """Processes to start, and to restart when one fails."""
    restarts: int = 10
    """Maximum number of restarts by --supervise."""
    dead_after: float = 60.0
    """Seconds without heartbeat until a process is failed."""
