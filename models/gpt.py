"""The GPT-2 family in Flax NNX: pre-norm blocks, learned positions, tied head.

Every parameter of the blocks is one array stacked over layers, and one scan applies them, so a
deep model compiles as fast as a shallow one. Compute follows the dtype of the parameters; layer
norm statistics, softmax and loss are fp32. Logits of a training batch never exist at once:
`chunked_cross_entropy` holds (loss_chunk, vocab) of them, and its gradients cost (V, D) elements in
fp32 and (M, D) in fp32 or bf16.

The dims of parameters and activations carry names (heads, mlp, vocab, seq, embed). They mean
nothing until Flax's logical axis rules map them to a mesh: heads, mlp and vocab split as Megatron
does (columns of qkv and up, rows of proj and down, rows of the embedding and the logits), seq as
its sequence parallelism does; `length` is a sequence that attention and matmuls need whole.

Shapes: B batch, T tokens of a row, D width, N heads, H head dim, V vocab, L layers,
F = 4·D, M tokens of a batch, C chunks of K tokens (C * K >= M).

GPT-2: Radford et al., Language Models are Unsupervised Multitask Learners (2019). The shapes of
the larger models follow Rajbhandari et al., arXiv:1910.02054.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .attend import AttentionFn, attend, with_kernel
from .cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from .dims import named, residual, whole
from .generate import generate as generate
from .gpt_config import PRESETS as PRESETS
from .gpt_config import GPTConfig as GPTConfig
from .gpt_config import flops_per_token as flops_per_token
from .gpt_config import num_params as num_params
from .gpt_config import preset as preset
from .next_token import loss as loss
from .norms import LayerNorm
from .token_chunks import in_chunks

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])


def _keep_dtype(arrays: _Arrays, /, *, dtype: Any = None, inexact: bool = True) -> _Arrays:
    # nnx.Embed casts to the dtype it was born with, which would undo a cast of the parameters.
    return arrays


def _embed(rows: int, width: int, name: str, rngs: nnx.Rngs) -> nnx.Embed:
    init = named(nnx.initializers.normal(0.02), name, "embed")
    return nnx.Embed(rows, width, embedding_init=init, promote_dtype=_keep_dtype, rngs=rngs)


def _linear(
    inputs: int, outputs: int, stddev: float, names: tuple[str, str], rngs: nnx.Rngs
) -> nnx.Linear:
    kernel_init = named(nnx.initializers.normal(stddev), *names)
    bias_init = named(nnx.initializers.zeros, names[1])
    return nnx.Linear(inputs, outputs, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs)


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def _split(key: jax.Array | None, num: int) -> Any:
    return (None,) * num if key is None else jax.random.split(key, num)


class Attention(nnx.Module):
    """Causal self-attention of `heads` heads, by `attention_fn`.

    The columns of `qkv` are ordered (heads, 3, H), so that a part of them is whole heads.
    """

    def __init__(
        self,
        config: GPTConfig,
        out_stddev: float,
        rngs: nnx.Rngs,
        attention_fn: AttentionFn | None = None,
    ):
        self.heads = config.heads
        self.attention_fn = attention_fn or attend
        self.implementation = config.attention
        self.qkv = _linear(config.width, 3 * config.width, 0.02, ("embed", "heads"), rngs)
        self.proj = _linear(config.width, config.width, out_stddev, ("heads", "embed"), rngs)

    def __call__(self, x_BxTxD: jax.Array, segments_BxT: jax.Array | None) -> jax.Array:
        B, T, D = x_BxTxD.shape
        qkv_BxTxNx3xH = self.qkv(x_BxTxD).reshape(B, T, self.heads, 3, D // self.heads)
        qkv_BxTxNx3xH = nn.with_logical_constraint(
            qkv_BxTxNx3xH, ("batch", "length", "heads", None, None)
        )
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = jnp.unstack(qkv_BxTxNx3xH, axis=3)
        attention = with_kernel(self.attention_fn, self.implementation)
        mixed_BxTxNxH = attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, segment_ids=segments_BxT)
        mixed_BxTxNxH = nn.with_logical_constraint(
            mixed_BxTxNxH, ("batch", "length", "heads", None)
        )
        return self.proj(mixed_BxTxNxH.reshape(B, T, D))


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """GELU that keeps its input alone for the backward pass: written out, it would keep five."""
    return nnx.gelu(x)


gelu.defvjp(
    lambda x: (nnx.gelu(x), x),
    lambda x, cotangent: jax.vjp(nnx.gelu, x)[1](cotangent),
)


class MLP(nnx.Module):
    """D to 4·D and back, with GELU between."""

    def __init__(self, config: GPTConfig, out_stddev: float, rngs: nnx.Rngs):
        self.up = _linear(config.width, 4 * config.width, 0.02, ("embed", "mlp"), rngs)
        self.down = _linear(4 * config.width, config.width, out_stddev, ("mlp", "embed"), rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        up_BxTxF = nn.with_logical_constraint(self.up(x_BxTxD), ("batch", "length", "mlp"))
        return self.down(gelu(up_BxTxF))


class Block(nnx.Module):
    """One pre-norm layer; a key of None makes it deterministic."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs, attention_fn: AttentionFn | None = None):
        # Two branches a layer add to the residual stream, whose variance this keeps near 1.
        out_stddev = 0.02 / (2 * config.layers) ** 0.5
        self.rate, self.mlp_chunk = config.dropout, config.mlp_chunk
        self.ln1 = LayerNorm(config.width, rngs)
        self.attn = Attention(config, out_stddev, rngs, attention_fn)
        self.ln2 = LayerNorm(config.width, rngs)
        self.mlp = MLP(config, out_stddev, rngs)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        key: jax.Array | None = None,
        segments_BxT: jax.Array | None = None,
    ) -> jax.Array:
        attn_key, mlp_key = _split(key, 2)
        x_BxTxD = residual(x_BxTxD)
        with jax.named_scope("attention"):
            mixed_BxTxD = residual(self.attn(whole(self.ln1(x_BxTxD)), segments_BxT))
            x_BxTxD = x_BxTxD + _dropout(mixed_BxTxD, self.rate, attn_key)
        with jax.named_scope("mlp"):
            out_BxTxD = residual(in_chunks([self.ln2, self.mlp], x_BxTxD, self.mlp_chunk))
            return residual(x_BxTxD + _dropout(out_BxTxD, self.rate, mlp_key))


class GPT(nnx.Module):
    """A GPT whose `blocks` hold every layer's parameters, stacked as (L, ...).

    All its variables are `nnx.Param`: dropout keys are arguments, not state.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs, attention_fn: AttentionFn | None = None):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs, attention_fn)

        self.config = config
        self.wte = _embed(config.vocab, config.width, "vocab", rngs)
        self.wpe = _embed(config.seq, config.width, "positions", rngs)
        self.blocks = stacked(rngs)
        self.ln_f = LayerNorm(config.width, rngs)

    @property
    def head_VxD(self) -> jax.Array:
        """The matrix of the logits."""
        return self.wte.embedding[...]

    def hidden(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array | None = None,
        positions_BxT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the final hidden states (B, T, D), after the last layer norm.

        Args:
          tokens_BxT: Token ids, T at most `config.seq`.
          segments_BxT: Document numbers in a packed row; attention stays within a document.
          positions_BxT: Position of each token in its document; by default its index in the row.
          dropout_key: A typed key of `jax.random.key`; None is deterministic.

        Raises:
          ValueError: The rows have more tokens than the model has positions.
        """
        config, T = self.config, tokens_BxT.shape[-1]
        if T > config.seq:
            raise ValueError(
                f"rows have {T} tokens, but the model has {config.seq} positions: shorten the "
                f"rows, or build it with seq={T} or more"
            )
        key = dropout_key if config.dropout > 0.0 else None
        embed_key, blocks_key = _split(key, 2)
        key_L = None if blocks_key is None else jax.random.split(blocks_key, config.layers)
        with jax.named_scope("embed"):
            x_BxTxD = self.wte(tokens_BxT)
            x_BxTxD += self.wpe(jnp.arange(T) if positions_BxT is None else positions_BxT)
            x_BxTxD = residual(x_BxTxD)
        x_BxTxD = _dropout(x_BxTxD, config.dropout, embed_key)
        return self.ln_f(_apply_blocks(self.blocks, x_BxTxD, key_L, segments_BxT))

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        """Returns fp32 logits (..., V) of hidden states, by the tied embedding."""
        return jnp.einsum(
            "...d,vd->...v", x_BxTxD, self.head_VxD, preferred_element_type=jnp.float32
        )

    def __call__(self, tokens_BxT: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns fp32 logits (B, T, V); for training, `loss` needs far less memory."""
        return self.logits(self.hidden(tokens_BxT, dropout_key=dropout_key))


@nnx.scan(in_axes=(0, nnx.Carry, 0, None), out_axes=nnx.Carry, graph_updates=False)
def _apply_blocks(
    block: Block, x_BxTxD: jax.Array, key: jax.Array | None, segments_BxT: jax.Array | None
) -> jax.Array:
    return block(x_BxTxD, key, segments_BxT)
