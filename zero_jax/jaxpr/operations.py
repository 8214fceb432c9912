"""Operations that do to a piece of an array what they do to the whole: the elementwise ones."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxpr.equations import shape_of

ELEMENTWISE = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "sign", "abs", "square", "max"),
        *("min", "pow", "integer_pow", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "log1p"),
        *("expm1", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "floor", "ceil"),
        *("round", "clamp", "select_n", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "and"),
        *("or", "xor", "not", "nextafter", "reduce_precision", "convert_element_type", "copy"),
        *("real", "imag", "conj", "complex", "stop_gradient", "population_count", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic"),
    )
)


def runs_on_pieces(eqn: jex.JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether it is elementwise along a leaf of that shape, with scalars as the rest."""
    if shape == () or any(shape_of(var) != shape for var in eqn.outvars):
        return False
    shapes = {shape_of(atom) for atom in eqn.invars}
    if eqn.primitive.name == "broadcast_in_dim":
        return shapes == {()}
    return eqn.primitive.name in ELEMENTWISE and bool(shapes) and shapes <= {shape, ()}


def on_piece(eqn: jex.JaxprEqn, values: Sequence[Any], shape: tuple[int, ...]) -> Sequence[Any]:
    """The results of such an equation for one piece; scalars stand for whole leaves."""
    pieces = [jnp.broadcast_to(value, shape) for value in values]
    if eqn.primitive.name == "broadcast_in_dim":
        return pieces
    return [eqn.primitive.bind(*pieces, **eqn.params)]
