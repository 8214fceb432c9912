"""Sharded dims of values by the rules of XLA's partitioner; dims of products and of gathers."""

import math
from collections.abc import Callable, Sequence

import jax.extend.core as jex

from zero_jax.tracing.dataflow import Forward
from zero_jax.tracing.jaxpr import REDUCTIONS, shape_of

Dim = int | None
Dims = tuple[Dim, ...]


class ShardedDims(Forward[Dims]):
    """The sharded dim of each value, for each of several groups of mesh axes."""

    def __init__(self, groups: int):
        super().__init__()
        self.constants: Dims = (None,) * groups

    def unknown(self) -> Dims:
        return self.constants

    def join(self, one: Dims, other: Dims) -> Dims:
        return tuple(b if a is None else a for a, b in zip(one, other, strict=True))

    def sliced(self, fact: Dims) -> Dims:
        return tuple(None if d is None or d == 0 else d - 1 for d in fact)

    def stacked(self, fact: Dims) -> Dims:
        return tuple(None if d is None else d + 1 for d in fact)

    def default(self, eqn: jex.JaxprEqn, values: list[Dims]) -> Sequence[Dims]:
        groups = [sharded_dims(eqn, dims) for dims in zip(*values, strict=True)]
        return list(zip(*groups, strict=True)) if groups else [self.constants] * len(eqn.outvars)


def sharded_dims(eqn: jex.JaxprEqn, dims: Sequence[Dim]) -> list[Dim]:
    """Returns the sharded dim of each result of an operation, or None.

    These are the rules of XLA's partitioner that decide about memory. A result is sharded if one of
    its dims comes from a sharded dim of an operand, and full if that dim was summed over. Source:
    GSPMD (arXiv:2105.04663), section 3.

    >>> import jax
    >>> product = jax.make_jaxpr(lambda a, b: a @ b)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 8)))
    >>> sharded_dims(product.eqns[0], [None, 1]), sharded_dims(product.eqns[0], [1, 0])
    ([1], [None])
    """
    if all(d is None for d in dims):
        return [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "dot_general":
        made = [of.get(d) for of, d in zip(kept_dims(eqn), dims, strict=True) if d is not None]
        return [next((d for d in made if d is not None), None)]
    if name == "optimization_barrier":
        return list(dims)
    if name == "gather":  # rows of a table: each device looks up its own, and they are summed
        return [None]
    if name in _RULES:
        return [None if dims[0] is None else _RULES[name](eqn, dims[0])] * len(eqn.outvars)
    pairs = zip(map(shape_of, eqn.invars), dims, strict=True)
    sharded = [(shape, d) for shape, d in pairs if d is not None]

    def alike(shape: tuple[int, ...]) -> Dim:
        """Elementwise: a result is sharded along a dim as long as that of an operand."""
        dims = (d for s, d in sharded if len(s) == len(shape) and s[d] == shape[d])
        return next(dims, None)

    return [alike(shape_of(v)) for v in eqn.outvars]


def kept_dims(eqn: jex.JaxprEqn) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, for each operand of a product, the dims of the result that its dims become.

    Dims of the result: batch dims, free dims of the first operand, those of the second. Summed dims
    are in no result.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (len(shape_of(a)) for a in eqn.invars)
    free = [d for d in range(lhs) if d not in (*lhs_sum, *lhs_batch)]
    columns = [d for d in range(rhs) if d not in (*rhs_sum, *rhs_batch)]
    left = {d: at for at, d in enumerate((*lhs_batch, *free))}
    right = {d: at for at, d in enumerate(rhs_batch)}
    right |= {d: len(left) + at for at, d in enumerate(columns)}
    return left, right


def index_dims(eqn: jex.JaxprEqn) -> list[int]:
    """Returns the dims of a gather's result that are those of its indices, in their order."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    return [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in offsets]


def _reshaped(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """Returns the dim of the new shape that begins where the sharded one began."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    starts = (math.prod(new[:at]) == math.prod(old[:dim]) for at in range(len(new)))
    return next((at for at, same in enumerate(starts) if same and new[at] > 1), None)


def _without(removed: Sequence[int], dim: int) -> Dim:
    return None if dim in removed else dim - sum(d < dim for d in removed)


def _as_long(eqn: jex.JaxprEqn, dim: int) -> Dim:
    """Slices and pads: sharded where the dim's size is unchanged."""
    return dim if shape_of(eqn.invars[0])[dim] == shape_of(eqn.outvars[0])[dim] else None


# Operations whose first operand decides.
_RULES: dict[str, Callable[[jex.JaxprEqn, int], Dim]] = {
    "reshape": _reshaped,
    "broadcast_in_dim": lambda eqn, dim: eqn.params["broadcast_dimensions"][dim],
    "transpose": lambda eqn, dim: eqn.params["permutation"].index(dim),
    "squeeze": lambda eqn, dim: _without(eqn.params["dimensions"], dim),
    "unstack": lambda eqn, dim: _without([eqn.params["axis"]], dim),
    "stack": lambda eqn, dim: dim + (eqn.params["axis"] <= dim),
    **dict.fromkeys(
        (*REDUCTIONS, "argmax", "argmin"),
        lambda eqn, dim: _without(eqn.params["axes"], dim),
    ),
    "reduce": lambda eqn, dim: _without(eqn.params["dimensions"], dim),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "split", "rev", "concatenate"), _as_long),
    **dict.fromkeys(
        ("scatter", "scatter-add", "dynamic_update_slice", "all_gather", "reduce_scatter", "psum"),
        lambda eqn, dim: dim,
    ),
    "cumsum": lambda eqn, dim: dim,
}
