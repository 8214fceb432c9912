"""Expert parallelism: rows are sent to the devices that store their experts, and back.

An expert's matrix is never gathered over the mesh axis `experts`. Its operand, with the same number
of rows for each expert, is sent to the devices that store it, and the results are sent back:

    (rows, E, ...) on each of G groups  ->  (G · rows, E / G, ...), by one all-to-all

A device sends (G - 1) / G of its rows once in each direction, forward and backward, for any number
of experts. An expert's gradient is complete where the expert is stored. Large operands are sent in
parts of the rows, each sent while the one before it is multiplied. Runs inside `shard_map`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from zero_jax.sharding.mesh import EXPERTS
from zero_jax.tracing.interpreter import Evaluator
from zero_jax.tracing.jaxpr import ELEMENTWISE, Walk, is_in, is_var, on_piece, shape_of

# Rows are sent in at most this many parts, of at least this many bytes: on a link between hosts,
# smaller ones take as long to start as to send.
MOST_PARTS, PART_BYTES = 4, 2**24
SCOPE = "zero_experts"  # in the names of the operations that communicate tokens


class ExpertDims(NamedTuple):
    """The dims of a value that count experts, and the rows of each of them."""

    experts: int
    rows: int


def expert_dims(
    closed: jex.ClosedJaxpr, experts: Mapping[int, int]
) -> dict[Any, ExpertDims] | None:
    """Returns the dims of experts and rows of each value that is computed per expert.

    Args:
      closed: Equations that multiply with matrices of experts, and those between them.
      experts: The inputs that are those matrices, with the dim that counts experts.

    Returns:
      None if an equation is not computed per expert, or has its rows along another dim.
    """
    walk = _PerExpert({closed.jaxpr.invars[at]: dim for at, dim in experts.items()})
    try:
        walk.environment(closed, [None] * len(closed.jaxpr.invars))
    except _NotPerExpertError:
        return None
    return walk.dims


class _NotPerExpertError(Exception):
    """An equation is not computed per expert."""


class _PerExpert(Walk[None]):
    """Finds the dims of values, also those of inputs, from the products that read them."""

    def __init__(self, weights: Mapping[jex.Var, int]):
        self._weights = weights
        self.dims: dict[Any, ExpertDims] = {}

    def literal(self, atom: jex.Literal) -> None:
        return None

    def equation(self, eqn: jex.JaxprEqn, values: list[None]) -> list[None]:
        rules = {"dot_general": self._product, "transpose": self._transposed}
        made = rules.get(eqn.primitive.name, self._elementwise)(eqn)
        if made is None or len(eqn.outvars) != 1:
            raise _NotPerExpertError
        self.dims[eqn.outvars[0]] = made
        return [None]

    def _product(self, eqn: jex.JaxprEqn) -> ExpertDims | None:
        summed, batch = eqn.params["dimension_numbers"]
        matrices = [(i, atom) for i, atom in enumerate(eqn.invars) if is_in(atom, self._weights)]
        if len(matrices) != 1 or not all(map(is_var, eqn.invars)):
            return None
        ((weight, matrix),) = matrices
        other, dim = 1 - weight, self._weights[matrix]
        if dim not in batch[weight]:
            return None
        at = tuple(batch[weight]).index(dim)
        bound = {*summed[other], *batch[other]}
        free = [d for d in range(len(shape_of(eqn.invars[other]))) if d not in bound]
        if not free:
            return None
        dims = self.dims.setdefault(eqn.invars[other], ExpertDims(batch[other][at], free[0]))
        if dims.experts != batch[other][at] or dims.rows not in free:
            return None
        # Dims of a product: batch dims, free dims of the first operand, those of the second.
        columns = len(shape_of(eqn.invars[0])) - len(summed[0]) if weight == 0 else len(batch[0])
        return ExpertDims(at, columns + free.index(dims.rows))

    def _transposed(self, eqn: jex.JaxprEqn) -> ExpertDims | None:
        dims, order = self.dims.get(eqn.invars[0]), tuple(eqn.params["permutation"])
        return dims and ExpertDims(order.index(dims.experts), order.index(dims.rows))

    def _elementwise(self, eqn: jex.JaxprEqn) -> ExpertDims | None:
        arrays = [atom for atom in eqn.invars if shape_of(atom)]
        known = {self.dims[atom] for atom in arrays if is_in(atom, self.dims)}
        alike = {shape_of(atom) for atom in arrays} == {shape_of(eqn.outvars[0])}
        if eqn.primitive.name not in ELEMENTWISE or len(known) != 1 or not alike:
            return None
        if any(not is_var(atom) or atom in self._weights for atom in arrays):
            return None
        (dims,) = known
        self.dims.update(dict.fromkeys(arrays, dims))
        return dims


@jax.named_scope(SCOPE)
def run(
    closed: jex.ClosedJaxpr,
    values: Sequence[Any],
    experts: Mapping[int, int],
    most: int = MOST_PARTS,
) -> list[jax.Array]:
    """Evaluates equations that are computed per expert.

    Args:
      closed: The equations.
      values: Its inputs; of experts those of this device's group.
      experts: As for `expert_dims`.
      most: Maximum number of parts of the rows.

    Returns:
      Its results, of all experts, for this device's rows.
    """
    known = expert_dims(closed, experts)
    assert known is not None
    of_inputs = [known.get(var) for var in closed.jaxpr.invars]
    of_results = [known[var] for var in closed.jaxpr.outvars]
    count = _parts([(x, d.rows) for x, d in zip(values, of_inputs, strict=True) if d], most)
    made = []
    for part in range(count):
        inputs = [
            x if dims is None else _sent(_part(x, dims.rows, part, count), dims)
            for x, dims in zip(values, of_inputs, strict=True)
        ]
        outs = Operations().run(closed, inputs)
        made.append([_returned(x, dims) for x, dims in zip(outs, of_results, strict=True)])
    return [
        jax.numpy.concatenate(parts, dims.rows) if count > 1 else parts[0]
        for parts, dims in zip(zip(*made, strict=True), of_results, strict=True)
    ]


class Operations(Evaluator):
    """Runs operations on arrays of other sizes than they were traced with."""

    def equation(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.primitive.name not in ELEMENTWISE:
            return [eqn.primitive.bind(*values, **eqn.params)]
        shape = next(x.shape for x in values if jax.numpy.ndim(x))
        return [*on_piece(eqn, values, shape)]


def _parts(operands: Sequence[tuple[jax.Array, int]], most: int) -> int:
    """Returns the number of parts that rows are sent in."""
    large = min(x.nbytes for x, _ in operands) // PART_BYTES
    fit = (n for n in range(most, 1, -1) if all(x.shape[rows] % n == 0 for x, rows in operands))
    return next((n for n in fit if n <= large), 1)


def _part(x: jax.Array, rows: int, part: int, count: int) -> jax.Array:
    size = x.shape[rows] // count
    return jax.lax.slice_in_dim(x, part * size, (part + 1) * size, axis=rows)


def _sent(x: jax.Array, dims: ExpertDims) -> jax.Array:
    """Returns the experts of this device's group, with the rows of all groups."""
    return jax.lax.all_to_all(x, EXPERTS, dims.experts, dims.rows, tiled=True)


def _returned(x: jax.Array, dims: ExpertDims) -> jax.Array:
    """Inverts `_sent`."""
    return jax.lax.all_to_all(x, EXPERTS, dims.rows, dims.experts, tiled=True)
