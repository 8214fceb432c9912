"""Bitwise comparison of the copies of a value on several devices.

They are equal by construction. A flipped bit in the memory of one device, or a faulty collective,
makes them differ without an error. Stage 0 and the axes `replica` and `model` have the most
replicated values. Stages 1 to 3 on `data` alone only replicate counters, scalars and small leaves.
"""

import collections
import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero_jax.sharding.paths import PyTree, named_leaves


class ReplicasDiffer(ValueError):
    """Devices store different values where they should store the same."""


def check_replicas(tree: PyTree) -> int:
    """Compares the copies of each leaf between devices; every process calls it.

    Copies one leaf at a time to host memory, and sends 16 bytes for each leaf and device.

    Args:
      tree: Sharded arrays: parameters, optimizer state.

    Returns:
      The number of leaves with a piece that several devices store.

    Raises:
      ReplicasDiffer: Names the first leaf that differs, and the devices in the minority.
    """
    replicated = [(name, leaf) for name, leaf in named_leaves(tree) if _has_replicas(leaf)]
    digests = _digests([value for _, value in replicated])
    for number, (name, value) in enumerate(replicated):
        devices: dict[str, dict[tuple[int, int], list[int]]] = {}  # ids by piece and digest
        for device, index in value.sharding.devices_indices_map(value.shape).items():
            holders = devices.setdefault(str(index), collections.defaultdict(list))
            holders[digests[number, device.id]].append(device.id)
        for holders in devices.values():
            *minority, majority = sorted(holders.values(), key=len)
            if minority:
                raise ReplicasDiffer(
                    f"{name} differs between its replicas: on devices "
                    f"{sorted(device for ids in minority for device in ids)} it is not as on "
                    f"{sorted(majority)}. Resume an earlier checkpoint, without those devices"
                )
    return len(replicated)


def _has_replicas(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array) or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    indices = leaf.sharding.devices_indices_map(leaf.shape).values()
    return len(set(map(str, indices))) < len(indices)


def _digests(values: list[jax.Array]) -> dict[tuple[int, int], tuple[int, int]]:
    """The digest of each shard on every process, by the array's number and the device's id."""
    rows = []
    for number, value in enumerate(values):
        for shard in value.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            digest = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
            rows.append([number, shard.device.id, *digest])
    table = multihost_utils.process_allgather(np.array(rows, np.uint32).reshape(-1, 4))
    return {(row[0], row[1]): (row[2], row[3]) for row in table.reshape(-1, 4).tolist()}
