"""Parameters, loss and FLOPs of a transformer of `zero_jax.models`.

With LoRA the parameters are those of `adapters.lora`: a frozen base and trained adapters.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from zero_jax.adapters.lora import Adapted, Lora
from zero_jax.engine.losses import Weighted
from zero_jax.models import families
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model, trained in full or by adapters.

    Attributes:
      config: Config of `models.families`.
      lora: Adapters to train; None trains the model.
    """

    config: families.Config
    lora: Lora | None = None

    def __post_init__(self) -> None:
        # Made at once: within the trace of a step Flax would place its variables on the mesh.
        self.graphdef  # noqa: B018

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[families.Model]:
        return nnx.graphdef(nnx.eval_shape(lambda: families.build(self.config, nnx.Rngs(0))))

    def model(self, params: PyTree) -> families.Model:
        """Returns the model with these parameters, without adapters."""
        model: families.Model = nnx.merge(self.graphdef, params)
        return model

    def own(self, key: jax.Array | int = 0) -> PyTree:
        """Returns new parameters of the model without adapters."""
        return nnx.state(families.build(self.config, nnx.Rngs(key)), nnx.Param)

    @functools.cached_property
    def adapted(self) -> Adapted | None:
        """The model with its adapters; None without."""
        if self.lora is None:
            return None
        # In the dtype of most runs: cuDNN's attention takes no other.
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), jax.eval_shape(self.own)
        )
        row = jax.ShapeDtypeStruct((1, min(self.config.seq, 8) + 1), jnp.int32)
        return self.lora.adapt(self._own_loss, shapes, (row,))

    @property
    def frozen(self) -> str | None:
        """The parameters that are not trained, for `Zero`."""
        return None if self.adapted is None else self.adapted.frozen

    def make(self, key: jax.Array | int = 0) -> PyTree:
        """Returns new parameters, for `Zero.init`."""
        return self.own(key) if self.adapted is None else self.adapted.init(self.own)(key)

    def loss(self, params: PyTree, batch: PyTree) -> Weighted:
        """Returns the cross entropy of tokens, or of (tokens, mask, segments, positions)."""
        batch = batch if isinstance(batch, tuple) else (batch,)
        fn = self._own_loss if self.adapted is None else self.adapted.loss
        made: Weighted = fn(params, batch)
        return made

    @property
    def routes(self) -> bool:
        """True if it trains experts, whose routers count in the loss."""
        return self.lora is None and getattr(self.config, "mixture", None) is not None

    def trained_loss(self, params: PyTree, batch: PyTree) -> PyTree:
        """Returns the minimised loss; with experts, including that of routers, and statistics."""
        if not self.routes:
            return self.loss(params, batch)
        batch = batch if isinstance(batch, tuple) else (batch,)
        pair, routed = families.routed_loss(self.model(params), *batch)
        return Weighted(*pair), routed

    def _own_loss(self, params: PyTree, batch: tuple[jax.Array, ...]) -> Weighted:
        return Weighted(*families.loss(self.model(params), *batch))

    def flops_per_token(self, tokens: int) -> float:
        """Returns the model FLOPs of one token of a row.

        Frozen matrices, the head included, have no gradient; adapters multiply like matrices.
        """
        flops = families.flops_per_token(self.config, tokens)
        if self.adapted is None:
            return flops
        known = dict(paths.named_leaves(jax.eval_shape(self.own)))
        frozen = sum(math.prod(known[name].shape) for name in self.adapted.multiplied)
        frozen += self.config.vocab * self.config.width
        shapes = jax.eval_shape(self.make)["lora"]
        return flops - 2 * frozen + 6 * sum(x.size for x in jax.tree.leaves(shapes))
