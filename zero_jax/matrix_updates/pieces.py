"""Partition of matrices over devices: the piece of each device, and its inverse."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Pieces:
    """The partition of matrices of one shape.

    Attributes:
      shape: Logical shape of a matrix: any array of rank 1 or more.
      dtype: Dtype of an element.
      axes: For each dim the mesh axes that shard it; each axis shards one dim.
      sizes: Sizes of the mesh axes, in the order in which devices are numbered.

    >>> rows = Pieces((5, 3), jnp.dtype("float32"), (("data",), ()), (("data", 2),))
    >>> rows.piece, rows.size, rows.stack_spec == PartitionSpec(None, "data", None)
    ((3, 3), 9, True)
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a device's piece of a matrix, padding included."""
        pairs = zip(self.shape, self._over, strict=True)
        return tuple(-(-n // math.prod(over)) for n, over in pairs)

    @property
    def size(self) -> int:
        """Elements of a piece."""
        return math.prod(self.piece)

    @property
    def stack_spec(self) -> PartitionSpec:
        """Partition of matrices stacked along a dim 0, for `shard_map`."""
        return PartitionSpec(None, *(names or None for names in self.axes))

    @property
    def _over(self) -> list[list[int]]:
        sizes = dict(self.sizes)
        return [[sizes[name] for name in names] for names in self.axes]

    @property
    def _padded(self) -> list[int]:
        pairs = zip(self.piece, self._over, strict=True)
        return [n * math.prod(over) for n, over in pairs]

    @property
    def _order(self) -> list[int]:
        """Permutation of (devices by axis, piece by dim) that groups them by dim."""
        at = {name: i for i, (name, _) in enumerate(self.sizes)}
        together = ((*(at[n] for n in names), len(at) + d) for d, names in enumerate(self.axes))
        return list(itertools.chain(*together))

    def padded(self, x: Any) -> Any:
        """Returns a matrix, or a stack along dim 0, padded with zeros."""
        own = zip(x.shape[-len(self.shape) :], self._padded, strict=True)
        stacked = [(0, 0)] * (x.ndim - len(self.shape))
        return jnp.pad(x, [*stacked, *((0, n - size) for size, n in own)])

    def stripped(self, x: Any) -> Any:
        """Inverts `padded`."""
        shape = (*x.shape[: x.ndim - len(self.shape)], *self.shape)
        return jax.lax.slice(x, [0] * x.ndim, shape)

    def join(self, pieces: Any) -> Any:
        """Returns a matrix, given the pieces of all devices (N, size)."""
        by_axis = pieces.reshape(*(n for _, n in self.sizes), *self.piece)
        return self.stripped(by_axis.transpose(self._order).reshape(self._padded))

    def part(self, matrix: Any) -> Any:
        """Inverts `join`."""
        pairs = zip(self._over, self.piece, strict=True)
        split = itertools.chain(*((*over, n) for over, n in pairs))
        by_dim = self.padded(matrix).reshape(list(split))
        return by_dim.transpose(_inverse(self._order)).reshape(-1, self.size)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
