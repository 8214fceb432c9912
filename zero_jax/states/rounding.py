"""Which way numbers are rounded: up as often as what is cut off says.

An average that moves by a thousandth a step never moves if it is rounded to the nearest of eight
numbers an octave: the root of a second moment with a decay of 0.999 is then half of what it should
be. Rounded like this it is right on average, as long as it is in the range of its block.

What decides is no random number but where an element is in a sequence that fills the interval
evenly (multiples of the golden ratio): what stands between two numbers is rounded up at even
intervals, which strays less than chance does. Elements begin at different places, by a hash of
their logical indices, so the bits are the same on any number of devices.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_GOLDEN = 2654435769  # 2^32 / 1.618...
_LARGEST = 0x7F7F  # the largest finite bf16


def noise(
    shape: Sequence[int],
    starts: Sequence[jax.Array | int],
    whole: Sequence[int],
    leaf: int,
    step: jax.Array,
) -> jax.Array:
    """uint32 for each element of a piece of a leaf.

    Args:
      shape: of the piece.
      starts: where it begins in the leaf.
      whole: the leaf's logical shape.
      leaf: its number, for no two to be rounded alike.
      step: how often it was updated.

    >>> whole = noise((4, 2), (0, 0), (4, 2), 0, jnp.int32(3))
    >>> whole[2:] == noise((2, 2), (2, 0), (4, 2), 0, jnp.int32(3))
    Array([[ True,  True],
           [ True,  True]], dtype=bool)
    """
    index = jnp.full(shape, jnp.uint32(leaf * _GOLDEN % 2**32))
    for dim, start in enumerate(starts):
        at = jax.lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.asarray(start, jnp.uint32)
        index += at * jnp.uint32(math.prod(whole[dim + 1 :]) % 2**32)
    return _mixed(index) + step.astype(jnp.uint32) * jnp.uint32(_GOLDEN)


def without_padding(piece: jax.Array, starts: Sequence[Any], whole: Sequence[int]) -> jax.Array:
    """A piece of a leaf with zeros where the leaf has ended, which share no block with numbers.

    Args:
      piece: with padding along a dim that is cut.
      starts: where it begins; traced where a dim is cut, a number elsewhere.
      whole: the leaf's logical shape.

    >>> without_padding(jnp.ones(4), [jnp.int32(4)], (6,))
    Array([1., 1., 0., 0.], dtype=float32)
    """
    for dim, start in enumerate(starts):
        if isinstance(start, jax.Array):
            at = jax.lax.broadcasted_iota(jnp.int32, piece.shape, dim) + start
            piece = jnp.where(at < whole[dim], piece, 0)
    return piece


def _mixed(x: jax.Array) -> jax.Array:
    """A hash (the end of MurmurHash3): each of its bits depends on all of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """fp32 as bf16; what is finite stays so, and what is not stays as it is.

    >>> to_bfloat16(jnp.float32(1 + 2**-9), jnp.uint32(2**32 - 1)) > 1
    Array(True, dtype=bool)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits & jnp.uint32(1 << 31)
    up = jnp.minimum(((bits ^ sign) + (noise >> 16)) >> 16, _LARGEST) | sign >> 16
    rounded = jax.lax.bitcast_convert_type(up.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
