"""Any optax transformation on partitioned parameters, exact at every stage and every N.

The transformation runs on sharded global arrays, inside `jit` and outside `shard_map`: the
partitioner inserts the sum over devices that a norm, a trust ratio or a row mean needs. Leaves
that are padded at rest are cut to their logical shape before it sees them and padded after,
which sends nothing, because the tiles line up.

State per device: K/N bytes per parameter (K = 8 for Adam's two moments; the fp32 master is the
parameter itself). Source: ZeRO, section 5.1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero_jax.collectives.precision import (
    Guard,
    Precision,
    init_guard,
    next_guard,
    norm_of,
    sum_of_squares,
    two_sums,
)
from zero_jax.offload import host_update, state_files, streamable, tiers
from zero_jax.sharding import layout, paths
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.splitter import Splitter

PyTree = Any
Frozen = str | Callable[[str], bool] | None


class ZeroState(NamedTuple):
    """State of a partitioned optimizer.

    Attributes:
      inner: the state of the wrapped transformation, partitioned.
      guard: loss scale and skip counters.
    """

    inner: Any
    guard: Guard


class ZeroTransform(optax.GradientTransformationExtraArgs):
    """What `Zero.optimizer` returns: `init` and `update`, as any optax transformation.

    Attributes:
      made_for: the settings it was made for, which those of the step must equal.
      apply: as `update`, but returns (parameters, state): what `optax.apply_updates` would give.
      resume: of the nvme tier: takes parameters at rest, returns (parameters, state) as of the
        last whole step.
      plain: the transformation that was wrapped.
    """

    made_for: Any
    apply: Callable[..., tuple[Any, ZeroState]]
    resume: Callable[..., tuple[Any, ZeroState]]
    plain: Any


def partition(
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    splitter: Splitter,
    *,
    precision: Precision,
    frozen: Frozen = None,
    offload: tiers.Offload = tiers.NONE,
    guard: bool = True,
) -> ZeroTransform:
    """Wraps a transformation so that its state is born, kept and updated in shards.

    Args:
      tx: any optax transformation.
      mesh: the mesh whose `data` axis the state is spread over.
      splitter: how parameters are cut, and a state like them.
      precision: decides whether the guard drives a loss scale.
      frozen: leaves without state or update, as for `Zero`.
      offload: what rests in host memory, as for `Zero`.
      guard: whether steps are skipped, as for `Zero`.

    Returns:
      A transformation over parameters at rest. With the guard a step whose gradients are not finite
      changes nothing but the guard's counters.
    """
    inner = without_frozen(tx, frozen)

    def state_cuts(state: PyTree, params: PyTree) -> list[layout.Split]:
        return layout.state_splits(state, params, splitter(params))

    def init(params: PyTree) -> ZeroState:
        def born(params: PyTree) -> ZeroState:
            full = layout.logical(tiers.to_device(params) if offload.streams_params else params)
            state = ZeroState(inner.init(full), init_guard(precision))
            return layout.at_rest(state, state_cuts(state, full))

        full = jax.eval_shape(layout.logical, params)
        _refuse_per_example(tx, full)
        abstract = jax.eval_shape(born, params)
        state = jax.eval_shape(layout.logical, abstract)
        placed = layout.shardings(abstract, state_cuts(state, full), mesh)
        if offload.states:
            still = paths.frozen_leaves(full, frozen)
            streamable.require_piecewise(
                tx, inner, full, splitter(full), still, offload.streams_params
            )
        if offload.streams:
            placed = streamable.placed_on_host(placed, state, full, splitter(full))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return layout.with_shardings(abstract, placed)
        if offload.in_files:
            start = init_guard(precision)
            return ZeroState(state_files.begin(files_for(params), inner, params, start), start)
        return jax.jit(born, out_shardings=placed)(params)

    def files_for(params: PyTree) -> Callable[..., state_files.Files]:
        cuts = splitter(jax.eval_shape(layout.logical, params))
        start = init_guard(precision)
        return functools.partial(state_files.Files, inner, mesh, params, start, cuts, offload)

    def resume(params: PyTree) -> tuple[PyTree, ZeroState]:
        if not offload.in_files:
            raise ValueError('only a state in files is resumed: Zero(offload="optimizer:nvme=DIR")')
        made = state_files.resume(files_for(params), inner, params, init_guard(precision))
        return made[0], ZeroState(*made[1:])

    def update(
        grads: PyTree,
        state: ZeroState,
        params: PyTree | None = None,
        *,
        finite: jax.Array | bool | None = None,
        apply: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, ZeroState]:
        if not isinstance(state, ZeroState):
            raise ValueError(
                f"the optimizer state is a {type(state).__name__}: make it with the wrapped "
                "optimizer, tx = zero.optimizer(tx); opt_state = tx.init(params)"
            )
        if offload.in_files:
            raise ValueError(
                "a state in files is updated by the host, not inside jit: use zero.train_step"
            )
        if offload.streams_params and not apply:
            raise ValueError(
                'with offload="optimizer,params" nothing can be added to masters in host memory as '
                "a whole: write params, opt_state = tx.apply(grads, opt_state, params) for "
                "tx.update and optax.apply_updates"
            )
        full_grads = layout.logical(grads)
        if not guard:
            finite = True
        elif finite is None:
            finite = all_finite(full_grads)
        counters = next_guard(state.guard, jnp.asarray(finite), precision)
        if offload.streams:
            made = in_pieces(grads, state.inner, params, finite, extra, apply=apply)
            return made[0], ZeroState(made[1], counters)
        full_state = layout.logical(state.inner)
        full_params = None if params is None else layout.logical(params)
        updates, new_state = inner.update(full_grads, full_state, full_params, **extra)
        _check_updates(full_grads, updates)
        # -0.0 is the addend that changes no bit of any number, -0.0 included.
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.full_like(u, -0.0)), updates)
        new_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new_state, full_state)
        like = full_grads if full_params is None else full_params
        rest = _keep(new_state, state_cuts(new_state, like), mesh)
        updates = _keep(updates, splitter(like), mesh)
        return optax.apply_updates(params, updates) if apply else updates, ZeroState(rest, counters)

    def in_pieces(grads: PyTree, state: PyTree, params: PyTree, *args: Any, apply: bool) -> Any:
        shapes = jax.eval_shape(layout.logical, (grads if params is None else params, state))
        cuts = splitter(shapes[0])
        frozen_leaves = paths.frozen_leaves(shapes[0], frozen)
        own = layout.state_splits(shapes[1], shapes[0], cuts)
        job = host_update.Update(inner, mesh, cuts, own, frozen_leaves, offload)
        return job.run(grads, state, params, *args, apply=apply)

    def apply(grads: PyTree, state: ZeroState, params: PyTree, **extra: Any) -> Any:
        return update(grads, state, params, apply=True, **extra)

    wrapped = ZeroTransform(init, update)
    wrapped.made_for = (mesh, splitter, precision, frozen, offload, guard)
    wrapped.apply, wrapped.resume, wrapped.plain = apply, resume, tx
    return wrapped


def _refuse_per_example(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raises for a transformation that takes gradients of each example: they come as their mean."""

    def update(params: PyTree) -> Any:
        return tx.update(params, tx.init(params), params)[0]

    try:
        updates = jax.eval_shape(update, params)
    except Exception:  # wants more than gradients: checked when it is used
        return
    _check_updates(params, updates)


def _check_updates(grads: PyTree, updates: PyTree) -> None:
    pairs = zip(paths.named_leaves(grads), jax.tree.leaves(updates), strict=False)
    for (name, given), made in pairs:
        if given.shape != made.shape and given.shape[1:] == made.shape:
            raise ValueError(
                f"the transformation makes of the gradient {given.shape} of {name} an update "
                f"{made.shape}: it takes gradients of each example along dim 0 (as "
                "optax.contrib.differentially_private_aggregate does), and Zero hands it their "
                "mean. Clip and add noise inside the loss, or leave it out"
            )


def without_frozen(
    tx: optax.GradientTransformation, frozen: Frozen
) -> optax.GradientTransformation:
    """The transformation on trained leaves only: the others get no state and no update."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()

    def trained(tree: PyTree) -> PyTree:
        flags = paths.frozen_leaves(tree, frozen)
        return jax.tree.unflatten(jax.tree.structure(tree), [not f for f in flags])

    masked = optax.masked(tx, trained)

    def pick(tree: PyTree) -> Any:
        return masked if any(paths.frozen_leaves(tree, frozen)) else tx

    # Without frozen leaves the state is exactly that of the user's own transformation.
    return optax.GradientTransformationExtraArgs(
        lambda params: pick(params).init(params),
        lambda grads, state, params=None, **extra: optax.with_extra_args_support(
            pick(grads)
        ).update(grads, state, params, **extra),
    )


def all_finite(grads: PyTree) -> jax.Array:
    """Whether every floating number is finite, also where the sum of squares would overflow."""
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.floating)]

    def squares(factor: Any) -> jax.Array:
        return sum((sum_of_squares(g, factor) for g in floats), jnp.float32(0))

    return norm_of(two_sums(squares))[1]


def _keep(tree: PyTree, cuts: list[layout.Split], mesh: AnyMesh) -> PyTree:
    """Pads a logical tree and pins it to its shards; leaves of other shapes stay whole."""
    rest = layout.at_rest(tree, cuts)
    # The update of a frozen leaf is a scalar, whatever the leaf's shape.
    pairs = zip(cuts, jax.tree.leaves(tree), strict=True)
    placed = [c if c.shape == x.shape else layout.split(x.shape, 1) for c, x in pairs]
    return jax.lax.with_sharding_constraint(rest, layout.shardings(rest, placed, mesh))
