"""Settings that `train.py` and `python -m zero_jax.plan` share, with names and defaults of `Zero`.

Each is written once: flags, help and files of settings are made from these classes. Those of `Zero`
and `Precision` are made from theirs, with the first sentence about each.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal

from zero_jax.adapters.lora import ALL_LINEAR, Lora
from zero_jax.collectives.precision import Precision
from zero_jax.commands.command_line import documented, flag, setting
from zero_jax.models import families
from zero_jax.sharding.mesh import CONTEXT, DATA, EXPERTS, MODEL, REPLICA
from zero_jax.zero import Zero, paper_config

ROW = 1024  # the default limit of a row, in tokens
DEVICES = 4  # the default number of simulated devices


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
    mlp_chunk: int | None = setting(
        None, "Tokens of a device in an MLP at once (default: all).", unit="tokens", most=2**24
    )
    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "lamb", "muon"] = setting(
        "adamw", "adamw, sgd, lion, adafactor, lamb or muon.", metavar="NAME"
    )


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
    """Devices and mesh."""

    devices: int | None = setting(
        None,
        "Number of devices (default: all GPUs, those of --mesh, or 4).",
        unit="devices",
        most=2**20,
    )
    mesh: str | None = setting(
        None, "Sizes of replica, experts, data, context, model.", metavar="AXIS=SIZE,..."
    )
    context_parallel: int = setting(
        1, "Devices that share the tokens of a row.", unit="devices", most=2**20
    )

    def axes(self) -> dict[str, int]:
        """Returns the sizes of the axes in --mesh and --context-parallel.

        Raises:
          ValueError: --mesh is not a list of axis=size, or both give the size of `context`.

        >>> DeviceSettings(mesh="data=2", context_parallel=4).axes()
        {'data': 2, 'context': 4}
        """
        sizes, size = mesh_sizes(self.mesh), self.context_parallel
        if size > 1:
            if CONTEXT in sizes:
                raise ValueError(
                    f"--context-parallel {size} and --mesh {self.mesh} both give the size of "
                    "context: leave one of them out"
                )
            sizes[CONTEXT] = size
        return sizes


# Settings of `Zero` and `Precision` that are no flags; the types of flags that are narrower; what
# only a flag has.
_NO_FLAGS = {"mesh", "precision", "frozen", "param_specs", "logical_axis_rules", "skip_nonfinite"}
_NO_FLAGS |= {"initial_scale", "growth_interval"}
_KINDS = {"compute_dtype": Literal["fp32", "bf16", "fp16"], "reduce_dtype": Literal["fp32", "bf16"]}
_ABOUT: dict[str, dict[str, Any]] = {
    "stage": {"least": 0},
    "grad_accum_steps": {"most": 2**20},
    "remat": {"metavar": "POLICY"},
    "offload": {"metavar": "STATES"},
    "context_exchange": {"metavar": "KIND"},
    "matmul_dtype": {"metavar": "DTYPE"},
    "bucket_bytes": {"most": 2**40},
    "memory_limit": {"metavar": "BYTES", "unit": "bytes"},
}


def _fields(cls: Any) -> list[tuple[str, Any, Any]]:
    """Returns the flags of a class, for `make_dataclass`."""
    kinds, help = {**typing.get_type_hints(cls.__init__), **_KINDS}, documented(cls)
    return [
        (name, kinds[name], setting(default, help.get(name, ""), **_ABOUT.get(name, {})))
        for name, default in ((f.name, f.default) for f in dataclasses.fields(cls))
        if name not in _NO_FLAGS
    ]


_OF_ZERO, _OF_PRECISION = _fields(Zero), _fields(Precision)


def zero_settings(settings: Any) -> dict[str, Any]:
    """Returns the arguments of `Zero`, without the mesh.

    >>> ZeroSettings(stage=2).zero_settings()["stage"]
    2
    """
    own = {name: getattr(settings, name) for name, *_ in _OF_ZERO}
    return {**own, "precision": Precision(*(getattr(settings, name) for name, *_ in _OF_PRECISION))}


_PAPER = Literal["c1", "c2", "c3", "c4", "c5", "zero-100b"] | None
_HELP = "Stage and remat of the paper: c1 to c5, zero-100b."
ZeroSettings: Any = dataclasses.make_dataclass(
    "ZeroSettings",
    [*_OF_ZERO, *_OF_PRECISION, ("paper_config", _PAPER, setting(None, _HELP, metavar="NAME"))],
    namespace={"__doc__": "ZeRO, precision and memory.", "zero_settings": zero_settings},
    frozen=True,
)


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
        None, "Dtype of the frozen model: fp32, bf16, int8, nf4 (default: bf16).", metavar="DTYPE"
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
    if (name := given.get("paper_config")) is None:
        return dict(given)
    if others := [flag(other) for other in ("stage", "remat") if other in given]:
        raise ValueError(
            f"--paper-config {name} sets --stage and --remat: leave {others[0]} out, or it"
        )
    return {**paper_config(name), **given}


AXES = (REPLICA, EXPERTS, DATA, CONTEXT, MODEL)


def mesh_sizes(given: str | None) -> dict[str, int]:
    """Returns the sizes of the axes that `--mesh` names.

    Raises:
      ValueError: It is not a list of axis=size.

    >>> mesh_sizes("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    sizes = dict[str, int]()
    for part in [] if given is None else given.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not re.fullmatch("0*[1-9][0-9]{0,8}", size):
            raise ValueError(
                f"--mesh {given}: {part!r} is not one of {', '.join(AXES)} with a size of at least "
                "1, each once: write for example data=4,model=2"
            )
        sizes[name] = int(size)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Inverts `mesh_sizes`.

    >>> mesh_text({"data": 4, "model": 2})
    'data=4,model=2'
    """
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def check_context(devices: int, config: families.Config, tokens: int) -> None:
    """Checks that the devices of a context axis can share rows of so many tokens.

    Raises:
      ValueError: The model has experts, or 2 chunks for each device do not divide a row.

    >>> check_context(4, families.preset("124m"), 100)
    Traceback (most recent call last):
    ValueError: --seq-len 100: with a context axis of 4 a multiple of 8 is required: use 96 or 104
    """
    if devices == 1:
        return
    if getattr(config, "mixture", None) is not None:
        raise ValueError(
            f"a context axis of {devices} for a model with experts: their capacity and their load "
            "are counted over a full row, and a device has a part of it. Leave out "
            "--context-parallel, for example for --mesh experts=2"
        )
    unit = 2 * devices
    if tokens % unit:
        sizes = [size for size in (tokens // unit * unit, -(-tokens // unit) * unit) if size]
        raise ValueError(
            f"--seq-len {tokens}: with a context axis of {devices} a multiple of {unit} is "
            f"required: use {' or '.join(map(str, sizes))}"
        )
