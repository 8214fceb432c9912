"""What stands for an adapted matrix while a traced loss runs: W + s·A·B, as its parts.

A product with it is a product with W and two thin ones, x·W + s·(x·A)·B: what W's gradient would
cost is never computed. Whatever else reads it gets the whole sum.

Of W's dims some are summed in the product (inputs), some stay (outputs), and those that are
neither (a stack of layers, experts of a batched product) A and B have too:

  A   W's dims without its outputs, then r
  B   W's dims without its inputs, r standing before the first output
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.adapters.quantised import Quantised
from zero_jax.tracing import jaxpr as equations


@dataclasses.dataclass(frozen=True)
class Dims:
    """Which dims of a matrix a product sums, and which stay; counted from the end.

    >>> Dims(inputs=(-2,), outputs=(-1,)).shapes((48, 4096, 1024), rank=16)
    ((48, 4096, 16), (48, 16, 1024))
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, matrix: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of A and B."""
        sizes = {d: n for d, n in zip(range(-len(matrix), 0), matrix, strict=True)}
        a = [n for d, n in sizes.items() if d not in self.outputs]
        b = [n for d, n in sizes.items() if d not in self.inputs]
        b.insert(self._place_of_rank(len(matrix)), rank)
        return (*a, rank), tuple(b)

    def fan_in(self, matrix: Sequence[int]) -> int:
        """Of how many inputs an output is the sum."""
        return math.prod(matrix[d] for d in self.inputs)

    def _place_of_rank(self, ndim: int) -> int:
        """Of r among B's dims, from the front."""
        first = min(self.outputs)
        return sum(d not in self.inputs for d in range(-ndim, first))

    def letters(self, ndim: int) -> tuple[str, str, str]:
        """A, B and W as `einsum` writes them."""
        named = {d: chr(ord("a") + i) for i, d in enumerate(range(-ndim, 0))}
        a = "".join(c for d, c in named.items() if d not in self.outputs) + "z"
        b = [c for d, c in named.items() if d not in self.inputs]
        b.insert(self._place_of_rank(ndim), "z")
        return a, "".join(b), "".join(named.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Matrix:
    """An adapted leaf, or a quantised one.

    Attributes:
      stored: W: an array or a `Quantised`.
      low: A and B; None for a leaf without adapter.
      path: its name.
      dtype: in which the program has it.
      dims: of the product, if it has an adapter.
      scale: s.
    """

    stored: Any
    low: tuple[Any, Any] | None
    path: str = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    dims: Dims | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    def base(self) -> jax.Array:
        """W alone."""
        if isinstance(self.stored, Quantised):
            return self.stored.open(self.dtype)
        return jnp.asarray(self.stored, self.dtype)

    def whole(self) -> jax.Array:
        """The sum."""
        if self.low is None:
            return self.base()
        assert self.dims is not None
        a, b, w = self.dims.letters(len(self.shape))
        delta = jnp.einsum(f"{a},{b}->{w}", *self.low, preferred_element_type=jnp.float32)
        return (self.base().astype(jnp.float32) + self.scale * delta).astype(self.dtype)

    def may_slice(self) -> bool:
        """Whether an element along dim 0 is made of such elements of its parts."""
        first = -len(self.shape)
        dims = () if self.dims is None else (*self.dims.inputs, *self.dims.outputs)
        blocks = self.stored.dim if isinstance(self.stored, Quantised) else None
        return first not in dims and first != blocks


def product_dims(eqn: jex.JaxprEqn, at: int) -> Dims:
    """Which dims of input `at` a product sums, and which stay."""
    contracted, batch = (part[at] for part in eqn.params["dimension_numbers"])
    ndim = len(equations.shape_of(eqn.invars[at]))
    stay = [d for d in range(ndim) if d not in (*contracted, *batch)]
    return Dims(tuple(d - ndim for d in sorted(contracted)), tuple(d - ndim for d in stay))


def product(eqn: jex.JaxprEqn, at: int, other: jax.Array, matrix: Matrix) -> jax.Array:
    """What a product makes of a matrix, its input `at`, and another array."""
    params = eqn.params
    precision = {"precision": params["precision"]}

    def times(x: jax.Array, y: jax.Array, dims: Any, dtype: Any) -> jax.Array:
        pair, (first, second) = ((x, y), dims) if at == 1 else ((y, x), dims[::-1])
        numbers: Any = tuple(zip(first, second, strict=True))
        return jax.lax.dot_general(*pair, numbers, **precision, preferred_element_type=dtype)

    contracted, batch = params["dimension_numbers"]
    mine, its = (tuple(part[i] for part in (contracted, batch)) for i in (at, 1 - at))
    out = times(other, matrix.base(), (its, mine), params["preferred_element_type"])
    if matrix.low is None:
        return out
    assert matrix.dims is not None
    a, b, w = matrix.dims.letters(len(matrix.shape))
    places = [[w[d] for d in part] for part in mine]
    of_a = tuple(tuple(a.index(c) for c in part) for part in places)
    thin = times(other, matrix.low[0], (its, of_a), jnp.float32).astype(other.dtype)
    # Of the thin product batch dims are first; r is last if x stands first, else after the batch.
    batched = tuple(range(len(places[1])))
    r = thin.ndim - 1 if at == 1 else len(batched)
    of_b = (b.index("z"),), tuple(b.index(c) for c in places[1])
    added = times(thin, matrix.low[1], (((r,), batched), of_b), jnp.float32)
    return out + (matrix.scale * added).astype(out.dtype)
