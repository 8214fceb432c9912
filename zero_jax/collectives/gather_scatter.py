"""Gather and reduce-scatter of one leaf, and the two as one differentiable touch.

Forward: the shard is cast to the compute dtype and all-gathered, then cut to its logical shape.
Backward: the cotangent is cast to the reduce dtype, reduce-scattered, and becomes an fp32 shard.
The cast is why this is a `custom_vjp`: JAX's own transpose of a bf16 gather would sum gradients
in bf16. A leaf of Ψ parameters sends Ψ words per gather and Ψ per reduce-scatter.

All functions run inside `shard_map`. Gradients are sums over devices here; the division by the
global weight comes once, later.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.collectives import buckets, quantised
from zero_jax.collectives.precision import cast
from zero_jax.sharding.layout import pad_dim, strip_dim
from zero_jax.sharding.mesh import Axis
from zero_jax.sharding.model_axis import on_pieces
from zero_jax.sharding.partition import Partition


@dataclasses.dataclass(frozen=True)
class Wire:
    """What travels: in which dtypes (None: the leaf's own), how much of it at once, in bytes (None:
    a leaf), and in how many bits of an integer matrices are gathered and their gradients scattered
    (None: in those dtypes)."""

    compute: Any = None
    reduce: Any = jnp.dtype("float32")
    bucket: int | None = None
    gather_bits: int | None = None
    scatter_bits: int | None = None


@jax.named_scope("zero_gather")
def gather(shard: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """The full leaf in the compute dtype, from every device's shard."""
    full = shard if wire.compute is None else cast(shard, wire.compute)
    if cut.dim is None:
        return full
    dim = cut.dim % full.ndim
    if wire.gather_bits and _as_integers(cut) and jnp.issubdtype(full.dtype, jnp.floating):
        args = (cut.axis, dim, wire.bucket, full.dtype)

        def exact(x: jax.Array) -> jax.Array:
            return buckets.all_gather(cast(x, full.dtype), cut.axis, dim, wire.bucket)

        collective = _as_if_exact(lambda x: quantised.all_gather(x, *args), exact)
        full = _pieces(collective, shard, cut)
    else:
        full = _along(buckets.all_gather, full, cut, cut.axis, wire)
    return strip_dim(full, dim, cut.size) if cut.padded else full


@jax.named_scope("zero_reduce_scatter")
def reduce_scatter(full: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """This device's fp32 shard of the sum of a full gradient over all devices."""

    wire = _cut_for(cut.axis, wire)
    collective: Any = buckets.psum_scatter
    bits = wire.scatter_bits if cut.dim is not None and _as_integers(cut) else None
    if bits:

        def collective(x: jax.Array, axis: Axis, dim: int, bucket: Any) -> jax.Array:
            return _as_if_exact(
                lambda x: quantised.psum_scatter(x, axis, dim, bucket, bits=bits),
                lambda x: buckets.psum_scatter(x, axis, dim, bucket),
            )(x)

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
    """This device's shard in the compute dtype, of the parts that rest on the devices of `axis`."""
    if cut.dim is None or cut.parts == 1:
        return part
    own = part if wire.compute is None else cast(part, wire.compute)
    return _by_layer(lambda x: _along(buckets.all_gather, x, cut, axis, wire), own, cut, wire)


def sum_parts(shard: jax.Array, cut: Partition, wire: Wire, axis: Axis) -> jax.Array:
    """A gradient's fp32 shard summed over the devices of `axis`; of it the part that rests here."""

    wire = _cut_for(axis, wire)

    def one(x: jax.Array) -> jax.Array:
        if cut.dim is None or cut.parts == 1:
            return _summed(x, cut, axis, wire)
        return _along(buckets.psum_scatter, x.astype(_sum_dtype(cut, wire)), cut, axis, wire)

    return _by_layer(one, shard, cut, wire).astype(shard.dtype)


def _cut_for(axis: Axis, wire: Wire) -> Wire:
    """On one device nothing travels: XLA drops the sums, but not the loops and copies of pieces."""
    return wire if jax.lax.axis_size(axis) > 1 else dataclasses.replace(wire, bucket=None)


def _as_integers(cut: Partition) -> bool:
    """Whether a leaf travels as integers where asked: not vectors, nor matrices of rows so short
    that a scale is more than the integers save."""
    return cut.layer_rank > 1 and cut.device_shape[-1] > quantised.TOO_SHORT


def _sum_dtype(cut: Partition, wire: Wire) -> Any:
    """In which gradients are summed over devices: vectors always in fp32."""
    return jnp.float32 if cut.layer_rank < 2 else wire.reduce


def _by_layer(fn: Any, x: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """A large stack goes layer by layer: written out, a trillion parameters are thousands of
    pieces, which take XLA minutes."""
    whole_stack = cut.stacked and cut.dim != -len(cut.shape) and x.ndim == len(cut.shape)
    large = wire.bucket is not None and x.nbytes > wire.bucket
    return jax.lax.map(fn, x) if whole_stack and large else fn(x)


def _as_if_exact(
    rounded: Callable[[Any], jax.Array], exact: Callable[[Any], jax.Array]
) -> Callable[[Any], jax.Array]:
    """A collective that rounds, with the derivative of one that does not: that of rounding is 0."""
    wrapped = jax.custom_jvp(rounded)

    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        out = wrapped(*primals)
        return out, exact(*tangents).astype(out.dtype)

    wrapped.defjvp(tangent)
    return wrapped


def _along(collective: Any, x: jax.Array, cut: Partition, axis: Axis, wire: Wire) -> jax.Array:
    """A collective over `axis` along the dim that is cut."""
    assert cut.dim is not None
    dim = cut.dim % x.ndim
    return _pieces(lambda x: collective(x, axis, dim, wire.bucket), x, cut)


def _summed(x: jax.Array, cut: Partition, axis: Axis, wire: Wire) -> jax.Array:
    def one(x: jax.Array) -> jax.Array:
        return _pieces(lambda x: buckets.psum(x, axis, wire.bucket), x, cut)

    return _by_layer(one, x, cut, wire)  # for what the cast to fp32 made large


def _pieces(fn: Any, x: jax.Array, cut: Partition) -> jax.Array:
    return on_pieces(fn, x, cut.model, cut.model_shards)


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
    """What the backward pass is told of a slot; nothing is kept."""

    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _touch(cut: Partition, wire: Wire, sums: bool, shard: Any, copy: Any, slot: Any) -> jax.Array:
    return gather(shard, cut, wire) if copy is None else copy


def _touch_fwd(cut: Partition, wire: Wire, sums: bool, shard: Any, copy: Any, slot: Any) -> Any:
    # A second derivative goes through the copy: a layer that is run again is not given the shard.
    full = _touch(cut, wire, sums, shard, None, slot) if copy is None else copy
    return full, None if slot is None else _Slot(slot.dtype)


def _touch_bwd(cut: Partition, wire: Wire, sums: bool, slot: Any, cotangent: jax.Array) -> Any:
    if not sums:  # over devices once, at the end of the step
        return cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32)), None, None
    grad = reduce_scatter(cotangent, cut, wire)
    # A slot of fp32, or of the dtype in which the sum over devices is: this rounds nothing but sums
    # of integers, which are in fp32.
    return (grad, None, None) if slot is None else (None, None, grad.astype(slot.dtype))


_touch.defvjp(_touch_fwd, _touch_bwd)


def takes_slot(cut: Partition, wire: Wire) -> bool:
    """Whether a leaf's gradient is summed over devices in a smaller dtype than the master's."""
    return cut.layer_rank > 1 and wire.reduce.itemsize < 4


def touch(
    shard: Any, copy: Any, slot: Any, cut: Partition, wire: Wire, sums: bool | None = None
) -> jax.Array:
    """The full leaf, differentiable with respect to the shard.

    Args:
      shard: this device's piece, in the master dtype.
      copy: the full leaf where it was gathered before (stage 2), or None to gather now (stage 3).
      slot: None; or an array of the shard's shape in the reduce dtype, whose values nobody reads
        and which the gradient is taken with respect to instead, so that gradients of scanned
        layers wait in the dtype in which they were summed over devices. Only for a leaf that
        `takes_slot` and is touched once: gradients of several touches would be added in it.
      cut: how the leaf is split.
      wire: over which axis and in which dtypes.
      sums: whether its cotangent is summed over devices at once, reduce-scattered if the leaf is
        cut; else it stays local. By default that of a leaf that is cut.

    Returns:
      The full leaf in the compute dtype.
    """
    sums = cut.dim is not None if sums is None else sums
    return _touch(cut, wire, sums, shard, copy, slot)
