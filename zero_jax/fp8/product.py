"""A matrix product in fp8 with its gradients, which are products in fp8 too.

Raw products of codes; scales multiply their results. So XLA can only run them in fp8: it has no
dequantised operand to multiply.

  y  = x · w      E4M3 · E4M3
  dx = g · wᵀ     E5M2 · E4M3
  dw = xᵀ · g     E4M3 · E5M2

Scales of an operand: one for each tensor ("tensor"), or one for each row of the product ("row"),
that is for each slice along the dims that the product sums over. The gradients sum over other dims,
in which such scales of the stored codes vary. They multiply g before it is quantised.

A weight is a pair: codes, which are read, and a stand-in of its shape, whose values are never read
and with respect to which the gradient is taken. The same holds for x.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.fp8.formats import E4M3, E5M2, quantise

# In the names of products in compiled programs, also of those that XLA runs in another dtype.
SCOPE = "fp8_product"
_Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A product, with the dims of its operands as letters.

    Attributes:
      x: The dims of the activations.
      w: The dims of the weight.
      out: The dims of the result.
      x_first: True if the activations are the first operand.
      by_row: True for a scale per row.
      dtype: Dtype of the result.
    """

    x: str
    w: str
    out: str
    x_first: bool
    by_row: bool
    dtype: DTypeLike

    def scaled(self, letters: str, other: str) -> list[int]:
        """Returns the dims of an operand along which numbers share a scale, given its partner's.

        With a scale per row, those that the product sums over.
        """
        if not self.by_row:
            return list(range(len(letters)))
        summed = {c for c in letters if c in other and c not in self.out}
        return [d for d, c in enumerate(letters) if c in summed]

    def quantised(self, x: jax.Array) -> _Pair:
        """Returns codes and scale of the activations; they have no derivative."""
        return quantise(jax.lax.stop_gradient(x), E4M3, self.scaled(self.x, self.w))


def product(
    form: Contraction, x: jax.Array, x_codes: _Pair, w: jax.Array, w_codes: _Pair
) -> jax.Array:
    """Returns the product of two matrices, given each with codes and scale.

    Args:
      form: The dims.
      x: Activations. Their values are not read.
      x_codes: Codes and scale of the activations.
      w: The weight, or an array of its shape and dtype. Its values are not read.
      w_codes: Codes and scale of the weight.
    """

    @jax.custom_vjp
    def fp8_product(x: jax.Array, w: jax.Array, x_codes: _Pair, w_codes: _Pair) -> jax.Array:
        operands = (*x_codes, form.x), (*w_codes, form.w)
        first, second = operands if form.x_first else operands[::-1]
        return _dot(first, second, form.out, form.dtype)

    def forward(
        x: jax.Array, w: jax.Array, x_codes: _Pair, w_codes: _Pair
    ) -> tuple[jax.Array, tuple[_Pair, _Pair]]:
        return fp8_product(x, w, x_codes, w_codes), (x_codes, w_codes)

    def backward(
        kept: tuple[_Pair, _Pair], g: jax.Array
    ) -> tuple[jax.Array, jax.Array, None, None]:
        dx, dw = _gradients(form, x.dtype, w.dtype, *kept, g)
        return _differentiated_once(dx), _differentiated_once(dw), None, None

    fp8_product.defvjp(forward, backward)
    return fp8_product(x, w, x_codes, w_codes)


def _gradients(
    form: Contraction, x_dtype: DTypeLike, w_dtype: DTypeLike, x: _Pair, w: _Pair, g: jax.Array
) -> _Pair:
    of_tensor = None if form.by_row else quantise(g, E5M2, range(g.ndim))

    def times(pair: _Pair, letters: str, result: str, dtype: DTypeLike) -> jax.Array:
        codes, scale = pair
        if of_tensor is not None:
            return _dot((*of_tensor, form.out), (codes, scale, letters), result, dtype)
        scaled = g.astype(jnp.float32) * _aligned(scale, letters, form.out)
        summed = [d for d, c in enumerate(form.out) if c not in result]
        left = quantise(scaled, E5M2, summed)
        return _dot((*left, form.out), (codes, jnp.ones((1,) * scale.ndim), letters), result, dtype)

    return times(w, form.w, form.x, x_dtype), times(x, form.x, form.w, w_dtype)


# Codes, scale and letters.
_Operand = tuple[jax.Array, jax.Array, str]


def _dot(a: _Operand, b: _Operand, out: str, dtype: DTypeLike) -> jax.Array:
    """Returns the product of two operands, whose scales do not vary along summed dims."""
    (x, x_scale, of_x), (y, y_scale, of_y) = a, b
    summed = [c for c in of_x if c in of_y and c not in out]
    batch = [c for c in of_x if c in of_y and c in out]
    numbers = (
        (tuple(map(of_x.index, summed)), tuple(map(of_y.index, summed))),
        (tuple(map(of_x.index, batch)), tuple(map(of_y.index, batch))),
    )
    free = [c for letters in (of_x, of_y) for c in letters if c not in (*summed, *batch)]
    # Unscaled sums exceed the range of fp16.
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    with jax.named_scope(SCOPE):
        codes = jax.lax.dot_general(x, y, numbers, preferred_element_type=wide)
    codes = jnp.transpose(codes, [[*batch, *free].index(c) for c in out])
    # Powers of two: exact in any dtype. In fp32 XLA would store the unscaled product in fp32.
    scales = (_aligned(*own, out).astype(wide) for own in ((x_scale, of_x), (y_scale, of_y)))
    return (codes * next(scales) * next(scales)).astype(dtype)


def _aligned(scale: jax.Array, letters: str, out: str) -> jax.Array:
    """Returns a scale with the dims of a result, with which it is multiplied."""
    kept = [c for c in letters if c in out]
    scale = jnp.squeeze(scale, [d for d, c in enumerate(letters) if c not in out])
    scale = jnp.transpose(scale, [kept.index(c) for c in out if c in kept])
    return jnp.expand_dims(scale, [d for d, c in enumerate(out) if c not in kept])


@jax.custom_vjp
def _differentiated_once(x: jax.Array) -> jax.Array:
    """Returns the array. A derivative of it is an error, once it is needed."""
    return x


def _no_second_derivative(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    raise ValueError(
        '`matmul_dtype`="fp8" has no second derivative: gradients are rounded to 3 bits. '
        "Use a Zero without it for derivatives of gradients"
    )


_differentiated_once.defvjp(lambda x: (x, None), _no_second_derivative)
