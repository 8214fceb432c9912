"""A GPT of `zero_jax.models` and how it is trained: what the command line and the figures plan."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zero_jax.engine import grads, losses
from zero_jax.models import gpt, optimizers
from zero_jax.plan import memory
from zero_jax.plan.planning import AnyZero, Plan

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is to be trained; everything but the stage.

    Attributes:
      config: of `models.gpt`.
      zero: a `Zero`: the mesh and all settings.
      optimizer: one of `models.optimizers`.
      rows: rows of the global batch.
    """

    config: gpt.GPTConfig
    zero: AnyZero
    optimizer: str
    rows: int

    @property
    def tx(self) -> optax.GradientTransformation:
        """As `train.py` makes it."""
        rate = optax.constant_schedule(optimizers.RATES[self.optimizer])
        return optimizers.make(self.optimizer, rate)

    def make(self) -> PyTree:
        """The parameters; only ever traced here."""
        return nnx.state(gpt.GPT(self.config, rngs=nnx.Rngs(0)), nnx.Param)

    @property
    def loss_fn(self) -> grads.LossFn:
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(self.config, rngs=nnx.Rngs(0))))
        return lambda params, tokens: losses.Weighted(
            *gpt.loss(nnx.merge(graphdef, params), tokens)
        )

    @property
    def batch(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.config.seq + 1), jnp.int32)

    @property
    def model_flops(self) -> float:
        """FLOPs of forward and backward on one device, without recomputation."""
        return gpt.flops_per_token(self.config) * self.config.seq * self.rows / self.zero.mesh.size

    def plan(self, stage: int, **options: Any) -> Plan:
        """The plan at a stage; options are those of `planning.of`."""
        zero = self.zero.at_stage(stage)
        params = zero.abstract(self.make)
        return zero.plan(
            *(self.loss_fn, self.tx, params, self.batch), model_flops=self.model_flops, **options
        )

    def choose(self, **options: Any) -> "Case":
        """The same with a stage and all that `Zero.choose` chooses, in place of "auto"."""
        params = self.zero.abstract(self.make)
        zero = self.zero.choose(self.loss_fn, self.tx, params, self.batch, **options)
        return dataclasses.replace(self, zero=zero)

    def states(self, shards: int, stage: int) -> int:
        """Bytes of model states on N devices, in closed form."""
        shapes = jax.eval_shape(self.make)
        zero = self.zero.at_stage(3)
        params = zero.abstract(self.make)
        traced = grads.GlobalLoss(zero.settings, self.loss_fn).read(params, self.batch, ())
        return memory.estimate(
            shapes,
            shards=shards,
            stage=stage,
            parts=self.zero.settings.parts,
            tx=self.tx,
            precision=self.zero.precision,
            micro_batches=self.zero.micro_batches,
            model_axis=self.zero.model_axis,
            window=traced.window,
        ).total
