"""Decoders of today in Flax NNX: Llama, Qwen, Mistral and Gemma, one model of few parts.

RMS norms, rotary positions, grouped queries, a gated MLP; norms of queries and keys, sliding
windows, a head of its own and the rest by what the config says. Every parameter of the blocks is
one array stacked over layers, and one scan applies them. Compute follows the dtype of the
parameters; statistics of norms, softmax and loss are fp32. Logits of a training batch never exist
at once: see `chunked_cross_entropy`.

The dims of parameters and activations carry the names that gpt.py uses, so tensor parallelism is
the same annotation: heads, mlp and vocab are split.

Shapes: B batch, T tokens of a row, D width, N heads of queries, M of keys and values, H head dim,
F width of the MLP, V vocab, L layers.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .attend import AttentionFn
from .decoder_block import STDDEV, Block, Norm
from .decoder_config import DecoderConfig as DecoderConfig
from .decoder_config import Mixture as Mixture
from .decoder_config import Rope as Rope
from .decoder_config import flops_per_token as flops_per_token
from .decoder_config import num_params as num_params
from .decoder_presets import PRESETS as PRESETS
from .decoder_presets import preset as preset
from .dims import named, residual, whole
from .experts import Routed
from .generate import generate as generate
from .next_token import loss as loss
from .next_token import routed_loss as routed_loss
from .rotary import Table, tables


class Head(nnx.Module):
    """The matrix of the logits, of the shape of the embedding."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        init = named(nnx.initializers.normal(STDDEV), "vocab", "embed")
        self.kernel = nnx.Param(init(rngs.params(), (config.vocab, config.width), jnp.float32))


class Decoder(nnx.Module):
    """A decoder whose `blocks` hold every layer's parameters, stacked as (L, ...)."""

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, attention_fn: AttentionFn | None = None
    ):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs, attention_fn)

        self.config = config
        self.embed = nnx.Embed(
            config.vocab,
            config.width,
            embedding_init=named(nnx.initializers.normal(STDDEV), "vocab", "embed"),
            rngs=rngs,
        )
        self.blocks = stacked(rngs)
        self.norm = Norm(config.width, config, rngs)
        if not config.tied:
            self.head = Head(config, rngs)

    @property
    def head_VxD(self) -> jax.Array:
        """The matrix of the logits."""
        return self.embed.embedding[...] if self.config.tied else self.head.kernel[...]

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        positions_BxT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the final hidden states (B, T, D), after the last norm; see `routed`."""
        return self.routed(tokens_BxT, segments_BxT, positions_BxT)[0]

    def routed(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        positions_BxT: jax.Array | None = None,
    ) -> tuple[jax.Array, Routed | None]:
        """Returns the final hidden states, and the routing statistics, if any, stacked over layers.

        Args:
          tokens_BxT: Token ids.
          segments_BxT: Document numbers in a packed row; attention stays within a document.
          positions_BxT: Position of each token in its document; by default its index in the row.

        Raises:
          ValueError: The rows have more than `config.seq` tokens.
        """
        config, T = self.config, tokens_BxT.shape[-1]
        if T > config.seq:
            raise ValueError(
                f"rows have {T} tokens, but the model is built for {config.seq}: shorten the "
                f"rows, or build it with seq={T} or more"
            )
        if positions_BxT is None:
            positions_BxT = jnp.arange(T)[None]
        with jax.named_scope("embed"):
            embedding_VxD = self.embed.embedding[...]
            x_BxTxD = jnp.take(embedding_VxD, tokens_BxT, axis=0)
            if config.embed_scale != 1.0:
                x_BxTxD *= jnp.asarray(config.embed_scale, x_BxTxD.dtype)
            x_BxTxD = residual(x_BxTxD)
        rope_tables, slides_L = self._per_layer(positions_BxT)
        x_BxTxD, routed = _apply_blocks(self.blocks, x_BxTxD, slides_L, rope_tables, segments_BxT)
        return self.norm(whole(x_BxTxD)), routed

    def _per_layer(self, positions_BxT: jax.Array) -> tuple[tuple[Table, ...], jax.Array | None]:
        """Tables of positions, that of sliding layers first; and which layers slide, if some do."""
        config = self.config
        ropes = [config.rope if config.local_rope is None else config.local_rope, config.rope]
        if len(set(config.slides)) == 1:
            own = ropes[0] if config.slides[0] else ropes[1]
            return (tables(own, config.head_dim, positions_BxT),), None
        if config.local_rope is None:
            del ropes[0]
        made = tuple(tables(rope, config.head_dim, positions_BxT) for rope in ropes)
        return made, jnp.asarray(config.slides)

    def __call__(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        positions_BxT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns fp32 logits (B, T, V); for training, `loss` needs far less memory."""
        return self.logits(self.hidden(tokens_BxT, segments_BxT, positions_BxT))

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        """Returns fp32 logits (..., V) of hidden states."""
        return jnp.einsum(
            "...d,vd->...v", x_BxTxD, self.head_VxD, preferred_element_type=jnp.float32
        )


@nnx.scan(in_axes=(0, nnx.Carry, 0, None, None), out_axes=(nnx.Carry, 0), graph_updates=False)
def _apply_blocks(
    block: Block,
    x_BxTxD: jax.Array,
    slides: jax.Array | None,
    by_kind: tuple[Table, ...],
    segments_BxT: jax.Array | None,
) -> tuple[jax.Array, Routed | None]:
    table = by_kind[0]
    if slides is not None and len(by_kind) > 1:
        table = jax.tree.map(functools.partial(jnp.where, slides), *by_kind)
    return block(x_BxTxD, table, slides, segments_BxT)
