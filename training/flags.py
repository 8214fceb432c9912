"""Every setting of a training run, with its help, in the groups in which the command line shows
them; those of ZeRO are `zero_jax.plan.options.Options`.

None means "whatever suits the others".
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Basics:
    """What is trained, and where it is written to."""

    model: str = "nano"
    """Preset of models/: nano, 124m to 1t, llama-3.1-8b, qwen3-4b, gemma-3-1b and others."""
    hf: str | None = None
    """Folder of transformers with config.json, safetensors and tokenizer: the model, its weights
    and its tokens, instead of a preset that begins anew."""
    adapter: str | None = None
    """Folder of PEFT's adapters to begin with, of the rank that --lora gives."""
    capacity: float | None = None
    """Tokens of a row that an expert takes at most, over an even share; the model's own unless
    given, which drops none. What is more is dropped, and counted in the metrics."""
    steps: int = 600
    """Updates of the parameters."""
    batch: int = 16
    """Sequences in a global batch: a multiple of devices x micro-batches."""
    out: str | None = None
    """Folder for config.json, metrics.jsonl, events.jsonl, TensorBoard files, loss.png and
    report.html, and for adapters as PEFT has them; the next free one of runs/001, runs/002 and so
    on unless given."""
    export: str | None = None
    """Folder to make at the end: the model as transformers reads it, adapters added."""


@dataclasses.dataclass(frozen=True)
class Data:
    """What it is trained on, as which tokens."""

    data: str | None = None
    """A text file, a folder of text files, token ids in a .bin (uint16), .u32.bin (uint32) or .npy
    file, or documents in .jsonl, .parquet, .csv, .tsv or .arrow, also compressed: texts,
    conversations, prompts with completions; of several sources chat.jsonl=3,more.parquet=1. English
    text that comes with Python by default. The last tenth is held out. Files must stay as they
    are until the run ends."""
    seq: int = 64
    """Tokens of a sequence; short ones teach a small model most in a short time."""
    vocab: int | None = None
    """Number of token ids; 256 for text that is read byte by byte, and the preset's for token
    files, unless given."""
    tokenizer: str | None = None
    """Folder with the tokenizer; that of --hf unless given."""
    loss_on: str = "assistant"
    """What is learned of conversations: the assistant's tokens, or all."""
    long: str = "cut"
    """What becomes of documents longer than a row: cut, drop or refuse."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Which devices there are, and how they form a mesh."""

    devices: int | None = None
    """Devices of the whole run on a machine without GPUs, where they are slices of the CPU,
    shared out evenly to the processes; those of --mesh, or 4, unless given. GPUs are always all
    used."""
    mesh: str | None = None
    """Sizes of the mesh's axes, as data=4,model=2: replica (copies of the partitioned states),
    experts (groups of devices, each with experts of its own), data (what states are partitioned
    over) and model (tensor parallelism); all devices are on data unless given."""
    config: str | None = None
    """A configuration of the ZeRO paper, which decides stage and remat: c1, c2, c3, c4, c5 or
    zero-100b; c2, c4, c5 and zero-100b need a model axis in --mesh."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How parameters are updated."""

    optimizer: str = "adamw"
    """adamw, sgd, lion, adafactor, lamb or muon."""
    lr: float | None = None
    """Peak learning rate; unless given one that suits the optimizer and small models that begin
    anew, a hundredth of it for a model of --hf, a twentieth for adapters."""
    warmup: int | None = None
    """Steps in which the rate rises from 0, before it falls as a cosine to a tenth; a tenth of
    all steps unless given."""
    weight_decay: float = 0.1
    """Decay per step and unit of learning rate; of matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient, beyond which it is scaled down; 0 never clips."""
    seed: int = 0
    """Seed of initial values, order of the data and sample."""


@dataclasses.dataclass(frozen=True)
class Looks:
    """What is looked at on the way and at the end."""

    eval_every: int = 200
    """Steps between looks at held-out text; 0 looks at the end only."""
    eval_batches: int = 64
    """Most held-out batches of such a look; the one at the end takes in all."""
    sample_length: int = 256
    """Tokens of the sample that is shown at the end; 0 for none. It needs the whole model on one
    device."""
    check_replicas_every: int = 0
    """Steps between comparisons of what several devices hold alike, by the bit; 0 for never."""
    wandb: str | None = None
    """Project of Weights & Biases to log to, beside TensorBoard's files; it needs `pip install
    wandb`. WANDB_MODE=offline leaves the upload to `wandb sync`."""
    profile: bool = False
    """Write a trace of steps 10 to 12 of this start to `profile` in --out, for TensorBoard, XProf
    or Perfetto."""
    debug: bool = False
    """Show where an error came from."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Checkpoints, and how a run goes on from them or ends."""

    checkpoint_every: int = 200
    """Steps between checkpoints, in `checkpoints` of --out, from which the same command goes on;
    one is made at the end too, and when the run is stopped. 0 makes none."""
    keep: int = 3
    """How many of the latest checkpoints stay."""
    keep_every: int | None = None
    """Steps whose multiples stay for ever; none unless given."""
    fresh: bool = False
    """Refuse to go on from checkpoints in --out."""
    from_step: int | None = None
    """Go on from this checkpoint in --out instead of the latest; later ones are set aside."""
    rollbacks: int = 0
    """How often to go back to the last checkpoint, past the batches since, when gradients are not
    finite too often in a row; 0 ends the run."""
    max_hours: float | None = None
    """Save and end after so many hours; no end unless given."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes, on one machine or many."""

    coordinator: str | None = None
    """host:port of process 0, with --num-processes and --process-id; SLURM and OpenMPI need none
    of the three."""
    num_processes: int | None = None
    """How many processes take part."""
    process_id: int | None = None
    """Rank of this one, from 0."""
    join_seconds: float = 300.0
    """How long processes wait until all of them are there."""
    supervise: int | None = None
    """Start so many processes here, and start them again from the last checkpoint when some fail;
    one process drives all GPUs of a machine."""
    restarts: int = 10
    """How often at most --supervise starts them again."""
    dead_after: float = 60.0
    """Seconds without a sign of life after which a process counts as dead, and the run ends."""
