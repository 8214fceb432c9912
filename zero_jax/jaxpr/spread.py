"""How a split dim spreads from one traced value to the next.

What is given to a program says which of its dims is split; XLA's partitioner carries that on
through it. This follows the part of it that decides where memory goes: a result is split if a dim
of it comes from a split dim of an operand, and whole if that dim was summed over.
Source: GSPMD (arXiv:2105.04663), section 3.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.jaxpr.equations import shape_of

Dim = int | None


def spread(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    """The split dim of each result of an equation, or None.

    Args:
      eqn: an equation of a jaxpr; calls and loops are the caller's business.
      given: the split dim of each operand, or None.

    >>> import jax
    >>> product = jax.make_jaxpr(lambda a, b: a @ b)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 8)))
    >>> spread(product.eqns[0], [None, 1]), spread(product.eqns[0], [1, 0])
    ([1], [None])
    """
    rule = _RULES.get(eqn.primitive.name, _alike)
    return rule(eqn, given) if any(d is not None for d in given) else [None] * len(eqn.outvars)


def _alike(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    """Elementwise: what is as large along the dim as a split operand is split as it is."""
    found = [(shape_of(a), d) for a, d in zip(eqn.invars, given, strict=True) if d is not None]

    def of(shape: tuple[int, ...]) -> Dim:
        alike = (d for s, d in found if len(s) == len(shape) and s[d] == shape[d])
        return next(alike, None)

    return [of(shape_of(v)) for v in eqn.outvars]


def _first(dim: Callable[[Any, int], Dim]) -> Callable[[Any, Sequence[Dim]], list[Dim]]:
    """A rule that looks at the first operand only."""

    def rule(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
        return [None if given[0] is None else dim(eqn, given[0])] * len(eqn.outvars)

    return rule


def _reshaped(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """The dim of the new shape that begins where the split one began and is cut as evenly."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    before = math.prod(old[:dim])
    for at, size in enumerate(new):
        if math.prod(new[:at]) == before and size > 1:
            return at
    return None


def _broadcast(eqn: jex.JaxprEqn, dim: int) -> Dim:
    return eqn.params["broadcast_dimensions"][dim]


def _squeezed(eqn: jex.JaxprEqn, dim: int) -> Dim:
    return dim - sum(d < dim for d in eqn.params["dimensions"])


def _reduced(eqn: jex.JaxprEqn, dim: int) -> Dim:
    axes = eqn.params["axes"]
    return None if dim in axes else dim - sum(d < dim for d in axes)


def _kept(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """Slices and pads: split where the dim's size is what it was."""
    same = shape_of(eqn.invars[0])[dim] == shape_of(eqn.outvars[0])[dim]
    return dim if same else None


def _unstacked(eqn: jex.JaxprEqn, dim: int) -> Dim:
    axis = eqn.params["axis"]
    return None if dim == axis else dim - (axis < dim)


def _stacked(eqn: jex.JaxprEqn, dim: int) -> Dim:
    return dim + (eqn.params["axis"] <= dim)


def _product(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (len(shape_of(a)) for a in eqn.invars)
    free = [d for d in range(lhs) if d not in (*lhs_sum, *lhs_batch)]
    columns = [d for d in range(rhs) if d not in (*rhs_sum, *rhs_batch)]
    left = {d: at for at, d in enumerate((*lhs_batch, *free))}
    right = {d: at for at, d in enumerate(rhs_batch)}
    right |= {d: len(left) + at for at, d in enumerate(columns)}
    spots = [left.get(given[0]), right.get(given[1])]
    return [next((s for s in spots if s is not None), None)]


def _whole(eqn: jex.JaxprEqn, given: Sequence[Dim]) -> list[Dim]:
    return [None] * len(eqn.outvars)


_RULES: dict[str, Callable[[Any, Sequence[Dim]], list[Dim]]] = {
    "dot_general": _product,
    "reshape": _first(_reshaped),
    "broadcast_in_dim": _first(_broadcast),
    "transpose": _first(lambda eqn, dim: eqn.params["permutation"].index(dim)),
    "squeeze": _first(_squeezed),
    "unstack": _first(_unstacked),
    "stack": _first(_stacked),
    "gather": _whole,  # rows of an embedding: each device looks up its own, and they are summed
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"),
        _first(_reduced),
    ),
    **dict.fromkeys(
        ("slice", "dynamic_slice", "pad", "split", "rev", "concatenate"), _first(_kept)
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "dynamic_update_slice"), _first(lambda eqn, dim: dim)
    ),
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "psum", "cumsum"), _first(lambda eqn, dim: dim)
    ),
}
