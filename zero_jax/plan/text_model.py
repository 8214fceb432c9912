"""Parameters, loss and FLOPs of a transformer of `zero_jax.models`.

With LoRA the parameters are those of `adapters.lora`: a frozen base and trained adapters.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zero_jax.adapters.lora import Adapted, Lora
from zero_jax.context_parallel.attention import attention
from zero_jax.engine.losses import Weighted
from zero_jax.models import families
from zero_jax.models.attend import AttentionFn
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

_OTHERS = ("mask", "segments", "positions")  # arrays beside tokens, in the order of a tuple


def shifted(rows: Sequence[Any]) -> dict[str, Any]:
    """Returns a batch (tokens, mask, segments, positions) with inputs and labels for tokens.

    Tokens are rows of T + 1, inputs and labels of T. The last arrays may be missing.

    >>> shifted([jnp.array([[3, 1, 2]])])["labels"].tolist()
    [[1, 2]]
    """
    tokens, *others = rows
    named = dict(zip(_OTHERS, others, strict=False))
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], **named}


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model, trained in full or by adapters.

    Attributes:
      config: Config of `models.families`.
      lora: Adapters to train; None trains the model.
      attention_fn: Attention of `families.build`.
    """

    config: families.Config
    lora: Lora | None = None
    attention_fn: AttentionFn = attention

    def __post_init__(self) -> None:
        # Made at once: within the trace of a step Flax would place its variables on the mesh.
        self.graphdef  # noqa: B018

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[families.Model]:
        return nnx.graphdef(nnx.eval_shape(lambda: self._build(0)))

    def model(self, params: PyTree) -> families.Model:
        """Returns the model with these parameters, without adapters."""
        model: families.Model = nnx.merge(self.graphdef, params)
        return model

    def own(self, key: jax.Array | int = 0) -> PyTree:
        """Returns new parameters of the model without adapters."""
        return nnx.state(self._build(key), nnx.Param)

    def _build(self, key: jax.Array | int) -> families.Model:
        return families.build(self.config, nnx.Rngs(key), self.attention_fn)

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
        """Returns the cross entropy of a batch.

        It is rows of T + 1 tokens, (tokens, mask, segments, positions), or the result of `shifted`,
        which a mesh with a context axis requires.
        """
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
        rows, more = _arguments(batch)
        pair, routed = families.routed_loss(self.model(params), *rows, **more)
        return Weighted(*pair), routed

    def _own_loss(self, params: PyTree, batch: PyTree) -> Weighted:
        rows, more = _arguments(batch)
        return Weighted(*families.loss(self.model(params), *rows, **more))

    def flops_per_token(self, tokens: int) -> float:
        """Returns the model FLOPs of one token of a row, without pairs of tokens that are masked.

        Frozen matrices, the head included, have no gradient; adapters multiply like matrices.
        """
        flops = families.flops_per_token(self.config, tokens, masked=True)
        if self.adapted is None:
            return flops
        known = dict(paths.named_leaves(jax.eval_shape(self.own)))
        frozen = sum(math.prod(known[name].shape) for name in self.adapted.multiplied)
        frozen += self.config.vocab * self.config.width
        shapes = jax.eval_shape(self.make)["lora"]
        return flops - 2 * frozen + 6 * sum(x.size for x in jax.tree.leaves(shapes))


def _arguments(batch: PyTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a batch as arguments of `families.loss`, after the model."""
    if isinstance(batch, Mapping):
        rows = (batch["inputs"], *map(batch.get, _OTHERS))
        return rows, {"labels_BxT": batch["labels"]}
    return batch if isinstance(batch, tuple) else (batch,), {}
