"""Regions told apart into kinds of matrices, dealt out, and run by an exchange."""

import itertools
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.jaxpr.equations import shape_of
from zero_jax.jaxpr.spread import Dim
from zero_jax.owners.deal import deal
from zero_jax.owners.exchange import Arrays, Kind, Layout, exchange
from zero_jax.owners.pieces import Pieces
from zero_jax.owners.regions import Walk
from zero_jax.owners.units import Units
from zero_jax.sharding.mesh import AnyMesh

Env = MutableMapping[Any, Any]


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which an update's values are cut.

    Attributes:
      mesh: the mesh.
      groups: as `regions.Dims` has a dim for each; a group's axes follow each other along it.
    """

    mesh: AnyMesh
    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(itertools.chain(*self.groups))

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Each with its size."""
        return tuple((name, self.mesh.shape[name]) for name in self.names)

    @property
    def owners(self) -> int:
        """N, the number of devices that share what is cut."""
        return math.prod(size for _, size in self.sizes)


class _Member(NamedTuple):
    """A region taken apart, and how its arrays are cut."""

    units: Units
    dealt: tuple[Pieces, ...]
    made: tuple[Pieces, ...]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal where matrices are computed and cut alike."""
        return self.units.program, self.units.region.same, self.dealt, self.made


class Exchange:
    """Regions that run together.

    Args:
      found: the regions, taken apart, none of which reads what another makes.
      walk: how values are cut.
      axes: over which.

    Attributes:
      kinds: what is computed, each with how many of it each owner has.
      flops: of one matrix of each kind.
    """

    def __init__(self, found: Sequence[Units], walk: Walk, axes: Axes):
        self._axes, self._walk = axes, walk
        alike: dict[Any, list[_Member]] = {}
        for member in map(self._member, found):
            alike.setdefault(member.alike, []).append(member)
        self._groups = list(alike.values())
        totals = [sum(one.units.count for one in group) for group in self._groups]
        self.flops = [group[0].units.flops for group in self._groups]
        loads = deal(list(zip(totals, self.flops, strict=True)), axes.owners)
        self.kinds = [
            Kind(_of_one(group[0].units), group[0].dealt, group[0].made, counts)
            for group, counts in zip(self._groups, zip(*loads, strict=True), strict=True)
        ]

    @property
    def sent(self) -> int:
        """Elements that a device sends: a row for each owner, there and back."""
        loads = list(zip(*(kind.counts for kind in self.kinds), strict=True))
        sides = [kind.dealt for kind in self.kinds], [kind.made for kind in self.kinds]
        return sum(len(loads) * Layout(pieces, loads).length for pieces in sides)

    @property
    def traced(self) -> jex.ClosedJaxpr:
        """What it does, as a function of what it reads."""
        regions = [one.units.region for one in self._members]
        read = [v for region in regions for v in (*region.dealt, *region.same)]

        def run(*values: Any) -> list[Any]:
            env: Env = dict(zip(read, values, strict=True))
            self(env)
            return [env[v] for region in regions for v in region.made]

        return jax.make_jaxpr(run)(*(v.aval for v in read))

    @property
    def _members(self) -> list[_Member]:
        return list(itertools.chain(*self._groups))

    def _member(self, one: Units) -> _Member:
        sides = zip((one.region.dealt, one.region.made), one.stacks, strict=True)
        dealt, made = (tuple(map(self._pieces, *side)) for side in sides)
        return _Member(one, dealt, made)

    def _pieces(self, var: jex.Var, stack: Dim) -> Pieces:
        """As the value is cut; by axes that do not cut it, along the dim that others do, or the
        longest one."""
        shape, dims = shape_of(var), self._walk.of(var)
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
        """Runs it: reads and writes the values of variables."""
        members = self._members
        dealt = [
            [p.padded(x) for p, x in zip(m.dealt, _stacks(m, env), strict=True)] for m in members
        ]
        same = [[env[v] for v in group[0].units.region.same] for group in self._groups]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._axes.mesh,
            in_specs=([[p.stack_spec for p in m.dealt] for m in members], PartitionSpec()),
            out_specs=[[p.stack_spec for p in m.made] for m in members],
            axis_names=set(self._axes.names),
            check_vma=False,
        )
        for member, arrays in zip(members, mapped(dealt, same), strict=True):
            one = member.units
            results = zip(one.region.made, one.stacks[1], member.made, arrays, strict=True)
            for var, stack, p, x in results:
                env[var] = jnp.moveaxis(p.stripped(x), 0, stack or 0).reshape(shape_of(var))

    def _on_device(self, dealt: list[Arrays], same: list[Arrays]) -> list[Arrays]:
        it = iter(dealt)
        own = [[next(it) for _ in group] for group in self._groups]
        joined = [[jnp.concatenate(x) for x in zip(*arrays, strict=True)] for arrays in own]
        made = exchange(self.kinds, self._axes.names, joined, same)
        return list(itertools.chain(*map(_apart, self._groups, made)))


def _stacks(member: _Member, env: Env) -> Iterator[Any]:
    """What is dealt, each matrix along dim 0."""
    one = member.units
    for var, p in zip(one.region.dealt, member.dealt, strict=True):
        yield env[var].reshape(one.count, *p.shape)


def _apart(group: list[_Member], made: Arrays) -> Iterator[Arrays]:
    """Of each member what was made for the matrices of all."""
    ends = list(itertools.accumulate((m.units.count for m in group), initial=0))
    for first, end in itertools.pairwise(ends):
        yield [x[first:end] for x in made]


def _of_one(one: Units) -> Any:
    """What is done for one matrix, without the dim that stacks them."""

    def of(index: Any, dealt: Arrays, same: Arrays) -> Arrays:
        shapes = [aval.shape for aval in one.one.in_avals[1:]]
        given = [x.reshape(shape) for x, shape in zip(dealt, shapes, strict=False)]
        # What is the same for two regions counts the matrices of each of them.
        made = one.run(index % one.count, given, same)
        return [_matrix(x, d) for x, d in zip(made, one.stacks[1], strict=True)]

    return of


def _matrix(x: Any, stack: Dim) -> Any:
    """Of rank 1 up."""
    matrix = x if stack is None else jnp.squeeze(x, stack)
    return matrix.reshape(matrix.shape or (1,))
