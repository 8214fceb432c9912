"""Layer norm with its own gradient.

JAX's derivative of the norm as written keeps several fp32 arrays as large as its input, and reads
them in many passes. This one keeps the input and two numbers a token.

Shapes: D width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .token_chunks import vary_alike

EPS = 1e-5


class LayerNorm(nnx.Module):
    """Layer norm over the last dim with a scale and a bias; its statistics are fp32."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,), jnp.float32))
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(*vary_alike(x, self.scale[...], self.bias[...]))


@jax.custom_vjp
def _layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    return _layer_norm_fwd(x, scale_D, bias_D)[0]


def _layer_norm_fwd(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = _wide(x)
    mean = jnp.mean(wide, -1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.mean((wide - mean) ** 2, -1, keepdims=True) + EPS)
    out = (wide - mean) * (factor * scale_D) + bias_D
    out = out.astype(jnp.result_type(x, scale_D, bias_D))
    # An empty array carries the dtype of the bias.
    return out, (x, scale_D, jnp.zeros((0,), bias_D.dtype), mean, factor)


def _layer_norm_bwd(residuals: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array, ...]:
    x, scale_D, bias_like, mean, factor = residuals
    tokens = tuple(range(x.ndim - 1))
    dout, normal = _wide(dout), (_wide(x) - mean) * factor
    dnormal = dout * scale_D
    along = jnp.mean(dnormal * normal, -1, keepdims=True)
    dx = factor * (dnormal - jnp.mean(dnormal, -1, keepdims=True) - normal * along)
    dscale_D, dbias_D = jnp.sum(dout * normal, tokens), jnp.sum(dout, tokens)
    return dx.astype(x.dtype), dscale_D.astype(scale_D.dtype), dbias_D.astype(bias_like.dtype)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
