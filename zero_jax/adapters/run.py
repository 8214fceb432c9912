"""Evaluates a traced loss with adapted matrices in place of some of its leaves.

Products use the parts of a matrix (`matrix.py`). A loop over a stack of matrices loops over their
parts, and slices of a stack are slices of the parts. Any other operation gets the full matrix:
always right, at a higher cost.

Each operation that reads a matrix is a `jax.checkpoint`: its backward pass saves the parts, never
the full matrix.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.adapters.matrix import Dims, Matrix, product, product_dims
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing.interpreter import Evaluator
from zero_jax.tracing.jaxpr import as_function, as_if_from, function, state_of, takes_elements

Value = PyTree  # an array, or a `Matrix` in its place
# Called with the name of each matrix that is read, and the dims of the product or None.
Seen = Callable[[str, Dims | None], None]


def run(
    closed: jex.ClosedJaxpr, args: Sequence[Value], seen: Seen = lambda *_: None
) -> list[Value]:
    """Evaluates a traced loss.

    Args:
      closed: Its jaxpr.
      args: Its inputs: arrays and matrices.
      seen: Called at each read of a matrix.
    """
    evaluator = _Adapted(seen)
    return evaluator.opened(evaluator.evaluate(closed, args))


class _Adapted(Evaluator[Value]):
    def __init__(self, seen: Seen, in_loop: bool = False):
        super().__init__()
        self._seen, self._in_loop = seen, in_loop

    def is_replaced(self, value: Value) -> bool:
        return isinstance(value, Matrix)

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
            matrix, dims = values[at], product_dims(eqn, at)
            if matrix.low is None or matrix.dims == dims:
                self._seen(matrix.path, dims)
                run = lambda m, x: [product(eqn, at, x, m)]  # noqa: E731
                return self._again(eqn, run, [matrix, values[1 - at]])
        return self._again(eqn, self._of_full(eqn), values)

    def _of_full(self, eqn: jex.JaxprEqn) -> Callable[..., list[Value]]:
        return lambda *values: function(eqn)(*self.opened(values))

    def while_loop(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        return self._of_full(eqn)(*values)

    # Like a loop, a function with a custom gradient decides by itself what it saves.
    custom_derivative = while_loop

    def cond(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        return self.default(eqn, values)

    def remat(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        of_gradient = eqn.params.get("differentiated")
        return self.default(eqn, values) if of_gradient else super().remat(eqn, values)

    def scan(self, eqn: jex.JaxprEqn, values: list[Value]) -> Sequence[Value]:
        start, carried = state_of(eqn)
        inside = _Adapted(self._seen, in_loop=True)

        def stays(at: int, value: Value) -> bool:
            """Returns True for a matrix that is a constant, or sliced along dim 0."""
            return at < start or (at >= start + carried and value.may_slice())

        inputs = [
            v if not self.is_replaced(v) or stays(at, v) else self.opened([v])[0]
            for at, v in enumerate(values)
        ]
        return Evaluator.scan(inside, eqn, inputs)

    def _again(
        self, eqn: jex.JaxprEqn, fun: Callable[..., list[Value]], values: Sequence[Value]
    ) -> list[Value]:
        """Runs a function in place of an equation, and again in its backward pass."""

        def placed(*values: Value) -> list[Value]:
            flat, tree = jax.tree.flatten(values)
            closed = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(tree, flat)))(*flat)
            return as_function(as_if_from(closed, eqn))(*flat)

        again: Callable[..., list[Value]] = jax.checkpoint(placed, prevent_cse=not self._in_loop)
        return again(*values)


def _through(eqn: jex.JaxprEqn, matrix: Matrix) -> list[Value] | None:
    """Returns the result of an operation if it is a matrix again, else None."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        # A cast to 8 bits rounds more than the step's own.
        wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
        return [dataclasses.replace(matrix, dtype=dtype)] if wide else None
    if name in ("copy", "stop_gradient"):
        return [jax.tree.map(jax.lax.stop_gradient, matrix) if name != "copy" else matrix]
    if not matrix.may_slice():
        return None
    if name == "unstack" and eqn.params["axis"] == 0:
        return [jax.tree.map(operator.itemgetter(at), matrix) for at in range(matrix.shape[0])]
    if name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
        return [jax.tree.map(operator.itemgetter(0), matrix)]
    if name == "slice" and takes_elements(eqn):
        start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
        stride = (eqn.params["strides"] or (1,))[0]
        return [jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, stop, stride), matrix)]
    return None
