"""Loss and gradients over the global batch.

The loss is traced once (`trace.py`) and its program run on every device with weights in place of
arrays (`device_step.py`, `rewrite.py`); how long copies and gradients live is in `lifetimes.py`.
Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.engine import losses, micro_batch, outside
from zero_jax.engine.config import Config
from zero_jax.engine.device_step import DeviceStep
from zero_jax.engine.device_step import Result as Result
from zero_jax.engine.trace import Traced, trace
from zero_jax.offload import tiers
from zero_jax.sharding import layout, paths
from zero_jax.sharding.mesh import batch_axes, batch_shards
from zero_jax.sharding.partition import Partition, partition

PyTree = Any
LossFn = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalLoss:
    """A loss function over the global batch.

    Attributes:
      settings: of the run.
      fn: the loss of one device: `fn(params, batch, *extras)`.
      has_aux: whether it returns (loss, aux).
    """

    settings: Config
    fn: LossFn
    has_aux: bool = False
    _told: set[str] = dataclasses.field(default_factory=set, repr=False)

    def value(self, params: PyTree, batch: PyTree, extras: tuple[Any, ...]) -> Result:
        """The loss alone."""
        return self._run(params, batch, extras, None)

    def gradients(
        self, params: PyTree, batch: PyTree, extras: tuple[Any, ...], scale: jax.Array | float = 1.0
    ) -> Result:
        """The loss and its gradients, computed at this loss scale and divided by it."""
        _check_masters(params, paths.frozen_leaves(params, self.settings.frozen))
        return self._run(params, batch, extras, scale)

    def read(
        self, params: PyTree, batch: PyTree, extras: tuple[Any, ...], k: int | None = None
    ) -> Traced:
        """The traced loss and what it says of leaves and layers; allocates nothing.

        Args:
          params: at rest, or their shapes.
          batch: the global batch, or its shapes.
          extras: further arguments of the loss.
          k: micro-batches: 1 for an evaluation; by default those of the settings.
        """
        return self._traced(params, batch, extras, k or self.settings.grad_accum_steps)[1]

    def _run(
        self,
        params: PyTree,
        batch: PyTree,
        extras: tuple[Any, ...],
        scale: jax.Array | float | None,
    ) -> Result:
        settings = self.settings
        if settings.offload.streams_params:
            params = tiers.to_device(params)
        k = 1 if scale is None else settings.grad_accum_steps
        full, traced = self._traced(params, batch, extras, k)
        rest = jax.tree.structure(params)
        specs = jax.tree.unflatten(rest, [leaf.cut.spec for leaf in traced.leaves])
        grads = None if scale is None else jax.tree.unflatten(rest, _gradient_specs(traced))
        axes: Any = PartitionSpec(batch_axes(settings.mesh))
        same: Any = PartitionSpec()
        aux = [axes if kind == losses.ROWS else same for kind in traced.kinds]

        def program(traced: Traced) -> Callable[..., Result]:
            step = DeviceStep(settings, traced, full, k)
            return jax.shard_map(
                step.loss if scale is None else step.gradients,
                mesh=settings.mesh,
                in_specs=(specs, axes, same, same),
                out_specs=Result(same, same, aux, grads, same, same),
                # `model` stays automatic: XLA splits the matmuls as the weights are split.
                axis_names=set(batch_axes(settings.mesh)),
                # Off: with it, JAX inserts sums of its own for every replicated input, and models
                # whose scan carries start replicated do not trace.
                check_vma=False,
            )

        given = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
        try:
            run = outside.differentiable(program, traced)
            out = run(params, batch, (*extras, *traced.captured), given)
        except ValueError as error:
            if "lax.while_loop" not in str(error):
                raise
            raise _without_gradient(traced) from error
        tree = jax.tree.structure(traced.aux)
        return dataclasses.replace(out, aux=jax.tree.unflatten(tree, out.aux))

    def _traced(
        self, params: PyTree, batch: PyTree, extras: tuple[Any, ...], k: int
    ) -> tuple[PyTree, Traced]:
        """Logical shapes of the parameters, and the traced loss."""
        full = jax.eval_shape(layout.unpad, params)
        cuts = self.settings.splitter(full)
        _check_params(params, cuts)
        micro_batch.check_batch(batch, batch_shards(self.settings.mesh), k)
        own = self.settings, self.fn, full, cuts, batch, extras
        return full, trace(*own, has_aux=self.has_aux, grad_accum_steps=k, told=self._told)


def _gradient_specs(traced: Traced) -> list[PartitionSpec]:
    """Where gradients rest; that of a frozen leaf is a scalar zero."""
    nothing = partition((), 1).spec
    return [nothing if leaf.frozen else leaf.cut.spec for leaf in traced.leaves]


def _without_gradient(traced: Traced) -> ValueError:
    """Returns the error for a loop without a gradient, with the parameters that it reads."""
    names = ", ".join(traced.looped) or "values derived from parameters"
    return ValueError(
        "a loop of unknown length (lax.while_loop, or lax.fori_loop with bounds that are not "
        f"Python numbers) reads {names}, and JAX has no gradient of it. Use lax.scan or a fixed "
        "number of iterations, stop the gradient with jax.lax.stop_gradient, or freeze those "
        "leaves"
    )


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
