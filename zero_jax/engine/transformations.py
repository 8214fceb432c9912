"""A user's transformation on trained leaves alone, with one structure of its state."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from zero_jax.sharding import paths
from zero_jax.sharding.paths import Frozen, PyTree
from zero_jax.tracing.jaxpr import CALLS, as_function, written_out

# Errors of a transformation that needs other arguments.
_ERRORS = (TypeError, ValueError, KeyError, AttributeError)


def check_updates(grads: PyTree, updates: PyTree) -> None:
    """Raises ValueError if an update lacks the first dim of its gradient."""
    pairs = zip(paths.named_leaves(grads), jax.tree.leaves(updates), strict=False)
    for (name, given), made in pairs:
        if given.shape != made.shape and given.shape[1:] == made.shape:
            raise ValueError(
                f"`tx` makes an update {made.shape} from the gradient {given.shape} of {name}: it "
                "needs per-example gradients along dim 0 (as "
                "optax.contrib.differentially_private_aggregate does). Zero passes their mean. "
                "Clip and add noise inside the loss, or leave it out"
            )


def without_frozen(
    tx: optax.GradientTransformation, frozen: Frozen
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation on trained leaves only: others get no state and no update.

    Its state has one structure. That of `optax.monitor` has no measurements before the first
    update. A step is one program that donates its state, keeps it where gradients are not finite,
    and restores it from a checkpoint, so such a state starts with the leaves that it has after an
    update, and zeros.

    Raises:
      ValueError: By `init`, if the first update computes something else than later ones, or loses
        leaves. By `update`, if it raises an error itself, or changes the structure of its state.

    >>> tx = without_frozen(optax.monitor({"norm": optax.tree.norm}), None)
    >>> float(tx.init({"w": jnp.ones(4)}).measurements["norm"])
    0.0
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()

    def trained(tree: PyTree) -> PyTree:
        flags = paths.frozen_leaves(tree, frozen)
        return jax.tree.unflatten(jax.tree.structure(tree), [not f for f in flags])

    masked = optax.masked(tx, trained)

    def pick(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        # Without frozen leaves the state is exactly that of the user's own transformation.
        own = masked if any(paths.frozen_leaves(tree, frozen)) else tx
        return optax.with_extra_args_support(own)

    def init(params: PyTree) -> PyTree:
        # optax itself promotes: under JAX_NUMPY_DTYPE_PROMOTION=strict optax.adam raises.
        with jax.numpy_dtype_promotion("standard"):
            own = pick(params)
            state = jax.tree.map(jnp.asarray, own.init(params))  # a leaf may be a Python number
            return _with_all_leaves(own, state, params)

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, PyTree]:
        try:
            with jax.numpy_dtype_promotion("standard"):
                updates, new = pick(grads).update(grads, state, params, **extra)
        except _ERRORS as error:
            given = ", ".join(["gradients", "state", "parameters", *extra])
            raise ValueError(
                f"`tx` raised an error with the arguments {given}: {error}. zero.train_step passes "
                "the loss as `value` and arrays by name, step(params, opt_state, batch, "
                "name=array), but no functions (grad_fn, value_fn) and no gradients of some "
                "parameters (optax.lookahead). Where state is in host memory or in fewer bits, it "
                "passes no arrays. Write the step yourself: gradients from "
                "zero.value_and_grad(loss_fn), then tx.update(grads, opt_state, params, ...)"
            ) from error
        if not _alike(state, new):
            raise ValueError(
                f"`tx` changes the structure of its state in `update`: {_difference(state, new)}. "
                "A step requires one structure, and this `update` cannot be traced in advance, "
                f"because it needs named arguments ({', '.join(extra) or 'none'}). Return all "
                "leaves from `init`"
            )
        return updates, new

    return optax.GradientTransformationExtraArgs(init, update)


def _with_all_leaves(
    tx: optax.GradientTransformationExtraArgs, state: PyTree, params: PyTree
) -> PyTree:
    """Returns an initial state with the leaves that it has after an update.

    Raises:
      ValueError: The first update computes something else than later ones, or loses leaves.
    """

    def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(grads, state, params, value=jnp.float32(1.0))

    like, old = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    try:
        new = jax.eval_shape(run, like, old, like)[1]
    except (*_ERRORS, NameError):  # it needs other arguments, and `update` checks its state
        return state
    if _alike(old, new):
        return state
    # Not `jnp.zeros`: a leaf may be a typed key.
    leaves = zip(_keys(new), jax.tree.leaves(new), strict=True)
    zeros = {key: jax.lax.full(x.shape, 0, x.dtype) for key, x in leaves}

    def begun(state: PyTree) -> PyTree:
        known = zeros | dict(zip(_keys(old), jax.tree.leaves(state), strict=True))
        return jax.tree.unflatten(jax.tree.structure(new), [known[key] for key in zeros])

    def later(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return run(grads, begun(state), params)

    programs = (jax.make_jaxpr(f)(like, old, like) for f in (run, later))
    if not zeros.keys() >= set(_keys(old)) or not _same(*programs):
        raise ValueError(
            "`tx` changes the structure of its state at the first update, which computes "
            f"something else than later ones: {_difference(old, new)}. A step is one program "
            "with one structure: return all leaves from `init`"
        )
    return begun(state)


def _same(*programs: jex.ClosedJaxpr) -> bool:
    """Returns True for two programs that compute the same."""
    # Inlined and traced again, they have no constants that nothing reads.
    runs = [(as_function(written_out(closed, CALLS)), closed.in_avals) for closed in programs]
    one, other = (jax.make_jaxpr(run)(*avals) for run, avals in runs)
    return str(one.jaxpr) == str(other.jaxpr) and all(map(_equal, one.consts, other.consts))


def _equal(a: ArrayLike, b: ArrayLike) -> bool:
    traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    return a is b or (not traced and np.array_equal(a, b))


def _keys(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    """Returns path and shape of each leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.shape(x)) for path, x in flat]


def _alike(a: PyTree, b: PyTree) -> bool:
    before: PyTree = jax.tree.structure(a)
    return bool(before == jax.tree.structure(b)) and _keys(a) == _keys(b)


def _difference(before: PyTree, after: PyTree) -> str:
    """Describes the leaves that only one of two states has."""
    old, new = ({f"{name} {shape}" for name, shape in _keys(tree)} for tree in (before, after))
    gained, lost = (", ".join(sorted(own)[:3]) or "no leaf" for own in (new - old, old - new))
    return f"it gains {gained} and loses {lost}"
