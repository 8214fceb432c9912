"""An update whose matrix operations run on assigned devices; the rest stays on shards."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh

from zero_jax.matrix_updates.exchange import Axes, Exchange
from zero_jax.matrix_updates.regions import Region, ShardedProgram
from zero_jax.matrix_updates.units import units
from zero_jax.sharding.layout import Partition, partition
from zero_jax.sharding.mesh import MODEL, REPLICA, AnyMesh, data_axis, model_size, names
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.sharded_dims import Dims

# A function, the atoms that it reads, and the variables of its results.
_Step = tuple[Callable[..., list[jax.Array]], Sequence[jaxprs.Atom], Sequence[jex.Var]]


def run(
    update: Callable[..., PyTree],
    args: Sequence[PyTree],
    cuts: Sequence[Partition],
    mesh: AnyMesh,
) -> PyTree:
    """Returns `update(*args)`, with full matrices computed on assigned devices.

    Args:
      update: A function of trees.
      args: Global arrays of logical shapes; other leaves are passed unchanged.
      cuts: Partition of the first leaves; the others are replicated.
      mesh: The mesh.

    Returns:
      The result of the update. Its operations are unchanged where there are no such matrices, and
      outside of `jit`, where XLA sees one operation at a time.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    if not any(isinstance(leaves[i], jax.core.Tracer) for i in at):
        return update(*args)

    def of_arrays(*arrays: jax.Array) -> PyTree:
        filled = dict(enumerate(leaves)) | dict(zip(at, arrays, strict=True))
        return update(*jax.tree.unflatten(treedef, filled.values()))

    arrays = [leaves[i] for i in at]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    # Under no mesh, since parts of it run inside `shard_map`, which has another mesh.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed, result = jax.make_jaxpr(of_arrays, return_shape=True)(*shapes)
    partitions = [cuts[i] if i < len(cuts) else partition((), 1) for i in at]
    program = assigned_update(closed, partitions, mesh)
    if not program.exchanges:
        return update(*args)
    return jax.tree.unflatten(jax.tree.structure(result), program(*arrays))


def assigned_update(
    closed: jex.ClosedJaxpr, cuts: Sequence[Partition], mesh: AnyMesh
) -> "AssignedUpdate":
    """Returns a traced update with its exchanges; see `run`."""
    # Experts are sharded over another axis: they are left to XLA.
    sharded = [c for c in cuts if c.dim is not None and c.experts is None]
    axes = {(*names(c.axis), *([REPLICA] if c.parts > 1 else [])) for c in sharded}
    (over,) = axes or {names(data_axis(mesh))}
    groups = (over, (MODEL,)) if model_size(mesh) > 1 else (over,)
    dims = [_dims(cut, leaf) for cut, leaf in zip(cuts, closed.in_avals, strict=False)]
    dims += [(None, None)] * (len(closed.in_avals) - len(dims))
    return AssignedUpdate(closed, [d[: len(groups)] for d in dims], Axes(mesh, groups))


def _dims(cut: Partition, leaf: jax.core.ShapedArray) -> Dims:
    """Returns the sharded dims of a leaf over `data` and over `model`.

    The gradient of a frozen leaf is a scalar.
    """
    if leaf.shape != cut.shape or cut.experts is not None:
        return None, None
    data, model = (None if d is None else d % len(cut.shape) for d in (cut.dim, cut.model))
    return data, model


class AssignedUpdate(ShardedProgram):
    """An update with its regions: equations that need none run first, then regions that can run.

    Args:
      closed: The update.
      dims: The sharded dims of its inputs.
      axes: The mesh axes.

    Attributes:
      exchanges: The regions that run together, in order, those of branches included. Without any
        the program is not called.
      left: Elements that a device receives for operations that XLA partitions.
    """

    def __init__(self, closed: jex.ClosedJaxpr, dims: Sequence[Dims], axes: Axes):
        super().__init__(closed, dims)
        self._axes, self.exchanges, self.left = axes, list[Exchange](), 0.0
        self._steps = list(self._planned()) if self.moved else []

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        body = self.closed.jaxpr
        env = dict(zip(body.invars, values, strict=True))
        env.update(zip(body.constvars, self.closed.consts, strict=True))
        for run, read, results in self._steps:
            made = run(*(jaxprs.read(env, atom) for atom in read))
            env.update(zip(results, made, strict=True))
        return [jaxprs.read(env, atom) for atom in body.outvars]

    def _planned(self) -> Iterator[_Step]:
        pays = [one for one in map(units, self.regions()) if one.pays(self._axes.devices)]
        equations = self._outside([one.region for one in pays])
        moved = [self.moved[at] for at in self.across if at in equations]
        self.left += sum(n for n in moved if n < math.inf)
        while True:
            results = [v for one in pays for v in one.region.results]
            blocked = set(self.graph.after(self.graph.made_by[v] for v in results))
            for at in equations:
                if at not in blocked:
                    eqn = self.graph.eqns[at]
                    yield self._function(at), eqn.invars, eqn.outvars
            if not pays:
                return
            equations = [at for at in equations if at in blocked]
            unknown = set(self.graph.made(blocked))
            able = [one for one in pays if unknown.isdisjoint(one.region.closed.jaxpr.invars)]
            assert able, "regions that need each other's results"
            pays = [one for one in pays if one not in able]
            exchange = Exchange(able, self, self._axes)
            self.exchanges.append(exchange)
            yield exchange, exchange.reads, exchange.results

    def _outside(self, inside: Sequence[Region]) -> list[int]:
        """Returns the equations that run outside of regions."""
        made = set[jex.Var]().union(*(one.made for one in inside))
        outside = self.graph.where(lambda eqn: made.isdisjoint(eqn.outvars))
        part = self.graph.part(outside)
        read = [*self.closed.jaxpr.outvars, *(v for one in inside for v in one.closed.jaxpr.invars)]
        read += jaxprs.variables(eqn for eqn in part if eqn.effects)
        wanted = needed(part, read)
        runs = (bool(eqn.effects) or not wanted.isdisjoint(eqn.outvars) for eqn in part)
        return list(itertools.compress(outside, runs))

    def _function(self, at: int) -> Callable[..., list[jax.Array]]:
        """Returns an equation as a function; branches have their own regions."""
        eqn = self.graph.eqns[at]
        if at not in self.moved or eqn.primitive.name != "cond":
            return jaxprs.function(eqn)
        dims, cases = [self.of(a) for a in eqn.invars[1:]], list[Callable[..., Any]]()
        for branch, _ in jaxprs.bodies(eqn):
            program = AssignedUpdate(branch, dims, self._axes)
            self.exchanges += program.exchanges
            self.left += program.left
            cases.append(program if program.exchanges else jaxprs.as_function(branch))
        # All devices take the same branch.
        return lambda which, *values: jax.lax.switch(which, cases, *values)
