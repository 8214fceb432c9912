"""All-gather and reduce-scatter of one leaf, and both as one differentiable function, `touch`.

Forward: the shard is cast to the compute dtype and all-gathered, and padding is removed.
Backward: the cotangent is cast to the reduce dtype, reduce-scattered, and becomes an fp32 shard.
The cast is why this is a `custom_vjp`: JAX's own transpose of a bf16 gather would sum gradients
in bf16. A leaf of Ψ parameters sends Ψ elements per gather and Ψ per reduce-scatter.

A model-sized fused buffer grows with the model: 12 GB for 3B parameters. Here no collective sends
more than a bucket. A larger leaf is sent in pieces, at the cost of one copy of it on the device.
XLA combines the smaller leaves of a layer, up to a bucket (engine/compiler.py).

All functions run inside `shard_map`. Gradients are sums over devices here; the division by the
global weight comes once, later.
Source of buckets: ZeRO (arXiv:1910.02054), section 6.2, constant size buffers (CB).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.collectives import quantised
from zero_jax.collectives.precision import cast
from zero_jax.collectives.quantised import Collective
from zero_jax.sharding.layout import Partition, pad_dim, strip_dim
from zero_jax.sharding.mesh import Axis
from zero_jax.sharding.model_axis import on_pieces

Optional = jax.Array | None
Function = Callable[[jax.Array], jax.Array]

# Bytes of the largest buffer, on one device. docs/performance-tables.md compares other sizes.
BUCKET_BYTES = 2**30
# A table is looked up only if it has this many times more rows than a device reads.
_FEW = 8


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
    collective: Collective = all_gather
    if wire.gather_bits and _as_integers(cut) and jnp.issubdtype(full.dtype, jnp.floating):
        full, collective = shard, quantised.all_gather(all_gather, full.dtype)
    full = _along(collective, full, cut, cut.axis, wire)
    return strip_dim(full, cut.dim, cut.size) if cut.padded else full


@jax.named_scope("zero_reduce_scatter")
def reduce_scatter(full: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns this device's fp32 shard of the sum of a full gradient over all devices."""
    collective: Collective = psum if cut.dim is None else psum_scatter
    bits = wire.scatter_bits if cut.dim is not None and _as_integers(cut) else None
    if bits:
        collective = quantised.psum_scatter(psum_scatter, by_owner, all_to_all, bits)

    def one(x: jax.Array) -> jax.Array:
        x = x if bits else x.astype(_sum_dtype(cut, wire))
        if cut.dim is not None and cut.padded:
            x = pad_dim(x, cut.dim % x.ndim, cut.shard_size * cut.shards)
        return _along(collective, x, cut, cut.axis, wire)

    shard = _by_layer(one, full, cut, cut.axis, wire)
    return shard.astype(jnp.promote_types(full.dtype, jnp.float32))


@jax.named_scope("zero_join")
def join(part: jax.Array, cut: Partition, wire: Wire, axis: Axis) -> jax.Array:
    """Returns this device's shard in the compute dtype, from its parts over `axis`."""
    if cut.dim is None or cut.parts == 1:
        return part
    gathered = functools.partial(_along, all_gather, cut=cut, axis=axis, wire=wire)
    return _by_layer(gathered, wire.cast(part), cut, axis, wire)


def sum_parts(shard: jax.Array, cut: Partition, wire: Wire, axis: Axis) -> jax.Array:
    """Sums a gradient's fp32 shard over `axis`; returns the part that this device stores."""
    scattered = cut.dim is not None and cut.parts > 1

    def one(x: jax.Array) -> jax.Array:
        x = x.astype(_sum_dtype(cut, wire)) if scattered else x
        return _along(psum_scatter if scattered else psum, x, cut, axis, wire)

    return _by_layer(one, shard, cut, axis, wire).astype(shard.dtype)


def _as_integers(cut: Partition) -> bool:
    """Returns False for vectors, and rows so short that a scale takes more than integers save."""
    return cut.layer_rank > 1 and cut.device_shape[-1] > quantised.TOO_SHORT


def _sum_dtype(cut: Partition, wire: Wire) -> DTypeLike:
    """Returns the dtype of sums of gradients over devices: fp32 for vectors."""
    return jnp.float32 if cut.layer_rank < 2 else wire.reduce


def _by_layer(fn: Function, x: jax.Array, cut: Partition, axis: Axis, wire: Wire) -> jax.Array:
    """Applies a function to a large stack layer by layer.

    Without the loop a trillion parameters are thousands of pieces, which XLA compiles for minutes.
    """
    whole_stack = cut.stacked and cut.dim != -len(cut.shape) and x.ndim == len(cut.shape)
    return jax.lax.map(fn, x) if whole_stack and _exceeds(x.nbytes, axis, wire.bucket) else fn(x)


def _along(
    collective: Collective, x: jax.Array, cut: Partition, axis: Axis, wire: Wire
) -> jax.Array:
    """Runs a collective over `axis`, along the sharded dim if there is one."""
    dim = -1 if cut.dim is None else cut.dim % x.ndim
    return on_pieces(
        lambda x: collective(x, axis, dim, wire.bucket), x, cut.model, cut.model_shards
    )


def takes_slot(cut: Partition, wire: Wire) -> bool:
    """Returns whether a leaf's gradient is summed over devices in fewer than 32 bits."""
    return cut.layer_rank > 1 and wire.reduce.itemsize < 4


def looked_up(cut: Partition, read: int, wire: Wire) -> bool:
    """Returns whether a device reads so few rows of a leaf that they are sent (lookup.py), not it.

    A leaf that is not read by rows has 0. No leaf is looked up if matrices are sent as integers.
    """
    if not read or cut.dim is None or cut.shards == 1 or cut.model_shards > 1:
        return False
    if wire.gather_bits or wire.scatter_bits:
        return False
    # All rows of some columns are held at once, in fp32 for the gradient.
    columns = 4 * cut.shape[0] * -(-cut.shape[1] // cut.shards)
    return _FEW * read < cut.shape[0] and columns <= (wire.bucket or BUCKET_BYTES)


def local_shard(full: jax.Array, cut: Partition, axis: Axis) -> jax.Array:
    """This device's piece of a leaf that every device holds in full; sends nothing."""
    if cut.dim is None:
        return full
    dim = cut.dim % full.ndim
    if cut.padded:
        full = pad_dim(full, dim, cut.shard_size * cut.shards)
    start = jax.lax.axis_index(axis) * cut.shard_size
    return jax.lax.dynamic_slice_in_dim(full, start, cut.shard_size, axis=dim)


def touch(
    shard: jax.Array,
    copy: Optional,
    slot: Optional,
    cut: Partition,
    wire: Wire,
    sums: bool,
    *,
    is_read: bool = True,
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
      is_read: False to return zeros, which have the derivative of the full leaf. Nothing is sent.
    """

    @jax.custom_vjp
    def opened(shard: jax.Array, copy: Optional, slot: Optional) -> jax.Array:
        if not is_read:
            return stand_in(shard, cut, wire)
        return gather(shard, cut, wire) if copy is None else copy

    def forward(shard: jax.Array, copy: Optional, slot: Optional) -> tuple[jax.Array, None]:
        # A second derivative goes through the copy: a layer that is run again has no shard.
        return opened(shard, None, slot) if copy is None else copy, None

    def backward(_: None, cotangent: jax.Array) -> tuple[Optional, Optional, Optional]:
        return touch_gradients(cotangent, slot, cut, wire, sums)

    opened.defvjp(forward, backward)
    return opened(shard, copy, slot)


def stand_in(shard: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns zeros with the shape and dtype of the full leaf."""
    shape = list(shard.shape)
    if cut.dim is not None:
        shape[cut.dim] = cut.size
    return jnp.zeros(shape, wire.compute or shard.dtype)


def touch_gradients(
    gradient: jax.Array, slot: Optional, cut: Partition, wire: Wire, sums: bool
) -> tuple[Optional, Optional, Optional]:
    """Returns the gradients of `touch` by its three arrays, or None, from that of its result."""
    if not sums:  # over devices once, at the end of the step
        return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)), None, None
    grad = reduce_scatter(gradient, cut, wire)
    # A slot of fp32, or of the dtype in which the sum over devices is: this rounds nothing but sums
    # of integers, which are in fp32.
    return (grad, None, None) if slot is None else (None, None, grad.astype(slot.dtype))


def all_gather(shard: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.all_gather(..., tiled=True)` along `dim`, at most a bucket at a time."""
    parts = jax.lax.axis_size(axis)
    if not _exceeds(parts * shard.nbytes, axis, bucket_bytes):
        return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
    rows = _in_pieces(lambda x: jax.lax.all_gather(x, axis), shard.reshape(-1), parts, bucket_bytes)
    shape = (*shard.shape[:dim], parts * shard.shape[dim], *shard.shape[dim + 1 :])
    return jnp.moveaxis(rows.reshape(parts, *shard.shape), 0, dim).reshape(shape)


def psum_scatter(full: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.psum_scatter(..., tiled=True)` along `dim`, at most a bucket at a time."""
    if not _exceeds(full.nbytes, axis, bucket_bytes):
        return _scatter(full, axis, dim)
    rows = by_owner(full, axis, dim)
    flat = rows.reshape(len(rows), -1)
    shard = _in_pieces(lambda x: _scatter(x, axis, 0)[0], flat, len(rows), bucket_bytes)
    return shard.reshape(rows.shape[1:])


def all_to_all(rows: jax.Array, axis: Axis, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.all_to_all` of dim 0: row i is sent to device i, at most a bucket at a time."""
    send = functools.partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    if not _exceeds(rows.nbytes, axis, bucket_bytes):
        return send(rows)
    flat = rows.reshape(len(rows), -1)
    return _in_pieces(send, flat, len(rows), bucket_bytes).reshape(rows.shape)


def psum(full: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.psum`, at most a bucket at a time; `dim` has no effect."""
    if not _exceeds(full.nbytes, axis, bucket_bytes):
        return jax.lax.psum(full, axis)
    summed = _in_pieces(lambda x: jax.lax.psum(x, axis), full.reshape(-1), 1, bucket_bytes)
    return summed.reshape(full.shape)


def _exceeds(nbytes: int, axis: Axis, bucket_bytes: int | None) -> bool:
    """Returns False for one device too: XLA drops its collectives, and would keep the copies."""
    return bucket_bytes is not None and nbytes > bucket_bytes and jax.lax.axis_size(axis) > 1


def _in_pieces(fn: Function, x: jax.Array, copies: int, bucket_bytes: int | None) -> jax.Array:
    """Applies `fn` to pieces of the last dim, and joins its results along it.

    The buffer has `copies` elements for each element of that dim, and at most `bucket_bytes`.
    """
    assert bucket_bytes is not None
    most = max(bucket_bytes // (copies * x.dtype.itemsize), 1)
    pieces = [fn(x[..., a : a + most]) for a in range(0, x.shape[-1], most)]
    return jnp.concatenate(pieces, axis=-1)


def _scatter(full: jax.Array, axis: Axis, dim: int) -> jax.Array:
    # For several processes on CPUs XLA uses gloo, which in jaxlib 0.10 to 0.12 sends from a buffer
    # that it already writes to: the end of the first device's shard is wrong (jax-ml/jax#40830).
    # An all-to-all and a local sum send as many elements.
    if not (jax.distributed.is_initialized() and jax.default_backend() == "cpu"):
        return jax.lax.psum_scatter(full, axis, scatter_dimension=dim, tiled=True)
    return jax.lax.all_to_all(by_owner(full, axis, dim), axis, 0, 0).sum(0)


def by_owner(full: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Returns the shards of `full` along `dim`, stacked: row i is that of device i."""
    parts = jax.lax.axis_size(axis)
    rows = full.reshape(*full.shape[:dim], parts, full.shape[dim] // parts, *full.shape[dim + 1 :])
    return jnp.moveaxis(rows, dim, 0)


def check_bucket(bucket_bytes: float, devices: int) -> int:
    """Returns the bucket as an integer number of bytes.

    Raises:
      ValueError: It has no room for one fp32 element of each device.

    >>> check_bucket(128e6, 8)
    128000000
    """
    least = 4 * devices
    number = isinstance(bucket_bytes, (int, float)) and not isinstance(bucket_bytes, bool)
    if not number or not least <= bucket_bytes < float("inf"):
        raise ValueError(
            f"`bucket_bytes`={bucket_bytes!r}: at least {least} bytes are required, 4 for each of "
            f"{devices} devices. The default is {BUCKET_BYTES}"
        )
    return int(bucket_bytes)
