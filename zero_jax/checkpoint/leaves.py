"""A tree of states as logical arrays by name: what a checkpoint holds, and what is made from it.

A leaf at rest is split over devices, padded, in device or in host memory; a checkpoint knows
nothing of that. So a leaf is seen as pieces of its logical array: what this process holds when it
is saved, what each of its devices wants when it is restored. A piece that several devices hold is
saved by the first.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.arrays import chunk_shape
from zero_jax.offload.state_in_files import InFiles, Stored
from zero_jax.sharding import layout, paths
from zero_jax.sharding.paths import Padded

PyTree = Any
Piece = tuple[tuple[int, ...], np.ndarray]
# A function that reads the part of the logical array between starts and stops.
Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]
_KEY = "key<"
_KINDS = (jax.Array, jax.ShapeDtypeStruct, InFiles, np.ndarray, np.generic, int, float)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree at rest.

    Attributes:
      name: its path.
      node: the array, ShapeDtypeStruct or number, in a `Padded` if it is padded.
    """

    name: str
    node: Any

    @property
    def value(self) -> Any:
        """What rests: padded, and a typed random key as it is."""
        return self.node.value if isinstance(self.node, Padded) else self.node

    @property
    def is_key(self) -> bool:
        """Whether it is a typed random key (`jax.random.key`)."""
        return jnp.issubdtype(getattr(self.value, "dtype", np.int32), jax.dtypes.prng_key)

    @property
    def dtype(self) -> str:
        """The name of the dtype; "key<threefry2x32>", say, for a random key."""
        if self.is_key:
            return f"{_KEY}{layout.key_impl(self.value)}>"
        return str(getattr(self.value, "dtype", None) or np.asarray(self.value).dtype)

    @property
    def _rest_shape(self) -> tuple[int, ...]:
        """Global shape at rest, the words of a random key included."""
        if self.is_key:
            return tuple(jax.eval_shape(jax.random.key_data, self.value).shape)
        return tuple(np.shape(self.value))

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape of what is stored."""
        shape = list(self._rest_shape)
        if isinstance(self.node, Padded):
            shape[self.node.dim] = self.node.size
        return tuple(shape)

    @property
    def stored_dtype(self) -> str:
        """The dtype of what is stored: a random key is its words."""
        return "uint32" if self.is_key else self.dtype

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The largest piece that a device holds."""
        sharding = getattr(self.value, "sharding", None)
        if sharding is None or self.is_key:
            return self._rest_shape
        return tuple(sharding.shard_shape(self._rest_shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the logical array."""
        return int(np.prod(self.shape)) * jnp.dtype(self.stored_dtype).itemsize

    @property
    def in_files(self) -> bool:
        return isinstance(self.node, InFiles)

    def pieces(self) -> list[Piece]:
        """Copies, in host memory, of what this process saves of it."""
        value = jax.random.key_data(self.value) if self.is_key else self.value
        if not isinstance(value, jax.Array):
            mine = [((0,) * np.ndim(value), np.array(value))]
            return mine if jax.process_index() == 0 else []
        if value.is_fully_addressable and jax.process_index() != 0:
            return []  # each process has an equal one of its own
        shards = [s for s in value.addressable_shards if s.replica_id == 0]
        found = []
        for shard in shards:
            # What comes from a GPU is a copy already. On a CPU it is a view, and maybe in host
            # memory too, of what the step donates.
            copied = shard.device.platform != "cpu" and value.sharding.memory_kind == "device"
            starts, stops = _bounds(shard.index, self.shape)
            sizes = tuple(b - a for a, b in zip(starts, stops, strict=True))
            if 0 not in sizes:
                part = np.asarray(shard.data)[tuple(map(slice, sizes))]
                found.append((starts, part if copied else np.array(part)))
        return found

    def fetch(self) -> None:
        """Starts to copy it to host memory."""
        if isinstance(self.value, jax.Array) and not self.is_key:
            for shard in self.value.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()

    def build(self, read: Read) -> Any:
        """The leaf with other values, each device's piece read once, placed as this one is."""
        whole = self._rest_shape
        if not hasattr(self.value, "sharding"):
            value = read((0,) * len(whole), whole)
            return value if isinstance(self.value, np.ndarray) else type(self.value)(value[()])
        known: dict[Any, np.ndarray] = {}

        def piece(index: Any) -> np.ndarray:
            bounds = _bounds(index, whole)
            if bounds not in known:
                known[bounds] = self._padded(read, *bounds)
            return known[bounds]

        if self.is_key:
            words = jax.make_array_from_callback(whole, _replicated(self.value), piece)
            return jax.random.wrap_key_data(words, impl=self.dtype[len(_KEY) : -1])
        if isinstance(self.value, jax.Array) and not self.value.committed:
            return jnp.asarray(read((0,) * len(whole), whole))
        made = jax.make_array_from_callback(whole, self.value.sharding, piece)
        if isinstance(self.node, Padded):
            return dataclasses.replace(self.node, value=made)
        return made

    def _padded(self, read: Read, starts: tuple[int, ...], stops: tuple[int, ...]) -> np.ndarray:
        """A part of the array at rest: the logical part, and zeros."""
        ends = tuple(max(a, min(b, n)) for a, b, n in zip(starts, stops, self.shape, strict=True))
        part = read(starts, ends)
        if ends == stops:
            return part
        out = np.zeros([b - a for a, b in zip(starts, stops, strict=True)], part.dtype)
        out[tuple(map(slice, part.shape))] = part
        return out


@dataclasses.dataclass(frozen=True)
class FileLeaf(Leaf):
    """A leaf whose values are in files (`offload="optimizer:nvme=DIR"`)."""

    node: InFiles

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.node.cut.device_shape

    def pieces(self) -> list[Piece]:
        return [
            (starts, self.node.read(name, inner, stops))
            for name, first, is_first in self.node.shards()
            for starts, inner, stops in self._boxes(first)
            if is_first
        ]

    def build(self, read: Read) -> InFiles:
        for name, first, _ in self.node.shards():
            for starts, inner, stops in self._boxes(first):
                sizes = [b - a for a, b in zip(inner, stops, strict=True)]
                ends = tuple(a + n for a, n in zip(starts, sizes, strict=True))
                self.node.write(name, inner, read(starts, ends))
        return self.node

    def _boxes(self, first: tuple[int, ...]) -> Any:
        """The parts of a shard without its padding, a chunk each: where it starts in the logical
        array, and its starts and stops in the shard."""
        itemsize = jnp.dtype(self.stored_dtype).itemsize
        chunk = chunk_shape(self.shape, self.shard_shape, itemsize)
        limits = [
            min(s, n - a) for s, n, a in zip(self.shard_shape, self.shape, first, strict=True)
        ]
        for inner in itertools.product(
            *(range(0, n, c) for n, c in zip(limits, chunk, strict=True))
        ):
            stops = [min(a + c, n) for a, c, n in zip(inner, chunk, limits, strict=True)]
            yield tuple(a + b for a, b in zip(first, inner, strict=True)), inner, stops


def leaves(tree: PyTree) -> list[Leaf]:
    """The leaves of a tree at rest, in tree order; a state in files is like any other.

    Raises:
      ValueError: two leaves have the same path, or one is no array or number.
    """
    tree = _unfolded(tree)
    nodes = jax.tree.leaves(tree, is_leaf=_is_padded)
    names = [name for name, _ in paths.named_leaves(tree)]
    found = [
        (FileLeaf if isinstance(x, InFiles) else Leaf)(name, x)
        for name, x in zip(names, nodes, strict=True)
    ]
    times = collections.Counter(names)
    for leaf in found:
        if times[leaf.name] > 1:
            raise ValueError(f"two leaves have the path {leaf.name!r}: give them different paths")
        kind = leaf.value
        if not isinstance(kind, _KINDS):
            raise ValueError(
                f"{leaf.name} is a {type(kind).__name__}, and a checkpoint holds arrays and "
                "numbers: put other values into `extra`"
            )
    return found


def rebuilt(tree: PyTree, nodes: list[Any]) -> PyTree:
    """The tree with these nodes in the places of its leaves."""
    made = jax.tree.unflatten(jax.tree.structure(_unfolded(tree), is_leaf=_is_padded), nodes)

    def folded(old: Any, new: Any) -> Any:
        return old.folded(new) if _is_stored(old) else new

    return jax.tree.map(folded, tree, made, is_leaf=_is_stored)


def _unfolded(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.unfolded() if _is_stored(x) else x, tree, is_leaf=_is_stored)


def _is_stored(node: Any) -> bool:
    return isinstance(node, Stored)


def _is_padded(node: Any) -> bool:
    return isinstance(node, Padded)


def _bounds(
    index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts and stops of an index within a shape."""
    pairs = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _ in pairs), tuple(max(a, b) for a, b in pairs)


def _replicated(value: Any) -> Any:
    sharding = value.sharding
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return sharding
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
