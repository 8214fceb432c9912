"""Checks of a user's transformation, and its restriction to trained leaves."""

import jax
import optax

from zero_jax.engine.changing_state import with_one_structure
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

Frozen = paths.Frozen


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
) -> optax.GradientTransformation:
    """Returns the transformation on trained leaves only: others get no state and no update.

    Its state has the same structure before and after every update.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()

    def trained(tree: PyTree) -> PyTree:
        flags = paths.frozen_leaves(tree, frozen)
        return jax.tree.unflatten(jax.tree.structure(tree), [not f for f in flags])

    masked = optax.masked(tx, trained)

    def pick(tree: PyTree) -> optax.GradientTransformation:
        return masked if any(paths.frozen_leaves(tree, frozen)) else tx

    def init(params: PyTree) -> PyTree:
        # optax itself promotes: under JAX_NUMPY_DTYPE_PROMOTION=strict optax.adam raises.
        with jax.numpy_dtype_promotion("standard"):
            return pick(params).init(params)

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, PyTree]:
        own = optax.with_extra_args_support(pick(grads))
        try:
            with jax.numpy_dtype_promotion("standard"):
                return own.update(grads, state, params, **extra)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            given = ", ".join(["gradients", "state", "parameters", *extra])
            raise ValueError(
                f"`tx` raised an error with the arguments {given}: {error}. zero.train_step "
                "passes the loss as `value`, and arrays that are passed by name, step(params, "
                "opt_state, batch, name=array). It passes none where state is in host memory or "
                "in fewer bits. Transformations that call functions (grad_fn, value_fn) or take "
                "gradients of some parameters (optax.lookahead) are unsupported there. Write the "
                "step yourself: gradients from zero.value_and_grad(loss_fn), then "
                "tx.update(grads, opt_state, params, ...)"
            ) from error

    # Without frozen leaves the state is exactly that of the user's own transformation.
    own = optax.GradientTransformationExtraArgs(init, update)
    return with_one_structure(own)
