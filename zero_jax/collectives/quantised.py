"""Collectives of matrices as integers with one scale per block: int8 weights, int8/int4 gradients.

A block is rounded to 255 steps (int8) or 15 (int4, two per byte). The error of a number is at most
half a step: the largest magnitude of its block / 254, or / 14.

Weights: every device rounds its shard of the fp32 master parameters and sends steps and scales, and
all devices dequantise them, in the forward and the backward pass. The master parameters are
unchanged, so errors do not accumulate over steps. Secondary shards were joined in the compute dtype
before, so a weight has that rounding error too.

Gradients: every device rounds its own full gradient and sends each shard to its device, which
dequantises and sums in fp32. Each number is rounded once per use and micro-batch, by its sender.
The error of the sum is at most N half steps. Sums over replicas use no integers. There is no error
feedback: it needs a full gradient on every device, 2Ψ bytes in bf16, that stages 2 and 3 never
hold.

Sends bits / 8 + 4 / block bytes per element instead of 2 (bf16).
Source: Wang et al., ZeRO++, arXiv:2306.10209, sections 3.1 (weights, qwZ) and 3.3 (gradients, qgZ;
here in one hop).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.collectives.precision import cast
from zero_jax.sharding.mesh import Axis

Collective = Callable[[jax.Array, Axis, int, int | None], jax.Array]  # of an axis, dim and bucket
_One = tuple[jax.Array]

# Bits of integers by the name of the setting.
BITS = {None: None, "fp8": None, "int8": 8, "int4": 4}
# Elements per scale: the largest divisor of the last dim between these, or all of it.
LARGEST, SMALLEST = 256, 32
# Four numbers and their scale are 8 bytes as int8: not fewer than as bf16.
TOO_SHORT = 4


def all_gather(exact: Collective, dtype: DTypeLike) -> Collective:
    """Returns an all-gather of matrices that are rounded to int8.

    Args:
      exact: An all-gather of arrays.
      dtype: Dtype of the result.
    """

    def rounded(shard: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
        steps, scales = (exact(x, axis, dim, bucket_bytes) for x in quantise(shard))
        return dequantise(steps, scales, dtype)

    return _as_if_exact(rounded, lambda x, *where: exact(cast(x, dtype), *where))


def psum_scatter(
    exact: Collective,
    by_owner: Callable[[jax.Array, Axis, int], jax.Array],
    all_to_all: Callable[[jax.Array, Axis, int | None], jax.Array],
    bits: int,
) -> Collective:
    """Returns a reduce-scatter of matrices that are rounded, summed in fp32.

    Args:
      exact: A reduce-scatter of arrays.
      by_owner: Stacks shards by their device.
      all_to_all: Sends row i to device i.
      bits: 8 or 4.
    """

    def rounded(full: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
        rows = by_owner(full, axis, dim)
        steps, scales = quantise(rows, bits)
        sent = pack(steps) if bits == 4 else steps
        sent, scales = (all_to_all(x, axis, bucket_bytes) for x in (sent, scales))
        steps = unpack(sent, rows.shape[-1]) if bits == 4 else sent
        return dequantise(steps, scales, jnp.float32).sum(0)

    return _as_if_exact(rounded, exact)


def _as_if_exact(rounded: Collective, exact: Collective) -> Collective:
    """Returns a collective that rounds, with the derivative of one that does not round."""
    wrapped = jax.custom_jvp(rounded, nondiff_argnums=(1, 2, 3))

    @wrapped.defjvp
    def tangent(
        axis: Axis, dim: int, bucket_bytes: int | None, primals: _One, tangents: _One
    ) -> tuple[jax.Array, jax.Array]:
        out = wrapped(*primals, axis, dim, bucket_bytes)
        return out, exact(*tangents, axis, dim, bucket_bytes).astype(out.dtype)

    return wrapped


def quantise(x: jax.Array, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """Returns int8 steps of the shape of `x`, and the step size of each block of the last dim.

    >>> steps, scales = quantise(jnp.array([[0.0, 0.5, -1.0]]))
    >>> steps.tolist(), round(1 / float(scales[0, 0]))
    ([[0, 64, -127]], 127)
    """
    block = _block(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Stays NaN for a block with a NaN, so that the step is skipped.
    scales = jnp.where(largest == 0, 1.0, largest / (2 ** (bits - 1) - 1))
    return jnp.round(blocks / scales).astype(jnp.int8).reshape(x.shape), scales[..., 0]


def dequantise(steps: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Inverts `quantise` up to rounding."""
    blocks = steps.astype(jnp.float32).reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).astype(dtype).reshape(steps.shape)


def pack(steps: jax.Array) -> jax.Array:
    """Packs 4-bit steps, from -7 to 7, two per byte: the first half of the last dim in low bits.

    >>> pack(jnp.array([1, -2, 3], jnp.int8)).tolist()
    [49, 14]
    """
    odd = steps.shape[-1] % 2
    if odd:
        steps = jnp.pad(steps, [(0, 0)] * (steps.ndim - 1) + [(0, 1)])
    low, high = jnp.split(steps, 2, axis=-1)
    return (high << 4) | (low & 15)


def unpack(packed: jax.Array, size: int) -> jax.Array:
    """Inverts `pack`; `size` is that of the last dim.

    >>> unpack(jnp.array([49, 14], jnp.int8), 3).tolist()
    [1, -2, 3]
    """
    return jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=-1)[..., :size]


def _block(size: int) -> int:
    """Returns the number of elements per scale, for a dim of that size.

    >>> _block(4096), _block(192), _block(786), _block(509)
    (256, 192, 131, 509)
    """
    fits = [b for b in range(SMALLEST, LARGEST + 1) if size % b == 0]
    return max(fits, default=size)
