"""Numbers in one byte: floats of 8 bits, whose exponents count from the largest of their block.

A block is 128 elements along one dim, by logical indices, so codes are the same however a leaf is
cut. Its scale is the exponent of its largest number: nothing is divided, a code is the first bits
of a float.

  with negative numbers   sign, 4 bits of exponent, 3 of mantissa: 14 octaves below the largest;
                          what is smaller is 0
  without any             5 bits of exponent, 3 of mantissa: 30 octaves; what is smaller is the
                          smallest there is, never 0, since roots of it are divided by

The second has twice the octaves, as squares have. Infinities and NaN have codes of their own and
change nothing about the rest of their block. Bits a number, scales included: 8.125; 8 + 16/d along
a dim of d < 128.
Source: blocks and a dynamic range as in Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, arXiv:2110.02861; exponents that a block shares as in OCP's Microscaling Formats.
"""

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.sharding.cuts import split

BLOCK = 128
_SHORT = 16  # a block of fewer elements is mostly scale
_MANTISSA = 3
_CUT = 23 - _MANTISSA  # bits of a float that a code does not have
_UNIT = 1 << _CUT  # the least that two codes differ by, in the bits of a float
_OCTAVE = 1 << _MANTISSA  # codes of one exponent
_INFINITY = 255 << 23  # in the bits of a float
_SIGNED, _POSITIVE = 15, 31  # octaves below the largest
_SIGN = 1 << 8  # in a scale, above the exponent: some have one
_NAN = 128  # the code of "minus zero", where there are signs
_LIKELY = 64  # devices


def block_dim(shape: tuple[int, ...]) -> int:
    """Along which dim a leaf's blocks run: a long one that many devices would not cut.

    The same for every N: where it is cut all the same, blocks may straddle shards.

    >>> block_dim((72, 3072, 12288)), block_dim((50257, 1600)), block_dim((4096,))
    (2, 0, 0)
    """
    cut = split(shape, _LIKELY).dim
    dims = range(len(shape))
    whole = [d for d in dims if (cut is None or d != cut % len(shape)) and shape[d] >= _SHORT]
    return max(whole or dims, key=lambda d: (shape[d], d))


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale for each block.

    >>> scales_shape((72, 3072, 12288)), scales_shape((50257, 1600))
    ((72, 3072, 96), (393, 1600))
    """
    dim = block_dim(shape)
    return (*shape[:dim], -(-shape[dim] // BLOCK), *shape[dim + 1 :])


def scales_of(x: jax.Array, dim: int) -> jax.Array:
    """The scales of blocks: uint16, exponents as floats have them, and whether any has a sign.

    The scale of two halves of a block is the `larger` of theirs.

    Args:
      x: fp32; a leaf, or a part of it that begins where a block does.
      dim: along which dim blocks run.

    >>> scales_of(jnp.array([0.0, 1.0, -0.5]), 0)
    Array([383], dtype=uint16)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    signed = (bits >> 31 == 1) & (magnitude > 0) & (magnitude <= _INFINITY)
    finite = jnp.where(magnitude < _INFINITY, magnitude, 0)
    # As if rounded up, whatever the noise is, and below the codes of infinity and NaN.
    top = jnp.clip((_largest(finite, dim) + (3 * _UNIT - 1)) >> 23, 1, 254)
    return (top | _largest(signed.astype(jnp.uint32) * _SIGN, dim)).astype(jnp.uint16)


def larger(scales: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """The scales of blocks that lie on several devices, of those of their parts.

    Args:
      scales: of the same blocks on all devices, 0 for those of which a device has nothing.
      axis: the mesh axes that the devices are of; inside `shard_map`.
    """
    wide = scales.astype(jnp.uint32)
    parts = jax.lax.pmax(jnp.stack([wide & 255, wide & _SIGN]), axis)
    return (parts[0] | parts[1]).astype(jnp.uint16)


def close(x: jax.Array, scales: jax.Array, dim: int, noise: jax.Array) -> jax.Array:
    """Floats as codes.

    Args:
      x: fp32, as for `scales_of`.
      scales: of its blocks.
      dim: along which dim they run.
      noise: uint32 of the same shape, all values equally likely: what decides about rounding.

    Returns:
      uint8 of the same shape.

    >>> x = jnp.array([0.0, 1.0, -0.5])
    >>> close(x, scales_of(x, 0), 0, jnp.zeros(3, jnp.uint32))
    Array([  0, 120, 240], dtype=uint8)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude, negative = bits & 0x7FFFFFFF, (bits >> 31).astype(jnp.int32)
    each = _to_each(scales, dim, x.shape)
    signed, lowest = each >= _SIGN, _lowest(each)
    least = jnp.where(signed, 0, jnp.maximum(1, _OCTAVE - lowest))  # no subnormal float
    infinity, nan = _not_finite(signed)
    code = ((magnitude + (noise >> (32 - _CUT))) >> _CUT).astype(jnp.int32) - lowest
    code = jnp.where(magnitude < _INFINITY, jnp.clip(code, least, infinity - 1), infinity)
    code = code | jnp.where(code > 0, negative << 7, 0)
    code = jnp.where(magnitude > _INFINITY, nan, code)
    return jnp.where(magnitude > 0, code, 0).astype(jnp.uint8)


def open(codes: jax.Array, scales: jax.Array, dim: int) -> jax.Array:
    """The inverse: fp32.

    >>> x = jnp.array([0.0, 1.0, -0.5])
    >>> open(close(x, scales_of(x, 0), 0, jnp.zeros(3, jnp.uint32)), scales_of(x, 0), 0)
    Array([ 0. ,  1. , -0.5], dtype=float32)
    """
    each = _to_each(scales, dim, codes.shape)
    code, signed = codes.astype(jnp.int32), each >= _SIGN
    magnitude = jnp.where(signed, code & 127, code)
    bits = magnitude + _lowest(each)
    # 0, or less than the smallest float that is not subnormal.
    bits = jnp.where((magnitude > 0) & (bits >= _OCTAVE), bits, 0) << _CUT
    infinity, nan = _not_finite(signed)
    bits = jnp.where(magnitude == infinity, _INFINITY, bits)
    x = jax.lax.bitcast_convert_type(bits | jnp.where(signed, code >> 7, 0) << 31, jnp.float32)
    return jnp.where(code == nan, jnp.float32(np.nan), x)


def _not_finite(signed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The codes of infinity and of NaN."""
    return jnp.where(signed, 127, 254), jnp.where(signed, _NAN, 255)


def _lowest(scales: jax.Array) -> jax.Array:
    """The smallest float of a block, in units of a code."""
    octaves = jnp.where(scales >= _SIGN, _SIGNED, _POSITIVE)
    return ((scales & 255) - octaves) << _MANTISSA


def _largest(x: jax.Array, dim: int) -> jax.Array:
    """Of each block."""
    size = x.shape[dim]
    blocks = -(-size // BLOCK)
    widths = [(0, blocks * BLOCK - size if d == dim else 0) for d in range(x.ndim)]
    filled = jnp.pad(x, widths) if size % BLOCK else x
    apart = filled.reshape(*x.shape[:dim], blocks, BLOCK, *x.shape[dim + 1 :])
    return apart.max(axis=dim + 1)


def _to_each(scales: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """For each element its block's; int32."""
    apart = jnp.expand_dims(scales.astype(jnp.int32), dim + 1)
    apart = jnp.broadcast_to(apart, (*apart.shape[: dim + 1], BLOCK, *apart.shape[dim + 2 :]))
    joined = apart.reshape(*shape[:dim], scales.shape[dim] * BLOCK, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(joined, 0, shape[dim], axis=dim)
