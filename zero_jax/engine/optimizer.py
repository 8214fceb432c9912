"""Any optax transformation on partitioned parameters, exact at every stage and every N.

The transformation runs on sharded global arrays without padding, inside `jit` and outside
`shard_map`: the partitioner inserts the sum over devices that a norm, a trust ratio or a row mean
needs. State per device: K/N bytes per parameter (K = 8 for Adam's two moments; the fp32 master
parameter is the parameter itself). Source: ZeRO, section 5.1.
"""

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zero_jax.collectives.precision import norm_of, sum_of_squares, two_sums, unless_skipped
from zero_jax.engine.config import Config
from zero_jax.engine.loss_scale import Guard, init_guard, next_guard
from zero_jax.engine.transformations import check_updates, without_frozen
from zero_jax.low_bit.state import FP32, LowBitState, initial, kind_of, restated, splits_of
from zero_jax.matrix_updates import update as matrix_updates
from zero_jax.offload import host
from zero_jax.offload.nvme import StateFiles
from zero_jax.sharding import layout
from zero_jax.sharding.layout import Partition, state_partitions
from zero_jax.sharding.paths import PyTree

# Settings that determine the state of an optimizer and its update.
_OF_STATE = (
    *("mesh", "splitter", "precision", "frozen", "offload"),
    *("skip_nonfinite", "optimizer_state_dtype"),
)
Trees = tuple[PyTree, PyTree, PyTree | None]  # gradients, state and parameters, as stored


class ZeroState(NamedTuple):
    """State of a partitioned optimizer.

    Attributes:
      inner: State of the wrapped transformation, partitioned.
      guard: Loss scale and counters of skipped steps.
    """

    inner: PyTree
    guard: Guard

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the wrapped state, for `optax.contrib.schedule_free_eval_params`."""
        inner = self.inner.inner if isinstance(self.inner, LowBitState) else self.inner
        if name in getattr(inner, "_fields", ()):
            return getattr(inner, name)
        raise AttributeError(f"no attribute {name!r}: a ZeroState of {type(inner).__name__}")


class ZeroTransform(optax.GradientTransformationExtraArgs):
    """Wraps a transformation so that its state is initialised, stored and updated in shards.

    `init` and `update` are as in optax, for sharded parameters. With `skip_nonfinite`, a step whose
    gradients are not finite changes only the counters of skipped steps and the loss scale.

    Attributes:
      plain: The wrapped transformation, any of optax.
      config: Settings that it was wrapped for, as for `Zero`.

    Raises:
      ValueError: `plain` is no transformation, or wrapped already.
    """

    plain: optax.GradientTransformation
    config: Config

    def __new__(cls, plain: optax.GradientTransformation, config: Config) -> Self:
        _check_transformation(plain, "optax.adamw(1e-3)")
        if isinstance(plain, ZeroTransform):
            raise ValueError("`tx` is wrapped already: pass the plain optax transformation")
        # Elements of the tuple, by which `optax.chain` reads a transformation.
        self: Self = super().__new__(
            cls, lambda *args: self.init(*args), lambda *args, **extra: self.update(*args, **extra)
        )
        self.plain, self.config = plain, config
        return self

    def __getnewargs__(self) -> tuple[optax.GradientTransformation, Config]:
        return self.plain, self.config  # for copies

    @functools.cached_property
    def _partition(self) -> host.Partitioning:
        return host.Partitioning(self.config.splitter, self.config.frozen, self.config.mesh)

    @functools.cached_property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        return without_frozen(self.plain, self.config.frozen)

    def init(self, params: PyTree) -> ZeroState:
        full = jax.eval_shape(layout.unpad, params)
        abstract = jax.eval_shape(self._initial_state, params)
        placed = self._placed(abstract, full)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return layout.with_shardings(abstract, placed)
        if self.config.offload.in_files:
            return ZeroState(*self._files(params, resume=False).begin(params))
        return jax.jit(self._initial_state, out_shardings=placed)(params)

    def _initial_state(self, params: PyTree) -> ZeroState:
        full = layout.unpad(
            host.to_device(params) if self.config.offload.streams_params else params
        )
        inner = initial(self.inner, full, self.config.optimizer_state_dtype)
        state = ZeroState(inner, init_guard(self.config.precision))
        return layout.pad(state, self._state_cuts(state, full))

    def _state_cuts(self, state: PyTree, params: PyTree) -> list[Partition]:
        return splits_of(state, params, self.config.splitter(params))

    def _placed(self, abstract: ZeroState, full: PyTree) -> PyTree:
        """Returns the state's shardings; raises if updates in pieces are needed and impossible."""
        state = jax.eval_shape(layout.unpad, abstract)
        placed = layout.shardings(abstract, self._state_cuts(state, full), self.config.mesh)
        if self._in_pieces or self.config.offload.in_files:
            self._traced(full)
        if self.config.offload.streams:
            return host.place_state(placed, host.offloaded(state, full, self.config.splitter))
        return placed

    def _traced(self, full: PyTree) -> host.PiecewiseUpdate:
        """Returns the update in pieces; raises CannotStream if that is impossible."""
        return host.traced_update(
            self.inner,
            full,
            self._partition,
            params_streamed=self.config.offload.streams_params,
            optimizer_state_dtype=self.config.optimizer_state_dtype,
        )

    @property
    def _in_pieces(self) -> bool:
        """True if states are updated in pieces inside the step."""
        return self.config.offload.streams or self.config.optimizer_state_dtype != FP32

    def _files(self, params: PyTree, *, resume: bool) -> StateFiles:
        return StateFiles(
            self.inner,
            self._traced(jax.eval_shape(layout.unpad, params)),
            params,
            init_guard(self.config.precision),
            self.config.offload,
            resume=resume,
        )

    def resume(self, params: PyTree) -> tuple[PyTree, ZeroState]:
        """Returns (parameters, state) of the last complete step of the nvme tier.

        Raises:
          ValueError: The state is not in files.
        """
        if not self.config.offload.in_files:
            raise ValueError(
                f'`offload`="{self.config.offload}": only a state in files can be resumed. Use '
                'Zero(offload="optimizer:nvme=DIR")'
            )
        params, *state = self._files(params, resume=True).resume(params)
        return params, ZeroState(*state)

    def restated(self, state: ZeroState, params: PyTree) -> ZeroState:
        """Converts a state, given its parameters, to the `optimizer_state_dtype` of `config`."""
        guard_of(state)
        if self.config.offload.in_files or isinstance(state.inner, StateFiles):
            raise ValueError(
                "`optimizer_state_dtype` of a state in files cannot change: restore a checkpoint "
                'with offload="optimizer"'
            )
        if kind_of(state.inner) == self.config.optimizer_state_dtype:
            return state
        full = jax.eval_shape(layout.unpad, params)
        abstract = jax.eval_shape(self._initial_state, params)
        like = jax.eval_shape(layout.unpad, abstract)

        def convert(state: ZeroState) -> ZeroState:
            made = restated(layout.unpad(host.to_device(state)), like)
            return layout.pad(made, self._state_cuts(made, full))

        return jax.jit(convert, out_shardings=self._placed(abstract, full))(state)

    def apply(
        self, grads: PyTree, state: ZeroState, params: PyTree, **extra: PyTree
    ) -> tuple[PyTree, ZeroState]:
        """Like `update`, but returns (parameters, state), as after `optax.apply_updates`."""
        return self.update(grads, state, params, apply=True, **extra)

    def update(
        self,
        grads: PyTree,
        state: ZeroState,
        params: PyTree | None = None,
        *,
        finite: jax.Array | bool | None = None,
        apply: bool = False,
        **extra: PyTree,
    ) -> tuple[PyTree, ZeroState]:
        self._check_use(state, apply)
        state = self._joined(state, grads if params is None else params)
        if not self.config.skip_nonfinite:
            finite = True
        elif finite is None:
            finite = all_finite(layout.unpad(grads))
        counters = next_guard(state.guard, jnp.asarray(finite), self.config.precision)
        run = self._pieces if self._in_pieces else self._whole
        made, inner = run((grads, state.inner, params), finite, extra, apply)
        return made, ZeroState(inner, counters)

    def _joined(self, state: ZeroState, params: PyTree) -> ZeroState:
        """Returns the state in its structure: `nnx.Optimizer` flattens padded leaves."""
        if not any(map(_is_apart, jax.tree.leaves(state, is_leaf=_is_apart))):
            return state
        like = jax.tree.structure(jax.eval_shape(self._initial_state, params))
        return jax.tree.unflatten(like, jax.tree.leaves(state))

    def _check_use(self, state: ZeroState, apply: bool) -> None:
        guard_of(state)
        if kind_of(state.inner) != self.config.optimizer_state_dtype:
            raise ValueError(
                f"the optimizer state is stored as {kind_of(state.inner)}, but this optimizer has "
                f'`optimizer_state_dtype`="{self.config.optimizer_state_dtype}": convert it with '
                "opt_state = tx.restated(opt_state, params)"
            )
        if self.config.offload.in_files:
            raise ValueError(
                "`offload`: the host updates a state in files, outside `jit`. Use zero.train_step"
            )
        if self.config.offload.streams_params and not apply:
            raise ValueError(
                "`offload`: fp32 master parameters in host memory are updated in pieces. Use "
                "params, opt_state = tx.apply(grads, opt_state, params) instead of tx.update and "
                "optax.apply_updates"
            )

    def _whole(
        self, trees: Trees, finite: jax.Array | bool, extra: dict[str, PyTree], apply: bool
    ) -> tuple[PyTree, PyTree]:
        """Returns (updates, state) from full arrays, or with `apply` (parameters, state)."""
        grads, state, params, _ = full = layout.unpad((*trees, extra))
        like = grads if params is None else params
        cuts = self.config.splitter(like)
        known = [*cuts, *state_partitions(state, like, cuts), *(cuts if params is not None else ())]
        updates, new = matrix_updates.run(
            lambda grads, state, params, extra: self.inner.update(grads, state, params, **extra),
            *(full, known, self.config.mesh),
        )
        check_updates(grads, updates)
        settle = functools.partial(unless_skipped, finite)
        updates, new = jax.tree.map(settle, updates), jax.tree.map(settle, new, state)
        rest = layout.constrained(new, self._state_cuts(new, like), self.config.mesh)
        updates = layout.constrained(updates, cuts, self.config.mesh)
        return optax.apply_updates(trees[2], updates) if apply else updates, rest

    def _pieces(
        self, trees: Trees, finite: jax.Array | bool, extra: dict[str, PyTree], apply: bool
    ) -> tuple[PyTree, PyTree]:
        """Updates like `_whole`, in pieces, for state in host memory or in 8 or 16 bits."""
        return host.update_in_pieces(
            functools.partial(self.inner.update, **layout.unpad(extra)),
            trees,
            self._partition,
            finite=finite,
            apply=apply,
            piece_bytes=self.config.offload.piece_bytes,
        )


def _check_transformation(tx: object, example: str) -> None:
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"`tx`={tx!r} is not an optax transformation with `init` and `update`: pass for "
            f"example {example}"
        )


def check_made_for(tx: object, config: Config) -> None:
    """Raises ValueError for a transformation that was not wrapped, or for other settings."""
    _check_transformation(tx, "zero.optimizer(optax.adamw(1e-3))")
    if not isinstance(tx, ZeroTransform):
        raise ValueError(
            f"`tx` is a plain {type(tx).__name__}: pass the partitioned transformation, tx = "
            "zero.optimizer(tx), and make the state with it, opt_state = tx.init(params)"
        )
    for name in _OF_STATE:
        before, now = getattr(tx.config, name), getattr(config, name)
        if before != now:
            raise ValueError(
                f"`tx` was wrapped by a Zero with {name}={before!r}, but this Zero has {now!r}: "
                "wrap it with the same Zero, tx = zero.optimizer(tx)"
            )


def guard_of(state: PyTree) -> Guard:
    """Returns the guard of an optimizer state; raises ValueError for a state of plain optax."""
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"the optimizer state is a {type(state).__name__}: make it with the wrapped "
            "optimizer, tx = zero.optimizer(tx); opt_state = tx.init(params)"
        )
    return state.guard


def _is_apart(node: PyTree) -> bool:
    return isinstance(node, nnx.State) and set(node) == {"value"}


def all_finite(grads: PyTree) -> jax.Array:
    """Returns whether all elements are finite, even if their sum of squares overflows."""
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.floating)]

    def squares(factor: jax.Array | float) -> jax.Array:
        return sum((sum_of_squares(g, factor) for g in floats), jnp.float32(0))

    return norm_of(two_sums(squares))[1]
