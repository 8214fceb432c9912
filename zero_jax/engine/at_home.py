"""Products with experts that stay with their part of the devices: tokens go there and back.

An expert's matrix is never gathered over the mesh axis `experts`. What it is multiplied with, for
each expert the same number of rows, is sent to the devices that have it, and what comes of it is
sent back:

    (rows, E, ...) on each of G groups  ->  (G · rows, E / G, ...), by one all-to-all

A device sends (G - 1) / G of its rows once there and once back, forward and backward, whatever the
number of experts. An expert's gradient is complete where it rests. Where there is much to send it
goes in parts of the rows, each sent while the one before it is multiplied. Runs inside `shard_map`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from zero_jax.jaxpr.equations import is_var, read, shape_of
from zero_jax.jaxpr.operations import ELEMENTWISE, on_piece
from zero_jax.sharding.mesh import EXPERTS

# Rows travel in at most so many parts, of so many bytes at least: below that a wire between hosts
# takes as long to begin as to send.
MOST_PARTS, PART_BYTES = 4, 2**24
SCOPE = "zero_experts"  # in the names of what tokens are sent by


class Place(NamedTuple):
    """Which dims of a value count experts, and rows that each of them takes."""

    experts: int
    rows: int


def places(jaxpr: jex.Jaxpr, experts: Mapping[int, int]) -> dict[Any, Place] | None:
    """Where experts and rows are in each value that is said expert by expert.

    Args:
      jaxpr: equations that multiply with matrices of experts, and what is done in between.
      experts: which of its inputs those matrices are, and which of their dims counts experts.

    Returns:
      None where an equation is not said expert by expert, or finds its rows along another dim.
    """
    weights: dict[Any, int] = {jaxpr.invars[at]: dim for at, dim in experts.items()}
    found: dict[Any, Place] = {}
    for eqn in jaxpr.eqns:
        if len(eqn.outvars) != 1:
            return None
        name = eqn.primitive.name
        put = {"dot_general": _product, "transpose": _transposed}.get(name, _elementwise)
        out = put(eqn, weights, found)
        if out is None:
            return None
        found[eqn.outvars[0]] = out
    return found


def _product(
    eqn: jex.JaxprEqn, weights: Mapping[Any, int], found: dict[Any, Place]
) -> Place | None:
    summed, batch = eqn.params["dimension_numbers"]
    matrices = [i for i, atom in enumerate(eqn.invars) if is_var(atom) and atom in weights]
    if len(matrices) != 1 or not all(map(is_var, eqn.invars)):
        return None
    (weight,) = matrices
    other, dim = 1 - weight, weights[eqn.invars[weight]]
    if dim not in batch[weight]:
        return None
    at = tuple(batch[weight]).index(dim)
    bound = {*summed[other], *batch[other]}
    free = [d for d in range(len(shape_of(eqn.invars[other]))) if d not in bound]
    if not free:
        return None
    place = found.setdefault(eqn.invars[other], Place(batch[other][at], free[0]))
    if place.experts != batch[other][at] or place.rows not in free:
        return None
    # Dims of a product: those of both, the free ones of the first, those of the second.
    columns = len(shape_of(eqn.invars[0])) - len(summed[0]) if weight == 0 else len(batch[0])
    return Place(at, columns + free.index(place.rows))


def _transposed(
    eqn: jex.JaxprEqn, weights: Mapping[Any, int], found: dict[Any, Place]
) -> Place | None:
    place, order = found.get(eqn.invars[0]), tuple(eqn.params["permutation"])
    return place and Place(order.index(place.experts), order.index(place.rows))


def _elementwise(
    eqn: jex.JaxprEqn, weights: Mapping[Any, int], found: dict[Any, Place]
) -> Place | None:
    arrays = [atom for atom in eqn.invars if shape_of(atom)]
    known = {found[atom] for atom in arrays if is_var(atom) and atom in found}
    alike = {shape_of(atom) for atom in arrays} == {shape_of(eqn.outvars[0])}
    if eqn.primitive.name not in ELEMENTWISE or len(known) != 1 or not alike:
        return None
    if any(not is_var(atom) or atom in weights for atom in arrays):
        return None
    (place,) = known
    found.update(dict.fromkeys(arrays, place))
    return place


@jax.named_scope(SCOPE)
def run(
    jaxpr: jex.Jaxpr, values: Sequence[Any], experts: Mapping[int, int], most: int = MOST_PARTS
) -> list[jax.Array]:
    """Runs equations that `places` takes.

    Args:
      jaxpr: the equations.
      values: its inputs; of experts those of this device's group.
      experts: as for `places`.
      most: parts in which rows may go.

    Returns:
      Its results, of all experts, for this device's rows.
    """
    known = places(jaxpr, experts)
    assert known is not None
    given = [known.get(var) for var in jaxpr.invars]
    results = [known[var] for var in jaxpr.outvars]
    sizes = [(x, place.rows) for x, place in zip(values, given, strict=True) if place]
    count = _parts(sizes, most)
    made = []
    for part in range(count):
        env: dict[Any, Any] = {}
        for var, x, place in zip(jaxpr.invars, values, given, strict=True):
            env[var] = x if place is None else _sent(_part(x, place.rows, part, count), place)
        for eqn in jaxpr.eqns:
            env[eqn.outvars[0]] = one(eqn, [read(env, atom) for atom in eqn.invars])
        made.append([_back(env[v], p) for v, p in zip(jaxpr.outvars, results, strict=True)])
    return [
        jax.numpy.concatenate(parts, place.rows) if count > 1 else parts[0]
        for parts, place in zip(zip(*made, strict=True), results, strict=True)
    ]


def one(eqn: jex.JaxprEqn, operands: Sequence[Any]) -> Any:
    """The result of an equation; what is elementwise may have numbers beside arrays."""
    if eqn.primitive.name not in ELEMENTWISE:
        return eqn.primitive.bind(*operands, **eqn.params)
    shape = next(x.shape for x in operands if jax.numpy.ndim(x))
    return on_piece(eqn, operands, shape)[0]


def _parts(given: Sequence[tuple[jax.Array, int]], most: int) -> int:
    """In how many parts rows travel."""
    large = min(x.nbytes for x, _ in given) // PART_BYTES
    fit = (n for n in range(most, 1, -1) if all(x.shape[rows] % n == 0 for x, rows in given))
    return next((n for n in fit if n <= large), 1)


def _part(x: jax.Array, rows: int, part: int, count: int) -> jax.Array:
    size = x.shape[rows] // count
    return jax.lax.slice_in_dim(x, part * size, (part + 1) * size, axis=rows)


def _sent(x: jax.Array, place: Place) -> jax.Array:
    """The experts of this device's group, with the rows of all groups."""
    return jax.lax.all_to_all(x, EXPERTS, place.experts, place.rows, tiled=True)


def _back(x: jax.Array, place: Place) -> jax.Array:
    """The inverse of `_sent`."""
    return jax.lax.all_to_all(x, EXPERTS, place.rows, place.experts, tiled=True)
