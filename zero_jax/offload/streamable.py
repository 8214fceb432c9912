"""Which leaves of an optimizer's state rest in host memory, and whether they can stream there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.offload.tiers import HOST
from zero_jax.offload.update_recipes import NotPiecewise, Program, Recipe
from zero_jax.sharding.cuts import Split, mirrors, state_splits

PyTree = Any


def offloaded(state_cuts: Sequence[Split], cuts: Sequence[Split]) -> list[bool]:
    """Which leaves of a state rest in host memory: those that mirror a parameter of rank 1 up."""
    pairs = zip(state_cuts, mirrors(state_cuts, cuts), strict=True)
    return [owner is not None and bool(cut.shape) for cut, owner in pairs]


def placed_on_host(placed: PyTree, state: PyTree, params: PyTree, cuts: Sequence[Split]) -> PyTree:
    """The state's shardings, in host memory for the leaves that rest there."""
    shardings, treedef = jax.tree.flatten(placed)
    flags = offloaded(state_splits(state, params, cuts), cuts)
    pairs = zip(shardings, flags, strict=True)
    moved = [s.with_memory_kind(HOST) if flag else s for s, flag in pairs]
    return jax.tree.unflatten(treedef, moved)


def program(
    update: Callable[..., Any],
    trees: tuple[PyTree, ...],
    owner: Sequence[int | None],
    state_held: Sequence[bool],
    params_held: Sequence[bool],
) -> Program:
    """The update as a program of (gradients, state, parameters, ...) to (updates, state).

    Args:
      update: of those trees.
      trees: what it is called with, abstract; all after the first three is global.
      owner: which parameter each leaf of the state mirrors.
      state_held: which leaves of the state come in pieces only.
      params_held: which parameters do.
    """
    leaves, treedef = jax.tree.flatten(trees)
    # As on the device, wherever they rest.
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    count = len(jax.tree.leaves(trees[0]))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(update(*jax.tree.unflatten(treedef, leaves)))

    own = list(range(count))
    more = len(avals) - count - len(state_held) - len(params_held)
    leaf_of = [*own, *owner, *own[: len(params_held)], *[None] * more]
    held = [*[False] * count, *state_held, *params_held, *[False] * more]
    return Program(flat, avals, leaf_of, held)


def recipes(
    traced: Program,
    cuts: Sequence[Split],
    owner: Sequence[int | None],
    held: Sequence[bool],
    frozen: Sequence[bool],
    masters: Sequence[bool],
) -> dict[int, Recipe]:
    """Returns a recipe for each leaf with state or parameters in host memory."""
    found = {}
    for at, cut in enumerate(cuts):
        states = [j for j, (o, h) in enumerate(zip(owner, held, strict=True)) if o == at and h]
        if cut.shape and not frozen[at] and (states or masters[at]):
            outputs = [at, *(len(cuts) + j for j in states)]
            found[at] = traced.recipe(at, outputs, cut.shape)
    for output in range(len(cuts) + len(held)):
        made = any(output in recipe.outputs for recipe in found.values())
        if not made and not traced.is_global(output):
            raise NotPiecewise("a value that is not part of one leaf")
    return found
