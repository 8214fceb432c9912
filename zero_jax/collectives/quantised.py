"""Matrices travel as integers with a scale for each block: int8 weights, int8 or int4 gradients.

A block is rounded to 255 steps (int8) or 15 (int4, two in a byte), so a number is off by at most
half a step: the largest magnitude of its block / 254, or / 14.

Weights: every device rounds its shard of the fp32 masters, sends steps and scales, and all of them
multiply back, in forward and backward pass alike; masters are not touched, so errors do not add up
over steps. Of hierarchical states the shard was joined in the compute dtype before, so a weight is
off by that rounding too.

Gradients: every device rounds its own full gradient and sends each shard's part to its owner, who
multiplies back and sums in fp32. So each number is rounded once a touch and micro-batch, by its
sender, and the sum of N is off by at most the N half steps; sums over replicas are of no integers.
What was rounded off is not carried to the next step (error
feedback): it is of a full gradient on every device, 2Ψ bytes in bf16 that no stage from 2 on holds.

Costs bits / 8 + 4 / block bytes an element instead of 2 (bf16).
Source: Wang et al., ZeRO++, arXiv:2306.10209, sections 3.1 (weights, qwZ) and 3.3 (gradients, qgZ;
here in one hop).
"""

from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.collectives import buckets
from zero_jax.sharding.mesh import Axis

# What a setting is called, and None for off.
BITS = {None: None, "int8": 8, "int4": 4}
# Elements that share a scale: the largest divisor of the last dim between these, or all of it.
LARGEST, SMALLEST = 256, 32
# Four numbers and their scale are 8 bytes as int8: not fewer than as bf16.
TOO_SHORT = 4


def all_gather(
    shard: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None, dtype: Any
) -> jax.Array:
    """`jax.lax.all_gather(..., tiled=True)` along `dim` of what is within half a step, by int8.

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


def psum_scatter(
    full: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None, bits: int
) -> jax.Array:
    """`jax.lax.psum_scatter(..., tiled=True)` along `dim` of what is within half a step, in fp32.

    Args:
      full: this device's whole gradient, of two dims or more.
      axis: the mesh axis to sum over.
      dim: the dim along which shards follow each other; their number divides it.
      bucket_bytes: the most that a collective moves at once.
      bits: 8 or 4.
    """
    rows = buckets.by_owner(full, axis, dim)
    steps, scales = quantise(rows, bits)
    if bits == 4:
        steps = pack(steps)
    steps, scales = (buckets.all_to_all(x, axis, bucket_bytes) for x in (steps, scales))
    if bits == 4:
        steps = unpack(steps, rows.shape[-1])
    return dequantise(steps, scales, jnp.float32).sum(0)


def quantise(x: jax.Array, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """Steps in int8, of the shape of `x`, and the size of a step for each block of the last dim.

    >>> steps, scales = quantise(jnp.array([[0.0, 0.5, -1.0]]))
    >>> steps.tolist(), round(1 / float(scales[0, 0]))
    ([[0, 64, -127]], 127)
    """
    block = _block(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Not 1 where that is NaN: all of its block shall be NaN too, for the guard to see.
    scales = jnp.where(largest == 0, 1.0, largest / (2 ** (bits - 1) - 1))
    return jnp.round(blocks / scales).astype(jnp.int8).reshape(x.shape), scales[..., 0]


def dequantise(steps: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """What `quantise` took apart, in `dtype`."""
    blocks = steps.astype(jnp.float32).reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).astype(dtype).reshape(steps.shape)


def pack(steps: jax.Array) -> jax.Array:
    """Steps of 4 bits, from -7 to 7, two in a byte: the last dim's first half in the low bits.

    >>> pack(jnp.array([1, -2, 3], jnp.int8)).tolist()
    [49, 14]
    """
    odd = steps.shape[-1] % 2
    if odd:
        steps = jnp.pad(steps, [(0, 0)] * (steps.ndim - 1) + [(0, 1)])
    low, high = jnp.split(steps, 2, axis=-1)
    return (high << 4) | (low & 15)


def unpack(packed: jax.Array, size: int) -> jax.Array:
    """What `pack` put together; `size` is that of the last dim.

    >>> unpack(jnp.array([49, 14], jnp.int8), 3).tolist()
    [1, -2, 3]
    """
    return jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=-1)[..., :size]


def _block(size: int) -> int:
    """Elements that share a scale, of a dim of that size.

    >>> _block(4096), _block(192), _block(786), _block(509)
    (256, 192, 131, 509)
    """
    fits = [b for b in range(SMALLEST, LARGEST + 1) if size % b == 0]
    return max(fits, default=size)
