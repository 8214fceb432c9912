"""Matrices as pieces of devices, and rows of pieces to send. Runs inside `shard_map`."""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

Arrays = list[jax.Array]
DType = np.dtype[Any]
# Rows of all devices by dtype, (N, length).
Rows = dict[DType, jax.Array]
# The number of matrices of each kind that a device is assigned.
Load = tuple[int, ...]


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
    dtype: DType
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

    def padded(self, x: jax.Array) -> jax.Array:
        """Returns a matrix, or a stack along dim 0, padded with zeros."""
        own = zip(x.shape[-len(self.shape) :], self._padded, strict=True)
        stacked = [(0, 0)] * (x.ndim - len(self.shape))
        return jnp.pad(x, [*stacked, *((0, n - size) for size, n in own)])

    def stripped(self, x: jax.Array) -> jax.Array:
        """Inverts `padded`."""
        shape = (*x.shape[: x.ndim - len(self.shape)], *self.shape)
        return jax.lax.slice(x, [0] * x.ndim, shape)

    def join(self, pieces: jax.Array) -> jax.Array:
        """Returns a matrix, given the pieces of all devices (N, size)."""
        by_axis = pieces.reshape(*(n for _, n in self.sizes), *self.piece)
        return self.stripped(by_axis.transpose(self._order).reshape(self._padded))

    def part(self, matrix: jax.Array) -> jax.Array:
        """Inverts `join`."""
        pairs = zip(self._over, self.piece, strict=True)
        split = itertools.chain(*((*over, n) for over, n in pairs))
        by_dim = self.padded(matrix).reshape(list(split))
        inverse = np.argsort(self._order).tolist()
        return by_dim.transpose(inverse).reshape(-1, self.size)


def _some(stack: jax.Array, first: int, count: int) -> jax.Array:
    return jax.lax.slice_in_dim(stack, first, first + count).reshape(-1)


class RowLayout:
    """The content of a row: the pieces of a device's matrices, by kind and array.

    Args:
      pieces: For each kind, the partition of its arrays.
      loads: For each device, the number of matrices of each kind.
    """

    def __init__(self, pieces: Sequence[Sequence[Pieces]], loads: Sequence[Load]):
        self._arrays = [(kind, p) for kind, arrays in enumerate(pieces) for p in arrays]
        self._numbers, self._loads = list(map(len, pieces)), loads
        sizes = [[(p.dtype, load[kind] * p.size) for kind, p in self._arrays] for load in loads]
        self._lengths = {
            p.dtype: max(sum(n for dtype, n in row if dtype == p.dtype) for row in sizes)
            for _, p in self._arrays
        }

    @property
    def length(self) -> int:
        """Elements of a row, of all dtypes."""
        return sum(self._lengths.values())

    def _joined(self, parts: Arrays) -> Rows:
        """Concatenates parts (..., n) of the same dtype, padded to the longest row."""
        rows = {}
        for dtype, length in self._lengths.items():
            same = [x for x in parts if x.dtype == dtype]
            fill = length - sum(x.shape[-1] for x in same)
            same.append(jnp.zeros((*same[0].shape[:-1], fill), dtype))
            rows[dtype] = jnp.concatenate(same, axis=-1)
        return rows

    def _split(self, rows: Rows, at: int | slice, load: Load) -> Iterator[jax.Array]:
        """Inverts `_joined` for a row or all rows of a device with this load."""
        ends = Counter[DType]()
        for kind, p in self._arrays:
            start = ends[p.dtype]
            ends[p.dtype] += load[kind] * p.size
            yield rows[p.dtype][at, start : ends[p.dtype]]

    def _by_kind(self, arrays: Iterator[jax.Array]) -> list[Arrays]:
        return [list(itertools.islice(arrays, number)) for number in self._numbers]

    def sent(self, sharded: Sequence[Arrays]) -> Rows:
        """Returns a row for each device, of this device's pieces of all matrices."""
        first, rows = [0] * len(sharded), []
        for load in self._loads:
            kinds = zip(sharded, first, load, strict=True)
            rows.append(self._joined([_some(x, at, n) for arrays, at, n in kinds for x in arrays]))
            first = list(map(operator.add, first, load))
        return {dtype: jnp.stack([row[dtype] for row in rows]) for dtype in self._lengths}

    def received(self, rows: Rows, load: Load) -> list[Arrays]:
        """Returns the pieces (count, N, size) of a device's matrices, by kind and array."""
        parts = zip(self._arrays, self._split(rows, slice(None), load), strict=True)
        shaped = (x.reshape(len(self._loads), load[kind], p.size) for (kind, p), x in parts)
        return self._by_kind(jnp.swapaxes(x, 0, 1) for x in shaped)

    def answered(self, results: Sequence[Arrays]) -> Rows:
        """Inverts `received`: returns a row for each device."""
        flat = itertools.chain(*results)
        return self._joined([jnp.swapaxes(x, 0, 1).reshape(len(self._loads), -1) for x in flat])

    def returned(self, rows: Rows) -> list[Arrays]:
        """Returns this device's pieces of the results, from a row of each device, by kind."""
        devices = [list(self._split(rows, at, load)) for at, load in enumerate(self._loads)]
        parts = zip(self._arrays, zip(*devices, strict=True), strict=True)
        return self._by_kind(jnp.concatenate(x).reshape(-1, *p.piece) for (_, p), x in parts)
