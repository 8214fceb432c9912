"""Weights travel as int8, a scale for each block: half the bytes of a gather in bf16.

Every device rounds its shard of the fp32 masters to 255 steps a block, sends steps and scales, and
all of them multiply back. A weight is off by at most half a step, the largest magnitude of its
block / 254, in forward and backward pass alike; masters and gradients are not touched, so errors
do not add up over steps. Of hierarchical states the shard was joined in the compute dtype before,
so a weight is off by that rounding too.

Costs 1 + 4 / block bytes an element instead of 2 (bf16).
Source: Wang et al., ZeRO++, arXiv:2306.10209, section 3.1 (quantised weight communication, qwZ).
"""

from typing import Any

import jax
import jax.numpy as jnp

from zero_jax import buckets

# Elements that share a scale: the largest divisor of the last dim between these, or all of it.
LARGEST, SMALLEST = 256, 32
_STEPS = 127


def all_gather(
    shard: jax.Array, axis: str, dim: int, bucket_bytes: int | None, dtype: Any
) -> jax.Array:
    """`jax.lax.all_gather(..., tiled=True)` along `dim` of what is within half a step.

    Args:
      shard: this device's piece, of two dims or more.
      axis: the mesh axis to gather over.
      dim: the dim along which pieces follow each other.
      bucket_bytes: the most that a collective moves at once.
      dtype: of the result.
    """
    steps, scales = quantise(shard)
    steps = buckets.all_gather(steps, axis, dim, bucket_bytes)
    scales = buckets.all_gather(scales, axis, dim, bucket_bytes)
    return dequantise(steps, scales, dtype)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Steps in int8, of the shape of `x`, and the size of a step for each block of the last dim.

    >>> steps, scales = quantise(jnp.array([[0.0, 0.5, -1.0]]))
    >>> steps.tolist(), round(1 / float(scales[0, 0]))
    ([[0, 64, -127]], 127)
    """
    block = _block(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Not 1 where that is NaN: all of its block shall be NaN too, for the guard to see.
    scales = jnp.where(largest == 0, 1.0, largest / _STEPS)
    return jnp.round(blocks / scales).astype(jnp.int8).reshape(x.shape), scales[..., 0]


def dequantise(steps: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """What `quantise` took apart, in `dtype`."""
    blocks = steps.astype(jnp.float32).reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).astype(dtype).reshape(steps.shape)


def _block(size: int) -> int:
    """Elements that share a scale, of a dim of that size.

    >>> _block(4096), _block(192), _block(786), _block(509)
    (256, 192, 131, 509)
    """
    fits = [b for b in range(SMALLEST, LARGEST + 1) if size % b == 0]
    return max(fits, default=size)
