"""Regions grouped into kinds of matrices, which are assigned to devices and exchanged.

All kinds are assigned together, for a balanced load. Each device gets an equal number of a kind.
The rest goes, the most expensive first, to the device with the least work. Matrices of a kind on
one device are consecutive, so they are sent as one piece.
"""

import itertools
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.matrix_updates.exchange import Arrays, Kind, RowLayout, exchange
from zero_jax.matrix_updates.pieces import Pieces
from zero_jax.matrix_updates.regions import ShardedProgram
from zero_jax.matrix_updates.units import Units
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.tracing.dataflow import Dim
from zero_jax.tracing.jaxpr import shape_of

Env = MutableMapping[Any, Any]


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


class _Member(NamedTuple):
    """A region taken apart, and the partition of its arrays."""

    units: Units
    sharded: tuple[Pieces, ...]
    results: tuple[Pieces, ...]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for regions with the same operations and partition."""
        return self.units.program, self.units.region.replicated, self.sharded, self.results


class Exchange:
    """Regions that run together.

    Args:
      found: The regions, taken apart, independent of each other.
      program: The update, with the partition of its values.
      axes: The mesh axes.

    Attributes:
      kinds: The kinds of matrices, with the number that each device has.
      flops: FLOPs of one matrix of each kind.
    """

    def __init__(self, found: Sequence[Units], program: ShardedProgram, axes: Axes):
        self._axes, self._program = axes, program
        alike: dict[Any, list[_Member]] = {}
        for member in map(self._member, found):
            alike.setdefault(member.alike, []).append(member)
        self._groups = list(alike.values())
        totals = [sum(one.units.count for one in group) for group in self._groups]
        self.flops = [group[0].units.flops for group in self._groups]
        loads = assign(list(zip(totals, self.flops, strict=True)), axes.devices)
        self.kinds = [
            Kind(_of_one(group[0].units), group[0].sharded, group[0].results, counts)
            for group, counts in zip(self._groups, zip(*loads, strict=True), strict=True)
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
        regions = [one.units.region for one in self._members]
        read = [v for region in regions for v in (*region.sharded, *region.replicated)]

        def run(*values: Any) -> list[Any]:
            env: Env = dict(zip(read, values, strict=True))
            self(env)
            return [env[v] for region in regions for v in region.results]

        return jax.make_jaxpr(run)(*(v.aval for v in read))

    @property
    def _members(self) -> list[_Member]:
        return list(itertools.chain(*self._groups))

    def _member(self, one: Units) -> _Member:
        sides = zip((one.region.sharded, one.region.results), one.stacks, strict=True)
        sharded, made = (tuple(map(self._pieces, *side)) for side in sides)
        return _Member(one, sharded, made)

    def _pieces(self, var: jex.Var, stack: Dim) -> Pieces:
        """Returns the partition of a value over all axes.

        Axes that do not shard it split the dim that others do, or the longest one.
        """
        shape, dims = shape_of(var), self._program.of(var)
        kept = [d for d in range(len(shape)) if d != stack]
        own = [d if d in kept else None for d in dims]
        longest = max(kept, key=shape.__getitem__, default=None)
        first = next((d for d in own if d is not None), longest)
        axes: dict[Dim, list[str]] = {}
        for names, d in zip(self._axes.groups, own, strict=True):
            axes.setdefault(first if d is None else d, []).extend(names)
        aval: Any = var.aval
        matrix = tuple(shape[d] for d in kept) or (1,)
        # A number for each matrix is padded to one for each device.
        over = tuple(tuple(axes.get(d, ())) for d in kept) or (self._axes.names,)
        return Pieces(matrix, aval.dtype, over, self._axes.sizes)

    def __call__(self, env: Env) -> None:
        """Runs the regions on the values of variables, and adds their results."""
        members = self._members
        sharded = [
            [p.padded(x) for p, x in zip(m.sharded, _stacks(m, env), strict=True)] for m in members
        ]
        replicated = [[env[v] for v in group[0].units.region.replicated] for group in self._groups]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._axes.mesh,
            in_specs=([[p.stack_spec for p in m.sharded] for m in members], PartitionSpec()),
            out_specs=[[p.stack_spec for p in m.results] for m in members],
            axis_names=set(self._axes.names),
            check_vma=False,
        )
        for member, arrays in zip(members, mapped(sharded, replicated), strict=True):
            one = member.units
            results = zip(one.region.results, one.stacks[1], member.results, arrays, strict=True)
            for var, stack, p, x in results:
                env[var] = jnp.moveaxis(p.stripped(x), 0, stack or 0).reshape(shape_of(var))

    def _on_device(self, sharded: list[Arrays], replicated: list[Arrays]) -> list[Arrays]:
        it = iter(sharded)
        own = [[next(it) for _ in group] for group in self._groups]
        joined = [[jnp.concatenate(x) for x in zip(*arrays, strict=True)] for arrays in own]
        made = exchange(self.kinds, self._axes.names, joined, replicated)
        return list(itertools.chain(*map(_apart, self._groups, made)))


def _stacks(member: _Member, env: Env) -> Iterator[Any]:
    """Yields the inputs that are exchanged, with the matrices along dim 0."""
    one = member.units
    for var, p in zip(one.region.sharded, member.sharded, strict=True):
        yield env[var].reshape(one.count, *p.shape)


def _apart(group: list[_Member], made: Arrays) -> Iterator[Arrays]:
    """Yields the part of each member of the results for a group."""
    ends = list(itertools.accumulate((m.units.count for m in group), initial=0))
    for first, end in itertools.pairwise(ends):
        yield [x[first:end] for x in made]


def _of_one(one: Units) -> Any:
    """Returns the computation for one matrix, without the dim that stacks them."""

    def of(index: Any, sharded: Arrays, replicated: Arrays) -> Arrays:
        shapes = [aval.shape for aval in one.one.in_avals[1:]]
        given = [x.reshape(shape) for x, shape in zip(sharded, shapes, strict=False)]
        # Factors that two regions share count the matrices of each of them.
        made = one.run(index % one.count, given, replicated)
        return [_matrix(x, d) for x, d in zip(made, one.stacks[1], strict=True)]

    return of


def _matrix(x: Any, stack: Dim) -> Any:
    """Returns an array of rank 1 or more."""
    matrix = x if stack is None else jnp.squeeze(x, stack)
    return matrix.reshape(matrix.shape or (1,))


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
    left = [
        (cost, kind) for kind, (total, cost) in enumerate(kinds) for _ in range(total % devices)
    ]
    for cost, kind in sorted(left, key=lambda one: (-one[0], one[1])):
        device = min(range(devices), key=load.__getitem__)
        counts[device][kind] += 1
        load[device] += cost
    return counts
