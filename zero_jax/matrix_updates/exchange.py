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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.matrix_updates.pieces import Arrays, Load, Pieces, RowLayout, Rows
from zero_jax.matrix_updates.regions import ShardedProgram
from zero_jax.matrix_updates.units import Units
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Dim
from zero_jax.tracing.jaxpr import dtype_of, shape_of


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
      mesh: The mesh.
      groups: The groups of mesh axes over which `program` has sharded dims.

    Attributes:
      kinds: The kinds of matrices, with the number that each device has.
      reads: The inputs of the regions, of one after the other.
      results: Their results.
    """

    def __init__(
        self,
        regions: Sequence[Units],
        program: ShardedProgram,
        mesh: AnyMesh,
        groups: Sequence[tuple[str, ...]],
    ):
        self._mesh, self._groups, self._program = mesh, groups, program
        self._axes = tuple(itertools.chain(*groups))
        alike: dict[_Alike, list[Units]] = {}
        for one in regions:
            sides = zip((one.region.sharded, one.region.results), one.stacks, strict=True)
            sharded, results = (tuple(map(self._pieces, *side)) for side in sides)
            key = sharded, results, (one.region.replicated, one.program)
            alike.setdefault(key, []).append(one)
        costs = [(sum(one.count for one in group), group[0].flops) for group in alike.values()]
        loads = assign(costs, math.prod(mesh.shape[name] for name in self._axes))
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
        for names, d in zip(self._groups, sharded, strict=True):
            axes.setdefault(first if d is None else d, []).extend(names)
        # A number for each matrix is padded to one for each device.
        over = tuple(tuple(axes.get(d, ())) for d in kept) or (self._axes,)
        matrix = tuple(shape[d] for d in kept) or (1,)
        sizes = tuple((name, self._mesh.shape[name]) for name in self._axes)
        return Pieces(matrix, dtype_of(var), over, sizes)

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        env, regions = dict(zip(self.reads, values, strict=True)), self._regions
        in_specs = [[p.stack_spec for p in kind.sharded] for kind, _ in regions]
        out_specs = [[p.stack_spec for p in kind.results] for kind, _ in regions]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._mesh,
            in_specs=(in_specs, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self._axes),
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
        kinds, loads, axes, regions = self.kinds, self._loads, self._axes, iter(sharded)
        parts = [list(itertools.islice(regions, len(kind.regions))) for kind in kinds]
        joined = [jnp.concatenate(x) for arrays in parts for x in zip(*arrays, strict=True)]
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
