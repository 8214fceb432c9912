"""Loss and gradients: a stage is how long the gathered copy and the full gradient live.

  stage   gathered copy   full local gradient             words sent, k micro-batches
  0       -               the step                        2Ψ          (one all-reduce)
  1       the step        the step, reduced once          Ψ + Ψ
  2       the step        one layer, reduced at once      Ψ + kΨ
  3       one touch       one layer, reduced at once      2kΨ + kΨ

Stages 0 and 1 differentiate with respect to full copies and reduce what they get at the end.
Stage 3 differentiates with respect to shards, through the doors of touch.py. Stage 2 does so for
layers, scanned or not; its other leaves are reduced when their gradient is complete, so one that
is used twice (a tied embedding) is sent once. Everything else is shared.
Source: ZeRO, sections 5 and 7.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax import collectives, jaxprs, layers, layout, micro_batch, paths, remat, tiers, touch
from zero_jax.mesh import REPLICA, batch_axes, batch_shards, model_size
from zero_jax.model_axis import named_activations
from zero_jax.settings import Settings

PyTree = Any
LossFn = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Result:
    """What one pass over the global batch gives, equal on every device except `grads`.

    Attributes:
      loss: fp32 scalar, the global weighted mean.
      weight: fp32 scalar, the global weight.
      aux: the loss function's aux, floats averaged over devices and micro-batches.
      grads: the gradient of `loss` at rest, or None for an evaluation.
      grad_norm: fp32 scalar, the l2 norm of all gradients, or None.
    """

    loss: jax.Array
    weight: jax.Array
    aux: Any
    grads: Any
    grad_norm: Any


def run(
    settings: Settings,
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    extras: tuple[Any, ...],
    *,
    has_aux: bool,
    differentiate: bool,
    loss_scale: jax.Array | float = 1.0,
) -> Result:
    """Evaluates a loss over the global batch, with or without its gradients."""
    if settings.offload.streams_params:
        params = tiers.to_device(params)
    full = jax.eval_shape(layout.logical, params)
    cuts = settings.splitter(full)
    _check_params(params, cuts)
    micro_batch.check_batch(
        batch, batch_shards(settings.mesh), settings.micro_batches if differentiate else 1
    )
    frozen = paths.frozen_leaves(full, settings.frozen)
    shapes = [(name, leaf.shape) for name, leaf in paths.named_leaves(full)]
    numbers = layers.number_layers(shapes)
    step = _Step(settings, loss_fn, has_aux, jax.tree.structure(full), cuts, frozen, full, numbers)
    rest = jax.tree.structure(params)
    specs = jax.tree.unflatten(rest, [c.spec for c in cuts])
    # The gradient of a frozen leaf is a scalar zero.
    grad_cuts = [layout.split((), 1) if f else c for c, f in zip(cuts, frozen, strict=True)]
    grad_specs = jax.tree.unflatten(rest, [c.spec for c in grad_cuts]) if differentiate else None
    whole: Any = PartitionSpec()
    body = jax.shard_map(
        functools.partial(step.run, differentiate=differentiate),
        mesh=settings.mesh,
        in_specs=(specs, PartitionSpec(batch_axes(settings.mesh)), whole, whole),
        out_specs=Result(whole, whole, whole, grad_specs, whole),
        # `model` stays automatic: XLA splits the matmuls by what the weights are split over.
        axis_names=set(batch_axes(settings.mesh)),
        # Off: with it, JAX inserts sums of its own for every replicated input, and models whose
        # scan carries start replicated do not trace.
        check_vma=False,
    )
    return body(params, batch, extras, jnp.asarray(loss_scale, jnp.float32))


class _Arrays(NamedTuple):
    """Of each leaf what the loss is given, as far as there is one: see `touch.Box`."""

    values: list[jax.Array]  # shards, or full leaves where there is no door
    copies: list[Any]
    slots: list[Any]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One device's part of the step; its methods run inside shard_map."""

    settings: Settings
    loss_fn: LossFn
    has_aux: bool
    treedef: Any
    cuts: list[layout.Split]
    frozen: list[bool]
    full: PyTree
    numbers: list[int | None]

    @property
    def _doors(self) -> list[bool]:
        """For each leaf whether the model reaches it through a touch."""
        if self.settings.stage < 2:
            return [False] * len(self.cuts)
        pairs = zip(self.cuts, self.numbers, strict=True)
        return [self.settings.stage == 3 or c.stacked or n is not None for c, n in pairs]

    def _reduced(self, cut: layout.Split, door: bool) -> str:
        """When a leaf's gradient is summed over devices."""
        if self.settings.stage < 2 or cut.dim is None:
            return "once a step"
        return "at its touch" if door else "once a micro-batch"

    def run(
        self, params: PyTree, batch: PyTree, extras: Any, scale: jax.Array, differentiate: bool
    ) -> Result:
        shards = jax.tree.leaves(params)
        k = self.settings.micro_batches if differentiate else 1
        values, copies = self._views(shards)
        arrays = _Arrays(values, copies, [None] * len(values))

        def one(micro: PyTree, index: Any) -> Any:
            mine = micro_batch.fold_keys(extras, self._position() * k + index)
            if not differentiate:
                return self._loss(arrays, micro, mine), None
            slots = self._slots(arrays, micro, mine)
            # None where there is nothing to differentiate: a frozen leaf, or one with a slot.
            leaves = zip(values, slots, self.frozen, strict=True)
            trained = [None if f or s is not None else v for v, s, f in leaves]

            def objective(trained: list[Any], slots: list[Any]) -> Any:
                own = [v if t is None else t for v, t in zip(values, trained, strict=True)]
                out = self._loss(_Arrays(own, copies, slots), micro, mine)
                return out[0] * scale, out

            differentiated = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
            (_, out), found = differentiated(trained, slots)
            grads = [g for pair in zip(*found, strict=True) for g in pair if g is not None]
            return out, self._reduce(grads, "once a micro-batch")

        (total, weight, (aux, exponent)), grads = micro_batch.accumulate(one, batch, k)
        axes = batch_axes(self.settings.mesh)
        total, weight = jax.lax.psum(jnp.stack([total, weight]), axes)
        aux = jax.tree.map(lambda a: jax.lax.pmean(a, axes) if micro_batch.is_float(a) else a, aux)
        norm = None
        if differentiate:
            grads, norm = self._finish(grads, 1.0 / (weight * scale))
        return Result(total / weight, jnp.ldexp(weight, exponent), aux, grads, norm)

    def _views(self, shards: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
        """What is differentiated, and what was gathered beside it for the whole step."""
        pairs = list(zip(shards, self.cuts, strict=True))
        if self.settings.stage == 3:
            wire = self.settings.wire
            joined = [collectives.join(x, c, wire, REPLICA) for x, c in pairs]
            return joined, [None] * len(shards)
        copies = [self._copy(x, c) for x, c in pairs]
        doors = self._doors
        values = [s if d else c for s, c, d in zip(shards, copies, doors, strict=True)]
        return values, [c if d else None for c, d in zip(copies, doors, strict=True)]

    def _copy(self, shard: jax.Array, cut: layout.Split) -> jax.Array:
        """A gathered leaf. Stacked matrices are gathered layer by layer."""

        def gather(x: jax.Array) -> jax.Array:
            return collectives.gather(x, cut, self.settings.wire)

        # Gathered as a whole, XLA lays them out with the split dim outermost; jax 0.10's compiler
        # then keeps a second, transposed copy of all layers for one of the two loops over them.
        matrices = cut.dim is not None and cut.stacked and cut.layer_rank > 1
        return jax.lax.map(gather, shard) if matrices else gather(shard)

    def _loss(self, arrays: "_Arrays", micro: PyTree, extras: Any) -> Any:
        # Sizes of a trace are those of all devices of `model`.
        bucket = self.settings.bucket_bytes * model_size(self.settings.mesh)
        wrapped = remat.apply(
            self._call, self.settings.remat, *self._described(arrays), bucket_bytes=bucket
        )
        return wrapped(arrays, micro, extras)

    def _described(self, arrays: "_Arrays") -> tuple[list[str | None], list[int | None]]:
        """Of every array the path if it is a shard, and its layer, as the tree is flattened."""
        named = zip(paths.named_leaves(self.full), self._doors, strict=True)
        names = [name if door else None for (name, _), door in named]
        leaves = list(zip(names, self.numbers, strict=True))
        beside = [*arrays.copies, *arrays.slots]
        own = [leaf for leaf, x in zip(leaves * 2, beside, strict=True) if x is not None]
        paths_of, numbers = map(list, zip(*leaves, *own, strict=True))
        return paths_of, numbers

    def _call(self, arrays: "_Arrays", micro: PyTree, extras: Any) -> Any:
        with named_activations(self.settings.model_axis.rules):
            out = self.loss_fn(self._tree(arrays), micro, *extras)
        return micro_batch.sum_and_weight(out, self.has_aux, self._exponent(micro))

    def _slots(self, arrays: "_Arrays", micro: PyTree, extras: Any) -> list[Any]:
        """Of each leaf the slot that its gradient is taken with respect to, or None.

        In the dtype in which gradients are sent: only of stacks of layers, each opened once in one
        scan. In fp32: of shards that were joined in the compute dtype.
        """
        small = self._opened_once(arrays, micro, extras)
        parts = zip(self.cuts, self.frozen, small, arrays.values, strict=True)
        return [
            None
            if frozen or not (once or (cut.dim is not None and cut.parts > 1))
            else jnp.zeros(x.shape, self.settings.wire.reduce if once else jnp.float32)
            for cut, frozen, once, x in parts
        ]

    def _opened_once(self, arrays: "_Arrays", micro: PyTree, extras: Any) -> list[bool]:
        """Of which leaves the gradient may wait in a smaller dtype than the master's.

        Seen in the trace, of the policy "none", under which every operation that uses a weight
        opens it.
        """
        parts = zip(self.cuts, self._doors, self.frozen, strict=True)
        able = [
            door and not frozen and cut.stacked and collectives.takes_slot(cut, self.settings.wire)
            for cut, door, frozen in parts
        ]
        if not any(able):
            return able
        opened = remat.apply(self._call, "none", *self._described(arrays))
        jaxpr = jax.make_jaxpr(opened)(arrays, micro, extras).jaxpr
        own = jaxpr.invars[: len(able)]
        once = [jaxprs.touched_once(jaxpr, var, collectives.TOUCHES) for var in own]
        return [a and b for a, b in zip(able, once, strict=True)]

    def _tree(self, arrays: "_Arrays") -> PyTree:
        """The parameters as the loss function gets them."""
        parts = zip(arrays.values, arrays.copies, arrays.slots, self.cuts, self._doors, strict=True)
        leaves = [self._leaf(v, c, s, cut) if door else v for v, c, s, cut, door in parts]
        return touch.with_doors(self.treedef, leaves)

    def _leaf(self, value: jax.Array, copy: Any, slot: Any, cut: layout.Split) -> Any:
        """A leaf with a door: a box, or the copy itself where a layer has one of its own."""
        box = touch.Box(value, copy, slot, cut, self.settings.wire)
        return box if copy is None or cut.stacked else box.unbox()

    @property
    def _trained(self) -> list[tuple[layout.Split, str]]:
        """Of each leaf that is trained, how it is cut and when its gradient is summed."""
        parts = zip(self.cuts, self._doors, self.frozen, strict=True)
        return [(c, self._reduced(c, door)) for c, door, frozen in parts if not frozen]

    def _reduce(self, grads: list[jax.Array], when: str) -> list[jax.Array]:
        """Sums those gradients over `data` whose time has come."""
        wire = self.settings.wire
        return [
            collectives.reduce_scatter(g, cut, wire) if due == when else g
            for g, (cut, due) in zip(grads, self._trained, strict=True)
        ]

    def _finish(self, grads: list[jax.Array], factor: jax.Array) -> tuple[PyTree, jax.Array]:
        """The mean gradient at rest and its norm, from sums over this device's micro-batches."""
        grads = self._reduce(grads, "once a step")
        grads = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
        if REPLICA in batch_axes(self.settings.mesh):
            pairs = zip(grads, self._trained, strict=True)
            wire = self.settings.wire
            grads = [collectives.sum_parts(g, cut, wire, REPLICA) for g, (cut, _) in pairs]
        grads = [g * factor for g in grads]
        norm = self._norm(grads)
        it = iter(grads)
        leaves = zip(jax.tree.leaves(self.full), self.frozen, strict=True)
        out = [jnp.full((), -0.0, x.dtype) if f else next(it) for x, f in leaves]
        rest = [_as_rest(g, c) for g, c in zip(out, self.cuts, strict=True)]
        return jax.tree.unflatten(self.treedef, rest), norm

    def _norm(self, grads: list[jax.Array]) -> jax.Array:
        """One scalar sum over devices; a leaf that every device holds counts on the first."""
        axes = self.settings.rest_axes
        first = jax.lax.axis_index(axes) == 0
        total = jnp.zeros((), jnp.float32)
        for grad, (cut, _) in zip(grads, self._trained, strict=True):
            square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
            total += square if cut.dim is not None else jnp.where(first, square, 0.0)
        return jnp.sqrt(jax.lax.psum(total, axes))

    def _position(self) -> Any:
        return jax.lax.axis_index(batch_axes(self.settings.mesh))

    def _exponent(self, micro: PyTree) -> int:
        """log2 of about the weight of a micro-batch, for fp16; static, so equal on all devices."""
        if not self.settings.precision.scaled:
            return 0
        return round(math.log2(max(math.prod(x.shape) for x in jax.tree.leaves(micro))))


def _as_rest(grad: jax.Array, cut: layout.Split) -> Any:
    return paths.Padded(grad, cut.dim, cut.size) if cut.padded and cut.dim is not None else grad


def _check_params(params: PyTree, cuts: list[layout.Split]) -> None:
    for (name, leaf), cut in zip(paths.named_leaves(params), cuts, strict=True):
        if tuple(leaf.shape) != cut.rest_shape:
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}, but over {cut.shards} devices it rests as "
                f"{cut.rest_shape}: make parameters with zero.init or zero.shard of the same Zero"
            )
