"""Check that a transformation does to shards what it does to full leaves, from its trace.

Inside `shard_map` an optimizer gets this device's shards alone, so it would compute a norm, a mean
or a factored moment from the wrong elements without an error. So `init` and `update` are traced
twice, on full leaves and on shards, and the two programs are compared equation by equation. If they
are the same, and no equation mixes elements along the sharded dim, then the result of a shard is
the shard of the full result. Values that are equal on every device (counters, schedules, leaves too
small to be sharded) may be used in any way.

The check runs nothing and needs no communication.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from zero_jax.jaxpr.equations import JIT, REMAT
from zero_jax.jaxpr.operations import ELEMENTWISE
from zero_jax.jaxpr.sources import transformation_of
from zero_jax.sharding.cuts import Split

PyTree = Any
Atom = jex.Var | jex.Literal
Pair = tuple[Atom, Atom]  # the same value in the two programs: of full leaves, and of shards

# These do what the jaxprs among their parameters do, with their own operands.
_CALLS = JIT | REMAT | {"custom_jvp_call", "custom_vjp_call", "cond", "while", "scan"}


class _Unlike(ValueError):
    """A value of a shard is not the shard of the value of the full leaf."""

    sources: Sequence[jex.JaxprEqn] = ()  # the equation, then the calls that it is in


def require_elementwise(
    tx: optax.GradientTransformation, params: PyTree, cuts: Sequence[Split]
) -> None:
    """Checks that the results of `tx` for shards are the shards of its results for full leaves.

    Args:
      tx: The transformation.
      params: The parameters; only their tree, shapes and dtypes matter.
      cuts: The partition of each, into two shards or more.

    Raises:
      ValueError: They are not; the message has the transformation, within a chain the one that
        fails.
    """
    full, piece = at_rest_and_shard(params, cuts)
    # A thread of its own: here `init` is being traced under the mesh's manual axes.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_require, tx, full, piece).result()


def at_rest_and_shard(params: PyTree, cuts: Sequence[Split]) -> tuple[PyTree, PyTree]:
    """Returns abstract parameters as stored and as one shard.

    A sharded dim is longer as stored than on a shard: even one of size 1 is padded.
    """
    leaves, treedef = jax.tree.flatten(params)

    def of(shapes: Sequence[tuple[int, ...]]) -> PyTree:
        pairs = zip(shapes, leaves, strict=True)
        return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(s, x.dtype) for s, x in pairs])

    return of([cut.rest_shape for cut in cuts]), of([cut.shard_shape for cut in cuts])


def _require(tx: optax.GradientTransformation, full: PyTree, piece: PyTree) -> None:
    sources: Sequence[jex.JaxprEqn | Exception]
    try:
        _compare(tx, full, piece)
    except _Unlike as error:
        verdict, why, sources = "is not", str(error), error.sources
    except Exception as error:
        said = str(error).partition("\n")[0]
        verdict, why = "could not be shown to be", f"it raised {type(error).__name__}: {said}"
        sources = [error]
    else:
        return
    whole = getattr(tx.update, "__qualname__", type(tx).__name__).partition(".<locals>")[0]
    raise ValueError(
        f"`tx`: {transformation_of(sources) or whole} {verdict} elementwise, and inside shard_map "
        f"it sees only this device's shards: {why}. Use tx = zero.optimizer(tx) outside shard_map, "
        "which is exact for every transformation"
    )


def _compare(tx: optax.GradientTransformation, full: PyTree, piece: PyTree) -> None:
    """Raises `_Unlike` if the state or the updates of shards are not shards."""
    tx = optax.with_extra_args_support(tx)

    def update(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> PyTree:
        return tx.update(grads, state, params, value=value)

    value = jax.ShapeDtypeStruct((), jnp.float32)
    trees = (full, piece)
    inits, states = zip(*(_traced(tx.init, tree) for tree in trees), strict=True)
    if len({jax.tree.structure(state) for state in states}) > 1:
        raise _Unlike("its state has another structure on a shard")
    _same_program(*inits)
    updates = []
    for tree, state in zip(trees, states, strict=True):
        made, results = _traced(update, tree, state, tree, value)
        if _shapes(results) != _shapes((tree, state)):
            raise _Unlike("its update or its state changes shape")
        updates.append(made)
    _same_program(*updates)


def _traced(fn: Callable[..., PyTree], *trees: PyTree) -> tuple[jex.ClosedJaxpr, PyTree]:
    return jax.make_jaxpr(fn, return_shape=True)(*trees)


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def _same_program(full: Any, piece: Any) -> None:
    """Raises `_Unlike` if results on shards are not shards of the results on full leaves."""
    one, other = getattr(full, "jaxpr", full), getattr(piece, "jaxpr", piece)
    sizes = [(len(p.eqns), len(p.invars), len(p.constvars)) for p in (one, other)]
    if sizes[0] != sizes[1]:
        error = _Unlike("its program depends on the shape of a shard")
        pairs = zip(one.eqns, other.eqns, strict=False)
        error.sources = [a for a, b in pairs if a.primitive is not b.primitive][:1]
        raise error
    for a, b in zip(getattr(full, "consts", ()), getattr(piece, "consts", ()), strict=True):
        if a is not b and not np.array_equal(a, b):
            raise _Unlike("it contains another constant on a shard")
    known = dict(zip((*one.invars, *one.constvars), (*other.invars, *other.constvars), strict=True))
    for a, b in zip(one.eqns, other.eqns, strict=True):
        try:
            _same_atoms(a.invars, b.invars, known)
            _same_equation(a, b)
        except _Unlike as error:
            error.sources = [*error.sources, a]
            raise
        known.update(zip(a.outvars, b.outvars, strict=True))
    _same_atoms(one.outvars, other.outvars, known)


def _same_atoms(
    full: Sequence[Atom], piece: Sequence[Atom], known: Mapping[jex.Var, jex.Var]
) -> None:
    for a, b in itertools.zip_longest(full, piece):
        if isinstance(a, jex.Literal) and isinstance(b, jex.Literal):
            if not np.array_equal(a.val, b.val, equal_nan=True):
                raise _Unlike(f"it uses {b.val} on a shard and {a.val} on a full leaf")
        elif not isinstance(a, jex.Var) or known[a] is not b:
            raise _Unlike("it uses other values on a shard")


def _same_equation(full: jex.JaxprEqn, piece: jex.JaxprEqn) -> None:
    """Raises `_Unlike` if the equation maps shards to anything but shards of its results."""
    name = full.primitive.name
    if full.primitive is not piece.primitive:
        raise _Unlike(f"it runs {piece.primitive.name} on a shard and {name} on a full leaf")
    if _settings(full) != _settings(piece):
        raise _Unlike(f"its {name} has other parameters on a shard")
    if name in _CALLS:
        for one, other in zip(_bodies(full.params), _bodies(piece.params), strict=True):
            _same_program(one, other)
        return
    given = [_cut_dim(*pair) for pair in zip(full.invars, piece.invars, strict=True)]
    made = [_cut_dim(*pair) for pair in zip(full.outvars, piece.outvars, strict=True)]
    cut = any(at is not None for at in (*given, *made))
    if cut and (len(made) > 1 or not _along(full, given, made[0])):
        raise _Unlike(f"its {name} needs full leaves")


def _bodies(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


def _settings(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Returns an equation's parameters without functions and shapes, which operands have."""
    if eqn.primitive.name in _CALLS:
        return {k: v for k, v in eqn.params.items() if isinstance(v, int)}
    return {k: str(v) for k, v in eqn.params.items() if k not in ("shape", "new_sizes")}


def _cut_dim(full: Atom, piece: Atom) -> int | None:
    """Returns the dim along which a value is sharded, or None."""
    shapes = _shape(full), _shape(piece)
    dims = [d for d, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
    if len(dims) > 1 or len(shapes[0]) != len(shapes[1]):
        raise _Unlike(
            f"it has a value of shape {shapes[1]} on a shard and {shapes[0]} on a full leaf"
        )
    return dims[0] if dims else None


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _along(eqn: jex.JaxprEqn, given: Sequence[int | None], made: int | None) -> bool:
    """Returns True if it mixes no elements along the sharded dims of operands and result."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [_shape(a) for a in eqn.invars]
    if name in ELEMENTWISE:
        return all(at == made for at, shape in zip(given, shapes, strict=True) if shape)
    if not shapes:
        return False
    at, shape = given[0], shapes[0]
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        if at is not None:
            return bool(places[at] == made)
        return all(d != made or size == 1 for d, size in zip(places, shape, strict=True))
    if at is None or made is None:
        return False
    if name.startswith("reduce_") and "axes" in params:
        return at not in params["axes"] and made == at - sum(d < at for d in params["axes"])
    if name == "transpose":
        return bool(params["permutation"][made] == at)
    if name in ("reshape", "squeeze"):  # of what lies in one piece behind the same leading dims
        return math.prod(shape[:at]) == math.prod(_shape(eqn.outvars[0])[:made])
    return False
