"""A tree of states as logical arrays by name: what a checkpoint holds, and what is made from it.

A leaf at rest is split over devices, padded, in device or in host memory; a checkpoint knows
nothing of that. So a leaf is seen as pieces of its logical array: what this process holds when it
is saved, what each of its devices wants when it is restored. A piece that several devices hold is
saved by the first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax import paths
from zero_jax.paths import Padded

PyTree = Any
Piece = tuple[tuple[int, ...], np.ndarray]
# A function that reads the part of the logical array between starts and stops.
Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]
_KEY = "key<"


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
            return f"{_KEY}{jax.random.key_impl(self.value)}>"
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

    def pieces(self) -> list[Piece]:
        """Copies, in host memory, of what this process saves of it."""
        value = jax.random.key_data(self.value) if self.is_key else self.value
        if not isinstance(value, jax.Array):
            mine = [((0,) * np.ndim(value), np.array(value))]
            return mine if jax.process_index() == 0 else []
        shards = [s for s in value.addressable_shards if s.replica_id == 0]
        found = []
        for shard in shards:
            starts, stops = _bounds(shard.index, self.shape)
            sizes = tuple(b - a for a, b in zip(starts, stops, strict=True))
            if 0 not in sizes:
                part = np.asarray(shard.data)[tuple(map(slice, sizes))]
                found.append((starts, np.array(part)))  # a copy: the step donates what it read
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


def leaves(tree: PyTree) -> list[Leaf]:
    """The leaves of a tree at rest, in tree order.

    Raises:
      ValueError: two leaves have the same path, or one is no array or number.
    """
    nodes = jax.tree.leaves(tree, is_leaf=_is_padded)
    found = [Leaf(name, x) for (name, _), x in zip(paths.named_leaves(tree), nodes, strict=True)]
    names = set()
    for leaf in found:
        if leaf.name in names:
            raise ValueError(f"two leaves are called {leaf.name!r}: give them paths of their own")
        names.add(leaf.name)
        kind = leaf.value
        if not isinstance(
            kind, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float)
        ):
            raise ValueError(
                f"{leaf.name} is a {type(kind).__name__}: a checkpoint holds arrays and numbers; "
                "put other things into `extra`"
            )
    return found


def rebuilt(tree: PyTree, nodes: list[Any]) -> PyTree:
    """The tree with these nodes in the places of its leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_padded), nodes)


def owned(leaf: Leaf, made: Any) -> Iterator[Piece]:
    """What this process holds of a restored leaf, as `pieces` of it."""
    yield from Leaf(leaf.name, made).pieces()


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
