"""An adapted matrix W + s·A·B as its parts, while a traced loss runs.

A product with it is a product with W and two thin ones, x·W + s·(x·A)·B; the gradient of W is never
computed. Any other operation reads the full sum.

A product sums over some dims of W (inputs) and keeps others (outputs). A and B also have the dims
that are neither (a stack of layers, experts of a batched product):

  A   W's dims without its outputs, then r
  B   W's dims without its inputs, with r before the first output
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.adapters.quantised import Quantised
from zero_jax.tracing import jaxpr as equations


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dims of a matrix that a product sums over, and those that stay; counted from the end.

    >>> Dims(inputs=(-2,), outputs=(-1,)).shapes((48, 4096, 1024), rank=16)
    ((48, 4096, 16), (48, 16, 1024))
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, matrix: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of A and B."""
        a, b, w = self.letters(len(matrix))
        sizes = dict(zip(w, matrix, strict=True)) | {"z": rank}
        return tuple(sizes[c] for c in a), tuple(sizes[c] for c in b)

    def letters(self, ndim: int) -> tuple[str, str, str]:
        """Returns the dims of A, B and W as letters of `einsum`; r is z."""
        named = {d: chr(ord("a") + i) for i, d in enumerate(range(-ndim, 0))}
        first = min(self.outputs)
        a = [c for d, c in named.items() if d not in self.outputs]
        b = ["z" + c if d == first else c for d, c in named.items() if d not in self.inputs]
        return "".join([*a, "z"]), "".join(b), "".join(named.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Matrix:
    """An adapted leaf, or a quantised one.

    Attributes:
      stored: W, an array or a `Quantised`.
      low: A and B; None for a leaf without adapter.
      path: Path of the leaf.
      dtype: Dtype of the leaf in the program.
      dims: Dims of the product, if it has an adapter.
      scale: The scale s.
    """

    stored: jax.Array | Quantised
    low: tuple[jax.Array, jax.Array] | None
    path: str = dataclasses.field(metadata={"static": True})
    dtype: DTypeLike = dataclasses.field(metadata={"static": True})
    dims: Dims | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    def base(self) -> jax.Array:
        """Returns W."""
        if isinstance(self.stored, Quantised):
            return self.stored.open(self.dtype)
        return jnp.asarray(self.stored, self.dtype)

    def whole(self) -> jax.Array:
        """Returns W + s·A·B."""
        if self.low is None:
            return self.base()
        assert self.dims is not None
        a, b, w = self.dims.letters(len(self.shape))
        delta = jnp.einsum(f"{a},{b}->{w}", *self.low, preferred_element_type=jnp.float32)
        return (self.base().astype(jnp.float32) + self.scale * delta).astype(self.dtype)

    def may_slice(self) -> bool:
        """Returns whether an element along dim 0 consists of such elements of its parts."""
        first = -len(self.shape)
        dims = () if self.dims is None else (*self.dims.inputs, *self.dims.outputs)
        blocks = self.stored.dim if isinstance(self.stored, Quantised) else None
        return first not in dims and first != blocks


# For each of two operands, the dims that a product contracts and its batch dims.
_ProductDims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def product_dims(eqn: jex.JaxprEqn, at: int) -> Dims:
    """Returns the dims of input `at` that a product sums over, and those that stay."""
    contracted, batch = (part[at] for part in eqn.params["dimension_numbers"])
    ndim = len(equations.shape_of(eqn.invars[at]))
    stay = [d for d in range(ndim) if d not in (*contracted, *batch)]
    return Dims(tuple(d - ndim for d in sorted(contracted)), tuple(d - ndim for d in stay))


def product(eqn: jex.JaxprEqn, at: int, other: jax.Array, matrix: Matrix) -> jax.Array:
    """Returns the product of a matrix, which is input `at` of an equation, and another array."""
    params = eqn.params
    precision = {"precision": params["precision"]}

    def times(x: jax.Array, y: jax.Array, dims: _ProductDims, dtype: DTypeLike) -> jax.Array:
        pair, (first, second) = ((x, y), dims) if at == 1 else ((y, x), dims[::-1])
        numbers = (first[0], second[0]), (first[1], second[1])
        return jax.lax.dot_general(*pair, numbers, **precision, preferred_element_type=dtype)

    contracted, batch = params["dimension_numbers"]
    mine, its = ((contracted[i], batch[i]) for i in (at, 1 - at))
    out = times(other, matrix.base(), (its, mine), params["preferred_element_type"])
    if matrix.low is None:
        return out
    assert matrix.dims is not None
    a, b, w = matrix.dims.letters(len(matrix.shape))
    places = [[w[d] for d in part] for part in mine]
    of_a = tuple(map(a.index, places[0])), tuple(map(a.index, places[1]))
    thin = times(other, matrix.low[0], (its, of_a), jnp.float32).astype(other.dtype)
    # Batch dims of the thin product come first; r is last if x comes first, else after the batch.
    batched = tuple(range(len(places[1])))
    r = thin.ndim - 1 if at == 1 else len(batched)
    of_b = (b.index("z"),), tuple(b.index(c) for c in places[1])
    added = times(thin, matrix.low[1], (((r,), batched), of_b), jnp.float32)
    return out + (matrix.scale * added).astype(out.dtype)
