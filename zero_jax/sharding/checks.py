"""Checks of trees: that they are parameters, their shards, and equal copies on several devices.

Copies are equal by construction. A flipped bit in the memory of one device, or a faulty collective,
makes them differ without an error. Stage 0 and the axes `replica` and `model` have the most
replicated values. Stages 1 to 3 on `data` alone only replicate counters, scalars and small leaves.
"""

import collections
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from zero_jax.releases import CRASHES_ON_EMPTY
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.paths import PyTree, named_leaves, path_name

# Of NNX, variables that no optimizer trains.
_NOT_TRAINED = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)
_SPLIT = "graphdef, params, rest = nnx.split(model, nnx.Param, ...)"


def check_arrays(tree: PyTree) -> None:
    """Checks that a tree has parameters only.

    Raises:
      ValueError: It is a module, has statistics of one, or a leaf is neither an array nor a number.
    """
    if isinstance(tree, nnx.Module):
        raise ValueError(
            f"the parameters are a module, {type(tree).__name__}: pass its trained variables, "
            f"{_SPLIT}, and merge them with the others in the loss"
        )
    nodes = jax.tree_util.tree_flatten_with_path(tree, lambda x: isinstance(x, nnx.Variable))[0]
    variables = ((path_name(path), node) for path, node in nodes)
    for name, node in (*variables, *named_leaves(tree)):
        numeric = hasattr(node, "dtype") or isinstance(node, (int, float, complex, nnx.Variable))
        if isinstance(node, _NOT_TRAINED) or not numeric:
            raise ValueError(
                f"parameter {name!r} is a {type(node).__name__}: parameters are trained numeric "
                f"arrays. Keep other things out of them, as arguments of the loss: {_SPLIT}"
            )


def check_leaves(tree: PyTree, devices: int, frozen: Sequence[bool]) -> None:
    """Checks that every leaf can be a parameter on this number of devices.

    Raises:
      ValueError: The tree is empty, or a leaf is not supported.
    """
    leaves = named_leaves(tree)
    if not leaves:
        raise ValueError("the parameters have no arrays: return a tree of arrays")
    for (name, leaf), still in zip(leaves, frozen, strict=True):
        if leaf.size == 0 and devices > 1 and jax.lib.__version__ == CRASHES_ON_EMPTY:
            raise ValueError(
                f"parameter {name!r} has shape {leaf.shape}, but jaxlib {CRASHES_ON_EMPTY} "
                "crashes on empty arrays on several devices: install another jaxlib, or leave "
                "such leaves out"
            )
        if not _is_supported(leaf.dtype, still):
            raise ValueError(
                f"parameter {name!r} has dtype {leaf.dtype}: parameters are real numbers, trained "
                "ones of 16 or 32 bits. Convert it with x.astype(jnp.float32), store the real and "
                f"the imaginary part as two arrays, or freeze fp8 with `frozen`={name!r}. Keep "
                "PRNG keys and other state out of them, as arguments of the loss"
            )


def _is_supported(dtype: jnp.dtype, frozen: bool) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
    return dtype != jnp.float64 and (frozen or dtype.itemsize > 1)


def check_bytes(tree: PyTree, partitions: Sequence[Partition]) -> None:
    """Checks that each device holds the shards of the layout, and nothing else.

    Raises:
      ValueError: A leaf has shards of the wrong shape.
    """
    for (name, leaf), cut in zip(named_leaves(tree), partitions, strict=True):
        shape = leaf.sharding.shard_shape(leaf.shape)
        if shape != cut.device_shape:
            raise ValueError(
                f"{name} {leaf.shape} has shards of {shape}, but the layout says "
                f"{cut.device_shape}. `jit` places shards: remove jax.disable_jit() "
                "(jax_disable_jit), or use stage=0. jax.debug.print shows values within a loss"
            )


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
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
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
