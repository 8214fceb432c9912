"""Any optax transformation on partitioned parameters, exact at every stage and every N.

The transformation runs on sharded global arrays, inside `jit` and outside `shard_map`: the
partitioner inserts the sum over devices that a norm, a trust ratio or a row mean needs. Leaves
that are padded at rest are cut to their logical shape before it sees them and padded after,
which sends nothing, because the tiles line up.

State per device: K/N bytes per parameter (K = 8 for Adam's two moments; the fp32 master is the
parameter itself). Source: ZeRO, section 5.1.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zero_jax.collectives.norms import norm_of, sum_of_squares, two_sums, unless_skipped
from zero_jax.collectives.precision import Precision
from zero_jax.engine import pieces
from zero_jax.engine.changing_state import ChangingState
from zero_jax.engine.loss_scale import Guard, init_guard, next_guard
from zero_jax.engine.transformations import (
    Frozen,
    check_updates,
    refuse_per_example,
    without_frozen,
)
from zero_jax.offload import streamable, tiers
from zero_jax.offload.piecewise import at_rest, require_piecewise
from zero_jax.offload.state_files import Files
from zero_jax.offload.state_in_files import Stored
from zero_jax.owners import update as owners
from zero_jax.sharding import layout, paths
from zero_jax.sharding.cuts import Split, Splitter, state_splits
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.states.narrow import FP32, NarrowState, cuts_of, initial, kind_of, restated

PyTree = Any
Trees = tuple[PyTree, PyTree, PyTree | None]  # gradients, state and parameters, at rest


class ZeroState(NamedTuple):
    """State of a partitioned optimizer.

    Attributes:
      inner: State of the wrapped transformation, partitioned.
      guard: Loss scale and counters of skipped steps.
    """

    inner: PyTree
    guard: Guard

    def __getattr__(self, name: str) -> Any:
        """A field of the wrapped state: `optax.contrib.schedule_free_eval_params` asks for some."""
        wraps = isinstance(self.inner, (NarrowState, ChangingState))
        inner = self.inner.inner if wraps else self.inner
        if name in getattr(inner, "_fields", ()):
            return getattr(inner, name)
        raise AttributeError(
            f"neither ZeroState nor the state that it wraps, a {type(inner).__name__}, has {name!r}"
        )


class ZeroTransform(optax.GradientTransformationExtraArgs):
    """The partitioned transformation of `Zero.optimizer`: `init` and `update` as in optax.

    Attributes:
      made_for: Settings that it was wrapped for; those of the step must be equal.
      apply: Like `update`, but returns (parameters, state), as after `optax.apply_updates`.
      resume: For the nvme tier. Takes sharded parameters, returns (parameters, state) of the last
        complete step.
      restated: Converts a state, given its parameters, from any `states` dtype to the one used
        here.
      plain: The wrapped transformation.
    """

    made_for: tuple[AnyMesh, Splitter, Precision, Frozen, tiers.Offload, bool, str]
    apply: Callable[..., tuple[PyTree, ZeroState]]
    resume: Callable[[PyTree], tuple[PyTree, ZeroState]]
    restated: Callable[[ZeroState, PyTree], ZeroState]
    plain: optax.GradientTransformation


def partition(
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    splitter: Splitter,
    *,
    precision: Precision,
    frozen: Frozen = None,
    offload: tiers.Offload = tiers.NONE,
    guard: bool = True,
    states: str = FP32,
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
      states: how large states are kept, as for `Zero`.

    Returns:
      A transformation over parameters at rest. With the guard a step whose gradients are not finite
      changes nothing but the guard's counters.
    """
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"tx={tx!r} is no optax transformation, which has init and update: optax.adamw(1e-3) "
            "say"
        )
    made = _Partition(tx, mesh, splitter, precision, frozen, offload, guard, states)
    wrapped = ZeroTransform(made.init, made.update)
    wrapped.made_for = (mesh, splitter, precision, frozen, offload, guard, states)
    wrapped.apply, wrapped.resume, wrapped.plain = made.apply, made.resume, tx
    wrapped.restated = made.restated
    return wrapped


def guard_of(state: Any) -> Guard:
    """The guard of an optimizer state.

    Raises:
      ValueError: it is that of a plain optax transformation.
    """
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"the optimizer state is a {type(state).__name__}: make it with the wrapped "
            "optimizer, tx = zero.optimizer(tx); opt_state = tx.init(params)"
        )
    return state.guard


@dataclasses.dataclass(frozen=True, eq=False)
class _Partition:
    """What `partition` was given, and the functions that it returns."""

    tx: optax.GradientTransformation
    mesh: AnyMesh
    splitter: Splitter
    precision: Precision
    frozen: Frozen
    offload: tiers.Offload
    guard: bool
    states: str

    @functools.cached_property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        return without_frozen(self.tx, self.frozen)

    def init(self, params: PyTree) -> ZeroState:
        full = jax.eval_shape(layout.logical, params)
        refuse_per_example(self.tx, full)
        abstract = jax.eval_shape(self._born, params)
        placed = self._placed(abstract, full)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return layout.with_shardings(abstract, placed)
        if self.offload.in_files:
            files = self._files(params, resume=False)
            return ZeroState(files.begin(params), files.guard)
        return jax.jit(self._born, out_shardings=placed)(params)

    def _born(self, params: PyTree) -> ZeroState:
        full = layout.logical(tiers.to_device(params) if self.offload.streams_params else params)
        inner = initial(self.inner, full, self.states)
        state = ZeroState(inner, init_guard(self.precision))
        return layout.at_rest(state, self._state_cuts(state, full))

    def _state_cuts(self, state: PyTree, params: PyTree) -> list[Split]:
        return cuts_of(state, params, self.splitter(params))

    def _placed(self, abstract: ZeroState, full: PyTree) -> PyTree:
        """The state's shardings; raises where it can't be updated in pieces, and must be."""
        state = jax.eval_shape(layout.logical, abstract)
        placed = layout.shardings(abstract, self._state_cuts(state, full), self.mesh)
        if self._in_pieces or self.offload.in_files:
            still = paths.frozen_leaves(full, self.frozen)
            cuts, masters = self.splitter(full), self.offload.streams_params
            given = self.tx, self.inner, full, self.mesh, cuts, still, masters
            require_piecewise(*given, states=self.states)
        if self.offload.streams:
            return streamable.placed_on_host(placed, state, full, self.splitter(full))
        return placed

    @property
    def _in_pieces(self) -> bool:
        """Whether states are updated piece by piece inside the step."""
        return self.offload.streams or self.states != FP32

    def _files(self, params: PyTree, *, resume: bool) -> Files:
        cuts = self.splitter(jax.eval_shape(layout.logical, params))
        start = init_guard(self.precision)
        return Files(self.inner, self.mesh, params, start, cuts, self.offload, resume=resume)

    def resume(self, params: PyTree) -> tuple[PyTree, ZeroState]:
        if not self.offload.in_files:
            raise ValueError('only a state in files is resumed: Zero(offload="optimizer:nvme=DIR")')
        params, stored, guard = self._files(params, resume=True).resume(params)
        return params, ZeroState(stored, guard)

    def restated(self, state: ZeroState, params: PyTree) -> ZeroState:
        guard_of(state)
        if self.offload.in_files or isinstance(state.inner, Stored):
            raise ValueError(
                'a state in files stays as it is: go on from a checkpoint with offload="optimizer"'
            )
        if kind_of(state.inner) == self.states:
            return state
        full = jax.eval_shape(layout.logical, params)
        abstract = jax.eval_shape(self._born, params)
        like = jax.eval_shape(layout.logical, abstract)

        def convert(state: ZeroState) -> ZeroState:
            made = restated(layout.logical(tiers.to_device(state)), like)
            return layout.at_rest(made, self._state_cuts(made, full))

        return jax.jit(convert, out_shardings=self._placed(abstract, full))(state)

    def apply(
        self, grads: PyTree, state: ZeroState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, ZeroState]:
        return self.update(grads, state, params, apply=True, **extra)

    def update(
        self,
        grads: PyTree,
        state: ZeroState,
        params: PyTree | None = None,
        *,
        finite: jax.Array | bool | None = None,
        apply: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, ZeroState]:
        self._check_use(state, apply)
        state = self._joined(state, grads if params is None else params)
        if not self.guard:
            finite = True
        elif finite is None:
            finite = all_finite(layout.logical(grads))
        counters = next_guard(state.guard, jnp.asarray(finite), self.precision)
        run = self._pieces if self._in_pieces else self._whole
        made, inner = run((grads, state.inner, params), finite, extra, apply)
        return made, ZeroState(inner, counters)

    def _joined(self, state: ZeroState, params: PyTree) -> ZeroState:
        """The state as it was made: `nnx.Optimizer` hands back padded leaves taken apart."""
        if not any(map(_is_apart, jax.tree.leaves(state, is_leaf=_is_apart))):
            return state
        like = jax.tree.structure(jax.eval_shape(self._born, params))
        return jax.tree.unflatten(like, jax.tree.leaves(state))

    def _check_use(self, state: ZeroState, apply: bool) -> None:
        guard_of(state)
        if kind_of(state.inner) != self.states:
            raise ValueError(
                f"the optimizer state is kept as {kind_of(state.inner)}, and this optimizer has "
                f'states="{self.states}": opt_state = tx.restated(opt_state, params) makes it one '
                "of this"
            )
        if self.offload.in_files:
            raise ValueError(
                "a state in files is updated by the host, not inside jit: use zero.train_step"
            )
        if self.offload.streams_params and not apply:
            raise ValueError(
                'with offload="optimizer,params" nothing can be added to masters in host memory as '
                "a whole: write params, opt_state = tx.apply(grads, opt_state, params) for "
                "tx.update and optax.apply_updates"
            )

    def _whole(
        self, trees: Trees, finite: jax.Array | bool, extra: dict[str, Any], apply: bool
    ) -> tuple[PyTree, PyTree]:
        """(updates, state) of whole arrays, or with `apply` (parameters, state)."""
        grads, state, params = layout.logical(trees)
        updates, new = self._updated((grads, state, params), layout.logical(extra))
        check_updates(grads, updates)
        settle = functools.partial(unless_skipped, finite)
        updates, new = jax.tree.map(settle, updates), jax.tree.map(settle, new, state)
        like = grads if params is None else params
        rest = at_rest(new, self._state_cuts(new, like), self.mesh)
        updates = at_rest(updates, self.splitter(like), self.mesh)
        return optax.apply_updates(trees[2], updates) if apply else updates, rest

    def _updated(self, trees: Trees, extra: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """The transformation's own update, of logical trees."""

        def update(grads: PyTree, state: PyTree, params: PyTree, extra: PyTree) -> Any:
            return self.inner.update(grads, state, params, **extra)

        grads, state, params = trees
        cuts = self.splitter(grads if params is None else params)
        states = state_splits(state, grads if params is None else params, cuts)
        known = [*cuts, *states, *(cuts if params is not None else ())]
        return owners.run(update, (*trees, extra), known, self.mesh)

    def _pieces(
        self, trees: Trees, finite: jax.Array | bool, extra: dict[str, Any], apply: bool
    ) -> tuple[PyTree, PyTree]:
        """The same, in pieces, of states in host memory or in fewer bits."""

        def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return self.inner.update(grads, state, params, **layout.logical(extra))

        given = pieces.Given(*trees, self.splitter, self.frozen, self.mesh)
        return given.run(update, finite, apply, self.offload.piece_bytes)


def _is_apart(node: Any) -> bool:
    return isinstance(node, nnx.State) and set(node) == {"value"}


def all_finite(grads: PyTree) -> jax.Array:
    """Whether every floating number is finite, also where the sum of squares would overflow."""
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.floating)]

    def squares(factor: jax.Array | float) -> jax.Array:
        return sum((sum_of_squares(g, factor) for g in floats), jnp.float32(0))

    return norm_of(two_sums(squares))[1]
