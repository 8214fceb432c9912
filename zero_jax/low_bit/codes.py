"""8-bit floats with a shared exponent per block, and unbiased rounding to 8 and 16 bits.

A block is 128 elements along one dim, by index in the full array, so codes do not depend on the
partition. Its scale is the exponent of its largest element, and a code is the first bits of a
float: nothing is divided.

  signed blocks    sign, 4 bits of exponent, 3 of mantissa: 14 octaves below the largest element;
                   smaller elements become 0
  positive blocks  5 bits of exponent, 3 of mantissa: 30 octaves; smaller elements become the
                   smallest code, never 0, since optimizers divide by their roots

Positive blocks have twice the octaves, as squares need. Infinities and NaN have their own codes and
change nothing else in their block. Bits per element with scales: 8.125; 8 + 16/d along a dim of
d < 128.

An average that moves by a thousandth per step never moves if it is rounded to the nearest of eight
values per octave: the root of a second moment with decay 0.999 would be half of what it should be.
So rounding goes up as often as the dropped bits say. A low-discrepancy sequence decides (multiples
of the golden ratio, offset by a hash of the element's index), which strays less than random bits
and does not depend on the number of devices.

Source: block-wise dynamic range as in 8-bit Optimizers via Block-wise Quantization
(arXiv:2110.02861); shared exponents as in OCP Microscaling Formats.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.sharding.layout import partition

BLOCK = 128
_SHORT = 16  # along shorter dims, blocks would be mostly scale
_MANTISSA = 3
_CUT = 23 - _MANTISSA  # bits of a float that a code drops
_UNIT = 1 << _CUT  # the difference of two adjacent codes, in the bits of a float
_OCTAVE = 1 << _MANTISSA  # codes of one exponent
_INFINITY = 255 << 23  # in the bits of a float
_SIGNED, _POSITIVE = 15, 31  # octaves below the largest element
_SIGN = 1 << 8  # in a scale, above the exponent: the block has negative elements
_NAN = 128  # the code of "minus zero" in signed blocks
_LIKELY = 64  # devices
_GOLDEN = 2654435769  # 2^32 / 1.618...
_LARGEST_BF16 = 0x7F7F  # the largest finite one


def block_dim(shape: tuple[int, ...]) -> int:
    """Returns the dim of a leaf's blocks: a long one that is not sharded over many devices.

    It is the same for every N. If it is sharded all the same, blocks may span devices.

    >>> block_dim((72, 3072, 12288)), block_dim((50257, 1600)), block_dim((4096,))
    (2, 0, 0)
    """
    sharded = partition(shape, _LIKELY).dim
    dims = range(len(shape))
    rest = [
        d for d in dims if (sharded is None or d != sharded % len(shape)) and shape[d] >= _SHORT
    ]
    return max(rest or dims, key=lambda d: (shape[d], d))


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales: one for each block.

    >>> scales_shape((72, 3072, 12288)), scales_shape((50257, 1600))
    ((72, 3072, 96), (393, 1600))
    """
    dim = block_dim(shape)
    return (*shape[:dim], -(-shape[dim] // BLOCK), *shape[dim + 1 :])


def scales_of(x: jax.Array, dim: int) -> jax.Array:
    """Returns the scales of blocks, uint16: the exponent of a float, and a bit for signed blocks.

    The scale of a block is the `larger` of those of its two halves.

    Args:
      x: A leaf in fp32, or a part of it that begins at a block.
      dim: The dim of the blocks.

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
    """Returns the scales of blocks that span devices, inside `shard_map`.

    Args:
      scales: The scales of the parts of the same blocks on each device, 0 for absent ones.
      axis: The mesh axes that the blocks span.
    """
    wide = scales.astype(jnp.uint32)
    parts = jax.lax.pmax(jnp.stack([wide & 255, wide & _SIGN]), axis)
    return (parts[0] | parts[1]).astype(jnp.uint16)


def encode(x: jax.Array, scales: jax.Array, dim: int | None, noise: jax.Array) -> jax.Array:
    """Encodes fp32 as uint8 codes of the same shape.

    Args:
      x: fp32, as for `scales_of`.
      scales: The scales of its blocks.
      dim: The dim of the blocks; None if each element has its own scale.
      noise: uint32 of the same shape, uniform: decides the rounding.

    >>> x = jnp.array([0.0, 1.0, -0.5])
    >>> encode(x, scales_of(x, 0), 0, jnp.zeros(3, jnp.uint32))
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


def decode(codes: jax.Array, scales: jax.Array, dim: int | None) -> jax.Array:
    """Decodes the codes of `encode` to fp32.

    >>> x = jnp.array([0.0, 1.0, -0.5])
    >>> decode(encode(x, scales_of(x, 0), 0, jnp.zeros(3, jnp.uint32)), scales_of(x, 0), 0)
    Array([ 0. ,  1. , -0.5], dtype=float32)
    """
    each = _to_each(scales, dim, codes.shape)
    code, signed = codes.astype(jnp.int32), each >= _SIGN
    magnitude = jnp.where(signed, code & 127, code)
    bits = magnitude + _lowest(each)
    # 0, or below the smallest float that is not subnormal.
    bits = jnp.where((magnitude > 0) & (bits >= _OCTAVE), bits, 0) << _CUT
    infinity, nan = _not_finite(signed)
    bits = jnp.where(magnitude == infinity, _INFINITY, bits)
    x = jax.lax.bitcast_convert_type(bits | jnp.where(signed, code >> 7, 0) << 31, jnp.float32)
    return jnp.where(code == nan, jnp.float32(np.nan), x)


def _not_finite(signed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of infinity and of NaN."""
    return jnp.where(signed, 127, 254), jnp.where(signed, _NAN, 255)


def _lowest(scales: jax.Array) -> jax.Array:
    """Returns the smallest float of a block, in units of a code."""
    octaves = jnp.where(scales >= _SIGN, _SIGNED, _POSITIVE)
    return ((scales & 255) - octaves) << _MANTISSA


def _largest(x: jax.Array, dim: int) -> jax.Array:
    """Returns the maximum of each block."""
    size = x.shape[dim]
    blocks = -(-size // BLOCK)
    widths = [(0, blocks * BLOCK - size if d == dim else 0) for d in range(x.ndim)]
    filled = jnp.pad(x, widths) if size % BLOCK else x
    apart = filled.reshape(*x.shape[:dim], blocks, BLOCK, *x.shape[dim + 1 :])
    return apart.max(axis=dim + 1)


def _to_each(scales: jax.Array, dim: int | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns the scale of each element, int32."""
    wide = scales.astype(jnp.int32)
    if dim is None:
        return wide
    apart = jnp.expand_dims(wide, dim + 1)
    apart = jnp.broadcast_to(apart, (*apart.shape[: dim + 1], BLOCK, *apart.shape[dim + 2 :]))
    joined = apart.reshape(*shape[:dim], scales.shape[dim] * BLOCK, *shape[dim + 1 :])
    return jax.lax.slice_in_dim(joined, 0, shape[dim], axis=dim)


def noise(
    shape: Sequence[int],
    starts: Sequence[jax.Array | int],
    full_shape: Sequence[int],
    seed: int,
    step: jax.Array,
) -> jax.Array:
    """Returns uint32 for each element of a piece of a leaf, which decides its rounding.

    Args:
      shape: Shape of the piece.
      starts: Where it begins in the leaf.
      full_shape: The leaf's full shape.
      seed: A number, so that leaves are rounded differently.
      step: Number of earlier updates.

    >>> full = noise((4, 2), (0, 0), (4, 2), 0, jnp.int32(3))
    >>> full[2:] == noise((2, 2), (2, 0), (4, 2), 0, jnp.int32(3))
    Array([[ True,  True],
           [ True,  True]], dtype=bool)
    """
    index = jnp.full(shape, jnp.uint32(seed * _GOLDEN % 2**32))
    for dim, start in enumerate(starts):
        at = jax.lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.asarray(start, jnp.uint32)
        index += at * jnp.uint32(math.prod(full_shape[dim + 1 :]) % 2**32)
    return _hash(index) + step.astype(jnp.uint32) * jnp.uint32(_GOLDEN)


def without_padding(
    piece: jax.Array, starts: Sequence[int | jax.Array], full_shape: Sequence[int]
) -> jax.Array:
    """Replaces the padding of a piece by zeros, which then share blocks with elements harmlessly.

    Args:
      piece: A piece of a leaf, padded along a sharded dim.
      starts: Where it begins: traced along sharded dims, numbers elsewhere.
      full_shape: The leaf's full shape.

    >>> without_padding(jnp.ones(4), [jnp.int32(4)], (6,))
    Array([1., 1., 0., 0.], dtype=float32)
    """
    for dim, start in enumerate(starts):
        if isinstance(start, jax.Array):
            at = jax.lax.broadcasted_iota(jnp.int32, piece.shape, dim) + start
            piece = jnp.where(at < full_shape[dim], piece, 0)
    return piece


def _hash(x: jax.Array) -> jax.Array:
    """Hashes uint32 (the finaliser of MurmurHash3): each bit depends on all bits of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds fp32 to bf16; finite elements stay finite, others keep their kind.

    >>> to_bfloat16(jnp.float32(1 + 2**-9), jnp.uint32(2**32 - 1)) > 1
    Array(True, dtype=bool)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits & jnp.uint32(1 << 31)
    up = jnp.minimum(((bits ^ sign) + (noise >> 16)) >> 16, _LARGEST_BF16) | sign >> 16
    rounded = jax.lax.bitcast_convert_type(up.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
