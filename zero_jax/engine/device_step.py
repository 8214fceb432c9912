"""One device's part of a step, inside `shard_map`: gather, differentiate, reduce.

The gradient of a leaf that is gathered where it is used is taken with respect to its shard, that of
any other leaf with respect to its gathered copy.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.collectives import gather_scatter, lookup
from zero_jax.collectives.precision import norm_of, sum_of_squares, two_sums
from zero_jax.context_parallel import chunks
from zero_jax.engine import execute, fp8_params, losses
from zero_jax.engine.config import Config
from zero_jax.engine.lazy_param import LazyParam, Param, full
from zero_jax.engine.lifetimes import LIFETIMES, MICRO_BATCH, STEP, TOUCH, Leaf
from zero_jax.engine.losses import Micro
from zero_jax.engine.trace import Traced
from zero_jax.remat import policies
from zero_jax.sharding import paths
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.mesh import (
    EXPERTS,
    REPLICA,
    batch_axes,
    batch_shards,
    model_size,
    names,
    row_axes,
)
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing.forms import Form

Leaves = list[jax.Array]
# The gradient of a leaf before it is padded, its l2 norm, and whether all of it is finite.
Gradients = tuple[PyTree, jax.Array, jax.Array]


class Views(NamedTuple):
    """Parameters as a step reads them.

    Attributes:
      values: Shards, or copies that are differentiated.
      copies: Copies gathered for the whole step, beside shards.
      codes: Codes of the parameters that are multiplied in fp8.
      scales: Their scales.
    """

    values: Leaves
    copies: list[jax.Array | None]
    codes: list[Param]
    scales: Leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one pass over the global batch, equal on every device except `grads` and rows.

    Attributes:
      loss: fp32 scalar, the global weighted mean.
      weight: fp32 scalar, the global weight.
      aux: The aux of the loss function over devices and micro-batches, see `losses`.
      grads: The sharded gradient of `loss`; None for an evaluation.
      grad_norm: fp32 scalar, the l2 norm of all gradients; None for an evaluation.
      finite: True if every number of the gradient is finite, or if non-finite steps are not
        skipped; None for an evaluation.
    """

    loss: jax.Array
    weight: jax.Array
    aux: PyTree
    grads: PyTree
    grad_norm: jax.Array | None
    finite: jax.Array | None


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """One device's part of a step; its methods run inside `shard_map`.

    Attributes:
      settings: Settings of the run.
      traced: The traced loss.
      full: Shapes of the unsharded parameters.
      k: Number of micro-batches.
    """

    settings: Config
    traced: Traced
    full: PyTree
    k: int

    def loss(
        self, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...], scale: jax.Array
    ) -> Result:
        """Returns the global loss alone."""
        views, batch = self._views(jax.tree.leaves(params)), self._own_tokens(batch)
        extras = losses.fold_keys(extras, self._place)
        total, weight, aux = self._run(self._weights(views), batch, extras)
        return self._result(*self._sums(total, weight), aux, (None, None, None))

    def gradients(
        self, params: PyTree, batch: PyTree, extras: tuple[PyTree, ...], scale: jax.Array
    ) -> Result:
        """Returns the global loss, and this device's shards of its gradients."""
        views, batch = self._views(jax.tree.leaves(params)), self._own_tokens(batch)

        def one(micro: PyTree, index: jax.Array | int) -> tuple[Micro, Leaves]:
            own = losses.fold_keys(extras, self._place * self.k + index)
            return self._one(views, micro, own, scale)

        (total, weight, undo, aux), grads = losses.accumulate(one, batch, self.k, self.traced.kinds)
        total, weight = self._sums(total, weight)
        return self._result(total, weight, aux, self._finish(grads, undo / (weight * scale)))

    def _own_tokens(self, batch: PyTree) -> PyTree:
        """Returns this device's tokens of its rows, if they are split over `context`."""
        leaves, treedef = jax.tree.flatten(batch)
        pairs = zip(leaves, self.traced.tokens, strict=True)
        return jax.tree.unflatten(treedef, [chunks.take(x, 1) if own else x for x, own in pairs])

    def _one(
        self, views: Views, micro: PyTree, extras: tuple[PyTree, ...], scale: jax.Array
    ) -> tuple[Micro, Leaves]:
        """Runs a micro-batch; its gradients are summed over devices where they are due."""
        pairs = zip(views.values, self.traced.leaves, strict=True)
        trained = [
            x if leaf.waits_in is None else jnp.zeros(x.shape, leaf.waits_in)
            for x, leaf in pairs
            if not leaf.frozen
        ]

        def objective(trained: Leaves) -> tuple[jax.Array, Micro]:
            total, weight, aux = self._run(self._weights(views, trained), micro, extras)
            down = self._scaled_down(weight)
            return total * (scale * down), Micro(total, weight, 1.0 / down, aux)

        (_, out), grads = jax.value_and_grad(objective, has_aux=True)(trained)
        return out, self._reduced(grads, MICRO_BATCH)

    def _run(
        self, weights: list[Any], micro: PyTree, extras: tuple[PyTree, ...]
    ) -> tuple[jax.Array, jax.Array, Leaves]:
        # Sizes of a trace are those of all devices of `model`.
        bucket = self.settings.bucket_bytes * model_size(self.settings.mesh)
        policy = policies.parse(self.settings.remat)
        args = [*weights, *jax.tree.leaves((micro, extras))]
        closed, outside = self.traced.closed, self.traced.outside
        how = execute.How(execute.evaluate, policy, bucket_bytes=bucket, outside=outside)
        total, weight, *aux = execute.run(closed, args, how, self.traced.positions)
        if self.traced.weighted:
            weight = jnp.where(weight < 0, jnp.nan, weight)
        return total, weight if outside else jax.lax.stop_gradient(weight), aux

    def _scaled_down(self, weight: jax.Array) -> jax.Array:
        """Returns a factor of the loss of a micro-batch, equal on all devices.

        For a mean with products in fp8, 1 / their number: gradients of one row are then rounded
        alike for every N. For a sum in fp16 a power of two near 1 / weight: its gradients over
        thousands of tokens would overflow.
        """
        if self.traced.fp8 and not self.traced.weighted:
            return jnp.float32(1 / (self.k * batch_shards(self.settings.mesh)))
        if not (self.settings.precision.scaled and self.traced.weighted):
            return jnp.float32(1)
        most = jax.lax.pmax(jnp.abs(jax.lax.stop_gradient(weight)), batch_axes(self.settings.mesh))
        return jnp.exp2(-jnp.floor(jnp.log2(jnp.where(most > 0, most, 1.0))))

    def _views(self, shards: Leaves) -> Views:
        """Returns the parameters as the step reads them."""
        wire, life = self.settings.wire, LIFETIMES[self.settings.stage]

        def view(shard: jax.Array, leaf: Leaf) -> tuple[jax.Array, jax.Array | None]:
            if life.copy == TOUCH:
                return gather_scatter.join(shard, leaf.cut, wire, REPLICA), None
            if leaf.is_stand_in:
                return shard if leaf.opens else gather_scatter.stand_in(shard, leaf.cut, wire), None
            copy = _by_layer(lambda x: gather_scatter.gather(x, leaf.cut, wire), leaf.cut, shard)
            return (shard, copy) if leaf.opens else (copy, None)

        pairs = list(map(view, shards, self.traced.leaves))
        scales, own = fp8_params.scales_of(shards, self.traced.fp8, wire)
        codes = [
            self._codes(shards[param.at], scale, param.codes.cut)
            for param, scale in zip(self.traced.fp8, own, strict=True)
        ]
        return Views([value for value, _ in pairs], [copy for _, copy in pairs], codes, scales)

    def _codes(self, shard: jax.Array, scale: jax.Array, cut: Partition) -> Param:
        """Returns the codes of a parameter in fp8, given its shard and the shard's scales."""
        wire = self.settings.wire

        def gather(shard: jax.Array, scale: jax.Array) -> jax.Array:
            return fp8_params.gather(shard, scale, cut, wire)

        if LIFETIMES[self.settings.stage].copy != TOUCH:
            return full(_by_layer(gather, cut, shard, scale))
        shard = gather_scatter.join(jax.lax.stop_gradient(shard), cut, wire, REPLICA)
        return Param((shard, scale), gather, free=False, local=cut.dim is None)

    def _weights(self, views: Views, trained: Leaves | None = None) -> list[Any]:
        """Returns the parameters that the traced loss is run with, then codes, then scales.

        In place of the value of a trained leaf is the array that is differentiated, or beside it
        its slot, if the gradient waits in another dtype; see `gather_scatter.touch`.
        """
        params, it = list[Param](), iter(trained or ())
        for at, leaf in enumerate(self.traced.leaves):
            value, slot = views.values[at], None
            if trained is not None and not leaf.frozen:
                value, slot = (next(it), None) if leaf.waits_in is None else (value, next(it))
            params.append(self._param(leaf, value, views.copies[at], slot))
        cuts = [leaf.cut for leaf in self.traced.leaves]
        cuts += [param.codes.cut for param in self.traced.fp8]
        lazy = [
            LazyParam(param, Form(at, len(cut.shape), cut.dim))
            for at, (param, cut) in enumerate(zip([*params, *views.codes], cuts, strict=True))
        ]
        return [*lazy, *views.scales]

    def _param(self, leaf: Leaf, *arrays: jax.Array | None) -> Param:
        """Returns a leaf, given its value, copy and slot."""
        if not leaf.opens:
            return full(arrays[0])
        wire, sums, (_, copy, slot) = self.settings.wire, leaf.summed == TOUCH, arrays
        is_read = not leaf.is_stand_in
        exist = [x is not None for x in arrays]

        def spread(arrays: Sequence[jax.Array]) -> Iterator[Any]:
            it = iter(arrays)
            return (next(it) if exists else None for exists in exist)

        def gather(*arrays: jax.Array) -> jax.Array:
            shard, copy, slot = spread(arrays)
            return gather_scatter.touch(shard, copy, slot, leaf.cut, wire, sums, is_read=is_read)

        def reduce(gradient: jax.Array) -> tuple[jax.Array | None, ...]:
            made = gather_scatter.touch_gradients(gradient, slot, leaf.cut, wire, sums)
            return tuple(itertools.compress(made, exist))

        def rows(
            arrays: tuple[jax.Array, ...], indices: jax.Array, how: Mapping[str, Any]
        ) -> jax.Array:
            shard, _, slot = spread(arrays)
            take = lookup.Take(how["mode"], how["fill_value"])
            return lookup.rows(shard, slot, indices, take, leaf.cut, wire)

        return Param(
            tuple(x for x in arrays if x is not None),
            gather,
            free=False,
            rows_of=rows if leaf.by_rows else None,
            local=copy is not None or leaf.cut.dim is None or not is_read,
            reduce=reduce,
        )

    def _sums(self, total: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, weight = jax.lax.psum(jnp.stack([total, weight]), batch_axes(self.settings.mesh))
        return total, weight

    def _result(
        self,
        total: jax.Array,
        weight: jax.Array,
        aux: Leaves,
        gradients: Gradients | tuple[None, None, None],
    ) -> Result:
        axes = batch_axes(self.settings.mesh)
        aux = losses.over_devices(self.traced.kinds, aux, axes)
        return Result(total / weight, weight, aux, *gradients)

    @property
    def _trained(self) -> list[Leaf]:
        return [leaf for leaf in self.traced.leaves if not leaf.frozen]

    def _reduced(self, grads: Leaves, when: str) -> Leaves:
        """Reduces the gradients scheduled for phase `when` over `data`."""
        wire = self.settings.wire
        return [
            gather_scatter.reduce_scatter(g, leaf.cut, wire) if leaf.summed == when else g
            for g, leaf in zip(grads, self._trained, strict=True)
        ]

    def _finish(self, grads: Leaves, factor: jax.Array) -> Gradients:
        """Returns the sharded mean gradient from sums over this device's micro-batches."""
        grads = self._reduced(grads, STEP)
        grads = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in grads]
        if REPLICA in batch_axes(self.settings.mesh):
            pairs = zip(grads, self._trained, strict=True)
            wire = self.settings.wire
            grads = [gather_scatter.sum_parts(g, leaf.cut, wire, REPLICA) for g, leaf in pairs]
        grads = [g * factor for g in grads]
        norm, finite = self._norm(grads)
        it, out = iter(grads), list[PyTree]()
        for x, leaf in zip(jax.tree.leaves(self.full), self.traced.leaves, strict=True):
            grad: PyTree = jnp.full((), -0.0, x.dtype) if leaf.frozen else next(it)
            if leaf.cut.padded and leaf.cut.dim is not None:
                grad = paths.Padded(grad, leaf.cut.dim, leaf.cut.size)
            out.append(grad)
        return jax.tree.unflatten(jax.tree.structure(self.full), out), norm, finite

    def _norm(self, grads: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the l2 norm, and whether all is finite; replicated shards count once."""
        axes = names(self.settings.rest_axes)

        def counts(cut: Partition) -> jax.Array | bool:
            split = {EXPERTS} if cut.experts is not None else set()
            if cut.dim is not None:
                split |= set(axes)
            same = tuple(axis for axis in axes if axis not in split)
            return jax.lax.axis_index(same) == 0 if same else True

        def squares(factor: jax.Array | float) -> jax.Array:
            total = jnp.float32(0)
            for grad, leaf in zip(grads, self._trained, strict=True):
                own = sum_of_squares(grad, factor)
                total += jnp.where(counts(leaf.cut), own, 0.0)
            return total

        norm, finite = norm_of(jax.lax.psum(two_sums(squares), axes))
        return norm, finite if self.settings.skip_nonfinite else jnp.asarray(True)

    @property
    def _place(self) -> jax.Array:
        return jax.lax.axis_index(row_axes(self.settings.mesh))


def _by_layer(gather: Callable[..., jax.Array], cut: Partition, *arrays: jax.Array) -> jax.Array:
    """Gathers a leaf for the whole step. Stacked matrices are gathered layer by layer."""
    # If all layers are gathered at once, XLA stores them with the sharded dim outermost, and the
    # compiler of jax 0.10 keeps a transposed copy of all for one of the loops over them.
    matrices = cut.by_layer and cut.layer_rank > 1
    return jax.lax.map(lambda x: gather(*x), arrays) if matrices else gather(*arrays)
