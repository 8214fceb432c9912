"""Where a kept activation lives between forward and backward: device, host, 1/MP of it, or both.

`put` stores a value that every device of the `model` axis holds whole, `fetch` brings it back.
P_a sends nothing when it stores a value that is whole on every device of `model`, and one
all-gather when it fetches: once a layer, where Megatron's five all-reduces send 10 times as much.
(One that is split already would be gathered to be stored: leave such names on the device.)

All functions run inside `shard_map`.
Source: ZeRO (arXiv:1910.02054), section 6.1.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.remat.policies import Place
from zero_jax.sharding.mesh import MODEL
from zero_jax.sharding.model_axis import over_model


def can_move(aval: Any) -> bool:
    """Whether a value is an activation worth a place of its own, not a counter, key or scalar."""
    return bool(aval.shape) and jnp.issubdtype(aval.dtype, jnp.floating)


def is_in_host(x: jax.Array) -> bool:
    """Whether a value is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def put(x: jax.Array, place: Place) -> jax.Array:
    """The value as it is kept at its place."""
    if not can_move(x):
        return x
    if place.partitioned:
        x = over_model(_split, x, PartitionSpec(), PartitionSpec(MODEL))
    return jax.device_put(x, jax.memory.Space.Host) if place.host else x


def fetch(kept: jax.Array, place: Place, like: Any) -> jax.Array:
    """The value again, from what `put` made of it.

    Args:
      kept: from `put`.
      place: as given to `put`.
      like: the value's shape.
    """
    if not can_move(like):
        return kept
    if place.host:
        kept = jax.device_put(kept, jax.memory.Space.Device)
    if not place.partitioned:
        return kept

    def gather(piece: jax.Array) -> jax.Array:
        full = jax.lax.all_gather(piece, MODEL, tiled=True)
        return full[: math.prod(like.shape)].reshape(like.shape)

    return over_model(gather, kept, PartitionSpec(MODEL), PartitionSpec())


def _split(x: jax.Array) -> jax.Array:
    """This device's piece of the flat value: contiguous here and when gathered."""
    parts = jax.lax.axis_size(MODEL)
    flat = x.reshape(-1)
    size = -(-flat.size // parts)
    if size * parts > flat.size:
        flat = jnp.pad(flat, (0, size * parts - flat.size))
    return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(MODEL) * size, size)
