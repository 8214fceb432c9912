"""The other way for tokens to meet experts that stay: tokens are gathered, results summed.

Where the rows of experts are picked out of tokens by index, and what each token gets back is picked
out of theirs and summed:

    tokens (T, D) on each of G groups  ->  (G, T, D), by one all-gather
    a group picks the rows of its own experts, multiplies, sums for each token what these made
    (G, T, D)  ->  (T, D), by one reduce-scatter

That is G · T · D words each way, whatever K and the capacity, beside the E · C · D of rows that go
there and back by all-to-all (`at_home.py`): fewer where G is below capacity · K, or below E where
nothing is dropped. Runs inside `shard_map`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zero_jax.engine import at_home
from zero_jax.engine.at_home import Place
from zero_jax.jaxpr import equations
from zero_jax.jaxpr.equations import bytes_of, shape_of
from zero_jax.sharding.mesh import EXPERTS

# Operations of one array, or of one and another, whose result is a sum of what they make of parts.
_LINEAR = frozenset(
    (
        *("dot_general", "mul", "reduce_sum", "transpose", "reshape", "squeeze"),
        "convert_element_type",
    )
)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations of a layer from tokens to what each token gets back of all experts.

    Attributes:
      eqns: these, in order.
      picks: the ones that pick rows for experts, each with the dim of its indices that counts
        experts.
      back: the one that picks what tokens get back.
      coordinate: which coordinate of its indices is an expert.
      total: the variable that holds the sums.
      experts: the matrices.
    """

    eqns: list[jex.JaxprEqn]
    picks: dict[jex.JaxprEqn, int]
    back: jex.JaxprEqn
    coordinate: int
    total: jex.Var
    experts: frozenset[jex.Var]

    def tokens(self) -> list[jex.Var]:
        """What its equations read that has tokens, and is gathered."""
        own = {v for eqn in self.eqns for v in eqn.outvars} | self.experts
        read = [a for eqn in self.eqns for a in eqn.invars[: 1 if eqn in self.picks else None]]
        return [v for v in dict.fromkeys(filter(equations.is_var, read)) if v not in own]

    def sent(self, groups: int) -> int:
        """Bytes that a device sends, forward."""
        indices = sum(bytes_of(eqn.invars[1]) for eqn in self.picks)
        return groups * sum(map(bytes_of, [*self.tokens(), self.total])) + indices


def around(
    jaxpr: jex.Jaxpr,
    stretch: Sequence[jex.JaxprEqn],
    experts: Mapping[jex.Var, int],
    groups: int,
    others: Sequence[jex.JaxprEqn] = (),
) -> Region | None:
    """What lies around products with experts, if gathering its tokens sends fewer bytes.

    Args:
      jaxpr: what a layer runs.
      stretch: the equations that multiply with experts, and what lies between them.
      experts: the matrices, each with the dim that counts experts.
      groups: of devices with experts of their own.
      others: equations of other such stretches, which run by themselves.

    Returns:
      None where rows are not picked by index, what comes of them is not picked and summed, or
      sending rows to the experts and back is as cheap.
    """
    uses = _Uses(jaxpr)
    inside = uses.until_picked(stretch)
    if inside is None:
        return None
    *inside, back = inside
    made = {v for eqn in inside for v in eqn.outvars}
    given = [v for v in dict.fromkeys(equations.variables(inside)) if v not in made]
    numbered = {at: experts[v] for at, v in enumerate(given) if v in experts}
    known = at_home.places(equations.new_jaxpr(given, (), inside), numbered)
    if known is None:
        return None
    rows = [v for v in given if v in known]
    coordinate = _coordinate(back, known[back.invars[0]])
    makers = [uses.made_by[v] for v in rows if v in uses.made_by]
    counted = [_counted(eqn, known[eqn.outvars[0]]) for eqn in makers]
    picks = {eqn: dim for eqn, dim in zip(makers, counted, strict=True) if dim is not None}
    read_elsewhere = any(eqn not in inside for v in rows for eqn in uses.of(v))
    if coordinate is None or len(picks) < len(rows) or read_elsewhere:
        return None
    found = [
        Region([*picks, *inside, back, *sums], picks, back, coordinate, total, frozenset(experts))
        for sums, total in uses.sums(back.outvars[0], others)
    ]
    best = min(found, key=lambda region: region.sent(groups))
    rows_bytes = sum(map(bytes_of, [*rows, back.invars[0]]))
    return best if best.sent(groups) < rows_bytes else None


@jax.named_scope(at_home.SCOPE)
def run(region: Region, env: Mapping[Any, Any]) -> jax.Array:
    """The sums for this device's tokens.

    Args:
      region: what `around` found.
      env: values of what it reads; of experts those of this device's group.
    """
    tokens = {v: jax.lax.all_gather(env[v], EXPERTS) for v in region.tokens()}
    indices = [_to_experts(env[eqn.invars[1]], dim) for eqn, dim in region.picks.items()]
    experts = {v: env[v] for v in region.experts}

    def of_one_group(tokens: dict[Any, jax.Array], indices: list[jax.Array]) -> jax.Array:
        known: dict[Any, Any] = {**experts, **tokens}
        own = dict(zip(region.picks, indices, strict=True))
        for eqn in region.eqns:
            operands = [
                own[eqn] if eqn in own and i else equations.read(known, a)
                for i, a in enumerate(eqn.invars)
            ]
            if eqn is region.back:
                operands[1] = _from_experts(operands, eqn, region.coordinate)
            known[eqn.outvars[0]] = at_home.one(eqn, operands)
        return known[region.total]

    # By lists: variables have no order, which a dict's keys need as a tree.
    names = list(tokens)
    of_all = jax.vmap(lambda values, own: of_one_group(dict(zip(names, values, strict=True)), own))
    return jax.lax.psum_scatter(of_all(list(tokens.values()), indices), EXPERTS)


class _Uses:
    """Which equation of a jaxpr makes a variable, and which read it."""

    def __init__(self, jaxpr: jex.Jaxpr):
        self.made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._readers: dict[Any, list[jex.JaxprEqn | None]] = {}
        for eqn in jaxpr.eqns:
            for v in dict.fromkeys(equations.variables([eqn])):
                self._readers.setdefault(v, []).append(eqn)
        for v in filter(equations.is_var, jaxpr.outvars):
            self._readers.setdefault(v, []).append(None)  # returned

    def of(self, var: jex.Var) -> list[jex.JaxprEqn | None]:
        return self._readers.get(var, [])

    def until_picked(self, stretch: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn] | None:
        """A stretch with what re-arranges its one result until it is picked from, and that."""
        inside = list(stretch)
        results = [
            v for e in stretch for v in e.outvars if any(r not in inside for r in self.of(v))
        ]
        if len(results) != 1:
            return None
        (var,) = results
        while len(self.of(var)) == 1 and (eqn := self.of(var)[0]) is not None:
            inside.append(eqn)
            if eqn.primitive.name == "gather":
                return inside if eqn.invars[0] is var else None
            if eqn.primitive.name not in ("transpose", "convert_element_type"):
                return None
            (var,) = eqn.outvars
        return None

    def sums(
        self, var: jex.Var, others: Sequence[jex.JaxprEqn]
    ) -> Iterator[tuple[list[jex.JaxprEqn], jex.Var]]:
        """What sums a variable, each longer by one equation, and what comes of it."""
        eqns: list[jex.JaxprEqn] = []
        while True:
            yield list(eqns), var
            readers = self.of(var)
            if len(readers) != 1 or (eqn := readers[0]) is None:
                return
            if not _is_linear(eqn, var) or any(eqn is own for own in others):
                return
            eqns.append(eqn)
            (var,) = eqn.outvars


def _is_linear(eqn: jex.JaxprEqn, var: jex.Var) -> bool:
    """Whether it makes of a sum the sum of what it makes of the parts, at next to no cost: what
    multiplies tokens with a matrix would do so for those of all groups."""
    (out,) = eqn.outvars[:1]
    if eqn.primitive.name not in _LINEAR or sum(a is var for a in eqn.invars) != 1:
        return False
    if not equations.is_float(out) or not shape_of(out):
        return False
    if eqn.primitive.name == "dot_general":
        other = 1 - [a is var for a in eqn.invars].index(True)
        summed, batch = eqn.params["dimension_numbers"]
        return len({*summed[other], *batch[other]}) == len(shape_of(eqn.invars[other]))
    # A sum of rounded parts is rounded again.
    return getattr(out.aval, "dtype").itemsize >= getattr(var.aval, "dtype").itemsize  # noqa: B009


def _counted(eqn: jex.JaxprEqn, place: Place) -> int | None:
    """The dim of a gather's indices that counts experts, or None where they do not say them."""
    if eqn.primitive.name != "gather":
        return None
    dims = eqn.params["dimension_numbers"]
    free = [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in dims.offset_dims]
    if place.experts not in free:
        return None
    dim = free.index(place.experts)
    return None if dim in dims.start_indices_batching_dims else dim


def _coordinate(eqn: jex.JaxprEqn, place: Place) -> int | None:
    """Which coordinate of a gather's indices is an expert; None where what is out of bounds is
    not 0, which makes what others have no part of a sum."""
    dims, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    zero = mode == jax.lax.GatherScatterMode.FILL_OR_DROP and eqn.params["fill_value"] == 0
    indexed = {*dims.collapsed_slice_dims} & {*dims.start_index_map}
    return (
        tuple(dims.start_index_map).index(place.experts)
        if place.experts in indexed and zero
        else None
    )


def _to_experts(indices: jax.Array, dim: int) -> jax.Array:
    """Of all groups the indices of what this one's experts are sent; groups come first."""
    return jax.lax.all_to_all(indices[None], EXPERTS, dim + 1, 0, tiled=True)


def _from_experts(operands: Sequence[jax.Array], eqn: jex.JaxprEqn, coordinate: int) -> jax.Array:
    """Indices that count this group's experts from 0 on; those of others are out of bounds."""
    made, indices = operands
    dim = eqn.params["dimension_numbers"].start_index_map[coordinate]
    first = (jax.lax.axis_index(EXPERTS) * made.shape[dim]).astype(indices.dtype)
    return indices.at[..., coordinate].add(-first)
