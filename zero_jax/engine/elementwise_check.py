"""Check that an optax transformation computes the same on shards as on full leaves.

Inside `shard_map` an optimizer sees the shards of one device, so a norm, a mean or a factored
moment would be taken over the wrong numbers without an error. `init` and `update` are traced twice,
on full leaves and on shards, and the two programs are compared equation by equation. If they are
the same, and no equation combines elements along a sharded dim, the results for a shard are the
shard of the results for the full leaf. Values that are equal on every device (counters, schedules,
leaves too small to be sharded) may be used in any way.

Nothing is run and nothing is communicated.
"""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zero_jax.sharding.layout import Partition
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.jaxpr import CALLS, ELEMENTWISE, REDUCTIONS, Atom, Walk, shape_of
from zero_jax.tracing.sharded_dims import Dim, sharded_dims
from zero_jax.tracing.sources import transformation_of

_LAYOUT = frozenset(("broadcast_in_dim", "transpose", "reshape", "squeeze"))


class _ShardDiffersError(ValueError):
    """A result for a shard is not that of the full leaf; `sources` are equations, outwards."""

    def __init__(self, why: str, *sources: jex.JaxprEqn):
        super().__init__(why)
        self.sources = list(sources)


def require_elementwise(
    tx: optax.GradientTransformation, params: PyTree, cuts: Sequence[Partition]
) -> None:
    """Raises ValueError unless `tx` returns for shards the shards of its result for full leaves.

    The message names the transformation, within a chain the one that fails. Of `params` only the
    tree, shapes and dtypes are used; their partitions are over two devices or more.
    """
    full, piece = at_rest_and_shard(params, cuts)
    # In another thread: here `init` is being traced under the mesh's manual axes.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_require, tx, full, piece).result()


def at_rest_and_shard(params: PyTree, cuts: Sequence[Partition]) -> tuple[PyTree, PyTree]:
    """Returns parameters as stored, and one shard of them, abstract.

    Every sharded dim is longer in storage, even a dim of 1, which is padded.
    """
    leaves, treedef = jax.tree.flatten(params)

    def of(shapes: Sequence[tuple[int, ...]]) -> PyTree:
        pairs = zip(shapes, leaves, strict=True)
        return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(s, x.dtype) for s, x in pairs])

    return of([cut.stored_shape for cut in cuts]), of([cut.shard_shape for cut in cuts])


def _require(tx: optax.GradientTransformation, full: PyTree, piece: PyTree) -> None:
    try:
        _compare(tx, full, piece)
    except Exception as error:  # any that the user's transformation raises
        sources: Sequence[jex.JaxprEqn | Exception] = [error]
        verdict, line = "could not be shown to be", str(error).partition("\n")[0]
        why = f"it raised {type(error).__name__}: {line}"
        if isinstance(error, _ShardDiffersError):
            sources, verdict, why = error.sources, "is not", str(error)
        whole = getattr(tx.update, "__qualname__", type(tx).__name__).partition(".<locals>")[0]
        raise ValueError(
            f"`tx`: {transformation_of(sources) or whole} {verdict} elementwise, and inside "
            f"shard_map it sees only this device's shards: {why}. Use tx = zero.optimizer(tx) "
            "outside shard_map, which is exact for every transformation"
        ) from error


def _compare(tx: optax.GradientTransformation, full: PyTree, piece: PyTree) -> None:
    """Raises `_ShardDiffersError` if the state or the updates of shards are not shards."""
    tx = optax.with_extra_args_support(tx)

    def run(grads: PyTree, params: PyTree, value: jax.Array) -> PyTree:
        state = tx.init(params)
        return state, tx.update(grads, state, params, value=value)

    value, trees = jax.ShapeDtypeStruct((), jnp.float32), (full, piece)
    traces = [jax.make_jaxpr(run, return_shape=True)(tree, tree, value) for tree in trees]
    programs, results = zip(*traces, strict=True)
    if len({jax.tree.structure(state) for state, _ in results}) > 1:
        raise _ShardDiffersError("its state has another structure on a shard")
    for tree, (state, made) in zip(trees, results, strict=True):
        if _shapes(made) != _shapes((tree, state)):
            raise _ShardDiffersError("its update or its state changes shape")
    _require_same(*programs)


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def _require_same(full: jex.ClosedJaxpr, piece: jex.ClosedJaxpr) -> None:
    """Raises `_ShardDiffersError` if results for shards are not shards of those for full leaves."""
    results = _SideBySide(piece).run(full, piece.jaxpr.invars)
    if not _are_same(results, piece.jaxpr.outvars):
        raise _ShardDiffersError("it returns other values on a shard")


class _SideBySide(Walk[Atom]):
    """Walks through a program of full leaves, with variables of that of shards as values."""

    def __init__(self, piece: jex.ClosedJaxpr):
        self._eqns = iter(piece.jaxpr.eqns)
        self._constants = zip(piece.jaxpr.constvars, piece.consts, strict=True)

    def literal(self, atom: jex.Literal) -> Atom:
        return atom

    def constant(self, atom: Atom, value: ArrayLike) -> Atom:
        other, shard = next(self._constants, (atom, ()))
        if value is not shard and not np.array_equal(value, shard):
            raise _ShardDiffersError("it contains another constant on a shard")
        return other

    def equation(self, eqn: jex.JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        other, name = next(self._eqns, None), eqn.primitive.name
        if not (other and _settings(eqn) == _settings(other) and _are_same(values, other.invars)):
            raise _ShardDiffersError(f"its {name} is another operation on a shard", eqn)
        try:
            for pair in zip(_bodies(eqn), _bodies(other), strict=True):
                _require_same(*pair)
        except _ShardDiffersError as error:
            error.sources.append(eqn)
            raise
        if not (_bodies(eqn) or _keeps_shards(eqn, other)):
            raise _ShardDiffersError(f"its {name} needs full leaves", eqn)
        return other.outvars


def _are_same(full: Sequence[Atom], piece: Sequence[Atom]) -> bool:
    """Returns True for the same variables and for equal literals."""

    def same(a: Atom | None, b: Atom | None) -> bool:
        if isinstance(a, jex.Literal) and isinstance(b, jex.Literal):
            return np.array_equal(a.val, b.val, equal_nan=True)
        return a is b

    return all(itertools.starmap(same, itertools.zip_longest(full, piece)))


def _bodies(eqn: jex.JaxprEqn) -> list[jex.ClosedJaxpr]:
    """Returns the jaxprs that a call, a loop or a branch runs."""
    if eqn.primitive.name in CALLS:
        return [jaxprs.inner(eqn)]
    ends = [eqn.params["cond_jaxpr"]] if eqn.primitive.name == "while" else []
    return [*(body for body, _ in jaxprs.bodies(eqn)), *ends]


def _settings(eqn: jex.JaxprEqn) -> tuple[str, Mapping[str, object]]:
    """Returns an operation's name, and its parameters except for shapes and functions."""
    if _bodies(eqn):
        return eqn.primitive.name, {k: v for k, v in eqn.params.items() if isinstance(v, int)}
    params = {k: str(v) for k, v in eqn.params.items() if k not in ("shape", "new_sizes")}
    return eqn.primitive.name, params


def _keeps_shards(full: jex.JaxprEqn, piece: jex.JaxprEqn) -> bool:
    """Returns True if it combines nothing along the sharded dims of its operands and its result."""
    pairs = zip((*full.invars, *full.outvars), (*piece.invars, *piece.outvars), strict=True)
    dims: list[Dim] = []
    for a, b in ((shape_of(a), shape_of(b)) for a, b in pairs):
        differing = [d for d, (m, n) in enumerate(zip(a, b, strict=False)) if m != n]
        if len(a) != len(b) or len(differing) > 1:
            return False
        dims.append(differing[0] if differing else None)
    if all(d is None for d in dims):
        return True
    operands, results = dims[: len(full.invars)], dims[len(full.invars) :]
    name = full.primitive.name
    if len(results) > 1 or name not in ELEMENTWISE | _LAYOUT | REDUCTIONS:
        return False
    if name == "broadcast_in_dim" and operands[0] is None:
        sizes = zip(full.params["broadcast_dimensions"], shape_of(full.invars[0]), strict=True)
        return all(d != results[0] or size == 1 for d, size in sizes)
    return results[0] is not None and sharded_dims(full, operands) == results
