"""Runs a traced loss with adapted matrices in place of some of its leaves.

Products take a matrix apart (`matrix.py`). A loop over a stack of matrices loops over their parts;
slices of a stack are slices of the parts. Whatever else reads one gets it whole: always right, and
dearer.

Each product, or whatever else reads a matrix, is a `jax.checkpoint` of its own: what its backward
pass keeps are the parts, never the opened matrix.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.adapters.matrix import Dims, Matrix, product, product_dims
from zero_jax.jaxpr import equations

# Told of each matrix that is read: how, or None if by no product.
Seen = Callable[[str, Dims | None], Any]


def run(closed: jex.ClosedJaxpr, args: Sequence[Any], seen: Seen = lambda *_: None) -> list[Any]:
    """Runs a traced loss.

    Args:
      closed: its jaxpr.
      args: its inputs: arrays, and matrices.
      seen: is told of each read.
    """
    inside = _Run(seen, in_loop=False)
    return inside.opened(inside(equations.written_out(closed), args))


class _Run:
    def __init__(self, seen: Seen, in_loop: bool):
        self._seen, self._in_loop = seen, in_loop

    def __call__(self, closed: jex.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [equations.read(env, a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self._one(eqn, values), strict=True))
        return [equations.read(env, a) for a in jaxpr.outvars]

    def _one(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        mine = [at for at, v in enumerate(values) if isinstance(v, Matrix)]
        if not mine:
            return equations.function(eqn)(*values)
        name = eqn.primitive.name
        if len(values) == 1 and (made := _through(eqn, values[0])) is not None:
            return made
        if name == "scan":
            return self._scan(eqn, values)
        if name in equations.REMAT and not eqn.params.get("differentiated"):
            return self._remat(eqn, values)
        if name == "dot_general" and len(mine) == 1:
            return self._product(eqn, values, mine[0])
        return self._whole(eqn, values)

    def _product(self, eqn: jex.JaxprEqn, values: list[Any], at: int) -> list[Any]:
        matrix, dims = values[at], product_dims(eqn, at)
        if matrix.low is not None and matrix.dims != dims:
            return self._whole(eqn, values)
        self._seen(matrix.path, dims)
        return self._again(eqn, lambda m, x: [product(eqn, at, x, m)], [matrix, values[1 - at]])

    def opened(self, values: Sequence[Any]) -> list[Any]:
        """The values, matrices among them whole."""
        for value in values:
            if isinstance(value, Matrix):
                self._seen(value.path, None)
        return [v.whole() if isinstance(v, Matrix) else v for v in values]

    def _whole(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        def opened(*values: Any) -> list[Any]:
            return equations.function(eqn)(*self.opened(values))

        # A loop or a function with a gradient of its own decides by itself what it keeps.
        keeps = eqn.primitive.name in equations.OWN_GRADIENT | {"while"}
        return opened(*values) if keeps else self._again(eqn, opened, values)

    def _again(
        self, eqn: jex.JaxprEqn, fun: Callable[..., list[Any]], values: Sequence[Any]
    ) -> list[Any]:
        """Runs what takes an equation's place, and again in its backward pass."""

        def placed(*values: Any) -> list[Any]:
            flat, tree = jax.tree.flatten(values)
            closed = jax.make_jaxpr(lambda *flat: fun(*jax.tree.unflatten(tree, flat)))(*flat)
            return equations.as_function(equations.as_if_from(closed, eqn))(*flat)

        again: Callable[..., list[Any]] = jax.checkpoint(placed, prevent_cse=not self._in_loop)
        return again(*values)

    def _remat(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        params, body = eqn.params, equations.written_out(equations.inner(eqn))
        again = jax.checkpoint(
            lambda *values: self(body, values),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return again(*values)

    def _scan(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        first, carried = equations.state_of(eqn)
        whole = [
            v if _stays(v, at, first, carried) else self.opened([v])[0]
            for at, v in enumerate(values)
        ]
        body = equations.written_out(equations.inner(eqn))
        inside = _Run(self._seen, in_loop=True)

        def turn(carry: Any, slices: Any) -> tuple[Any, Any]:
            outs = inside(body, [*whole[:first], *carry, *slices])
            return self.opened(outs[:carried]), outs[carried:]

        params = eqn.params
        carry, stacked = jax.lax.scan(
            turn,
            whole[first : first + carried],
            whole[first + carried :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]


def _is_wide(dtype: Any) -> bool:
    """Whether a cast there rounds no more than a step's own: else it is done to the whole sum."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def _stays(value: Any, at: int, first: int, carried: int) -> bool:
    """Whether a value goes into a loop as it is: a matrix as a constant or slice by slice."""
    if not isinstance(value, Matrix):
        return True
    return at < first or (at >= first + carried and value.may_slice())


def _through(eqn: jex.JaxprEqn, matrix: Matrix) -> list[Any] | None:
    """What an operation makes of a matrix if that is a matrix again."""
    name = eqn.primitive.name
    if name == "convert_element_type" and _is_wide(eqn.params["new_dtype"]):
        return [dataclasses.replace(matrix, dtype=eqn.params["new_dtype"])]
    if name in ("copy", "stop_gradient"):
        return [jax.tree.map(jax.lax.stop_gradient, matrix) if name != "copy" else matrix]
    if not matrix.may_slice():
        return None
    if name == "unstack" and eqn.params["axis"] == 0:
        return [jax.tree.map(operator.itemgetter(at), matrix) for at in range(matrix.shape[0])]
    if name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
        return [jax.tree.map(operator.itemgetter(0), matrix)]
    if name == "slice" and equations.takes_elements(eqn):
        start, stop = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
        stride = (eqn.params["strides"] or (1,))[0]
        return [jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, stop, stride), matrix)]
    return None
