"""Dims of a matrix in its products."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax.extend.core as jex

from zero_jax.tracing.jaxpr import shape_of


@dataclasses.dataclass(frozen=True)
class ProductDims:
    """The dims of a matrix that a product sums over, and those that stay; counted from the end.

    Dims that are neither count matrices: layers, or experts of a batched product.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, eqn: jex.JaxprEqn, at: int, places: Sequence[int] | None = None) -> Self:
        """Returns the dims of input `at` of a product.

        Args:
          eqn: The product.
          at: 0 or 1.
          places: The dim of the matrix that each dim of the input is; by default the same.
        """
        contracted, batch = (part[at] for part in eqn.params["dimension_numbers"])
        ndim = len(shape_of(eqn.invars[at]))
        known = range(-ndim, 0) if places is None else places
        stay = [d for d in range(ndim) if d not in (*contracted, *batch)]
        inputs, outputs = (tuple(sorted(known[d] for d in own)) for own in (contracted, stay))
        return cls(inputs, outputs)
