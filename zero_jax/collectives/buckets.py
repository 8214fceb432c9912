"""Constant-size communication buffers: leaves larger than a bucket are communicated in pieces.

A model-sized fused buffer grows with the model: 12 GB for 3B parameters. Here no collective sends
more than `bucket_bytes`. A larger leaf is gathered, scattered or summed piece by piece. XLA
combines the smaller leaves of a layer, up to a bucket (engine/compiler.py).

Costs one copy on the device of a leaf that is sent in pieces; sends no additional elements.
Source: ZeRO (arXiv:1910.02054), section 6.2, constant size buffers (CB).
"""

import jax
import jax.numpy as jnp

from zero_jax.sharding.mesh import Axis

# Bytes of the largest buffer, on one device. docs/performance-tables.md compares other sizes.
BUCKET_BYTES = 2**30


def all_gather(shard: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.all_gather(..., tiled=True)` along `dim`, at most a bucket at a time."""
    parts = jax.lax.axis_size(axis)
    runs = _runs(shard.size, parts * shard.dtype.itemsize, bucket_bytes)
    if len(runs) == 1:
        return jax.lax.all_gather(shard, axis, axis=dim, tiled=True)
    flat = shard.reshape(-1)
    pieces = [jax.lax.all_gather(flat[a:b], axis) for a, b in runs]
    rows = jnp.concatenate(pieces, axis=1).reshape(parts, *shard.shape)
    shape = (*shard.shape[:dim], parts * shard.shape[dim], *shard.shape[dim + 1 :])
    return jnp.moveaxis(rows, 0, dim).reshape(shape)


def psum_scatter(full: jax.Array, axis: Axis, dim: int, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.psum_scatter(..., tiled=True)` along `dim`, at most a bucket at a time."""
    parts = jax.lax.axis_size(axis)
    runs = _runs(full.size // parts, parts * full.dtype.itemsize, bucket_bytes)
    if len(runs) == 1:
        return _scatter(full, axis, dim)
    rows = by_owner(full, axis, dim)
    flat = rows.reshape(parts, -1)
    pieces = [_scatter(flat[:, a:b], axis, 0)[0] for a, b in runs]
    return jnp.concatenate(pieces).reshape(rows.shape[1:])


def by_owner(full: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Returns the shards of `full` along `dim`, stacked: row i is that of device i."""
    parts = jax.lax.axis_size(axis)
    rows = full.reshape(*full.shape[:dim], parts, full.shape[dim] // parts, *full.shape[dim + 1 :])
    return jnp.moveaxis(rows, dim, 0)


def _scatter(full: jax.Array, axis: Axis, dim: int) -> jax.Array:
    # For several processes on CPUs XLA uses gloo, which in jaxlib 0.10 to 0.12 sends from a buffer
    # that it already writes to: the end of the first device's shard is wrong (jax-ml/jax#40830).
    # An all-to-all and a local sum send as many elements.
    if not (jax.distributed.is_initialized() and jax.default_backend() == "cpu"):
        return jax.lax.psum_scatter(full, axis, scatter_dimension=dim, tiled=True)
    return jax.lax.all_to_all(by_owner(full, axis, dim), axis, 0, 0).sum(0)


def all_to_all(rows: jax.Array, axis: Axis, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.all_to_all` of dim 0: row i is sent to device i, at most a bucket at a time."""
    runs = _runs(rows.size // len(rows), len(rows) * rows.dtype.itemsize, bucket_bytes)
    if len(runs) == 1:
        return jax.lax.all_to_all(rows, axis, 0, 0)
    flat = rows.reshape(len(rows), -1)
    pieces = [jax.lax.all_to_all(flat[:, a:b], axis, 0, 0) for a, b in runs]
    return jnp.concatenate(pieces, axis=1).reshape(rows.shape)


def psum(full: jax.Array, axis: Axis, bucket_bytes: int | None) -> jax.Array:
    """`jax.lax.psum`, at most a bucket at a time."""
    runs = _runs(full.size, full.dtype.itemsize, bucket_bytes)
    if len(runs) == 1:
        return jax.lax.psum(full, axis)
    flat = full.reshape(-1)
    return jnp.concatenate([jax.lax.psum(flat[a:b], axis) for a, b in runs]).reshape(full.shape)


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


def _runs(size: int, word_bytes: int, bucket_bytes: int | None) -> list[tuple[int, int]]:
    """Returns the bounds of pieces of `size` elements, each of `word_bytes` in the buffer."""
    most = max(size if bucket_bytes is None else bucket_bytes // word_bytes, 1)
    return [(start, min(start + most, size)) for start in range(0, max(size, 1), most)]
