"""An update whose matrix operations run on assigned devices; the rest stays on shards."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh

from zero_jax.matrix_updates.assign import Axes, Env, Exchange
from zero_jax.matrix_updates.regions import Region, ShardedProgram, regions
from zero_jax.matrix_updates.units import units
from zero_jax.sharding.mesh import MODEL, REPLICA, AnyMesh, data_axis, model_size, names
from zero_jax.sharding.partition import Partition, partition
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Dims, needed

PyTree = Any


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

    def of_arrays(*arrays: Any) -> PyTree:
        filled = leaves.copy()
        for i, array in zip(at, arrays, strict=True):
            filled[i] = array
        return update(*jax.tree.unflatten(treedef, filled))

    arrays = [leaves[i] for i in at]
    partitions = [cuts[i] if i < len(cuts) else partition((), 1) for i in at]
    closed, made = traced(of_arrays, arrays)
    program = assigned_update(closed, partitions, mesh)
    if not program.exchanges:
        return update(*args)
    return jax.tree.unflatten(jax.tree.structure(made), program(*arrays))


def traced(fn: Callable[..., PyTree], arrays: Sequence[Any]) -> tuple[jex.ClosedJaxpr, PyTree]:
    """Returns a function's jaxpr and its abstract result.

    It is traced under no mesh, since parts of it run inside `shard_map`, which has another mesh.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(fn, return_shape=True)(*shapes)


def assigned_update(
    closed: jex.ClosedJaxpr, cuts: Sequence[Partition], mesh: AnyMesh
) -> "AssignedUpdate":
    """Returns a traced update with its exchanges; see `run`."""
    # Experts are sharded over another axis: they are left to XLA.
    mine = [c for c in cuts if c.dim is not None and c.experts is None]
    rest = {(*names(c.axis), *([REPLICA] if c.parts > 1 else [])) for c in mine}
    (over,) = rest or {names(data_axis(mesh))}
    axes = Axes(mesh, (over, (MODEL,)) if model_size(mesh) > 1 else (over,))
    dims = [_dims(cut, leaf) for cut, leaf in zip(cuts, closed.in_avals, strict=False)]
    dims += [(None, None)] * (len(closed.in_avals) - len(dims))
    return AssignedUpdate(closed, [d[: len(axes.groups)] for d in dims], axes)


def _dims(cut: Partition, leaf: Any) -> Dims:
    """Returns the sharded dims of a leaf over `data` and over `model`.

    The gradient of a frozen leaf is a scalar.
    """
    if leaf.shape != cut.shape or cut.experts is not None:
        return None, None
    data, model = (None if d is None else d % len(cut.shape) for d in (cut.dim, cut.model))
    return data, model


class AssignedUpdate:
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
        self._program = program = ShardedProgram(closed, dims)
        self._jaxpr, self._axes = program.closed.jaxpr, axes
        self._consts = dict(zip(self._jaxpr.constvars, program.closed.consts, strict=True))
        self.exchanges: list[Exchange] = []
        self.left = sum(n for n in program.across.values() if n < math.inf)
        self._steps = self._planned() if program.across or program.apart else []

    def __call__(self, *values: Any) -> list[Any]:
        env: Env = {**self._consts, **dict(zip(self._jaxpr.invars, values, strict=True))}
        for step in self._steps:
            step(env)
        return [jaxprs.read(env, atom) for atom in self._jaxpr.outvars]

    def _planned(self) -> list[Callable[[Env], None]]:
        waiting_units = [
            one for one in map(units, regions(self._program)) if one.pays(self._axes.devices)
        ]
        moved = [one.region.moved for one in waiting_units]
        self.left -= sum(n for n in moved if n < math.inf)
        waiting = self._outside([one.region for one in waiting_units])
        known = {*self._jaxpr.invars, *self._consts}
        steps: list[Callable[[Env], None]] = []
        while waiting or waiting_units:
            later = []
            for at in waiting:
                eqn = self._program.graph.eqns[at]
                if known.issuperset(jaxprs.variables([eqn])):
                    steps.append(self._step(at))
                    known.update(eqn.outvars)
                else:
                    later.append(at)
            waiting = later
            able = [
                one
                for one in waiting_units
                if known.issuperset((*one.region.sharded, *one.region.replicated))
            ]
            assert able or not waiting_units, "regions that need each other's results"
            if able:
                waiting_units = [one for one in waiting_units if one not in able]
                self.exchanges.append(Exchange(able, self._program, self._axes))
                steps.append(self.exchanges[-1])
                known.update(v for one in able for v in one.region.results)
        return steps

    def _outside(self, found: Sequence[Region]) -> list[int]:
        """Returns the equations that are needed outside of regions."""
        made = {v for region in found for v in region.results}
        inside = set(map(id, itertools.chain.from_iterable(region.eqns for region in found)))
        inputs = [v for region in found for v in (*region.sharded, *region.replicated)]

        def runs(eqn: jex.JaxprEqn, used: Sequence[bool]) -> bool:
            has_effect = bool(eqn.effects) and id(eqn) not in inside
            return has_effect or any(
                u and v not in made for u, v in zip(used, eqn.outvars, strict=True)
            )

        graph = self._program.graph
        wanted = needed(
            graph.eqns,
            [*self._jaxpr.outvars, *inputs],
            lambda eqn, used: [runs(eqn, used)] * len(eqn.invars),
        )
        return graph.where(lambda eqn: runs(eqn, [v in wanted for v in eqn.outvars]))

    def _step(self, at: int) -> Callable[[Env], None]:
        eqn = self._program.graph.eqns[at]
        run = self._branches(eqn) if at in self._program.apart else jaxprs.function(eqn)

        def step(env: Env) -> None:
            made = run(*(jaxprs.read(env, atom) for atom in eqn.invars))
            env.update(zip(eqn.outvars, made, strict=True))

        return step

    def _branches(self, eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
        """Returns branches with regions in them; all devices take the same one."""
        dims = [self._program.of(a) for a in eqn.invars[1:]]
        cases: list[Callable[..., list[Any]]] = []
        for branch, _ in jaxprs.bodies(eqn):
            program = AssignedUpdate(branch, dims, self._axes)
            self.exchanges += program.exchanges
            self.left += program.left
            cases.append(program if program.exchanges else jaxprs.as_function(branch))
        return functools.partial(_switch, cases)


def _switch(cases: Sequence[Callable[..., list[Any]]], which: Any, *values: Any) -> list[Any]:
    return jax.lax.switch(which, cases, *values)
