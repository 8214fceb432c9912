"""A model of `zero_jax.models` and its training step, as planned by the command line."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.adapters.lora import Lora
from zero_jax.context_parallel import cudnn
from zero_jax.context_parallel.attention import sent_heads
from zero_jax.engine import grads
from zero_jax.engine.config import Stage
from zero_jax.hlo.targets import Target
from zero_jax.models import families, optimizers
from zero_jax.plan import auto, model_states
from zero_jax.plan.plans import Plan
from zero_jax.plan.text_model import TextModel, shifted
from zero_jax.sharding.mesh import batch_shards, context_size, model_size
from zero_jax.sharding.paths import PyTree
from zero_jax.zero import Zero, ZeroChoice

# Tokens of an MLP's chunks, if they are chosen. Llama-3.1-8B on 8 H100 with a row of 1M tokens then
# takes 27.9 GB instead of 41.1 GB and as long; with 128k tokens it takes 3 % longer (modelled).
MLP_CHUNK = 8192


def choose(
    zero: Zero,
    model: TextModel,
    step_of: Callable[[TextModel], tuple[PyTree, ...]],
    tokens: int,
    **options: Any,
) -> tuple[Zero, TextModel]:
    """Chooses settings in place of stage="auto", and the chunk size of MLPs in long rows.

    Args:
      zero: Settings with `stage="auto"`.
      model: The model. MLPs with chunks or experts stay as they are.
      step_of: Returns the arguments of `Zero.choose` for a model.
      tokens: Tokens of a row on one device. From two chunks on, chunks of `MLP_CHUNK` tokens are
        compared with all tokens at once.
      **options: Options of `Zero.choose`.

    Returns:
      The settings and the model of the shortest modelled step that fits; of steps that take as
      long, the smaller one. Without a modelled step time, chunks are chosen only if needed.

    Raises:
      ValueError: No candidate fits, or the device does not report its memory.
    """
    models, config = [model], model.config
    is_open = config.mlp_chunk is None and getattr(config, "mixture", None) is None
    if is_open and tokens >= 2 * MLP_CHUNK:
        chunked = dataclasses.replace(config, mlp_chunk=MLP_CHUNK)
        models.append(dataclasses.replace(model, config=chunked))
    choices, errors = list[tuple[ZeroChoice, TextModel]](), list[ValueError]()
    for variant in models:
        try:
            choice = zero.choose(*step_of(variant), has_aux=variant.routes, **options)
        except ValueError as error:
            errors.append(error)
        else:
            choices.append((choice, variant))
    if not choices:
        raise errors[-1]
    least = min(choice.chosen.seconds for choice, _ in choices) * (1 + auto.TIE)
    short = [pair for pair in choices if pair[0].chosen.seconds <= least]
    choice, chosen = short[0]
    if math.isfinite(least):
        choice, chosen = min(short, key=lambda pair: pair[0].chosen.plan.total_bytes)
    if len(models) > 1 and jax.process_index() == 0:
        print(f"chose MLPs of {chosen.config.mlp_chunk or 'all'} tokens at a time (--mlp-chunk)")
    return choice.zero, chosen


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its training step; methods take the stage.

    Attributes:
      config: Model config of `models.families`.
      zero: A `Zero` with the mesh and all settings; its `frozen` is replaced for adapters.
      optimizer: Name in `models.optimizers`.
      rows: Rows of the global batch.
      tokens: Tokens of a row; the default is the model's limit.
      lora: Adapters to train; None trains the model.
    """

    config: families.Config
    zero: Zero
    optimizer: str
    rows: int
    tokens: int | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.lora is not None:
            zero = self.zero.replace(frozen=self.model.frozen)
            object.__setattr__(self, "zero", zero)

    @functools.cached_property
    def model(self) -> TextModel:
        return TextModel(self.config, self.lora)

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.tokens or self.config.seq

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer of `train.py`."""
        rate = optax.constant_schedule(optimizers.RATES[self.optimizer])
        return optimizers.make(self.optimizer, rate)

    def make(self) -> PyTree:
        """Returns the parameters; only traced."""
        return self.model.make()

    @property
    def loss_fn(self) -> grads.LossFn:
        return self.model.trained_loss

    @property
    def batch(self) -> PyTree:
        tokens = jax.ShapeDtypeStruct((self.rows, self.row + 1), jnp.int32)
        return tokens if context_size(self.zero.mesh) == 1 else jax.eval_shape(shifted, (tokens,))

    @property
    def model_flops(self) -> float:
        """FLOPs of forward and backward on one device, without recomputation."""
        return self.model.flops_per_token(self.row) * self.row * self.rows / self.zero.mesh.size

    def attention_on(self, target: Target) -> str:
        """Formats the attention kernel of a run on this target, and that of packed documents."""
        config, mesh, said = self.config, self.zero.mesh, list[str]()
        head_dim = getattr(config, "head_dim", config.width // config.heads)
        parts, devices = model_size(mesh), context_size(mesh)
        heads, keys = config.heads, getattr(config, "kv_heads", config.heads)
        queries, sent_keys = sent_heads(heads, keys, devices)
        tokens = self.rows // batch_shards(mesh) * self.row // devices
        against = ""
        if devices > 1 and self.zero.context_exchange == "all_gather":
            against = "`context_exchange`='all_gather' gives no full rows"
        elif keys % parts:
            against = f"{parts} devices of the model axis do not divide {keys} heads of keys"
        with cudnn.compiling_for(target.platform, target.compute_capability):
            for packed in (False, True):
                reason = against or cudnn.reason_against(
                    self.zero.precision.compute,
                    head_dim,
                    packed=packed,
                    grouped=queries != sent_keys,
                    elements=tokens * queries * head_dim // parts,
                )
                said.append(f"in blocks of queries ({reason})" if reason else "cuDNN")
        return "attention: " + "; packed documents: ".join(dict.fromkeys(said))

    def plan(self, stage: Stage, **options: Any) -> Plan:
        """Returns the plan of a stage; options are those of `planning.of`."""
        zero = self.zero.at_stage(stage)
        options = {"model_flops": self.model_flops, "has_aux": self.model.routes, **options}
        return zero.plan(*self._step(zero, self.model), **options)

    def choose(self, **options: Any) -> "Case":
        """Returns this case with the settings that `Zero.choose` chooses in place of "auto"."""
        tokens = self.row // context_size(self.zero.mesh)
        step_of = functools.partial(self._step, self.zero)
        zero, model = choose(self.zero, self.model, step_of, tokens, **options)
        return dataclasses.replace(self, zero=zero, config=model.config)

    def _step(self, zero: Zero, model: TextModel) -> tuple[PyTree, ...]:
        tx, params = zero.optimizer(self.tx), zero.eval_shape(self.make)
        return model.trained_loss, tx, params, self.batch

    def states(self, shards: int, stage: Stage) -> int:
        """Returns the bytes of model states on N devices, in closed form."""
        shapes = jax.eval_shape(self.make)
        zero = self.zero.at_stage(3)
        params = zero.eval_shape(self.make)
        loss = grads.GlobalLoss(zero, self.loss_fn, has_aux=self.model.routes)
        traced = loss.read(params, self.batch, ())
        own = self.zero.at_stage(stage)
        return model_states.estimate(
            shapes, own, self.tx, shards=shards, window=traced.window
        ).total
