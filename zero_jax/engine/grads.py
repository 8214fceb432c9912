"""Loss and gradients over the global batch.

The loss is traced once for each signature (`trace.py`), and its program is run on every device with
weights in place of arrays (`device_step.py`, `execute.py`). `lifetimes.py` says how long gathered
copies and full gradients live. Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.engine import losses, outside
from zero_jax.engine.config import Config
from zero_jax.engine.device_step import DeviceStep
from zero_jax.engine.device_step import Result as Result
from zero_jax.engine.losses import LossFn as LossFn
from zero_jax.engine.trace import Traced, trace
from zero_jax.offload import host
from zero_jax.sharding import layout, paths
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.mesh import batch_axes, batch_shards, row_axes
from zero_jax.sharding.paths import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalLoss:
    """A loss function over the global batch.

    Attributes:
      settings: Settings of the run.
      fn: The loss of one device: `fn(params, batch, *extras)`.
      has_aux: True if it returns (loss, aux).
    """

    settings: Config
    fn: LossFn
    has_aux: bool = False
    _told: set[str] = dataclasses.field(default_factory=set, repr=False)

    def value(self, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...]) -> Result:
        """Returns the loss alone."""
        return self._run(params, batch, extras, None)

    def gradients(
        self,
        params: PyTree,
        batch: PyTree,
        extras: tuple[PyTree, ...],
        scale: jax.Array | float = 1.0,
    ) -> Result:
        """Returns the loss and its gradients, computed at this loss scale and divided by it."""
        _check_masters(params, paths.frozen_leaves(params, self.settings.frozen))
        return self._run(params, batch, extras, scale)

    def read(
        self, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...], k: int | None = None
    ) -> Traced:
        """Returns the traced loss, with its leaves and layers; allocates nothing.

        The loss is traced once for arguments of the same shapes, under the same settings of JAX,
        and for k micro-batches: 1 for an evaluation, by default those of the settings.
        """
        k = k or self.settings.grad_accum_steps
        full = jax.eval_shape(layout.unpad, params)
        _check_params(params, self.settings.splitter(full))
        losses.check_batch(batch, batch_shards(self.settings.mesh), k)
        full, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (full, batch))
        traced: Traced = self._trace.trace(full, batch, extras, k).out_info
        # Values of an outer trace, which the loss closes over, are others in the next one.
        return self._trace_loss(full, batch, extras, k) if traced.captured else traced

    @functools.cached_property
    def _trace(self) -> jax.stages.Wrapped:
        """Traces the loss; `jit` remembers the result, by shapes and by JAX's own settings."""
        return jax.jit(self._trace_loss, static_argnums=3)

    def _trace_loss(
        self, full: PyTree, batch: PyTree, extras: tuple[PyTree, ...], k: int
    ) -> Traced:
        args = self.settings, self.fn, full, batch, extras
        return trace(*args, has_aux=self.has_aux, grad_accum_steps=k, told=self._told)

    def _run(
        self,
        params: PyTree,
        batch: PyTree,
        extras: tuple[PyTree, ...],
        scale: jax.Array | float | None,
    ) -> Result:
        settings = self.settings
        if settings.offload.streams_params:
            params = host.to_device(params)
        k = 1 if scale is None else settings.grad_accum_steps
        traced = self.read(params, batch, extras, k)
        full, rest = jax.eval_shape(layout.unpad, params), jax.tree.structure(params)
        specs = jax.tree.unflatten(rest, [leaf.cut.spec for leaf in traced.leaves])
        axes: PyTree = PartitionSpec(row_axes(settings.mesh))
        same: PyTree = PartitionSpec()
        # The gradient of a frozen leaf is a scalar zero.
        grads = [same if leaf.frozen else leaf.cut.spec for leaf in traced.leaves]
        grad_specs = None if scale is None else jax.tree.unflatten(rest, grads)
        aux = [axes if kind == losses.ROWS else same for kind in traced.kinds]

        def program(traced: Traced) -> Callable[..., Result]:
            step = DeviceStep(settings, traced, full, k)
            return jax.shard_map(
                step.loss if scale is None else step.gradients,
                mesh=settings.mesh,
                in_specs=(specs, axes, same, same),
                out_specs=Result(same, same, aux, grad_specs, same, same),
                # `model` stays automatic: XLA splits the matmuls as the weights are split.
                axis_names=set(batch_axes(settings.mesh)),
                # Off: with it, JAX inserts sums of its own for every replicated input, and models
                # whose scan carries start replicated do not trace.
                check_vma=False,
            )

        given = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
        run = outside.differentiable(program, traced)
        try:
            out = run(params, batch, (*extras, *traced.captured), given)
        except ValueError as error:  # the loss itself was traced before
            if scale is None or not traced.undifferentiable:
                raise
            raise ValueError(
                "a loop of unknown length (lax.while_loop, or lax.fori_loop with bounds that are "
                f"not Python numbers) reads {traced.undifferentiable}, and JAX has no gradient of "
                "it. Use lax.scan or a fixed number of iterations, stop the gradient with "
                "jax.lax.stop_gradient, or freeze those leaves"
            ) from error
        tree = jax.tree.structure(traced.aux)
        return dataclasses.replace(out, aux=jax.tree.unflatten(tree, out.aux))


def _check_masters(params: PyTree, frozen: list[bool]) -> None:
    """Raises ValueError for a trained parameter below fp32: small updates would be rounded away."""
    for (name, leaf), still in zip(paths.named_leaves(params), frozen, strict=True):
        if not still and leaf.dtype != jnp.float32:
            raise ValueError(
                f"`params`: {name!r} has dtype {leaf.dtype}, but trained parameters must be fp32. "
                "Make them with zero.init or zero.shard, and compute in fewer bits with "
                'Zero(mesh, precision="bf16")'
            )


def _check_params(params: PyTree, cuts: list[Partition]) -> None:
    for (name, leaf), cut in zip(paths.named_leaves(params), cuts, strict=True):
        if tuple(leaf.shape) != cut.stored_shape:
            raise ValueError(
                f"`params`: {name} has shape {tuple(leaf.shape)}, but its shape sharded over "
                f"{cut.shards} devices is {cut.stored_shape}. Make parameters with zero.init or "
                "zero.shard of the same Zero"
            )
