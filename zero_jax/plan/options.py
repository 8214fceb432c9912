"""The settings of a `Zero` that command lines ask for, each written once, with its help.

`train.py` makes its own command line of a class that adds its settings to these.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from zero_jax.adapters.lora import ALL_LINEAR, Lora
from zero_jax.collectives.precision import Precision
from zero_jax.engine.settings import AUTO
from zero_jax.states.narrow import FP32

C = TypeVar("C", bound=Any)
ROW = 1024  # tokens of a row, unless a command is told otherwise


@dataclasses.dataclass(frozen=True)
class Options:
    """ZeRO settings, other than the mesh."""

    stage: int | Literal["auto"] | None = None
    """ZeRO stage: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters;
    auto also chooses micro-batches, remat, offload. None: 3."""
    memory_limit: float | None = None
    """GB (1e9 bytes) to use per device; None is its memory pool."""
    sequence_parallel: bool = False
    """Sequence parallelism over model, outside matmuls."""
    hierarchical: bool = False
    """Stage 3: shard states over replica, gather once a step."""
    micro_batches: int = 1
    """Gradient accumulation steps; gradients accumulate in fp32."""
    compute: str = "fp32"
    """Compute dtype: fp32, bf16 or fp16; parameters stay fp32."""
    reduce: str = "fp32"
    """Gradient reduction dtype: fp32 or bf16."""
    gather: str | None = None
    """Parameter all-gather dtype: int8; None is --compute."""
    scatter: str | None = None
    """Gradient reduce-scatter dtype: int8, int4; None: --reduce."""
    remat: str | None = None
    """Activation checkpointing: none, dots (matmuls), block (layer inputs),
    block_sqrt, names:a,b; @host, @partitioned. None: block."""
    offload: str | None = None
    """CPU offload: optimizer or optimizer,params, and activations;
    add :auto (if supported) or :nvme=DIR (files). None: none."""
    states: str = FP32
    """Optimizer state dtype: fp32, bf16 or 8bit."""

    def stage_and_remat(self) -> Mapping[str, Any]:
        """What is partitioned and what is kept: as given, or what is usual.

        >>> Options(stage="auto").stage_and_remat()
        {'stage': 'auto', 'remat': 'none'}
        """
        stage = 3 if self.stage is None else self.stage
        return {"stage": stage, "remat": self.remat or ("none" if stage == AUTO else "block")}

    def settings(self) -> dict[str, Any]:
        """The fields of a `Zero` by name; the mesh is not among them."""
        limit = self.memory_limit
        return {
            **self.stage_and_remat(),
            "precision": Precision(self.compute, self.reduce, self.gather, self.scatter),
            "micro_batches": self.micro_batches,
            "sequence_parallel": self.sequence_parallel,
            "hierarchical": self.hierarchical,
            "offload": self.offload,
            "states": self.states,
            "memory_limit": None if limit is None else 1e9 * limit,
        }


@dataclasses.dataclass(frozen=True)
class Adapters:
    """LoRA adapters of a frozen model."""

    lora: int | None = None
    """Rank of LoRA on a frozen model; None trains all weights."""
    lora_alpha: float | None = None
    """LoRA scale is alpha / rank; None is twice the rank."""
    lora_targets: str = ALL_LINEAR
    """Adapted matrices: all-linear, or paths as attn/q."""
    base: str | None = None
    """Frozen parameter dtype: fp32, bf16, int8, nf4; None: bf16."""

    def adapters(self, seed: int = 0) -> Lora | None:
        """What is asked for, new ones by a seed; None to train the whole model.

        Raises:
          ValueError: something is asked of adapters that are not.

        >>> Adapters(lora=8, base="nf4").adapters().scale
        2.0
        """
        if self.lora is None:
            for name, given in vars(Adapters()).items():
                if getattr(self, name) != given:
                    flag = "--" + name.replace("_", "-")
                    raise ValueError(
                        f"{flag} {getattr(self, name)}: only a model that is not trained rests so, "
                        f"beside adapters: give --lora 16 too, or leave {flag} out"
                    )
            return None
        chosen = self.lora_targets
        targets = chosen if chosen == ALL_LINEAR else chosen.split(",")
        return Lora(self.lora, self.lora_alpha, targets, self.base or "bf16", seed)


def add_options(parser: argparse.ArgumentParser, cls: type = Options, **defaults: Any) -> None:
    """Adds every option of a class but the stage to a parser, with other defaults where given."""
    helps = _helps(cls)
    for field in dataclasses.fields(cls):
        flag, help = "--" + field.name.replace("_", "-"), helps[field.name]
        if field.type is bool:
            parser.add_argument(flag, action="store_true", help=help)
        elif field.name != "stage":
            default = defaults.get(field.name, field.default)
            help += "" if default is None else " (default: %(default)s)"
            parser.add_argument(flag, type=_plain(field.type), default=default, help=help)


def parsed_options(parsed: argparse.Namespace, cls: type[C], **given: Any) -> C:
    """What such a parser was given for a class, and the rest."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in vars(parsed).items() if k in names} | given)


def _plain(kind: Any) -> Any:
    """Of a type that may be None the other one."""
    return next(k for k in get_args(kind) or (kind,) if k is not types.NoneType)


def _helps(cls: type) -> dict[str, str]:
    """The string under each field, as tyro reads it too."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
