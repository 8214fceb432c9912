"""Settings that `train.py` and `python -m zero_jax.plan` share, with names and defaults of `Zero`.

Each is written once: flags, help and files of settings are made from these classes. Settings that
`Zero` has too take its default.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from zero_jax.adapters.lora import ALL_LINEAR, Lora
from zero_jax.collectives.precision import Precision
from zero_jax.commands.command_line import flag, setting
from zero_jax.engine.config import Config
from zero_jax.zero import paper_config

ROW = 1024  # the default limit of a row, in tokens
DEVICES = 4  # the default number of simulated devices


def _zero(name: str, help: str, **about: Any) -> Any:
    """Returns a field with the default of `Zero`, or of its `Precision`."""
    fields = {f.name: f for cls in (Config, Precision) for f in dataclasses.fields(cls)}
    default = fields[name].default
    return setting(None if name == "offload" else default, help, **about)


# The largest numbers are far beyond any machine or model. Shapes and their bytes are counted in 32
# and 64 bits, and a plan goes through the pieces of a parameter.


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Model and batch."""

    model: str = setting("nano", "Preset, such as 124m, 7.5b, llama-3.1-8b.", metavar="PRESET")
    init_from: str | None = setting(
        None, "Folder of a transformers model; replaces --model.", metavar="FOLDER"
    )
    vocab_size: int | None = setting(
        None,
        "Vocabulary size (default: the model's, or 256 for bytes).",
        unit="tokens",
        most=2**24,
    )
    expert_capacity_factor: float | None = setting(
        None, "Expert capacity factor (default: the model's).", unit="ratio", least=0, most=1e6
    )
    global_batch_size: int = setting(
        16, "Rows per step, over all devices.", unit="rows", most=2**30
    )
    seq_len: int | None = setting(
        None, "Tokens of a row (default: the model's limit, or 1024).", unit="tokens", most=2**24
    )
    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "lamb", "muon"] = setting(
        "adamw", "Optimizer"
    )


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
    """Devices and mesh."""

    devices: int | None = setting(
        None,
        "Devices (default: all GPUs in train.py, else those of --mesh, or 4).",
        unit="devices",
        most=2**20,
    )
    mesh: str | None = setting(
        None, "Sizes of replica, experts, data, model (tensor parallel).", metavar="AXIS=SIZE,..."
    )


@dataclasses.dataclass(frozen=True)
class ZeroSettings:
    """ZeRO, precision and memory."""

    stage: Literal[0, 1, 2, 3, "auto"] = _zero("stage", "ZeRO stage", least=0)
    paper_config: Literal["c1", "c2", "c3", "c4", "c5", "zero-100b"] | None = setting(
        None, "Stage and remat of the ZeRO paper"
    )
    grad_accum_steps: int = _zero("grad_accum_steps", "Gradient-accumulation steps.", most=2**20)
    compute_dtype: Literal["fp32", "bf16", "fp16"] = _zero("compute_dtype", "Compute dtype")
    reduce_dtype: Literal["fp32", "bf16"] = _zero(
        "reduce_dtype", "Dtype of gradient sums over devices"
    )
    param_comm_dtype: Literal["int8"] | None = _zero(
        "param_comm_dtype", "Dtype of all-gathers (default: --compute-dtype)."
    )
    grad_comm_dtype: Literal["int8", "int4"] | None = _zero(
        "grad_comm_dtype", "Dtype of reduce-scatters (default: --reduce-dtype)."
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = _zero(
        "optimizer_state_dtype", "Dtype of optimizer state."
    )
    remat: str = _zero(
        "remat",
        "Activation checkpointing: dots, block, block_sqrt, names:a; @host, @partitioned.",
        metavar="POLICY",
    )
    offload: str | None = _zero(
        "offload",
        "CPU offload: optimizer[,params][,activations][:nvme=DIR|:auto].",
        metavar="STATES",
    )
    sequence_parallel: bool = _zero(
        "sequence_parallel", "Sequence parallelism over the model axis."
    )
    secondary_shards: bool = _zero("secondary_shards", "Shard states over replica too (stage 3).")
    bucket_bytes: int = _zero("bucket_bytes", "Maximum bytes per collective.", most=2**40)
    memory_limit: str | None = _zero(
        "memory_limit",
        "Memory per device, such as 80GB (default: the device's).",
        metavar="BYTES",
        unit="bytes",
    )

    def zero_settings(self) -> dict[str, Any]:
        """Returns the arguments of `Zero`, without the mesh.

        >>> ZeroSettings(stage=2).zero_settings()["stage"]
        2
        """
        own = {f.name for f in dataclasses.fields(Config)} - {"mesh", "precision"}
        dtypes = self.compute_dtype, self.reduce_dtype, self.param_comm_dtype, self.grad_comm_dtype
        settings = {name: getattr(self, name) for name in own if hasattr(self, name)}
        return {**settings, "precision": Precision(*dtypes)}


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """LoRA adapters of a frozen model."""

    lora_rank: int | None = setting(
        None,
        "Rank of the adapters (default: none, all weights are trained).",
        unit="dims",
        most=2**20,
    )
    lora_alpha: float | None = setting(
        None, "LoRA scale is alpha / rank (default: 2 x rank).", unit="none", least=0, most=1e6
    )
    lora_targets: str = setting(
        ALL_LINEAR, "Adapted matrices, such as attn/q,attn/v.", metavar="PATHS"
    )
    lora_base_dtype: Literal["fp32", "bf16", "int8", "nf4"] | None = setting(
        None, "Dtype of the frozen model (default: bf16)."
    )

    def adapters(self, seed: int = 0) -> Lora | None:
        """Returns the adapters, initialised from a seed; None to train all weights.

        Raises:
          ValueError: A setting of adapters is given without a rank.

        >>> LoraSettings(lora_rank=8, lora_base_dtype="nf4").adapters().scale
        2.0
        """
        if self.lora_rank is None:
            for field in dataclasses.fields(LoraSettings):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{flag(field.name)} {getattr(self, field.name)} requires adapters: add "
                        f"--lora-rank 16, or leave {flag(field.name)} out"
                    )
            return None
        chosen = self.lora_targets
        targets = chosen if chosen == ALL_LINEAR else chosen.split(",")
        return Lora(self.lora_rank, self.lora_alpha, targets, self.lora_base_dtype or "bf16", seed)


SHARED = (ModelSettings, DeviceSettings, ZeroSettings, LoraSettings)


def with_paper_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with the stage and remat of `--paper-config`.

    Raises:
      ValueError: It is given with `--stage` or `--remat`.

    >>> with_paper_config({"paper_config": "c1"})
    {'stage': 1, 'remat': 'block', 'paper_config': 'c1'}
    """
    name = given.get("paper_config")
    if name is None:
        return dict(given)
    for other in ("stage", "remat"):
        if other in given:
            raise ValueError(
                f"--paper-config {name} sets --stage and --remat: leave {flag(other)} out, or "
                "--paper-config; also of the file of --config"
            )
    return {**paper_config(name), **given}


AXES = ("replica", "experts", "data", "model")


def mesh_sizes(given: str | None) -> dict[str, int]:
    """Returns the sizes of the axes that `--mesh` names.

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
                f"--mesh {given}: {part!r} is not one of {', '.join(AXES)} with a size of at least "
                "1, each once: write for example data=4,model=2"
            )
        sizes[name] = int(size)
    return sizes
