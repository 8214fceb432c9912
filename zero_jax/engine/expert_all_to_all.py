"""Expert parallelism: rows are sent to the devices that store their experts, and back.

An expert's matrix is never gathered over the mesh axis `experts`. Its operand, with the same number
of rows for each expert, is sent to the devices that store it, and the results are sent back:

    (rows, E, ...) on each of G groups  ->  (G · rows, E / G, ...), by one all-to-all

A device sends (G - 1) / G of its rows once in each direction, forward and backward, for any number
of experts. An expert's gradient is complete where the expert is stored. Large operands are sent in
parts of the rows, each sent while the one before it is multiplied. Runs inside `shard_map`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from zero_jax.sharding.mesh import EXPERTS
from zero_jax.tracing.dataflow import Graph, kept_dims
from zero_jax.tracing.interpreter import Resized
from zero_jax.tracing.jaxpr import ELEMENTWISE, Atom, Walk, is_in, is_var, shape_of, stretch

# Rows are sent in at most this many parts, of at least this many bytes: on a link between hosts,
# smaller ones take as long to start as to send.
MOST_PARTS, PART_BYTES = 4, 2**24
SCOPE = "zero_experts"  # in the names of the operations that communicate tokens
Weights = Mapping[Atom, int]  # matrices of experts, with the dim that counts experts


class ExpertDims(NamedTuple):
    """The dims of a value that count experts, and the rows of each of them."""

    experts: int
    rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertProducts:
    """Equations that are computed per expert: products with experts, and those between them.

    Attributes:
      at: Their positions.
      closed: The equations as a jaxpr.
      dims: The dims of experts and rows of each variable, except for the matrices of experts.
    """

    at: Sequence[int]
    closed: jex.ClosedJaxpr
    dims: Mapping[Atom, ExpertDims]

    @jax.named_scope(SCOPE)
    def run(self, values: Sequence[jax.Array], most: int = MOST_PARTS) -> list[jax.Array]:
        """Returns results of all experts for this device's rows, sent in at most `most` parts.

        Of experts it takes those of this device's group.
        """
        of_inputs = [self.dims.get(var) for var in self.closed.jaxpr.invars]
        of_results = [self.dims[var] for var in self.closed.jaxpr.outvars]
        count = _parts([(x, d.rows) for x, d in zip(values, of_inputs, strict=True) if d], most)
        made = []
        for part in range(count):
            inputs = [
                x if dims is None else _sent(_part(x, dims.rows, part, count), dims)
                for x, dims in zip(values, of_inputs, strict=True)
            ]
            outs = Resized().run(self.closed, inputs)
            made.append([_returned(x, dims) for x, dims in zip(outs, of_results, strict=True)])
        return [
            jax.numpy.concatenate(parts, dims.rows) if count > 1 else parts[0]
            for parts, dims in zip(zip(*made, strict=True), of_results, strict=True)
        ]


def per_expert(graph: Graph, at: Sequence[int], weights: Weights) -> ExpertProducts | None:
    """Returns equations that multiply with experts, and those between them, as products.

    None if an equation is not computed per expert, or has its rows along another dim.
    """
    closed, walk = stretch(graph.part(at), graph.results(at)), _PerExpert(weights)
    walk.environment(closed, [None] * len(closed.jaxpr.invars))
    return ExpertProducts(at, closed, walk.dims) if walk.holds else None


class _PerExpert(Walk[None]):
    """Finds the dims of values, also those of inputs, from the products that read them.

    Attributes:
      dims: The dims.
      holds: False if an equation is not computed per expert.
    """

    def __init__(self, weights: Weights):
        self._weights = weights
        self.dims: dict[Atom, ExpertDims] = {}
        self.holds = True

    def literal(self, atom: jex.Literal) -> None:
        return None

    def equation(self, eqn: jex.JaxprEqn, values: list[None]) -> list[None]:
        rules = {"dot_general": self._product, "transpose": self._transposed}
        made = rules.get(eqn.primitive.name, self._elementwise)(eqn)
        if made is None or len(eqn.outvars) != 1:
            self.holds = False
        else:
            self.dims[eqn.outvars[0]] = made
        return [None] * len(eqn.outvars)

    def _product(self, eqn: jex.JaxprEqn) -> ExpertDims | None:
        matrices = [at for at, atom in enumerate(eqn.invars) if is_in(atom, self._weights)]
        if len(matrices) != 1:
            return None
        (weight,) = matrices
        other, dims = eqn.invars[1 - weight], kept_dims(eqn)
        # Batch dims are the first of the result.
        batch = eqn.params["dimension_numbers"][1][1 - weight]
        experts = dims[weight].get(self._weights[eqn.invars[weight]])
        free = [d for d in dims[1 - weight] if d not in batch]
        if experts is None or experts >= len(batch) or not free or not is_var(other):
            return None
        known = self.dims.setdefault(other, ExpertDims(batch[experts], free[0]))
        if known.experts != batch[experts] or known.rows not in free:
            return None
        return ExpertDims(experts, dims[1 - weight][known.rows])

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
