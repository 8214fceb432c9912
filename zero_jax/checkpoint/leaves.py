"""Leaves of a sharded tree as named arrays without padding.

A leaf may be partitioned and padded, in device memory, host memory or files. A checkpoint stores
its unpadded array: saving splits it into the pieces that this process stores, and restoring reads
the piece of each device. A piece that several devices store is saved from the first.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.arrays import KEY, Index, Piece, StoredArray, chunk_shape
from zero_jax.names import check_once
from zero_jax.offload.nvme import FileArray, StateFiles
from zero_jax.sharding import layout, paths
from zero_jax.sharding.paths import Padded, PyTree

# Reads the part of the unpadded array between two indices.
Read = Callable[[Index, Index], np.ndarray]
_KINDS = (jax.Array, jax.ShapeDtypeStruct, FileArray, np.ndarray, np.generic, int, float)


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One leaf of a sharded tree.

    Attributes:
      name: Its path.
      node: An array, FileArray, ShapeDtypeStruct or number, in a `Padded` if it is padded.
      number: Its position in the tree, which names its folder in a checkpoint.
    """

    name: str
    node: PyTree
    number: int

    @property
    def value(self) -> PyTree:
        """The stored value, with padding."""
        return self.node.value if isinstance(self.node, Padded) else self.node

    @property
    def in_files(self) -> bool:
        """True if its values are in files (`offload="optimizer:nvme=DIR"`)."""
        return isinstance(self.value, FileArray)

    @property
    def is_key(self) -> bool:
        """True for a typed random key (`jax.random.key`)."""
        return jnp.issubdtype(getattr(self.value, "dtype", np.int32), jax.dtypes.prng_key)

    @functools.cached_property
    def array(self) -> StoredArray:
        """The array on disk, without its checksum."""
        data = jax.eval_shape(jax.random.key_data, self.value) if self.is_key else self.value
        shape = tuple(np.shape(self.node if isinstance(self.node, Padded) else data))
        dtype = getattr(data, "dtype", None) or np.asarray(data).dtype
        sharding = getattr(data, "sharding", None)
        shard = sharding.shard_shape(data.shape) if sharding else np.shape(data)
        chunk = chunk_shape(shape, shard, dtype.itemsize)
        name = f"{KEY}{layout.key_impl(self.value)}>" if self.is_key else str(dtype)
        return StoredArray(f"arrays/{self.number:04d}", shape, name, str(dtype), chunk)

    def pieces(self) -> list[Piece]:
        """Returns copies in host memory of the pieces that this process saves."""
        data: PyTree = self.value.fetch() if self.in_files else self.value
        data = jax.random.key_data(data) if self.is_key else data
        if not isinstance(data, jax.Array):
            piece = (0,) * np.ndim(data), np.array(data)
            return [piece] if jax.process_index() == 0 else []
        if data.is_fully_addressable and jax.process_index() != 0:
            return []  # every process has an equal one
        pieces = []
        for shard in data.addressable_shards:
            starts, stops = _bounds(shard.index, self.array.shape)
            sizes = tuple(map(operator.sub, stops, starts))
            if shard.replica_id != 0 or 0 in sizes:
                continue
            # From GPU memory this is a copy; else a view of memory that the next step may donate.
            part = np.asarray(shard.data)[tuple(map(slice, sizes))]
            is_copy = shard.device.platform != "cpu" and data.sharding.memory_kind == "device"
            pieces.append((starts, part if is_copy else np.array(part)))
        return pieces

    def build(self, read: Read) -> PyTree:
        """Returns the node with the values of `read`, placed as this one; reads pieces once."""
        shape = self.array.shape if self.is_key else tuple(np.shape(self.value))
        origin = (0,) * len(shape)
        if not hasattr(self.value, "sharding"):
            value = read(origin, shape)
            return value if isinstance(self.value, np.ndarray) else type(self.value)(value[()])
        if isinstance(self.value, jax.Array) and not self.is_key and not self.value.committed:
            return jnp.asarray(read(origin, shape))

        @functools.cache
        def padded(starts: Index, stops: Index) -> np.ndarray:
            ends = tuple(map(max, starts, map(min, stops, self.array.shape)))
            widths = [(0, b - a) for a, b in zip(ends, stops, strict=True)]
            return np.pad(read(starts, ends), widths) if ends != stops else read(starts, ends)

        def piece(index: PyTree) -> np.ndarray:
            return padded(*_bounds(index, shape))

        sharding = self.value.sharding
        if self.is_key and hasattr(sharding, "mesh"):
            sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        array = jax.make_array_from_callback(shape, sharding, piece)
        if self.in_files:
            self.value.replace(array)
            return self.node
        if self.is_key:
            return jax.random.wrap_key_data(array, impl=self.array.dtype[len(KEY) : -1])
        return dataclasses.replace(self.node, value=array) if self.node is not self.value else array


def leaves(tree: PyTree) -> list[NamedLeaf]:
    """Returns the leaves of a sharded tree, in tree order; raises ValueError for a wrong one."""
    tree = _unfolded(tree)
    nodes = jax.tree.leaves(tree, is_leaf=_is_padded)
    names = [name for name, _ in paths.named_leaves(tree)]
    check_once(names)
    pairs = enumerate(zip(names, nodes, strict=True))
    named = [NamedLeaf(name, node, number) for number, (name, node) in pairs]
    for leaf in named:
        if not isinstance(leaf.value, _KINDS):
            raise ValueError(f"{leaf.name} is a {type(leaf.value).__name__}: put it into `extra`")
    return named


def unflatten(tree: PyTree, nodes: list[PyTree]) -> PyTree:
    """Returns the tree with other nodes, in the order of `leaves`."""
    treedef = jax.tree.structure(_unfolded(tree), is_leaf=_is_padded)
    return jax.tree.map(
        lambda old, new: old.folded(new) if _is_stored(old) else new,
        *(tree, jax.tree.unflatten(treedef, nodes)),
        is_leaf=_is_stored,
    )


def _unfolded(tree: PyTree) -> PyTree:
    """The tree with an `FileArray` for every leaf in files."""
    return jax.tree.map(lambda x: x.unfolded() if _is_stored(x) else x, tree, is_leaf=_is_stored)


def _is_stored(node: PyTree) -> bool:
    return isinstance(node, StateFiles)


def _is_padded(node: PyTree) -> bool:
    return isinstance(node, Padded)


def _bounds(index: tuple[slice, ...], shape: Index) -> tuple[Index, Index]:
    """Starts and stops of an index within a shape."""
    pairs = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _ in pairs), tuple(max(a, b) for a, b in pairs)
