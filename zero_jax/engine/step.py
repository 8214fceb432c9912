"""The training step: gradients, guard, update and metrics in one jitted program."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.distributed.agreement import check_agreement
from zero_jax.engine import grads
from zero_jax.engine.compiler import CheckedJit, XlaOptions
from zero_jax.engine.config import AUTO, Config
from zero_jax.engine.loss_scale import Guard, next_guard
from zero_jax.engine.optimizer import ZeroState, ZeroTransform, check_made_for, guard_of
from zero_jax.engine.trace import Traced
from zero_jax.sharding import layout, paths
from zero_jax.sharding.mesh import check_global, on_gpu
from zero_jax.sharding.paths import PyTree

# Steps that run before the host reads their counters: reading the newest would wait for the device.
_IN_FLIGHT = 2
# Arguments that the step itself passes to a transformation by name.
_RESERVED = ("value", "finite", "apply")
# Settings that must be equal in all processes.
_COMPARED = (
    *("stage", "precision", "grad_accum_steps", "remat", "offload", "secondary_shards"),
    *("context_exchange", "skip_nonfinite", "optimizer_state_dtype"),
)
# Returns the settings that take the place of stage="auto", given parameters, batch and extras.
Choose = Callable[[PyTree, PyTree, tuple[PyTree, ...]], Config]


class NonFiniteError(ArithmeticError):
    """Raised when more steps in a row than allowed had non-finite gradients."""


class Metrics(NamedTuple):
    """Metrics of a training step, equal on every device.

    Attributes:
      loss: Global weighted mean.
      grad_norm: L2 norm of the global gradient, before any clipping.
      weight: Global weight (the number of devices times micro-batches if the loss is a mean).
      skipped: Number of steps skipped so far because of non-finite gradients.
      skipped_in_a_row: Number of steps skipped since the last good step.
      loss_scale: Loss scale of this step; 1 unless compute is fp16.
      aux: The aux output of the loss function, or None.
    """

    loss: jax.Array
    grad_norm: jax.Array
    weight: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    loss_scale: jax.Array
    aux: PyTree = None


class TrainStep:
    """A jitted training step, from `Zero.train_step`.

    `step(params, opt_state, batch, *extras, **named)` returns (params, opt_state, Metrics). The
    first two arguments are donated. Extras are passed to the loss, and named arrays to the
    transformation. With stage="auto", settings are chosen at the first use.

    Attributes:
      settings: Settings of the step.
      transformation: The partitioned transformation of the update.
      function: The step before `jit`, a function of `(params, opt_state, batch, *extras, **named)`.

    Raises:
      NonFiniteError: By a call, after `max_skips` consecutive skipped steps.
      ValueError: By a call, if a named argument is a function or a reserved name, or if settings
        differ between processes.
    """

    def __init__(
        self,
        settings: Config,
        loss_fn: grads.LossFn,
        tx: ZeroTransform,
        *,
        has_aux: bool = False,
        max_skips: int = 20,
        choose: Choose | None = None,
    ):
        check_made_for(tx, settings.resolved)
        if max_skips < 1:
            raise ValueError(f"`max_skips`={max_skips}: at least 1 is required")
        self.settings = settings
        self.transformation, self.function = tx, self._step
        self._loss = grads.GlobalLoss(settings, loss_fn, has_aux)
        self._max_skips = max_skips
        self._choose = choose
        self._pending: collections.deque[jax.Array] = collections.deque()
        self._agreed = False
        options = self.compiler_options if on_gpu(settings.mesh) else None
        self._program = CheckedJit(self._step, options, donate_argnums=(0, 1))

    def __call__(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: PyTree, **named: PyTree
    ) -> tuple[PyTree, ZeroState, Metrics]:
        _check_named(named)
        self._settle(params, batch, extras)
        self._agree(batch)
        while len(self._pending) >= _IN_FLIGHT:
            self._look(params, opt_state, batch, extras)
        run = self._update_files if self.settings.offload.in_files else self._program
        params, opt_state, metrics = run(params, opt_state, batch, *extras, **named)
        self._pending.append(metrics.skipped_in_a_row)
        return params, opt_state, metrics

    def _step(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: PyTree, **named: PyTree
    ) -> tuple[PyTree, ZeroState, Metrics]:
        self._settle(params, batch, extras)
        scale = guard_of(opt_state).loss_scale
        out = self._loss.gradients(params, batch, extras, scale)
        with jax.named_scope("zero_update"):
            params, opt_state = self.transformation.apply(
                *(out.grads, opt_state, params), finite=out.finite, value=out.loss, **named
            )
        return params, opt_state, _metrics(out, opt_state.guard, scale)

    def _update_files(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: PyTree, **named: PyTree
    ) -> tuple[PyTree, ZeroState, Metrics]:
        """Runs a step whose optimizer state is in files: gradients in one program, then pieces."""
        if named:
            raise ValueError(
                f"{', '.join(named)}: with the nvme tier a transformation gets `value`, the loss, "
                'and no other named argument. Use offload="optimizer" (host memory)'
            )
        guard, files = guard_of(opt_state), opt_state.inner
        out = self._gradients(params, batch, extras, guard.loss_scale)
        after = next_guard(guard, out.finite, self.settings.precision)
        params = files.step(out.grads, params, after, finite=out.finite, loss=out.loss)
        return params, ZeroState(files, after), _metrics(out, after, guard.loss_scale)

    @functools.cached_property
    def _gradients(self) -> CheckedJit:
        return CheckedJit(self._loss.gradients)

    def _settle(self, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...]) -> None:
        """Chooses the settings of stage="auto", once."""
        if self.settings.stage == AUTO:
            assert self._choose is not None
            self.settings = self._choose(params, batch, extras)
            self._loss = dataclasses.replace(self._loss, settings=self.settings)

    def read(self, params: PyTree, opt_state: PyTree, batch: PyTree, *extras: PyTree) -> Traced:
        """Returns the leaves and layers found in the traced loss; allocates nothing."""
        self._settle(params, batch, extras)
        return self._loss.read(params, batch, extras)

    def compiler_options(self, *args: PyTree, **_: PyTree) -> XlaOptions:
        """Returns the XLA options for GPUs, given the step's arguments or their shapes."""
        layers = self.read(*args).layers
        return self.settings.compiler_options(layers)

    def trace(
        self, params: PyTree, opt_state: PyTree, batch: PyTree, *extras: PyTree, **named: PyTree
    ) -> jax.stages.Traced:
        """Returns the traced program, for arrays or ShapeDtypeStructs, without compiling."""
        if self.settings.offload.in_files:
            raise ValueError(
                "`offload`: with the nvme tier a step is many programs and cannot be traced as "
                'one. Plan with offload="optimizer"; the files take twice its bytes of host memory'
            )
        self._settle(params, batch, extras)
        return self._program.trace(params, opt_state, batch, *extras, **named)

    def lower(
        self, params: PyTree, opt_state: PyTree, batch: PyTree, *extras: PyTree, **named: PyTree
    ) -> jax.stages.Lowered:
        """Returns the lowered program, to compile and audit; takes arrays or ShapeDtypeStructs."""
        return self.trace(params, opt_state, batch, *extras, **named).lower()

    def first_bad_leaf(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: PyTree
    ) -> str | None:
        """Returns the path of the first leaf with a non-finite gradient on this batch, or None.

        A skipped step leaves the parameters unchanged, so a later call reproduces its gradients.
        """
        self._settle(params, batch, extras)
        out = self._gradients(params, batch, extras, opt_state.guard.loss_scale)
        return first_nonfinite(layout.unpad(out.grads))

    def _look(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, extras: tuple[PyTree, ...]
    ) -> None:
        """Raises NonFiniteError if the oldest unread step was one skipped step too many."""
        skips = int(self._pending.popleft())
        if skips < self._max_skips:
            return
        self._pending.clear()
        leaf = self.first_bad_leaf(params, opt_state, batch, *extras)
        where = f"the gradient of {leaf}" if leaf else "an earlier batch (this one is finite)"
        raise NonFiniteError(
            f"{skips} steps in a row were skipped (`max_skips`={self._max_skips}); not finite: "
            f"{where}; loss scale {float(opt_state.guard.loss_scale):g}. Parameters are those of "
            "the last good step: lower the learning rate, or inspect the data"
        )

    def _agree(self, batch: PyTree) -> None:
        mesh = self.settings.mesh
        if len(mesh.local_devices) == mesh.size:
            return  # a process alone: others may not call
        check_global(batch, mesh)
        if self._agreed:
            return
        s = self.settings
        settings = {
            "mesh": dict(s.mesh.shape),
            **{name: getattr(s, name) for name in _COMPARED},
            "frozen": s.frozen if isinstance(s.frozen, str) else s.frozen is not None,
            "batch shapes": [str(jax.typeof(x)) for x in jax.tree.leaves(batch)],
            "jax version": jax.__version__,
        }
        check_agreement(settings)
        self._agreed = True


def _metrics(out: grads.Result, guard: Guard, scale: jax.Array) -> Metrics:
    """Returns the metrics of a step from its gradients, the guard after it and its loss scale."""
    assert out.grad_norm is not None
    return Metrics(
        loss=out.loss,
        grad_norm=out.grad_norm,
        weight=out.weight,
        skipped=guard.skipped,
        # A buffer of its own: the guard's is donated to the next step.
        skipped_in_a_row=guard.consecutive + jnp.zeros((), jnp.int32),
        loss_scale=scale,
        aux=out.aux,
    )


def _check_named(named: Mapping[str, PyTree]) -> None:
    """Raises ValueError for a named argument that the transformation cannot take."""
    for name, given in named.items():
        if name in _RESERVED:
            raise ValueError(
                f"`{name}`: the step passes its own {name} to the transformation. Leave it out"
            )
        if any(callable(x) for x in jax.tree.leaves(given)):
            raise ValueError(
                f"`{name}`={given!r}: a step passes arrays to the transformation, not functions. "
                "Write the step yourself: gradients from zero.value_and_grad(loss_fn), then "
                f"tx.update(grads, opt_state, params, {name}=...)"
            )


def first_nonfinite(tree: PyTree) -> str | None:
    """Returns the path of the first leaf that has a NaN or an infinity, or None; runs on the host.

    >>> first_nonfinite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])})
    'b'
    """
    for name, leaf in paths.named_leaves(tree):
        if not bool(jnp.all(jnp.isfinite(leaf))):
            return name
    return None
