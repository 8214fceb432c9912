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
    """All of a `Zero` but its mesh, in words; None is "whatever suits the others"."""

    stage: int | Literal["auto"] | None = None
    """State that is partitioned: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters; auto
    chooses stage, micro-batches, remat and, on GPUs, the state in host memory, by the shortest
    modelled step that fits; 3 by default."""
    memory_limit: float | None = None
    """GB (1e9 bytes) of a device that may be used; JAX's pool of its memory, or the target's,
    unless given."""
    sequence_parallel: bool = False
    """Split sequences over the model axis too, between the matrix products."""
    hierarchical: bool = False
    """At stage 3, cut states over replica too, and join what a replica needs once a step."""
    micro_batches: int = 1
    """Parts the batch is worked off in, one after the other; gradients add up."""
    compute: str = "fp32"
    """Dtype of the model's arithmetic: fp32, bf16 or fp16; masters are always fp32. GPUs
    multiply fp32 matrices in TF32 unless JAX_DEFAULT_MATMUL_PRECISION=highest is set."""
    reduce: str = "fp32"
    """Dtype in which gradients are summed over devices: fp32 or bf16."""
    gather: str | None = None
    """int8 sends weights in half the bytes of bf16, each within half of 1/127 of the largest of its
    block; in the dtype of --compute unless given."""
    scatter: str | None = None
    """int8 or int4 sends gradients in half or a quarter of the bytes of bf16 and sums them in fp32,
    each within half of 1/127 or 1/7 of the largest of its block; in the dtype of --reduce unless
    given."""
    remat: str | None = None
    """What is kept for the backward pass: none (everything is), dots (matrix products), block (the
    input of each layer), block_sqrt (of each group of layers) or names:a,b (marked values), on the
    device or @host, @partitioned; block unless given, or what fits where the stage is chosen."""
    offload: str | None = None
    """What rests in host memory and is updated in pieces: optimizer, or optimizer,params for the
    fp32 masters too, and activations for what remat keeps; with :auto only where the devices can,
    with :nvme=DIR in files."""
    states: str = FP32
    """As what the large states of an elementwise optimizer (adamw, sgd, lion) rest: fp32, bf16 or
    8bit (8.125 bits a number)."""

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
    """What is trained beside a model that is not."""

    lora: int | None = None
    """Train adapters of this rank (LoRA) beside the matrices of a frozen model."""
    lora_alpha: float | None = None
    """Adapters count alpha / rank; twice the rank unless given."""
    lora_targets: str = ALL_LINEAR
    """Which matrices have adapters: all-linear, or patterns of paths with commas between,
    attn/q,attn/v say."""
    base: str | None = None
    """How the frozen model rests and travels: bf16 or fp32, or with its matrices in int8 or nf4
    (8.25 and 4.25 bits); bf16 unless given."""

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
