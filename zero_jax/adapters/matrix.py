"""Evaluates a traced loss with adapted matrices W + s·A·B, as their parts, in place of its leaves.

A product with a matrix is a product with W and two thin ones, x·W + s·(x·A)·B; the gradient of W is
never computed. A loop over a stack of matrices loops over their parts, and slices of a stack are
slices of the parts. Any other operation gets the full sum: always right, at a higher cost.

A product sums over some dims of W (inputs) and keeps others (outputs). A and B also have the dims
that are neither (a stack of layers, experts of a batched product):

  A   W's dims without its outputs, then r
  B   W's dims without its inputs, with r before the first output

Each operation that reads a matrix is a `jax.checkpoint`: its backward pass saves the parts, never
the full matrix.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.adapters.quantised import Quantised
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.evaluator import Evaluator
from zero_jax.tracing.products import ProductDims


class Dims(ProductDims):
    """The dims of an adapted matrix, and those of its adapters.

    >>> Dims(inputs=(-2,), outputs=(-1,)).shapes((48, 4096, 1024), rank=16)
    ((48, 4096, 16), (48, 16, 1024))
    """

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


Value = PyTree  # an array, or a `Matrix` in its place
# Called with the path of each matrix that is read, and the dims of the product or None.
Seen = Callable[[str, Dims | None], object]


def is_matrix(value: Value) -> bool:
    """Returns True for a `Matrix`."""
    return isinstance(value, Matrix)


def run(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    args: tuple[PyTree, ...],
    seen: Seen = lambda *_: None,
) -> PyTree:
    """Evaluates a loss of parameters with matrices; calls `seen` at each read of a matrix."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_matrix)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed, out_shapes = jax.make_jaxpr(loss_fn, return_shape=True)(
        jax.tree.unflatten(structure, shapes), *args
    )
    evaluator = _Adapted(seen)
    outs = evaluator.opened(evaluator.evaluate(closed, [*leaves, *jax.tree.leaves(args)]))
    return jax.tree.unflatten(jax.tree.structure(out_shapes), outs)


class _Adapted(Evaluator[Value]):
    def __init__(self, seen: Seen, in_loop: bool = False):
        super().__init__()
        self._seen, self._in_loop = seen, in_loop

    def is_replaced(self, value: Value) -> bool:
        return is_matrix(value)

    def opened(self, values: Sequence[Value]) -> list[Value]:
        """Returns the values, with full arrays in place of matrices."""
        for value in filter(self.is_replaced, values):
            self._seen(value.path, None)
        return [v.whole() if isinstance(v, Matrix) else v for v in values]

    def agreed(self, values: list[Value], like: Sequence[Value]) -> list[Value]:
        return self.opened(values)

    def default(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        if len(values) == 1 and (made := _through(eqn, values[0])) is not None:
            return made
        at = next(i for i, value in enumerate(values) if self.is_replaced(value))
        if eqn.primitive.name == "dot_general" and not self.is_replaced(values[1 - at]):
            matrix, dims = values[at], Dims.of(eqn, at)
            if matrix.low is None or matrix.dims == dims:
                self._seen(matrix.path, dims)
                fun = lambda *pair: [_product(eqn, at, *pair)]  # noqa: E731
                return self._again(eqn, fun, [matrix, values[1 - at]])
        return self._again(eqn, lambda *values: self.while_loop(eqn, values), values)

    def while_loop(self, eqn: jex.JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
        return jaxprs.function(eqn)(*self.opened(values))

    # Like a loop, a function with a custom gradient decides by itself what it saves.
    custom_derivative = while_loop

    def cond(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        return self.default(eqn, values)

    def remat(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        of_gradient = eqn.params.get("differentiated")
        return self.default(eqn, values) if of_gradient else super().remat(eqn, values)

    def scan(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        start, carried = jaxprs.state_of(eqn)
        inputs = list(values)
        for at, value in enumerate(values[start:], start):
            is_sliced = at >= start + carried and self.is_replaced(value) and value.may_slice()
            inputs[at] = value if is_sliced else self.opened([value])[0]
        return Evaluator.scan(_Adapted(self._seen, in_loop=True), eqn, inputs)

    def _again(
        self, eqn: jex.JaxprEqn, fun: Callable[..., Sequence[Value]], values: Sequence[Value]
    ) -> list[Value]:
        """Runs a function in place of an equation, and again in its backward pass."""

        def placed(*values: Value) -> list[Value]:
            closed = jax.make_jaxpr(fun)(*values)
            return jaxprs.as_function(jaxprs.as_if_from(closed, eqn))(*jax.tree.leaves(values))

        again: Callable[..., list[Value]] = jax.checkpoint(placed, prevent_cse=not self._in_loop)
        return again(*values)


def _through(eqn: jex.JaxprEqn, matrix: Matrix) -> list[Value] | None:
    """Returns the results of an operation if they are matrices again, else None."""
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        dtype = params["new_dtype"]
        # A cast to 8 bits rounds more than the step's own.
        wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
        return [dataclasses.replace(matrix, dtype=dtype)] if wide else None
    if name in ("copy", "stop_gradient"):
        return [jax.tree.map(jax.lax.stop_gradient, matrix) if name != "copy" else matrix]
    elements: list[int | slice] = []
    if name == "unstack" and params["axis"] == 0:
        elements = [*range(matrix.shape[0])]
    elif name == "squeeze" and tuple(params["dimensions"]) == (0,):
        elements = [0]
    elif name == "slice" and jaxprs.takes_elements(eqn):
        start, stop, stride = params["start_indices"], params["limit_indices"], params["strides"]
        elements = [slice(start[0], stop[0], stride and stride[0])]
    if not elements or not matrix.may_slice():
        return None
    return [jax.tree.map(operator.itemgetter(at), matrix) for at in elements]


# For each of two operands, the dims that a product contracts and its batch dims.
_ProductDims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _product(eqn: jex.JaxprEqn, at: int, matrix: Matrix, other: jax.Array) -> jax.Array:
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
