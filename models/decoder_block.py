"""One layer of a decoder: RMS norms, grouped queries with rotary positions, a gated MLP or several.

Shapes: B batch, T tokens of a row, D width, N heads of queries, M of keys and values, H head dim,
F width of the MLP.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .attend import AttentionFn, attend, with_kernel
from .decoder_config import DecoderConfig
from .dims import named, residual, whole
from .experts import Experts, Routed
from .rotary import Table, rotate
from .token_chunks import in_chunks

STDDEV = 0.02  # of new matrices


class Norm(nnx.Module):
    """Root mean square norm over the last dim, computed in fp32."""

    def __init__(self, size: int, config: DecoderConfig, rngs: nnx.Rngs):
        init = nnx.initializers.zeros if config.norm_from_one else nnx.initializers.ones
        self.eps, self.base = config.eps, float(config.norm_from_one)
        self.scale = nnx.Param(init(rngs.params(), (size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return (normal * (self.base + scale.astype(jnp.float32))).astype(scale.dtype)


def _linear(
    inputs: int, outputs: int, names: tuple[str, str], bias: bool, stddev: float, rngs: nnx.Rngs
) -> nnx.Linear:
    kernel_init = named(nnx.initializers.normal(stddev), *names)
    bias_init = named(nnx.initializers.zeros, names[1])
    return nnx.Linear(
        inputs, outputs, use_bias=bias, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs
    )


class Attention(nnx.Module):
    """Causal self-attention in which N / M heads of queries share a head of keys and values."""

    def __init__(
        self,
        config: DecoderConfig,
        out_stddev: float,
        rngs: nnx.Rngs,
        attention_fn: AttentionFn | None = None,
    ):
        D, H, bias = config.width, config.head_dim, config.qkv_bias
        columns = ("embed", "heads")
        self.config, self.attention_fn = config, attention_fn or attend
        self.q = _linear(D, config.heads * H, columns, bias, STDDEV, rngs)
        self.k = _linear(D, config.kv_heads * H, columns, bias, STDDEV, rngs)
        self.v = _linear(D, config.kv_heads * H, columns, bias, STDDEV, rngs)
        rows = ("heads", "embed")
        self.out = _linear(config.heads * H, D, rows, config.out_bias, out_stddev, rngs)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(H, config, rngs), Norm(H, config, rngs)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        table: Table,
        slides: jax.Array | None,
        segments_BxT: jax.Array | None,
    ) -> jax.Array:
        B, T, _ = x_BxTxD.shape
        q_BxTxNxH, k_BxTxMxH, v_BxTxMxH = (
            self._heads(f(x_BxTxD)) for f in (self.q, self.k, self.v)
        )
        if self.config.qk_norm:
            q_BxTxNxH, k_BxTxMxH = self.q_norm(q_BxTxNxH), self.k_norm(k_BxTxMxH)
        q_BxTxNxH, k_BxTxMxH = (rotate(x, table) for x in (q_BxTxNxH, k_BxTxMxH))
        mixed_BxTxNxH = self._mix(slides, q_BxTxNxH, k_BxTxMxH, v_BxTxMxH, segments_BxT)
        return self.out(mixed_BxTxNxH.reshape(B, T, -1))

    def _heads(self, x_BxTxNH: jax.Array) -> jax.Array:
        x_BxTxNxH = x_BxTxNH.reshape(*x_BxTxNH.shape[:2], -1, self.config.head_dim)
        return nn.with_logical_constraint(x_BxTxNxH, ("batch", "length", "heads", None))

    def _mix(self, slides: jax.Array | None, *given: Any) -> jax.Array:
        """Attention with the layer's window; where layers differ, of two programs one runs."""
        config = self.config
        attention = with_kernel(self.attention_fn, config.attention)

        def mix(window: int | None, q: Any, k: Any, v: Any, segments_BxT: Any) -> jax.Array:
            how = {"window": window, "scale": config.query_scale}
            return attention(q, k, v, segment_ids=segments_BxT, **how)

        sliding, full = (functools.partial(mix, window) for window in (config.window, None))
        if slides is None:
            return sliding(*given)
        return jax.lax.cond(slides, sliding, full, *given)


class MLP(nnx.Module):
    """D to F twice, one of them through the activation as a gate of the other, and back."""

    def __init__(self, config: DecoderConfig, out_stddev: float, rngs: nnx.Rngs):
        D, F, bias = config.width, config.hidden, config.mlp_bias
        self.gate = _linear(D, F, ("embed", "mlp"), bias, STDDEV, rngs)
        self.up = _linear(D, F, ("embed", "mlp"), bias, STDDEV, rngs)
        self.down = _linear(F, D, ("mlp", "embed"), bias, out_stddev, rngs)
        self.activation = nnx.silu if config.activation == "silu" else nnx.gelu

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        gated_BxTxF = self.activation(self.gate(x_BxTxD)) * self.up(x_BxTxD)
        gated_BxTxF = nn.with_logical_constraint(gated_BxTxF, ("batch", "length", "mlp"))
        return self.down(gated_BxTxF)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each on a normalised residual stream."""

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, attention_fn: AttentionFn | None = None
    ):
        # Two branches a layer add to the residual stream, whose variance this keeps near 1.
        out_stddev = STDDEV / (2 * config.layers) ** 0.5
        self.post_norms, self.mlp_chunk = config.post_norms, config.mlp_chunk
        self.attn_norm, self.mlp_norm = (Norm(config.width, config, rngs) for _ in range(2))
        self.attn = Attention(config, out_stddev, rngs, attention_fn)
        self.mlp = (MLP if config.mixture is None else Experts)(config, out_stddev, rngs)
        if config.post_norms:
            self.attn_post_norm, self.mlp_post_norm = (
                Norm(config.width, config, rngs) for _ in range(2)
            )

    def __call__(
        self,
        x_BxTxD: jax.Array,
        table: Table,
        slides: jax.Array | None,
        segments_BxT: jax.Array | None,
    ) -> tuple[jax.Array, Routed | None]:
        """The residual stream after it, and what its router did, if it has one."""
        x_BxTxD = residual(x_BxTxD)
        with jax.named_scope("attention"):
            mixed_BxTxD = self.attn(whole(self.attn_norm(x_BxTxD)), table, slides, segments_BxT)
            if self.post_norms:
                mixed_BxTxD = self.attn_post_norm(whole(mixed_BxTxD))
            x_BxTxD = x_BxTxD + residual(mixed_BxTxD)
        with jax.named_scope("mlp"):
            routed, post_norms = None, [self.mlp_post_norm] if self.post_norms else []
            if isinstance(self.mlp, Experts):
                out_BxTxD, routed = self.mlp(whole(self.mlp_norm(x_BxTxD)))
                for norm in post_norms:
                    out_BxTxD = norm(whole(out_BxTxD))
            else:
                modules = [self.mlp_norm, self.mlp, *post_norms]
                out_BxTxD = in_chunks(modules, x_BxTxD, self.mlp_chunk)
            return residual(x_BxTxD + residual(out_BxTxD)), routed
