"""Expert parallelism: tokens are gathered and results summed, instead of an all-to-all of rows.

Possible where the rows of experts are picked out of tokens by index, and the results for each token
are picked out of theirs and summed:

    tokens (T, D) on each of G groups  ->  (G, T, D), by one all-gather
    a group picks the rows of its experts, multiplies, and sums the results for each token
    (G, T, D)  ->  (T, D), by one reduce-scatter

This sends G · T · D elements in each direction, for any K and capacity. The all-to-all of rows
(`expert_all_to_all.py`) sends E · C · D in each direction: more where G is below capacity · K, or
below E where no token is dropped. Runs inside `shard_map`.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.extend.core as jex

from zero_jax.engine.expert_all_to_all import SCOPE, ExpertDims, Weights, per_expert
from zero_jax.sharding.mesh import EXPERTS
from zero_jax.tracing.dataflow import Graph, index_dims
from zero_jax.tracing.interpreter import Resized
from zero_jax.tracing.jaxpr import (
    bytes_of,
    dtype_of,
    inputs_of,
    is_float,
    is_var,
    shape_of,
    stretch,
)

# Operations of one array, or of one and another, that map a sum to the sum of their results.
_LINEAR = frozenset(("dot_general", "mul", "reduce_sum", "convert_element_type"))
_LINEAR |= {"transpose", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRegion:
    """Equations of a layer from its tokens to the sum of the experts' results for each token.

    Attributes:
      at: Their positions.
      closed: The equations as a jaxpr to the sums.
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
        indices = [_to_experts(env[eqn.invars[1]], dim) for eqn, dim in self.picks.items()]

        def of_one_group(
            tokens: Sequence[jax.Array], indices: Sequence[jax.Array]
        ) -> list[jax.Array]:
            inputs = env | dict(zip(self.tokens, tokens, strict=True))
            return _TokensOfOneGroup(self, indices).run(self.closed, list(inputs.values()))

        of_all = jax.vmap(of_one_group)(tokens, indices)
        return [jax.lax.psum_scatter(sums, EXPERTS) for sums in of_all]


def around(
    graph: Graph, group: Sequence[int], weights: Weights, groups: int, others: Collection[int]
) -> TokenRegion | None:
    """Returns the region around products with experts, if to gather its tokens sends fewer bytes.

    None where rows are not picked by index, where the results are not picked and summed, or where
    an all-to-all of rows sends as few bytes.

    Args:
      graph: The equations of a layer.
      group: Those that multiply with experts, and those between them.
      weights: The matrices of experts.
      groups: Number of groups of devices, each with a part of the experts.
      others: Equations of other such groups, which are evaluated separately.
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
        made = {*graph.made(picks), *graph.made(rest), *weights}
        read = [*(graph.eqns[at].invars[0] for at in picks), *inputs_of(graph.part(rest))]
        regions.append(
            TokenRegion(
                at=[*picks, *rest],
                closed=stretch([graph.eqns[at] for at in (*picks, *rest)], [total]),
                tokens=[v for v in dict.fromkeys(read) if is_var(v) and v not in made],
                picks={graph.eqns[at]: dim for at, dim in picks.items()},
                back=back,
                coordinate=coordinate,
            )
        )
    best = min(regions, key=lambda region: region.sent(groups))
    rows_bytes = sum(map(bytes_of, [*rows, back.invars[0]]))
    return best if best.sent(groups) < rows_bytes else None


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
            values = [values[0], _from_experts(values, eqn, self._region.coordinate)]
        return super().equation(eqn, values)


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


def _to_experts(indices: jax.Array, dim: int) -> jax.Array:
    """Returns the indices of all groups for this group's experts; groups are dim 0."""
    return jax.lax.all_to_all(indices[None], EXPERTS, dim + 1, 0, tiled=True)


def _from_experts(operands: Sequence[jax.Array], eqn: jex.JaxprEqn, coordinate: int) -> jax.Array:
    """Returns indices that count this group's experts from 0; others are out of bounds."""
    made, indices = operands
    dim = eqn.params["dimension_numbers"].start_index_map[coordinate]
    first = (jax.lax.axis_index(EXPERTS) * made.shape[dim]).astype(indices.dtype)
    return indices.at[..., coordinate].add(-first)
