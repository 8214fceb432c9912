"""An optimizer's update with states that rest in host memory: what is global first, then pieces.

Exact for every transformation that is elementwise but for global values of gradients (a norm, a
schedule, a step counter); all others are refused by name. Per device during the update: the
gradients, into whose memory the updates go, and two pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from zero_jax import layout, paths
from zero_jax.layout import Split
from zero_jax.mesh import DATA, AnyMesh
from zero_jax.piecewise import NotPiecewise, Program, Recipe, blame
from zero_jax.streaming import Leaf, stream
from zero_jax.tiers import HOST, Offload, is_on_host

PyTree = Any


def owners(state_cuts: Sequence[Split], cuts: Sequence[Split]) -> list[int | None]:
    """For each leaf of a state, which parameter it mirrors."""
    # layout.state_splits hands out a mirrored parameter's own Split, so identity tells.
    index = {id(cut): at for at, cut in enumerate(cuts)}
    return [index.get(id(cut)) for cut in state_cuts]


def offloaded(state_cuts: Sequence[Split], cuts: Sequence[Split]) -> list[bool]:
    """Which leaves of a state rest in host memory: those that mirror a parameter of rank 1 up."""
    pairs = zip(state_cuts, owners(state_cuts, cuts), strict=True)
    return [owner is not None and bool(cut.shape) for cut, owner in pairs]


def placed_on_host(
    placed: PyTree, state: PyTree, params: PyTree, cuts: Sequence[Split]
) -> PyTree:
    """The state's shardings, in host memory for the leaves that rest there."""
    shardings, treedef = jax.tree.flatten(placed)
    flags = offloaded(layout.state_splits(state, params, cuts), cuts)
    pairs = zip(shardings, flags, strict=True)
    moved = [s.with_memory_kind(HOST) if flag else s for s, flag in pairs]
    return jax.tree.unflatten(treedef, moved)


def require_piecewise(
    tx: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    params: PyTree,
    cuts: Sequence[Split],
    frozen: Sequence[bool],
    masters: bool,
) -> None:
    """Raises unless `tx` can be updated in pieces.

    Args:
      tx: the user's transformation.
      inner: the same, on trained leaves only.
      params: logical parameters, abstract.
      cuts: how they are split.
      frozen: which of them are not trained.
      masters: whether they rest in host memory too.

    Raises:
      ValueError: naming the transformation, within a chain the one that is to blame.
    """

    def why(part: optax.GradientTransformation) -> str:
        try:
            _try(part, params, cuts, frozen, masters)
        except NotPiecewise as error:
            return str(error)
        return ""

    found = why(inner)
    if found:
        name = blame(tx, lambda part: bool(why(part)))
        raise ValueError(
            f"{name} can't be updated in pieces: its {found} needs the whole of what rests in host "
            "memory. What looks at gradients alone, as clip_by_global_norm, can stand before a "
            'transformation with a state; else leave offload out, or use an elementwise one, adamw'
            " say"
        )


def _try(
    tx: optax.GradientTransformation,
    params: PyTree,
    cuts: Sequence[Split],
    frozen: Sequence[bool],
    masters: bool,
) -> None:
    tx = optax.with_extra_args_support(tx)
    leaves, treedef = jax.tree.flatten(params)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)  # the gradient of a frozen leaf
    flat = [scalar if f else x for x, f in zip(leaves, frozen, strict=True)]
    state = jax.eval_shape(tx.init, params)
    state_cuts = layout.state_splits(state, params, cuts)
    owner, held = owners(state_cuts, cuts), offloaded(state_cuts, cuts)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(grads, state, params, value=jnp.float32(1.0))

    own = [masters and bool(cut.shape) for cut in cuts]
    trees = (jax.tree.unflatten(treedef, flat), state, params)
    program = _program(update, trees, owner, held, own)
    _recipes(program, cuts, owner, held, frozen, own)


def _program(
    update: Callable[..., Any],
    trees: tuple[PyTree, PyTree, PyTree],
    owner: Sequence[int | None],
    state_held: Sequence[bool],
    params_held: Sequence[bool],
) -> Program:
    """The update as a program of (gradients, state, parameters) to (updates, state)."""
    leaves, treedef = jax.tree.flatten(trees)
    # As on the device, wherever they rest.
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    count = len(jax.tree.leaves(trees[0]))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(update(*jax.tree.unflatten(treedef, leaves)))

    own = list(range(count))
    leaf_of = [*own, *owner, *own[: len(params_held)]]
    return Program(flat, avals, leaf_of, [*[False] * count, *state_held, *params_held])


def _recipes(
    program: Program,
    cuts: Sequence[Split],
    owner: Sequence[int | None],
    held: Sequence[bool],
    frozen: Sequence[bool],
    masters: Sequence[bool],
) -> dict[int, Recipe]:
    """A recipe for each leaf that has something in host memory."""
    found = {}
    for at, cut in enumerate(cuts):
        states = [j for j, (o, h) in enumerate(zip(owner, held, strict=True)) if o == at and h]
        if cut.shape and not frozen[at] and (states or masters[at]):
            outputs = [at, *(len(cuts) + j for j in states)]
            found[at] = program.recipe(at, outputs, cut.shape)
    for output in range(len(cuts) + len(held)):
        made = any(output in recipe.outputs for recipe in found.values())
        if not made and not program.is_global(output):
            raise NotPiecewise("a value that is no part of one leaf")
    return found


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
        program = _program(update, shapes, owner, held, hosted[len(g) + len(s) :])
        recipes = _recipes(program, self.cuts, owner, held, self.frozen, masters)
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
                    new[at] = p[at] if self.frozen[at] else _applied(p[at], new[at])
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
        given = {
            slot: _logical(x, cut)
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
        arrays = [rest[i] for i in places] + [_rest(values[w], cut, self.mesh) for w in recipe.wholes]
        dtype = program.outputs[at].dtype
        target = places.index(own[0] if apply else at)
        if arrays[target].dtype != dtype and not apply:
            target = len(arrays)
            arrays.append(_rest(jnp.zeros(cut.shape, dtype), cut, self.mesh))

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
            results[target] = _applied(pieces[target], update) if apply else update
            return results

        scalars = [finite, *(values[s] for s in recipe.scalars)]
        held = [i < len(places) and hosted[places[i]] for i in range(len(arrays))]
        writes = {at: target, **{state: places.index(state) for state in states}}
        return _Job(Leaf(arrays, held, cut.spec(DATA), scalars, run), writes)

    def _settled(self, value: Any, old: Any, cut: Split, finite: jax.Array) -> jax.Array:
        """A global result at rest; the old state, or no update, if the step is skipped."""
        before = jnp.full_like(value, -0.0) if old is None else _logical(old, cut)
        return _rest(jnp.where(finite, value, before), cut, self.mesh)


@dataclass(frozen=True)
class _Job:
    leaf: Leaf
    writes: dict[int, int]  # outputs of the program to arrays of the leaf


def apply_updates(
    params: PyTree, updates: PyTree, cuts: Sequence[Split], mesh: AnyMesh, offload: Offload
) -> PyTree:
    """`optax.apply_updates` where masters rest in host memory: in pieces, in place."""
    old, new = jax.tree.leaves(params), jax.tree.leaves(updates)
    streams = [is_on_host(p) and p.shape == u.shape for p, u in zip(old, new, strict=True)]

    def run(pieces: Sequence[jax.Array], _: Any) -> list[Any]:
        return [_applied(*pieces), None]

    leaves = [
        Leaf([p, u], [True, False], cut.spec(DATA), [], run)
        for p, u, cut, streamed in zip(old, new, cuts, streams, strict=True)
        if streamed
    ]
    done = iter(stream(leaves, mesh, offload.piece_bytes))
    # What is left are frozen leaves, whose update is a scalar -0.0.
    out = [next(done)[0] if streamed else p for p, streamed in zip(old, streams, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), out)


def _applied(param: jax.Array, update: jax.Array) -> jax.Array:
    return (param + update).astype(param.dtype)


def _logical(x: jax.Array, cut: Split) -> jax.Array:
    if not cut.padded or x.ndim == 0:
        return x
    assert cut.dim is not None
    return layout.strip_dim(x, cut.dim, cut.size)


def _rest(x: jax.Array, cut: Split, mesh: AnyMesh) -> jax.Array:
    """A logical array as it rests; the update of a frozen leaf is a scalar and stays one."""
    own = cut if cut.shape == x.shape else layout.split(x.shape, 1)
    (padded,) = jax.tree.leaves(layout.at_rest([x], [own]))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return padded
    return jax.lax.with_sharding_constraint(padded, NamedSharding(mesh, own.spec(DATA)))
