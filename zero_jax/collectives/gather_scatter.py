"""Gather and reduce-scatter of one leaf, and both as one differentiable function, `touch`.

Forward: the shard is cast to the compute dtype and all-gathered, and padding is removed.
Backward: the cotangent is cast to the reduce dtype, reduce-scattered, and becomes an fp32 shard.
The cast is why this is a `custom_vjp`: JAX's own transpose of a bf16 gather would sum gradients
in bf16. A leaf of Ψ parameters sends Ψ elements per gather and Ψ per reduce-scatter.

All functions run inside `shard_map`. Gradients are sums over devices here; the division by the
global weight comes once, later.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.collectives import buckets, quantised
from zero_jax.collectives.precision import cast
from zero_jax.sharding.layout import Partition, pad_dim, strip_dim
from zero_jax.sharding.mesh import Axis
from zero_jax.sharding.model_axis import on_pieces

Optional = jax.Array | None
_One = tuple[jax.Array]
Function = Callable[[jax.Array], jax.Array]
Collective = Callable[[jax.Array, Axis, int, int | None], jax.Array]  # over an axis, along a dim


@dataclasses.dataclass(frozen=True)
class Wire:
    """Dtypes and sizes of communication.

    Attributes:
      compute: Dtype of gathered parameters; None keeps the leaf's.
      reduce: Dtype in which gradients are summed over devices.
      bucket: Maximum bytes per collective; None for no limit.
      gather_bits: Bits of the integers that matrices are gathered as; None gathers `compute`.
      scatter_bits: Bits of the integers that gradients of matrices are sent as; None sends
        `reduce`.
    """

    compute: jnp.dtype | None = None
    reduce: jnp.dtype = jnp.dtype("float32")
    bucket: int | None = None
    gather_bits: int | None = None
    scatter_bits: int | None = None

    def cast(self, x: jax.Array) -> jax.Array:
        """Casts a floating-point leaf to the compute dtype; returns others unchanged."""
        return x if self.compute is None else cast(x, self.compute)


@jax.named_scope("zero_gather")
def gather(shard: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns the full leaf in the compute dtype, from every device's shard."""
    full = wire.cast(shard)
    if cut.dim is None:
        return full
    collective: Collective = buckets.all_gather
    dim, dtype = cut.dim % full.ndim, full.dtype
    if wire.gather_bits and _as_integers(cut) and jnp.issubdtype(dtype, jnp.floating):
        full = shard
        collective = _as_if_exact(
            functools.partial(quantised.all_gather, dtype=dtype),
            lambda x, axis, dim, bucket: buckets.all_gather(cast(x, dtype), axis, dim, bucket),
        )
    full = _along(collective, full, cut, cut.axis, wire)
    return strip_dim(full, dim, cut.size) if cut.padded else full


@jax.named_scope("zero_reduce_scatter")
def reduce_scatter(full: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns this device's fp32 shard of the sum of a full gradient over all devices."""
    wire = _cut_for(cut.axis, wire)
    collective: Collective = buckets.psum_scatter
    bits = wire.scatter_bits if cut.dim is not None and _as_integers(cut) else None
    if bits:
        rounded = functools.partial(quantised.psum_scatter, bits=bits)
        collective = _as_if_exact(rounded, buckets.psum_scatter)

    def one(x: jax.Array) -> jax.Array:
        x = x if bits else x.astype(_sum_dtype(cut, wire))
        if cut.dim is None:
            return _summed(x, cut, cut.axis, wire)
        if cut.padded:
            x = pad_dim(x, cut.dim % x.ndim, cut.shard_size * cut.shards)
        return _along(collective, x, cut, cut.axis, wire)

    return _by_layer(one, full, cut, wire).astype(jnp.promote_types(full.dtype, jnp.float32))


@jax.named_scope("zero_join")
def join(part: jax.Array, cut: Partition, wire: Wire, axis: Axis) -> jax.Array:
    """Returns this device's shard in the compute dtype, from its parts over `axis`."""
    if cut.dim is None or cut.parts == 1:
        return part

    gathered = functools.partial(_along, buckets.all_gather, cut=cut, axis=axis, wire=wire)
    return _by_layer(gathered, wire.cast(part), cut, wire)


def sum_parts(shard: jax.Array, cut: Partition, wire: Wire, axis: Axis) -> jax.Array:
    """Sums a gradient's fp32 shard over `axis`; returns the part that this device stores."""
    wire = _cut_for(axis, wire)

    def one(x: jax.Array) -> jax.Array:
        if cut.dim is None or cut.parts == 1:
            return _summed(x, cut, axis, wire)
        return _along(buckets.psum_scatter, x.astype(_sum_dtype(cut, wire)), cut, axis, wire)

    return _by_layer(one, shard, cut, wire).astype(shard.dtype)


def _cut_for(axis: Axis, wire: Wire) -> Wire:
    """Returns communication without buckets for one device, where XLA keeps their copies."""
    return wire if jax.lax.axis_size(axis) > 1 else dataclasses.replace(wire, bucket=None)


def _as_integers(cut: Partition) -> bool:
    """Returns False for vectors, and rows so short that a scale takes more than integers save."""
    return cut.layer_rank > 1 and cut.device_shape[-1] > quantised.TOO_SHORT


def _sum_dtype(cut: Partition, wire: Wire) -> DTypeLike:
    """Returns the dtype of sums of gradients over devices: fp32 for vectors."""
    return jnp.float32 if cut.layer_rank < 2 else wire.reduce


def _by_layer(fn: Function, x: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Applies a function to a large stack layer by layer.

    Without the loop a trillion parameters are thousands of pieces, which XLA compiles for minutes.
    """
    whole_stack = cut.stacked and cut.dim != -len(cut.shape) and x.ndim == len(cut.shape)
    large = wire.bucket is not None and x.nbytes > wire.bucket
    return jax.lax.map(fn, x) if whole_stack and large else fn(x)


def _as_if_exact(rounded: Collective, exact: Collective) -> Collective:
    """Returns a collective that rounds, with the derivative of one that does not round."""
    wrapped = jax.custom_jvp(rounded, nondiff_argnums=(1, 2, 3))

    @wrapped.defjvp
    def tangent(
        axis: Axis, dim: int, bucket: int | None, primals: _One, tangents: _One
    ) -> tuple[jax.Array, jax.Array]:
        out = wrapped(*primals, axis, dim, bucket)
        return out, exact(*tangents, axis, dim, bucket).astype(out.dtype)

    return wrapped


def _along(
    collective: Collective, x: jax.Array, cut: Partition, axis: Axis, wire: Wire
) -> jax.Array:
    """Runs a collective over `axis` along the sharded dim."""
    assert cut.dim is not None
    dim, bucket = cut.dim % x.ndim, wire.bucket
    return on_pieces(lambda x: collective(x, axis, dim, bucket), x, cut.model, cut.model_shards)


def _summed(x: jax.Array, cut: Partition, axis: Axis, wire: Wire) -> jax.Array:
    def layer(x: jax.Array) -> jax.Array:
        psum = functools.partial(buckets.psum, axis=axis, bucket_bytes=wire.bucket)
        return on_pieces(psum, x, cut.model, cut.model_shards)

    return _by_layer(layer, x, cut, wire)  # for what the cast to fp32 made large


def local_shard(full: jax.Array, cut: Partition, axis: Axis) -> jax.Array:
    """This device's piece of a leaf that every device holds in full; sends nothing."""
    if cut.dim is None:
        return full
    dim = cut.dim % full.ndim
    if cut.padded:
        full = pad_dim(full, dim, cut.shard_size * cut.shards)
    start = jax.lax.axis_index(axis) * cut.shard_size
    return jax.lax.dynamic_slice_in_dim(full, start, cut.shard_size, axis=dim)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slot:
    """The dtype of a slot, for the backward pass; no array is saved."""

    dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def touch(
    shard: jax.Array, copy: Optional, slot: Optional, cut: Partition, wire: Wire, sums: bool
) -> jax.Array:
    """Returns the full leaf in the compute dtype, differentiable with respect to the shard.

    Args:
      shard: This device's shard of the fp32 master parameter.
      copy: The full leaf, gathered before (stage 2), or None to gather it now (stage 3).
      slot: None, or an array of the shard's shape in the reduce dtype. The gradient is taken with
        respect to it, so that gradients of scanned layers are stored in the dtype of their sum over
        devices. Its values are not used. Only for a leaf that `takes_slot` and is used once:
        gradients of several uses would be added in that dtype.
      cut: Partition of the leaf.
      wire: Dtypes and bucket of the communication.
      sums: True to reduce its cotangent over devices at once, False to leave it local.
    """
    return gather(shard, cut, wire) if copy is None else copy


def _touch_fwd(
    shard: jax.Array, copy: Optional, slot: Optional, cut: Partition, wire: Wire, sums: bool
) -> tuple[jax.Array, _Slot | None]:
    # A second derivative goes through the copy: a layer that is run again is not given the shard.
    full = touch(shard, None, slot, cut, wire, sums) if copy is None else copy
    return full, None if slot is None else _Slot(slot.dtype)


def _touch_bwd(
    cut: Partition, wire: Wire, sums: bool, slot: _Slot | None, cotangent: jax.Array
) -> tuple[Optional, Optional, Optional]:
    if not sums:  # over devices once, at the end of the step
        return cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32)), None, None
    grad = reduce_scatter(cotangent, cut, wire)
    # A slot of fp32, or of the dtype in which the sum over devices is: this rounds nothing but sums
    # of integers, which are in fp32.
    return (grad, None, None) if slot is None else (None, None, grad.astype(slot.dtype))


touch.defvjp(_touch_fwd, _touch_bwd)


def touch_gradients(
    gradient: jax.Array, slot: Optional, cut: Partition, wire: Wire, sums: bool
) -> tuple[Optional, Optional, Optional]:
    """Returns the gradients of `touch` by its three arrays, or None, from that of its result."""
    return _touch_bwd(cut, wire, sums, None if slot is None else _Slot(slot.dtype), gradient)


def takes_slot(cut: Partition, wire: Wire) -> bool:
    """Returns whether a leaf's gradient is summed over devices in fewer than 32 bits."""
    return cut.layer_rank > 1 and wire.reduce.itemsize < 4
