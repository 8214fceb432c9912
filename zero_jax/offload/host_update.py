"""An optimizer's update with states that rest in host memory: what is global first, then pieces.

Exact for every transformation that is elementwise but for global values of gradients (a norm, a
schedule, a step counter); all others are refused by name. Per device during the update: the
gradients, into whose memory the updates go, and two pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zero_jax.jaxpr.equations import Atom
from zero_jax.offload.piece_stream import Leaf, stream
from zero_jax.offload.streamable import owners
from zero_jax.offload.streamable import program as traced
from zero_jax.offload.streamable import recipes as recipes_of
from zero_jax.offload.tiers import Offload, is_on_host
from zero_jax.offload.update_recipes import Program, Recipe
from zero_jax.sharding import layout
from zero_jax.sharding.layout import Split
from zero_jax.sharding.mesh import AnyMesh

PyTree = Any


@dataclass(frozen=True)
class Update:
    """One update of states in host memory; its methods run inside `jit`.

    Attributes:
      inner: the transformation, with extra arguments.
      mesh: the mesh.
      cuts: of the parameters.
      state_cuts: of the state.
      frozen: which parameters are not trained.
      offload: the setting.
    """

    inner: Any
    mesh: AnyMesh
    cuts: Sequence[Split]
    state_cuts: Sequence[Split]
    frozen: Sequence[bool]
    offload: Offload

    def run(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree | None,
        finite: jax.Array,
        extra: dict[str, Any],
        *,
        apply: bool,
    ) -> tuple[PyTree, PyTree]:
        """(updates, state), or with `apply` (parameters, state), at rest as they came."""
        trees = (grads, state, params)
        g, s, p = (jax.tree.leaves(tree) for tree in trees)
        hosted = [is_on_host(x) for x in (*g, *s, *p)]
        count, held = len(g), hosted[len(g) : len(g) + len(s)]
        owner = owners(self.state_cuts, self.cuts)

        def update(grads: PyTree, state: PyTree, params: PyTree) -> Any:
            return self.inner.update(grads, state, params, **extra)

        shapes = tuple(jax.eval_shape(layout.logical, tree) for tree in trees)
        masters = hosted[len(g) + len(s) :] or [False] * count
        program = traced(update, shapes, owner, held, hosted[len(g) + len(s) :])
        recipes = recipes_of(program, self.cuts, owner, held, self.frozen, masters)
        rest = [*g, *s, *p]
        values = self._globals(program, recipes, trees, hosted)
        jobs = {
            at: self._job(at, recipe, program, values, rest, hosted, finite, len(p) if apply else 0)
            for at, recipe in recipes.items()
        }
        done = stream([j.leaf for j in jobs.values()], self.mesh, self.offload.piece_bytes)
        new = {}
        for job, arrays in zip(jobs.values(), done, strict=True):
            new.update({out: arrays[i] for out, i in job.writes.items()})
        for output in range(count + len(s)):
            if output not in new and not (apply and output in jobs):
                cut = self.cuts[output] if output < count else self.state_cuts[output - count]
                old = None if output < count else rest[output]
                new[output] = self._settled(values[program.outputs[output]], old, cut, finite)
        if apply:
            for at in range(count):
                if at not in jobs:
                    new[at] = p[at] if self.frozen[at] else applied(p[at], new[at])
        first = jax.tree.structure(params if apply else grads)
        return (
            jax.tree.unflatten(first, [new[at] for at in range(count)]),
            jax.tree.unflatten(jax.tree.structure(state), [new[count + j] for j in range(len(s))]),
        )

    def _globals(
        self, program: Program, recipes: dict[int, Recipe], trees: Any, hosted: Sequence[bool]
    ) -> dict[Any, Any]:
        """Everything that is computed first, on logical arrays, by its place in the program."""
        rest = jax.tree.leaves(trees)
        cuts = [*self.cuts, *self.state_cuts, *self.cuts][: len(rest)]
        given: dict[Atom, Any] = {
            slot: logical_of(x, cut)
            for slot, x, cut, host in zip(program.inputs, rest, cuts, hosted, strict=True)
            if not host
        }
        made = {output for recipe in recipes.values() for output in recipe.outputs}
        outputs = [s for at, s in enumerate(program.outputs) if at not in made]
        wanted = [*outputs, *(s for r in recipes.values() for s in (*r.scalars, *r.wholes))]
        return dict(zip(wanted, program.evaluate(wanted, given), strict=True))

    def _job(
        self,
        at: int,
        recipe: Recipe,
        program: Program,
        values: dict[Any, Any],
        rest: Sequence[jax.Array],
        hosted: Sequence[bool],
        finite: jax.Array,
        apply: int,
    ) -> "_Job":
        """What is streamed for one leaf; `apply` is 0, or the number of leaves."""
        cut, states = self.cuts[at], recipe.outputs[1:]
        # Outputs are updates and states, inputs gradients, states and parameters: the places of
        # gradients and states are the same.
        own = [len(hosted) - apply + at] if apply else []
        places = sorted({at, *recipe.inputs, *states, *own})
        arrays = [rest[i] for i in places] + [
            rest_of(values[w], cut, self.mesh) for w in recipe.wholes
        ]
        dtype = program.dtype_of(at)
        target = places.index(own[0] if apply else at)
        if arrays[target].dtype != dtype and not apply:
            target = len(arrays)
            arrays.append(rest_of(jnp.zeros(cut.shape, dtype), cut, self.mesh))

        def run(pieces: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> list[Any]:
            finite, *others = scalars
            named = dict(zip(places, pieces, strict=False))
            given = [named[i] for i in recipe.inputs]
            wholes = pieces[len(places) : len(places) + len(recipe.wholes)]
            update, *new = recipe.run(pieces[0].shape, given, wholes, others)
            # -0.0 is the addend that changes no bit of any number, -0.0 included.
            update = jnp.where(finite, update, jnp.full_like(update, -0.0))
            results: list[Any] = [None] * len(arrays)
            for state, value in zip(states, new, strict=True):
                results[places.index(state)] = jnp.where(finite, value, named[state])
            results[target] = applied(pieces[target], update) if apply else update
            return results

        scalars = [finite, *(values[s] for s in recipe.scalars)]
        held = [i < len(places) and hosted[places[i]] for i in range(len(arrays))]
        writes = {at: target, **{state: places.index(state) for state in states}}
        return _Job(Leaf(arrays, held, cut.spec_at_rest, scalars, run), writes)

    def _settled(self, value: Any, old: Any, cut: Split, finite: jax.Array) -> jax.Array:
        """A global result at rest; the old state, or no update, if the step is skipped."""
        before = jnp.full_like(value, -0.0) if old is None else logical_of(old, cut)
        return rest_of(jnp.where(finite, value, before), cut, self.mesh)


@dataclass(frozen=True)
class _Job:
    leaf: Leaf
    writes: dict[int, int]  # outputs of the program to arrays of the leaf


def applied(param: jax.Array, update: jax.Array) -> jax.Array:
    return (param + update).astype(param.dtype)


def logical_of(x: jax.Array, cut: Split) -> jax.Array:
    if not cut.padded or x.ndim == 0:
        return x
    assert cut.dim is not None
    return layout.strip_dim(x, cut.dim, cut.size)


def rest_of(x: jax.Array, cut: Split, mesh: AnyMesh) -> jax.Array:
    """A logical array as it rests; the update of a frozen leaf is a scalar and stays one."""
    own = cut if cut.shape == x.shape else layout.split(x.shape, 1)
    (padded,) = jax.tree.leaves(layout.at_rest([x], [own]))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return padded
    return jax.lax.with_sharding_constraint(padded, NamedSharding(mesh, own.spec_at_rest))
