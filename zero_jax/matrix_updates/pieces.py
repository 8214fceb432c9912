"""Matrices as pieces of devices, and rows of pieces to send. Runs inside `shard_map`."""

import itertools
import math
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
        return tuple(-(-n // over) for n, over in zip(self.shape, self._over, strict=True))

    @property
    def size(self) -> int:
        """Elements of a piece."""
        return math.prod(self.piece)

    @property
    def stack_spec(self) -> PartitionSpec:
        """Partition of matrices stacked along a dim 0, for `shard_map`."""
        return PartitionSpec(None, *(names or None for names in self.axes))

    @property
    def _over(self) -> list[int]:
        """Devices that each dim is sharded over."""
        sizes = dict(self.sizes)
        return [math.prod(sizes[name] for name in names) for names in self.axes]

    @property
    def _padded(self) -> list[int]:
        return [n * over for n, over in zip(self.piece, self._over, strict=True)]

    @property
    def _apart(self) -> tuple[list[int], list[int]]:
        """Returns the shape (devices by axis, piece by dim), and its order that groups by dim."""
        at = {name: i for i, (name, _) in enumerate(self.sizes)}
        together = ((*(at[n] for n in names), len(at) + d) for d, names in enumerate(self.axes))
        return [*(n for _, n in self.sizes), *self.piece], list(itertools.chain(*together))

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
        shape, order = self._apart
        return self.stripped(pieces.reshape(shape).transpose(order).reshape(self._padded))

    def part(self, matrix: jax.Array) -> jax.Array:
        """Inverts `join`."""
        shape, order = self._apart
        by_dim = self.padded(matrix).reshape([shape[at] for at in order])
        inverse = np.argsort(order).tolist()
        return by_dim.transpose(inverse).reshape(-1, self.size)


class RowLayout:
    """The content of a row: the pieces of a device's matrices, by array.

    Args:
      arrays: The kind of matrices, and their partition, of each array.
      loads: For each device, the number of matrices of each kind.

    Attributes:
      firsts: For each kind, the first matrix of each device.
    """

    def __init__(self, arrays: Sequence[tuple[int, Pieces]], loads: Sequence[Load]):
        self._arrays, self._loads = arrays, loads
        counts = zip(*loads, strict=True)
        self.firsts = [[sum(of_kind[:at]) for at in range(len(loads))] for of_kind in counts]
        sizes = [[(p.dtype, load[kind] * p.size) for kind, p in arrays] for load in loads]
        self._lengths = {
            p.dtype: max(sum(n for dtype, n in row if dtype == p.dtype) for row in sizes)
            for _, p in arrays
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

    def sent(self, sharded: Arrays) -> Rows:
        """Returns a row for each device, of this device's pieces of all matrices."""
        rows = []
        for device, load in enumerate(self._loads):
            boxes = [(self.firsts[kind][device], load[kind]) for kind, _ in self._arrays]
            pairs = zip(sharded, boxes, strict=True)
            rows.append(self._joined([_some(x, first, count) for x, (first, count) in pairs]))
        return {dtype: jnp.stack([row[dtype] for row in rows]) for dtype in self._lengths}

    def received(self, rows: Rows, load: Load) -> Arrays:
        """Returns the pieces (count, N, size) of a device's matrices."""
        parts = zip(self._arrays, self._split(rows, slice(None), load), strict=True)
        shaped = (x.reshape(len(self._loads), load[kind], p.size) for (kind, p), x in parts)
        return [jnp.swapaxes(x, 0, 1) for x in shaped]

    def answered(self, results: Arrays) -> Rows:
        """Inverts `received`: returns a row for each device."""
        return self._joined([jnp.swapaxes(x, 0, 1).reshape(len(self._loads), -1) for x in results])

    def returned(self, rows: Rows) -> Arrays:
        """Returns this device's pieces of the results, from a row of each device."""
        devices = [list(self._split(rows, at, load)) for at, load in enumerate(self._loads)]
        parts = zip(self._arrays, zip(*devices, strict=True), strict=True)
        return [jnp.concatenate(x).reshape(-1, *p.piece) for (_, p), x in parts]


def _some(stack: jax.Array, first: int, count: int) -> jax.Array:
    return jax.lax.slice_in_dim(stack, first, first + count).reshape(-1)
