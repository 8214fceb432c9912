"""Matrices sent to their assigned devices, and results sent back.

Regions are grouped into kinds of matrices. All kinds are assigned together, for a balanced load.
Each device gets an equal number of a kind. The rest goes, the most expensive first, to the device
with the least work. Matrices of a kind on one device are consecutive, so they are sent as one
piece.

Each device has a piece of every matrix. It sends a row to each device, with its pieces of the
matrices assigned to that device, and receives a row of results: two all-to-alls of N rows, as long
as the longest. Only the matrices that a device computes are full.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zero_jax.matrix_updates.regions import ShardedProgram
from zero_jax.matrix_updates.units import Units
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.jaxpr import dtype_of, shape_of
from zero_jax.tracing.sharded_dims import Dim

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
      loads: For each device, the number of matrices of each kind. `firsts` has the first ones.
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
            parts = []
            for (kind, _), x in zip(self._arrays, sharded, strict=True):
                first = self.firsts[kind][device]
                parts.append(jax.lax.slice_in_dim(x, first, first + load[kind]).reshape(-1))
            rows.append(self._joined(parts))
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


class Axes(NamedTuple):
    """The mesh axes over which an update is sharded.

    Attributes:
      mesh: The mesh.
      groups: Groups of axes; `Dims` has a dim for each, which all axes of the group shard.
    """

    mesh: AnyMesh
    groups: tuple[tuple[str, ...], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return {name: self.mesh.shape[name] for group in self.groups for name in group}

    @property
    def devices(self) -> int:
        """N, the number of devices that an array is sharded over."""
        return math.prod(self.sizes.values())


@dataclass(frozen=True)
class Kind:
    """Matrices with the same computation.

    Attributes:
      regions: The regions that have them, taken apart.
      sharded: Partition of the sharded inputs of a matrix.
      results: Partition of its results.
      counts: Number of matrices of each device.
    """

    regions: Sequence[Units]
    sharded: tuple[Pieces, ...]
    results: tuple[Pieces, ...]
    counts: Load

    def each(self, first: jax.Array, sharded: Arrays, replicated: Arrays) -> Arrays:
        """Computes the matrices of this device, from and to pieces of all devices.

        Args:
          first: The number of the first one.
          sharded: Pieces (count, N, size).
          replicated: The inputs that each device has in full.
        """
        like, (count, devices) = self.regions[0], sharded[0].shape[:2]
        shapes = [aval.shape for aval in like.one.in_avals[1:]]
        run = jaxprs.as_function(like.one)

        def one(numbered: tuple[jax.Array, Arrays]) -> Arrays:
            index, pieces = numbered
            full = [p.join(x) for p, x in zip(self.sharded, pieces, strict=True)]
            stacks = [x.reshape(shape) for x, shape in zip(full, shapes, strict=False)]
            # Factors that two regions share count the matrices of each of them.
            results = run(index % like.count, *stacks, *replicated)
            matrices = [x.reshape(p.shape) for x, p in zip(results, self.results, strict=True)]
            return [p.part(x) for p, x in zip(self.results, matrices, strict=True)]

        if count == 0:
            return [jnp.zeros((0, devices, p.size), p.dtype) for p in self.results]
        return jax.lax.map(one, (first + jnp.arange(count), sharded))


# Equal for regions of a kind: the partition of inputs and results, and the operations.
_Alike = tuple[tuple[Pieces, ...], tuple[Pieces, ...], Hashable]


class Exchange:
    """Regions that run together: a function of the values of `reads` to those of `results`.

    Args:
      regions: The regions, taken apart, independent of each other.
      program: The update, with the partition of its values.
      axes: The mesh axes.

    Attributes:
      kinds: The kinds of matrices, with the number that each device has.
      reads: The inputs of the regions, of one after the other.
      results: Their results.
    """

    def __init__(self, regions: Sequence[Units], program: ShardedProgram, axes: Axes):
        self._axes, self._program = axes, program
        alike: dict[_Alike, list[Units]] = {}
        for one in regions:
            sides = zip((one.region.sharded, one.region.results), one.stacks, strict=True)
            sharded, results = (tuple(map(self._pieces, *side)) for side in sides)
            key = sharded, results, (one.region.replicated, one.program)
            alike.setdefault(key, []).append(one)
        costs = [(sum(one.count for one in group), group[0].flops) for group in alike.values()]
        loads = assign(costs, axes.devices)
        self.kinds = [
            Kind(group, sharded, results, counts)
            for ((sharded, results, _), group), counts in zip(
                alike.items(), zip(*loads, strict=True), strict=True
            )
        ]
        self._loads, kinds = loads, list(enumerate(self.kinds))
        self._there = RowLayout([(at, p) for at, kind in kinds for p in kind.sharded], loads)
        self._back = RowLayout([(at, p) for at, kind in kinds for p in kind.results], loads)
        self._regions = [(kind, one) for kind in self.kinds for one in kind.regions]
        self.reads = [v for _, one in self._regions for v in one.region.closed.jaxpr.invars]
        self.results = [v for _, one in self._regions for v in one.region.results]

    @property
    def sent(self) -> int:
        """Elements that a device sends: a row to each device, in each direction."""
        return len(self._loads) * (self._there.length + self._back.length)

    def _pieces(self, var: jex.Var, stack: Dim) -> Pieces:
        """Returns the partition of a value over all axes.

        Axes that do not shard it split the dim that others do, or the longest one.
        """
        shape = shape_of(var)
        kept = [d for d in range(len(shape)) if d != stack]
        sharded = [d if d in kept else None for d in self._program.of(var)]
        longest = max(kept, key=shape.__getitem__, default=None)
        first = next((d for d in sharded if d is not None), longest)
        axes: dict[Dim, list[str]] = {}
        for names, d in zip(self._axes.groups, sharded, strict=True):
            axes.setdefault(first if d is None else d, []).extend(names)
        # A number for each matrix is padded to one for each device.
        over = tuple(tuple(axes.get(d, ())) for d in kept) or (tuple(self._axes.sizes),)
        matrix = tuple(shape[d] for d in kept) or (1,)
        return Pieces(matrix, dtype_of(var), over, tuple(self._axes.sizes.items()))

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        env, regions = dict(zip(self.reads, values, strict=True)), self._regions
        in_specs = [[p.stack_spec for p in kind.sharded] for kind, _ in regions]
        out_specs = [[p.stack_spec for p in kind.results] for kind, _ in regions]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._axes.mesh,
            in_specs=(in_specs, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self._axes.sizes),
            check_vma=False,
        )
        sharded = []
        for kind, one in regions:
            pairs = zip(one.region.sharded, kind.sharded, strict=True)
            sharded.append([p.padded(env[v].reshape(one.count, *p.shape)) for v, p in pairs])
        replicated = [[env[v] for v in kind.regions[0].region.replicated] for kind in self.kinds]
        made = []
        for (kind, one), arrays in zip(regions, mapped(sharded, replicated), strict=True):
            results = zip(one.region.results, one.stacks[1], kind.results, arrays, strict=True)
            for var, stack, p, x in results:
                made.append(jnp.moveaxis(p.stripped(x), 0, stack or 0).reshape(shape_of(var)))
        return made

    def _on_device(self, sharded: list[Arrays], replicated: list[Arrays]) -> list[Arrays]:
        """Computes all matrices, each on its assigned device.

        Args:
          sharded: For each region, this device's pieces of its matrices, stacked.
          replicated: For each kind, the inputs that each device has in full.

        Returns:
          This device's pieces of the results, like `sharded`.
        """
        kinds, loads, axes = self.kinds, self._loads, tuple(self._axes.sizes)
        parts, joined = iter(sharded), list[jax.Array]()
        for kind in kinds:
            of_regions = [next(parts) for _ in kind.regions]
            joined += map(jnp.concatenate, zip(*of_regions, strict=True))
        received = _to_all(self._there.sent(joined), axes)
        me = jax.lax.axis_index(axes)
        firsts = [jnp.asarray(first)[me] for first in self._there.firsts]

        def work(load: Load, received: Rows) -> Rows:
            pieces, results = iter(self._there.received(received, load)), list[jax.Array]()
            for kind, first, same in zip(kinds, firsts, replicated, strict=True):
                results += kind.each(first, [next(pieces) for _ in kind.sharded], same)
            return self._back.answered(results)

        # Devices with equal numbers of each kind run the same program.
        alike = sorted(set(loads))
        branches = [functools.partial(work, load) for load in alike]
        which = jnp.asarray([alike.index(load) for load in loads])[me]
        rows = _to_all(jax.lax.switch(which, branches, received), axes)
        pieces, apart = iter(self._back.returned(rows)), list[Arrays]()
        for kind in kinds:
            arrays = [next(pieces) for _ in kind.results]
            ends = itertools.accumulate((one.count for one in kind.regions), initial=0)
            apart += [[x[first:end] for x in arrays] for first, end in itertools.pairwise(ends)]
        return apart


def _to_all(rows: Rows, axes: tuple[str, ...]) -> Rows:
    """Sends row i to device i; row i of the result is from device i."""
    return {
        dtype: jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        for dtype, x in rows.items()
    }


def assign(kinds: Sequence[tuple[int, int]], devices: int) -> list[Load]:
    """Returns the number of matrices of each kind for each device.

    Args:
      kinds: The number of matrices of each kind, and the FLOPs of one.
      devices: Number of devices.

    >>> assign([(5, 10), (1, 7), (3, 4)], 2)
    [(3, 0, 1), (2, 1, 2)]
    """
    counts = [[total // devices for total, _ in kinds] for _ in range(devices)]
    load = [sum(total // devices * cost for total, cost in kinds)] * devices
    rest = [kind for kind, (total, _) in enumerate(kinds) for _ in range(total % devices)]
    for kind in sorted(rest, key=lambda kind: -kinds[kind][1]):
        device = min(range(devices), key=load.__getitem__)
        counts[device][kind] += 1
        load[device] += kinds[kind][1]
    return list(map(tuple, counts))
