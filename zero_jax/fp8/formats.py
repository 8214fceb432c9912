"""8-bit floats with scales that are powers of two.

  E4M3   4 bits of exponent, 3 of mantissa: up to 448; weights and activations
  E5M2   5 bits of exponent, 2 of mantissa: up to 57344; gradients

A number x is stored as codes = round(x / scale). The scale is the smallest power of two with which
the largest number fits. So scaling rounds nothing, and the codes of normal numbers do not depend on
the scale: the relative error is at most 2^-4 (E4M3) or 2^-3 (E5M2). Numbers below 2^-14 (E4M3) or
2^-29 (E5M2) of the largest have an absolute error, of at most 2^-17 or 2^-31 of the largest.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
# The exponent of the largest number of a format. Its mantissa is 1.75 in both.
_EXPONENTS = {E4M3: 8, E5M2: 15}
_BIAS, _MANTISSA, _LARGEST_MANTISSA = 127, 23, 0x600000  # of fp32


def scale_for(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the fp32 scale for numbers up to a magnitude; NaN if that is not finite.

    >>> import numpy as np
    >>> np.asarray(scale_for(jnp.array([448.0, 449.0, 1.0, 0.0]), E4M3)).tolist()
    [1.0, 2.0, 0.00390625, 1.0]
    """
    largest = largest.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> _MANTISSA) - _BIAS - _EXPONENTS[jnp.dtype(dtype)]
    exponent += (bits & (2**_MANTISSA - 1)) > _LARGEST_MANTISSA
    # The scale and its inverse are normal numbers.
    exponent = jnp.clip(exponent, 1 - _BIAS, _BIAS - 1)
    scale = jax.lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)
    return jnp.where(jnp.isfinite(largest), jnp.where(largest > 0, scale, 1.0), jnp.nan)


def encode(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the codes of numbers that fit with a scale, rounded once."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype)


def quantise(x: jax.Array, dtype: DTypeLike, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Returns codes, and a scale for all numbers along some dims, which have size 1 in it.

    >>> codes, scale = quantise(jnp.array([[0.5, -3.0], [900.0, 1.0]]), E4M3, [1])
    >>> (codes.astype(jnp.float32) * scale).tolist(), scale[:, 0].tolist()
    ([[0.5, -3.0], [896.0, 1.0]], [0.0078125, 4.0])
    """
    largest = jnp.max(jnp.abs(x), axis=tuple(dims), keepdims=True, initial=0)
    scale = scale_for(largest, dtype)
    return encode(x, scale, dtype), scale
