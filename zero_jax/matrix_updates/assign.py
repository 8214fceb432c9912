"""Regions grouped into kinds of matrices, which are assigned to devices and exchanged.

All kinds are assigned together, for a balanced load. Each device gets an equal number of a kind.
The rest goes, the most expensive first, to the device with the least work. Matrices of a kind on
one device are consecutive, so they are sent as one piece.
"""

import itertools
import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.matrix_updates.exchange import Arrays, Kind, Pieces, RowLayout, exchange
from zero_jax.matrix_updates.regions import ShardedProgram
from zero_jax.matrix_updates.units import Units
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.tracing.dataflow import Dim
from zero_jax.tracing.jaxpr import dtype_of, shape_of

Env = MutableMapping[jex.Var, jax.Array]


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which an update is sharded.

    Attributes:
      mesh: The mesh.
      groups: Groups of axes; `Dims` has a dim for each, which all axes of the group shard.
    """

    mesh: AnyMesh
    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All axes."""
        return tuple(itertools.chain(*self.groups))

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Each axis with its size."""
        return tuple((name, self.mesh.shape[name]) for name in self.names)

    @property
    def devices(self) -> int:
        """N, the number of devices that an array is sharded over."""
        return math.prod(size for _, size in self.sizes)


# Equal for regions of a kind: the partition of inputs and results, and the operations.
_Alike = tuple[tuple[Pieces, ...], tuple[Pieces, ...], Hashable]


class Exchange:
    """Regions that run together.

    Args:
      regions: The regions, taken apart, independent of each other.
      program: The update, with the partition of its values.
      axes: The mesh axes.

    Attributes:
      kinds: The kinds of matrices, with the number that each device has.
      flops: FLOPs of one matrix of each kind.
    """

    def __init__(self, regions: Sequence[Units], program: ShardedProgram, axes: Axes):
        self._axes, self._program = axes, program
        groups: dict[_Alike, list[Units]] = {}
        for one in regions:
            sides = zip((one.region.sharded, one.region.results), one.stacks, strict=True)
            sharded, results = (tuple(map(self._pieces, *side)) for side in sides)
            alike = sharded, results, (one.region.replicated, one.program)
            groups.setdefault(alike, []).append(one)
        self._groups = list(groups.values())
        self.flops = [group[0].flops for group in self._groups]
        totals = [sum(one.count for one in group) for group in self._groups]
        loads = assign(list(zip(totals, self.flops, strict=True)), axes.devices)
        by_kind = zip(groups.items(), zip(*loads, strict=True), strict=True)
        self.kinds = [
            Kind(_of_one(group[0], results), sharded, results, counts)
            for ((sharded, results, _), group), counts in by_kind
        ]

    @property
    def sent(self) -> int:
        """Elements that a device sends: a row to each device, in each direction."""
        loads = list(zip(*(kind.counts for kind in self.kinds), strict=True))
        sides = [kind.sharded for kind in self.kinds], [kind.results for kind in self.kinds]
        return sum(len(loads) * RowLayout(pieces, loads).length for pieces in sides)

    @property
    def traced(self) -> jex.ClosedJaxpr:
        """The exchange as a jaxpr of the inputs of its regions."""
        regions = [one.region for group in self._groups for one in group]
        read = [v for region in regions for v in region.closed.jaxpr.invars]

        def run(*values: jax.Array) -> list[jax.Array]:
            env: Env = dict(zip(read, values, strict=True))
            self(env)
            return [env[v] for region in regions for v in region.results]

        return jax.make_jaxpr(run)(*(v.aval for v in read))

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
        over = tuple(tuple(axes.get(d, ())) for d in kept) or (self._axes.names,)
        matrix = tuple(shape[d] for d in kept) or (1,)
        return Pieces(matrix, dtype_of(var), over, self._axes.sizes)

    def __call__(self, env: Env) -> None:
        """Runs the regions on the values of variables, and adds their results."""
        pairs = list(zip(self._groups, self.kinds, strict=True))
        in_specs = [[[p.stack_spec for p in kind.sharded]] * len(group) for group, kind in pairs]
        out_specs = [[[p.stack_spec for p in kind.results]] * len(group) for group, kind in pairs]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._axes.mesh,
            in_specs=(in_specs, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self._axes.names),
            check_vma=False,
        )
        sharded = [[_stacks(one, kind, env) for one in group] for group, kind in pairs]
        replicated = [[env[v] for v in group[0].region.replicated] for group in self._groups]
        for (group, kind), parts in zip(pairs, mapped(sharded, replicated), strict=True):
            for one, arrays in zip(group, parts, strict=True):
                results = zip(one.region.results, one.stacks[1], kind.results, arrays, strict=True)
                for var, stack, p, x in results:
                    env[var] = jnp.moveaxis(p.stripped(x), 0, stack or 0).reshape(shape_of(var))

    def _on_device(
        self, sharded: list[list[Arrays]], replicated: list[Arrays]
    ) -> list[list[Arrays]]:
        joined = [[jnp.concatenate(x) for x in zip(*parts, strict=True)] for parts in sharded]
        results = exchange(self.kinds, self._axes.names, joined, replicated)
        return list(map(_apart, self._groups, results))


def _stacks(one: Units, kind: Kind, env: Env) -> Arrays:
    """Returns the inputs that are exchanged, with the matrices along dim 0, padded."""
    pairs = zip(one.region.sharded, kind.sharded, strict=True)
    return [p.padded(env[var].reshape(one.count, *p.shape)) for var, p in pairs]


def _apart(group: list[Units], results: Arrays) -> list[Arrays]:
    """Returns the part of each region of the results for a group."""
    ends = itertools.accumulate((one.count for one in group), initial=0)
    return [[x[first:end] for x in results] for first, end in itertools.pairwise(ends)]


def _of_one(one: Units, pieces: Sequence[Pieces]) -> Callable[[jax.Array, Arrays, Arrays], Arrays]:
    """Returns the computation for one matrix, without the dim that stacks them."""
    shapes = [aval.shape for aval in one.one.in_avals[1:]]

    def run(index: jax.Array, sharded: Arrays, replicated: Arrays) -> Arrays:
        stacks = [x.reshape(shape) for x, shape in zip(sharded, shapes, strict=False)]
        # Factors that two regions share count the matrices of each of them.
        results = one.run(index % one.count, stacks, replicated)
        return [x.reshape(p.shape) for x, p in zip(results, pieces, strict=True)]

    return run


def assign(kinds: Sequence[tuple[int, int]], devices: int) -> list[list[int]]:
    """Returns the number of matrices of each kind for each device.

    Args:
      kinds: The number of matrices of each kind, and the FLOPs of one.
      devices: Number of devices.

    >>> assign([(5, 10), (1, 7), (3, 4)], 2)
    [[3, 0, 1], [2, 1, 2]]
    """
    counts = [[total // devices for total, _ in kinds] for _ in range(devices)]
    load = [sum(total // devices * cost for total, cost in kinds)] * devices
    rest = [kind for kind, (total, _) in enumerate(kinds) for _ in range(total % devices)]
    for kind in sorted(rest, key=lambda kind: -kinds[kind][1]):
        device = min(range(devices), key=load.__getitem__)
        counts[device][kind] += 1
        load[device] += kinds[kind][1]
    return counts
