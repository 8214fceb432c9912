"""A state of one structure for transformations whose own changes at the first update.

The state of `optax.monitor` has no measurements before the first update and one of each after it. A
step is one program: it donates its state, leaves it as it was where gradients are not finite, and
restores it from a checkpoint, so the structure must be the same from the start.
"""

import dataclasses
from collections.abc import Hashable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zero_jax.sharding import layout, paths
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import jaxpr as equations


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChangingState:
    """A state whose first update computes something else than later ones.

    Attributes:
      inner: The state after an update. Before the first one, leaves that are not in the initial
        state are zero.
      lost: Leaves of the initial state that are not in `inner`.
      updated: bool scalar, True after the first update.
      treedef: Structure of the initial state.
      sources: For each leaf of the initial state the index in `inner`, or None for the next one of
        `lost`.
    """

    inner: PyTree
    lost: tuple[jax.Array, ...]
    updated: jax.Array
    treedef: jax.tree_util.PyTreeDef = dataclasses.field(metadata={"static": True})
    sources: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    @property
    def initial(self) -> PyTree:
        """The state before the first update."""
        leaves, lost = jax.tree.leaves(self.inner), iter(self.lost)
        own = [next(lost) if at is None else leaves[at] for at in self.sources]
        return jax.tree.unflatten(self.treedef, own)


def with_one_structure(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with one structure of its state before and after every update.

    A state that does not change is that of `tx`. A state that gains leaves which no update reads
    (the measurements of `optax.monitor`) starts with the structure that it has after an update, and
    zeros. Any other is a `ChangingState`: the program has both updates, and a step runs one.

    Raises:
      ValueError: The structure changes at the second update too.

    >>> tx = with_one_structure(optax.monitor({"norm": optax.tree.norm}))
    >>> float(tx.init({"w": jnp.ones(4)}).measurements["norm"])
    0.0
    """
    known: dict[Hashable, _Change | None] = {}

    def change_of(params: PyTree) -> _Change | None:
        leaves, treedef = jax.tree.flatten(params)
        key = treedef, tuple((x.shape, x.dtype) for x in leaves)
        if key not in known:
            known[key] = _change(tx, params)
        return known[key]

    def init(params: PyTree) -> PyTree:
        # A leaf may be a Python number.
        state, change = jax.tree.map(jnp.asarray, tx.init(params)), change_of(params)
        return state if change is None else change.begun(state)

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, PyTree]:
        def later() -> PyTree:
            made = tx.update(grads, state.inner, params, **extra)
            return jax.tree.map(jnp.asarray, made)

        def first() -> PyTree:
            made = tx.update(grads, state.initial, params, **extra)
            return jax.tree.map(
                lambda x, like: jnp.asarray(x, like.dtype), made, jax.eval_shape(later)
            )

        if isinstance(state, ChangingState):
            updates, inner = jax.lax.cond(state.updated, later, first)
            return updates, dataclasses.replace(state, inner=inner, updated=jnp.array(True))
        updates, new = tx.update(grads, state, params, **extra)
        if not _alike(state, new):
            raise ValueError(
                f"`tx` changes the structure of its state in `update`: {_told(state, new)}. A "
                "step requires one structure, and this `update` cannot be traced in advance, "
                f"because it needs named arguments ({', '.join(extra) or 'none'}). Return all "
                "leaves from `init`"
            )
        return updates, new

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Change:
    """How the structure of a state changes at the first update.

    Attributes:
      later: The state after it, abstract.
      sources: See `ChangingState`.
      same_program: True if the first update computes the same as later ones.
    """

    later: PyTree
    sources: tuple[int | None, ...]
    same_program: bool

    def begun(self, state: PyTree) -> PyTree:
        """Returns the initial state in the structure of later ones."""
        leaves, treedef = jax.tree.flatten(state)
        pairs = list(zip(leaves, self.sources, strict=True))
        kept = {at: x for x, at in pairs if at is not None}
        later, into = jax.tree.flatten(self.later)
        inner = jax.tree.unflatten(
            into, [kept[at] if at in kept else _zeros(x) for at, x in enumerate(later)]
        )
        if self.same_program:
            return inner
        lost = tuple(x for x, at in pairs if at is None)
        return ChangingState(inner, lost, jnp.array(False), treedef, self.sources)


def _change(tx: optax.GradientTransformationExtraArgs, params: PyTree) -> _Change | None:
    """Returns the change at the first update.

    None if there is no change, or if the update needs other arguments than `value`.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(grads, state, params, value=jnp.float32(1.0))

    state = jax.eval_shape(tx.init, like)
    try:
        later = jax.eval_shape(update, like, state, like)[1]
    except (TypeError, ValueError, KeyError, AttributeError, NameError):  # raised when it updates
        return None
    if _alike(state, later):
        return None
    again = jax.eval_shape(update, like, later, like)[1]
    if not _alike(later, again):
        raise ValueError(
            "`tx` changes the structure of its state at the first update and at the second: "
            f"{_told(later, again)}. A step requires one structure: return all leaves from `init`"
        )
    index = {key: at for at, key in enumerate(_keys(later))}
    sources = tuple(index.get(key) for key in _keys(state))
    first, second = (jax.make_jaxpr(update)(like, own, like) for own in (state, later))
    return _Change(later, sources, _same(first, second, len(jax.tree.leaves(like)), sources))


def _same(
    first: jex.ClosedJaxpr,
    second: jex.ClosedJaxpr,
    params: int,
    sources: tuple[int | None, ...],
) -> bool:
    """Returns whether two updates compute the same.

    Both are functions of gradients, states and parameters; `sources` has, for each leaf of the
    second state, that of the first."""
    shared = [at for at, to in enumerate(sources) if to is not None]
    orders = shared, [at for at in sources if at is not None]
    texts, consts = [], []
    for closed, order in zip((first, second), orders, strict=True):
        flat = equations.written_out(closed, equations.CALLS)
        body, states = flat.jaxpr, len(flat.jaxpr.invars) - 2 * params
        kept = [*range(params), *(params + at for at in order)]
        invars = [body.invars[at] for at in (*kept, *range(params + states, len(body.invars)))]
        read = {*equations.variables(body.eqns), *filter(equations.is_var, body.outvars)}
        if not read.isdisjoint(set(body.invars) - set(invars)):
            return False
        same = equations.new_jaxpr(invars, body.outvars, body.eqns, constvars=body.constvars)
        texts.append(str(same))
        consts.append(flat.consts)
    pairs = zip(*consts, strict=False)
    return texts[0] == texts[1] and all(a is b or _equal(a, b) for a, b in pairs)


def _equal(a: ArrayLike, b: ArrayLike) -> bool:
    traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    return not traced and np.array_equal(a, b)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=layout.key_impl(like)), like.shape)
    return jnp.zeros(like.shape, like.dtype)


def _keys(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    """Returns path and shape of each leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.shape(x)) for path, x in flat]


def _alike(a: PyTree, b: PyTree) -> bool:
    before: PyTree = jax.tree.structure(a)
    return bool(before == jax.tree.structure(b)) and _keys(a) == _keys(b)


def _told(before: PyTree, after: PyTree) -> str:
    """Describes the leaves that only one of two states has."""
    old, new = (
        {f"{name} {tuple(np.shape(x))}" for name, x in paths.named_leaves(tree)}
        for tree in (before, after)
    )
    gained, lost = (", ".join(sorted(own)[:3]) or "no leaf" for own in (new - old, old - new))
    return f"it gains {gained} and loses {lost}"
