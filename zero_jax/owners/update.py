"""An update run with its matrices at their owners; all else of it stays where it is."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh

from zero_jax.jaxpr import equations
from zero_jax.jaxpr.equations import CALLS, is_var, read, variables
from zero_jax.owners.kinds import Axes, Env, Exchange
from zero_jax.owners.regions import Dims, Region, Walk, regions
from zero_jax.owners.units import units
from zero_jax.sharding.cuts import Split, split
from zero_jax.sharding.mesh import MODEL, REPLICA, AnyMesh, data_axis, model_size, names

PyTree = Any


def run(
    update: Callable[..., PyTree],
    args: Sequence[PyTree],
    cuts: Sequence[Split],
    mesh: AnyMesh,
) -> PyTree:
    """`update(*args)`, what needs whole matrices by their owners.

    Args:
      update: of trees.
      args: global arrays, of logical shapes; what else is in the trees is handed on.
      cuts: how their first leaves are cut; the others are whole.
      mesh: the mesh.

    Returns:
      As the update, with the very same operations where there are no such matrices, and outside of
      `jit`, where XLA sees one operation at a time.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    if not any(isinstance(leaves[i], jax.core.Tracer) for i in at):
        return update(*args)

    def of_arrays(*arrays: Any) -> PyTree:
        given = leaves.copy()
        for i, array in zip(at, arrays, strict=True):
            given[i] = array
        return update(*jax.tree.unflatten(treedef, given))

    arrays = [leaves[i] for i in at]
    whole = split((), 1)
    own = [cuts[i] if i < len(cuts) else whole for i in at]
    closed, made = traced(of_arrays, arrays)
    program = program_of(closed, own, mesh)
    if not program.exchanges:
        return update(*args)
    return jax.tree.unflatten(jax.tree.structure(made), program(arrays))


def traced(fn: Callable[..., PyTree], arrays: Sequence[Any]) -> tuple[jex.ClosedJaxpr, PyTree]:
    """A function's jaxpr and what it returns, abstract. It knows of no mesh: inside `shard_map`,
    where parts of it run, there is another one than outside."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(fn, return_shape=True)(*shapes)


def program_of(closed: jex.ClosedJaxpr, cuts: Sequence[Split], mesh: AnyMesh) -> "Program":
    """A traced update told apart; see `run`."""
    # Experts are over others: they are left to XLA.
    mine = [c for c in cuts if c.dim is not None and c.experts is None]
    rest = {(*names(c.axis), *([REPLICA] if c.parts > 1 else [])) for c in mine}
    (over,) = rest or {names(data_axis(mesh))}
    axes = Axes(mesh, (over, (MODEL,)) if model_size(mesh) > 1 else (over,))
    cut = [_dims(cut, leaf) for cut, leaf in zip(cuts, closed.in_avals, strict=False)]
    whole = [(None, None)] * (len(closed.in_avals) - len(cut))
    return Program(closed, [dims[: len(axes.groups)] for dims in (*cut, *whole)], axes)


def _dims(cut: Split, leaf: Any) -> Dims:
    """Of a leaf, over `data` and over `model`; the gradient of a frozen one is a scalar."""
    if leaf.shape != cut.shape or cut.experts is not None:
        return None, None
    data, model = (None if d is None else d % len(cut.shape) for d in (cut.dim, cut.model))
    return data, model


class Program:
    """A jaxpr with regions in it: what reads none runs first, then the regions that can, and so on.

    Args:
      closed: the jaxpr.
      dims: how its inputs are cut.
      axes: over which axes.

    Attributes:
      exchanges: the regions that run together, in their order; also those of branches. Without any
        it is not called.
      left: elements that a device is sent for what XLA partitions all the same.
    """

    def __init__(self, closed: jex.ClosedJaxpr, dims: Sequence[Dims], axes: Axes):
        flat = equations.written_out(closed, CALLS)
        self._jaxpr, self._axes = flat.jaxpr, axes
        self._consts = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self._walk = walk = Walk(flat.jaxpr, list(dims))
        self._apart = [flat.jaxpr.eqns[at] for at in walk.apart]
        self.exchanges: list[Exchange] = []
        self.left = sum(n for n in walk.across.values() if n < math.inf)
        self._steps = self._planned() if walk.across or walk.apart else []

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        env: Env = {**self._consts, **dict(zip(self._jaxpr.invars, values, strict=True))}
        for step in self._steps:
            step(env)
        return [read(env, atom) for atom in self._jaxpr.outvars]

    def _planned(self) -> list[Callable[[Env], None]]:
        apart = map(units, regions(self._walk))
        found = [one for one in apart if one.pays(self._axes.owners)]
        self.left -= sum(one.region.moved for one in found if one.region.moved < math.inf)
        waiting = self._outside([one.region for one in found])
        known = {*self._jaxpr.invars, *self._consts}
        steps: list[Callable[[Env], None]] = []
        while waiting or found:
            later = []
            for eqn in waiting:
                if known.issuperset(variables([eqn])):
                    steps.append(self._step(eqn))
                    known.update(eqn.outvars)
                else:
                    later.append(eqn)
            waiting = later
            own = [u for u in found if known.issuperset((*u.region.dealt, *u.region.same))]
            assert own or not found, "regions that wait for each other"
            if own:
                found = [one for one in found if one not in own]
                self.exchanges.append(Exchange(own, self._walk, self._axes))
                steps.append(self.exchanges[-1])
                known.update(v for one in own for v in one.region.made)
        return steps

    def _outside(self, found: Sequence[Region]) -> list[jex.JaxprEqn]:
        """The equations that are needed outside of regions."""
        made = {v for region in found for v in region.made}
        inside = {id(eqn) for region in found for eqn in region.eqns}
        wanted = {a for a in self._jaxpr.outvars if is_var(a)}
        wanted.update(v for region in found for v in (*region.dealt, *region.same))
        kept = []
        for eqn in reversed(self._jaxpr.eqns):
            alone = eqn.effects and id(eqn) not in inside
            if alone or not (wanted - made).isdisjoint(eqn.outvars):
                kept.append(eqn)
                wanted.update(variables([eqn]))
        return kept[::-1]

    def _step(self, eqn: jex.JaxprEqn) -> Callable[[Env], None]:
        apart = any(eqn is one for one in self._apart)
        run = self._branches(eqn) if apart else equations.function(eqn)

        def step(env: Env) -> None:
            made = run(*(read(env, atom) for atom in eqn.invars))
            env.update(zip(eqn.outvars, made, strict=True))

        return step

    def _branches(self, eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
        """Branches with regions of their own; all devices take the same one."""
        dims = [self._walk.of(a) for a in eqn.invars[1:]]
        cases: list[Callable[[Sequence[Any]], list[Any]]] = []
        for branch, _ in equations.bodies(eqn):
            own = Program(branch, dims, self._axes)
            self.exchanges += own.exchanges
            self.left += own.left
            cases.append(own if own.exchanges else functools.partial(_plain, branch))
        return functools.partial(_switch, cases)


def _plain(closed: jex.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    return equations.as_function(closed)(*values)


def _switch(
    cases: Sequence[Callable[[Sequence[Any]], list[Any]]], which: Any, *values: Any
) -> list[Any]:
    branches = [lambda *given, case=case: case(given) for case in cases]
    return jax.lax.switch(which, branches, *values)
