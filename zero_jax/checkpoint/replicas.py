"""Are values that several devices hold equal on all of them, to the bit?

They are made to be: every device computes them from the same numbers. A bit that flips in one
device's memory, or a collective that misbehaves, makes them drift apart without a word. Stage 0 and
the axes `replica` and `model` hold the most of such values; at stages 1 to 3 on `data` alone only
counters, scalars and leaves too small to be split.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zero_jax.checkpoint.checksum import checksum
from zero_jax.checkpoint.leaves import leaves

PyTree = Any


class ReplicasDiffer(ValueError):
    """Devices hold different values where they should hold the same."""


def check_replicas(tree: PyTree) -> int:
    """Compares what several devices hold of each leaf; every process calls it.

    Copies one leaf after the other to host memory, and sends 8 bytes for each leaf and device.

    Args:
      tree: arrays at rest: parameters, optimizer state.

    Returns:
      How many leaves have pieces that more than one device holds.

    Raises:
      ReplicasDiffer: names the first such leaf, and the devices that differ from most.
    """
    arrays = [(x.name, x.value) for x in leaves(tree) if isinstance(x.value, jax.Array)]
    arrays = [(name, x) for name, x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    arrays = [(name, x) for name, x in arrays if len(x.sharding.device_set) > 1]
    shared = [(name, x) for name, x in arrays if _copies(x)]
    for (name, value), sums in zip(shared, _sums([x for _, x in shared]), strict=True):
        groups: dict[Any, dict[int, list[int]]] = {}
        places: dict[Any, Any] = dict(value.sharding.devices_indices_map(value.shape))
        for device, index in places.items():
            held = groups.setdefault(str(index), {})
            held.setdefault(sums[device.id], []).append(device.id)
        for held in groups.values():
            if len(held) > 1:
                most = max(held.values(), key=len)
                others = sorted(d for devices in held.values() if devices != most for d in devices)
                raise ReplicasDiffer(
                    f"{name} differs between its replicas: on devices {others} it is not as on "
                    f"{sorted(most)}. Resume an earlier checkpoint, without those devices"
                )
    return len(shared)


def _copies(value: jax.Array) -> bool:
    indices = value.sharding.devices_indices_map(value.shape)
    return len({str(index) for index in indices.values()}) < len(indices)


def _sums(values: list[jax.Array]) -> list[dict[int, int]]:
    """For each array the checksum of what each device holds, by the device's id."""
    local = {
        (at, shard.device.id): checksum(np.asarray(shard.data), (0,) * value.ndim)
        for at, value in enumerate(values)
        for shard in value.addressable_shards
    }
    rows = [(at, device, s >> 32, s & 0xFFFFFFFF) for (at, device), s in local.items()]
    table = np.array(rows, np.uint32).reshape(-1, 4)
    if jax.process_count() > 1:
        table = np.asarray(multihost_utils.process_allgather(table)).reshape(-1, 4)
    found: list[dict[int, int]] = [{} for _ in values]
    for at, device, high, low in table.tolist():
        found[at][device] = (high << 32) + low
    return found
