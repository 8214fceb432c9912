"""Storage of saved activations: on the device or in host memory, in full or 1/MP per device.

P_a stores 1/MP of a value that is replicated over the `model` axis. It sends nothing to store it,
and one all-gather per layer to fetch it; Megatron's five all-reduces send 10 times as much. (A
value that is sharded over `model` would be gathered first: store such values on the device.)

All functions run inside `shard_map`.
Source: ZeRO (arXiv:1910.02054), section 6.1.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.remat.policies import Place
from zero_jax.sharding.mesh import MODEL
from zero_jax.sharding.model_axis import over_model


def can_move(aval: object) -> bool:
    """Returns True for a float array, False for a counter, key, scalar or token."""
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", bool)
    return bool(shape) and jnp.issubdtype(dtype, jnp.floating)


def put(x: jax.Array, place: Place) -> jax.Array:
    """Returns the value as it is stored at a place."""
    if not can_move(x):
        return x
    if place.partitioned:
        x = over_model(_split, x, PartitionSpec(), PartitionSpec(MODEL))
    return jax.device_put(x, jax.memory.Space.Host) if place.host else x


def fetch(stored: jax.Array, place: Place, like: jax.Array | jax.core.ShapedArray) -> jax.Array:
    """Inverts `put`; `like` has the shape and dtype of the value."""
    if not can_move(like):
        return stored
    if place.host:
        stored = jax.device_put(stored, jax.memory.Space.Device)
    if not place.partitioned:
        return stored

    def gather(piece: jax.Array) -> jax.Array:
        full = jax.lax.all_gather(piece, MODEL, tiled=True)
        return full[: math.prod(like.shape)].reshape(like.shape)

    return over_model(gather, stored, PartitionSpec(MODEL), PartitionSpec())


def _split(x: jax.Array) -> jax.Array:
    """Returns this device's contiguous piece of the flat value."""
    parts = jax.lax.axis_size(MODEL)
    flat = x.reshape(-1)
    size = -(-flat.size // parts)
    if size * parts > flat.size:
        flat = jnp.pad(flat, (0, size * parts - flat.size))
    return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(MODEL) * size, size)
