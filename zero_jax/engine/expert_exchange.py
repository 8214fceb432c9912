"""Expert parallelism: rows or tokens are sent to the devices that store their experts, and back.

An expert's matrix is never gathered over the mesh axis `experts`. With G groups of devices along
it, `ExpertProducts` sends rows, the same number for each expert:

    (rows, E, ...) on each of G groups  ->  (G · rows, E / G, ...), by one all-to-all
    results are sent back in the same way

A device sends (G - 1) / G of its rows once in each direction, forward and backward, for any number
of experts. Large operands are sent in parts of the rows, each sent while the one before it is
multiplied. Where rows are picked out of T tokens by index, and the results for each token are
picked out of theirs and summed, `TokenRegion` gathers tokens if that sends fewer bytes:

    tokens (T, D) on each of G groups  ->  (G, T, D), by one all-gather
    a group picks the rows of its experts, multiplies, and sums the results for each token
    (G, T, D)  ->  (T, D), by one reduce-scatter

This sends G · T · D elements in each direction, for any K and capacity. The all-to-all of rows
sends E · C · D: more where G is below capacity · K, or below E where no token is dropped.

An expert's gradient is complete where the expert is stored. All of it runs inside `shard_map`.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from zero_jax.sharding.mesh import EXPERTS
from zero_jax.tracing.evaluator import Resized
from zero_jax.tracing.graph import Graph
from zero_jax.tracing.jaxpr import (
    ELEMENTWISE,
    Atom,
    bytes_of,
    dtype_of,
    inputs_of,
    is_float,
    is_in,
    is_var,
    shape_of,
    stretch,
)
from zero_jax.tracing.sharded_dims import index_dims, kept_dims

# Rows are sent in at most this many parts, of at least this many bytes: on a link between hosts,
# smaller ones take as long to start as to send.
MOST_PARTS, PART_BYTES = 4, 2**24
SCOPE = "zero_experts"  # in the names of the operations that communicate tokens
# Operations of one array, or of one and another, that map a sum to the sum of their results.
_LINEAR = frozenset(("dot_general", "mul", "reduce_sum", "convert_element_type"))
_LINEAR |= {"transpose", "reshape", "squeeze"}
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
      most: The largest number of parts that rows are sent in.
    """

    at: Sequence[int]
    closed: jex.ClosedJaxpr
    dims: Mapping[Atom, ExpertDims]
    most: int = MOST_PARTS

    @jax.named_scope(SCOPE)
    def run(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns results of all experts for this device's rows; takes experts of its group."""
        of_inputs = [self.dims.get(var) for var in self.closed.jaxpr.invars]
        of_results = [self.dims[var] for var in self.closed.jaxpr.outvars]
        count = self._parts([(x, d) for x, d in zip(values, of_inputs, strict=True) if d])

        def send(x: jax.Array, dims: ExpertDims, part: int) -> jax.Array:
            """Returns the experts of this device's group, with these rows of all groups."""
            size = x.shape[dims.rows] // count
            x = jax.lax.slice_in_dim(x, part * size, (part + 1) * size, axis=dims.rows)
            return jax.lax.all_to_all(x, EXPERTS, dims.experts, dims.rows, tiled=True)

        def send_back(x: jax.Array, dims: ExpertDims) -> jax.Array:
            return jax.lax.all_to_all(x, EXPERTS, dims.rows, dims.experts, tiled=True)

        made = []
        for part in range(count):
            pairs = zip(values, of_inputs, strict=True)
            inputs = [x if dims is None else send(x, dims, part) for x, dims in pairs]
            made.append(list(map(send_back, Resized().run(self.closed, inputs), of_results)))
        return [
            jax.numpy.concatenate(parts, dims.rows) if count > 1 else parts[0]
            for parts, dims in zip(zip(*made, strict=True), of_results, strict=True)
        ]

    def _parts(self, operands: Sequence[tuple[jax.Array, ExpertDims]]) -> int:
        large = min(x.nbytes for x, _ in operands) // PART_BYTES
        counts = range(min(self.most, large), 1, -1)
        return next((n for n in counts if all(x.shape[d.rows] % n == 0 for x, d in operands)), 1)


def per_expert(graph: Graph, at: Sequence[int], weights: Weights) -> ExpertProducts | None:
    """Returns equations as products, or None if one is not computed per expert and row."""
    rules = {"dot_general": _product, "transpose": _transposed}
    part, dims = graph.part(at), dict[Atom, ExpertDims]()
    for eqn in part:
        made = rules.get(eqn.primitive.name, _elementwise)(eqn, weights, dims)
        if made is None or len(eqn.outvars) != 1:
            return None
        dims[eqn.outvars[0]] = made
    return ExpertProducts(at, stretch(part, graph.results(at)), dims)


# Rules return the dims of a result, and add those of operands, which products determine.


def _product(
    eqn: jex.JaxprEqn, weights: Weights, dims: dict[Atom, ExpertDims]
) -> ExpertDims | None:
    matrices = [at for at, atom in enumerate(eqn.invars) if is_in(atom, weights)]
    if len(matrices) != 1:
        return None
    (weight,) = matrices
    other, kept = eqn.invars[1 - weight], kept_dims(eqn)
    # Batch dims are the first of the result.
    batch = eqn.params["dimension_numbers"][1][1 - weight]
    experts = kept[weight].get(weights[eqn.invars[weight]])
    free = [d for d in kept[1 - weight] if d not in batch]
    if experts is None or experts >= len(batch) or not free or not is_var(other):
        return None
    known = dims.setdefault(other, ExpertDims(batch[experts], free[0]))
    if known.experts != batch[experts] or known.rows not in free:
        return None
    return ExpertDims(experts, kept[1 - weight][known.rows])


def _transposed(
    eqn: jex.JaxprEqn, weights: Weights, dims: dict[Atom, ExpertDims]
) -> ExpertDims | None:
    known, order = dims.get(eqn.invars[0]), tuple(eqn.params["permutation"])
    return known and ExpertDims(order.index(known.experts), order.index(known.rows))


def _elementwise(
    eqn: jex.JaxprEqn, weights: Weights, dims: dict[Atom, ExpertDims]
) -> ExpertDims | None:
    arrays = [atom for atom in eqn.invars if shape_of(atom)]
    known = {dims[atom] for atom in arrays if is_in(atom, dims)}
    alike = {shape_of(atom) for atom in arrays} == {shape_of(eqn.outvars[0])}
    if eqn.primitive.name not in ELEMENTWISE or len(known) != 1 or not alike:
        return None
    if any(not is_var(atom) or atom in weights for atom in arrays):
        return None
    (made,) = known
    dims.update(dict.fromkeys(arrays, made))
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRegion:
    """Equations of a layer from its tokens to the sum of the experts' results for each token.

    Attributes:
      at: Their positions.
      closed: The equations as a jaxpr.
      tokens: Inputs that have tokens, and are gathered.
      picks: Those that pick rows for experts, with the dim of their indices that counts experts.
      back: The one that picks the results for tokens.
      coordinate: The coordinate of its indices that is an expert.
    """

    at: list[int]
    closed: jex.ClosedJaxpr
    tokens: list[jex.Var]
    picks: dict[jex.JaxprEqn, int]
    back: jex.JaxprEqn
    coordinate: int

    def sent(self, groups: int) -> int:
        """Returns the bytes that a device sends in the forward pass."""
        indices = sum(bytes_of(eqn.invars[1]) for eqn in self.picks)
        sums = self.closed.jaxpr.outvars
        return groups * sum(map(bytes_of, [*self.tokens, *sums])) + indices

    @jax.named_scope(SCOPE)
    def run(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the sums for this device's tokens; takes experts of this device's group."""
        env = dict(zip(self.closed.jaxpr.invars, values, strict=True))
        tokens = [jax.lax.all_gather(env[v], EXPERTS) for v in self.tokens]
        # The indices of all groups for this group's experts; groups are dim 0.
        indices = [
            jax.lax.all_to_all(env[eqn.invars[1]][None], EXPERTS, dim + 1, 0, tiled=True)
            for eqn, dim in self.picks.items()
        ]

        def of_one_group(
            tokens: Sequence[jax.Array], indices: Sequence[jax.Array]
        ) -> list[jax.Array]:
            inputs = env | dict(zip(self.tokens, tokens, strict=True))
            return _TokensOfOneGroup(self, indices).run(self.closed, list(inputs.values()))

        of_all = jax.vmap(of_one_group)(tokens, indices)
        return [jax.lax.psum_scatter(sums, EXPERTS) for sums in of_all]


class _TokensOfOneGroup(Resized):
    """Runs a region for the tokens of one group, with these indices of rows for experts."""

    def __init__(self, region: TokenRegion, indices: Sequence[jax.Array]):
        super().__init__()
        self._region = region
        self._indices = dict(zip(region.picks, indices, strict=True))

    def equation(self, eqn: jex.JaxprEqn, values: list[jax.Array]) -> Sequence[jax.Array]:
        if eqn in self._indices:
            values = [values[0], self._indices[eqn]]
        if eqn is self._region.back:
            # Counts this group's experts from 0; others are out of bounds.
            (made, indices), coordinate = values, self._region.coordinate
            dim = eqn.params["dimension_numbers"].start_index_map[coordinate]
            first = (jax.lax.axis_index(EXPERTS) * made.shape[dim]).astype(indices.dtype)
            values = [made, indices.at[..., coordinate].add(-first)]
        return super().equation(eqn, values)


def around(
    graph: Graph, group: Sequence[int], weights: Weights, groups: int, others: Collection[int]
) -> TokenRegion | None:
    """Returns the region around products with experts, if to gather its tokens sends fewer bytes.

    None where rows are not picked by index, or their results not picked and summed. `group` are the
    products, and `others` equations of other products, which are evaluated separately.
    """
    until = _until_picked(graph, group)
    if until is None:
        return None
    *inside, last = until
    back, products = graph.eqns[last], per_expert(graph, inside, weights)
    if products is None:
        return None
    dims = products.dims
    rows = [v for v in products.closed.jaxpr.invars if v in dims]
    picks: dict[int, int] = {}
    for var in rows:
        at = graph.made_by.get(var)
        dim = None if at is None else _counted(graph.eqns[at], dims[var])
        if at is None or dim is None or not set(graph.readers(var)).issubset(inside):
            return None
        picks[at] = dim
    coordinate = _coordinate(back, dims[back.invars[0]])
    if coordinate is None:
        return None
    regions = []
    for sums, total in _sums(graph, back.outvars[0], others):
        rest = [*inside, last, *sums]
        positions = [*picks, *rest]
        made = {*graph.made(positions), *weights}
        read = [*(graph.eqns[at].invars[0] for at in picks), *inputs_of(graph.part(rest))]
        regions.append(
            TokenRegion(
                at=positions,
                closed=stretch([graph.eqns[at] for at in positions], [total]),
                tokens=[v for v in dict.fromkeys(read) if is_var(v) and v not in made],
                picks={graph.eqns[at]: dim for at, dim in picks.items()},
                back=back,
                coordinate=coordinate,
            )
        )
    best = min(regions, key=lambda region: region.sent(groups))
    rows_bytes = sum(map(bytes_of, [*rows, back.invars[0]]))
    return best if best.sent(groups) < rows_bytes else None


def _until_picked(graph: Graph, group: Sequence[int]) -> list[int] | None:
    """Returns equations, those that rearrange their one result, and the one that picks from it."""
    positions, results = list(group), graph.results(group)
    while len(results) == 1 and (at := graph.only_reader(results[0])) is not None:
        positions.append(at)
        eqn = graph.eqns[at]
        if eqn.primitive.name == "gather":
            return positions if eqn.invars[0] is results[0] else None
        if eqn.primitive.name not in ("transpose", "convert_element_type"):
            return None
        results = eqn.outvars
    return None


def _sums(
    graph: Graph, var: jex.Var, others: Collection[int]
) -> Iterator[tuple[list[int], jex.Var]]:
    """Yields equations that sum a variable, each time one more, with their result."""
    positions: list[int] = []
    while True:
        yield list(positions), var
        at = graph.only_reader(var)
        if at is None or at in others or not _is_linear(graph.eqns[at], var):
            return
        positions.append(at)
        (var,) = graph.eqns[at].outvars


def _is_linear(eqn: jex.JaxprEqn, var: jex.Var) -> bool:
    """Returns True if it maps a sum to the sum of its results for the parts, at little cost.

    A product of tokens with a matrix would be computed for the tokens of all groups.
    """
    out, own = eqn.outvars[0], [a is var for a in eqn.invars]
    if eqn.primitive.name not in _LINEAR or sum(own) != 1 or not (is_float(out) and shape_of(out)):
        return False
    if eqn.primitive.name == "dot_general":
        other = own.index(False)
        summed, batch = eqn.params["dimension_numbers"]
        return len({*summed[other], *batch[other]}) == len(shape_of(eqn.invars[other]))
    # A sum of rounded parts is rounded again.
    return dtype_of(out).itemsize >= dtype_of(var).itemsize


def _counted(eqn: jex.JaxprEqn, made: ExpertDims) -> int | None:
    """Returns the dim of a gather's indices that counts experts, or None."""
    if eqn.primitive.name != "gather":
        return None
    dims, batch = index_dims(eqn), eqn.params["dimension_numbers"].start_indices_batching_dims
    dim = dims.index(made.experts) if made.experts in dims else None
    return None if dim in batch else dim


def _coordinate(eqn: jex.JaxprEqn, read: ExpertDims) -> int | None:
    """Returns the coordinate of a gather's indices that is an expert.

    None unless indices out of bounds give 0, so that the experts of others add nothing to a sum.
    """
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    zero = mode == jax.lax.GatherScatterMode.FILL_OR_DROP and eqn.params["fill_value"] == 0
    indexed = {*numbers.collapsed_slice_dims} & {*numbers.start_index_map}
    if read.experts not in indexed or not zero:
        return None
    return tuple(numbers.start_index_map).index(read.experts)
