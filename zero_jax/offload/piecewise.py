"""An update told apart: what is computed first, on whole arrays, and what runs on pieces of leaves.

`update_in_pieces` drives it inside the step's program, `engine/file_step` from the host.
Arrays come and go as they rest; those that stream come in pieces.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.collectives.norms import unless_skipped
from zero_jax.jaxpr.equations import Atom
from zero_jax.offload import streamable
from zero_jax.offload.blame import blame
from zero_jax.offload.update_recipes import NotPiecewise
from zero_jax.sharding import layout
from zero_jax.sharding.cuts import Split, mirrors, split, state_splits
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.states.narrow import FP32

PyTree = Any
Values = Mapping[Atom, jax.Array]  # by their place in the program


class CannotStream(ValueError):
    """A transformation that can't be updated in pieces."""


class Piecewise:
    """An optimizer's update of (gradients, state, parameters, ...) to (updates, state).

    Inputs and outputs are numbered by leaves: gradients, states, parameters, others; and updates,
    states.

    Args:
      update: of those trees.
      trees: what it is called with: logical, abstract.
      mesh: the mesh.
      cuts: of the parameters.
      state_cuts: of the state.
      state_held: which leaves of the state come in pieces only.
      params_held: which parameters do; as many as are given.
      frozen: which parameters are not trained.

    Raises:
      NotPiecewise: something needs the whole of what comes in pieces.
    """

    def __init__(
        self,
        update: Callable[..., PyTree],
        trees: tuple[PyTree, ...],
        *,
        mesh: AnyMesh,
        cuts: Sequence[Split],
        state_cuts: Sequence[Split],
        state_held: Sequence[bool],
        params_held: Sequence[bool],
        frozen: Sequence[bool],
    ):
        self.mesh, self.cuts, self.frozen = mesh, cuts, frozen
        owner = mirrors(state_cuts, cuts)
        self.program = streamable.program(update, trees, owner, state_held, params_held)
        masters = params_held or [False] * len(cuts)
        self.recipes = streamable.recipes(self.program, cuts, owner, state_held, frozen, masters)
        self.first_param = len(cuts) + len(state_cuts)
        self._cuts = [*cuts, *state_cuts, *cuts]
        streamed = {output for recipe in self.recipes.values() for output in recipe.outputs}
        self._first = [at for at in range(self.first_param) if at not in streamed]

    def values(self, given: Mapping[int, jax.Array]) -> Values:
        """All that is computed first, of the inputs that don't come in pieces, at rest."""
        cuts = dict(enumerate(self._cuts))
        known: Values = {
            self.program.inputs[at]: logical_of(x, cuts[at]) if at in cuts else x
            for at, x in given.items()
        }
        wanted = [self.program.outputs[at] for at in self._first]
        wanted += [s for r in self.recipes.values() for s in (*r.scalars, *r.wholes)]
        return dict(zip(wanted, self.program.evaluate(wanted, known), strict=True))

    def outputs(
        self,
        values: Values,
        given: Mapping[int, jax.Array],
        finite: jax.Array | bool,
        *,
        apply: bool,
    ) -> dict[int, jax.Array]:
        """The outputs that don't stream, at rest; with `apply` new parameters in place of updates,
        and none for those that are frozen."""
        found, count = {}, len(self.cuts)
        for at in self._first:
            if apply and at < count and self.frozen[at]:
                continue
            cut = self._cuts[at]
            old = None if at < count else logical_of(given[at], cut)
            new = unless_skipped(finite, values[self.program.outputs[at]], old)
            found[at] = rest_of(new, cut, self.mesh)
            if apply and at < count:
                found[at] = applied(given[self.first_param + at], found[at])
        return found

    def scalars(self, at: int, values: Values) -> list[jax.Array]:
        """Global values that pieces of one leaf need."""
        return [values[s] for s in self.recipes[at].scalars]

    def wholes(self, at: int, values: Values) -> list[jax.Array]:
        """What was computed first and is cut into pieces as the leaf is, at rest."""
        return [rest_of(values[w], self.cuts[at], self.mesh) for w in self.recipes[at].wholes]

    def on_piece(
        self,
        at: int,
        finite: jax.Array,
        pieces: Mapping[int, jax.Array],
        wholes: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The update, and the new states, of a piece of one leaf.

        Args:
          at: the leaf.
          finite: whether the step counts.
          pieces: of the inputs that the recipe needs, and of the leaf's states, by their number.
          wholes: pieces of `wholes`.
          scalars: those of the leaf.
        """
        recipe = self.recipes[at]
        states = recipe.outputs[1:]
        shape = next(iter(pieces.values())).shape
        given = [pieces[i] for i in recipe.inputs]
        update, *new = recipe.run(shape, given, wholes, scalars)
        pairs = zip(new, (pieces[i] for i in states), strict=True)
        kept = [unless_skipped(finite, value, old).astype(old.dtype) for value, old in pairs]
        return unless_skipped(finite, update), kept


def require_piecewise(
    tx: optax.GradientTransformation,
    inner: optax.GradientTransformation,
    params: PyTree,
    mesh: AnyMesh,
    cuts: Sequence[Split],
    frozen: Sequence[bool],
    masters: bool,
    *,
    optimizer_state_dtype: str = FP32,
) -> None:
    """Raises CannotStream if `tx` cannot be updated in pieces.

    Args:
      tx: The user's transformation.
      inner: The same transformation, on trained leaves only.
      params: Full parameters, abstract.
      mesh: The mesh.
      cuts: The partition of each parameter.
      frozen: True for each parameter that is not trained.
      masters: True if the fp32 master parameters are in host memory too.
      optimizer_state_dtype: Dtype of state. Below fp32, a state must have the shape of its
        parameter and be read element by element.

    Raises:
      CannotStream: The message has the transformation, within a chain the one that fails.
    """
    leaves, treedef = jax.tree.flatten(params)
    # The gradient of a frozen leaf is a scalar.
    pairs = zip(leaves, frozen, strict=True)
    grads = [jax.ShapeDtypeStruct((), x.dtype) if still else x for x, still in pairs]

    def why(part: optax.GradientTransformation) -> str:
        part = optax.with_extra_args_support(part)
        state = jax.eval_shape(part.init, params)
        state_cuts = state_splits(state, params, cuts)
        held = streamable.offloaded(state_cuts, cuts)
        if optimizer_state_dtype != FP32:
            held = [bool(x.shape) for x in jax.tree.leaves(state)]
        try:
            Piecewise(
                functools.partial(part.update, value=jnp.float32(1.0)),
                (jax.tree.unflatten(treedef, grads), state, params),
                mesh=mesh,
                cuts=cuts,
                state_cuts=state_cuts,
                state_held=held,
                params_held=[masters and bool(cut.shape) for cut in cuts],
                frozen=frozen,
            )
        except NotPiecewise as error:
            return str(error)
        return ""

    found = why(inner)
    if found:
        name = blame(tx, lambda part: bool(why(part)))
        setting, what = "offload", "state in host memory"
        if optimizer_state_dtype != FP32:
            setting, what = (
                "optimizer_state_dtype",
                f"state stored as {optimizer_state_dtype}",
            )
        raise CannotStream(
            f"{name} cannot be updated in pieces, because of {found}: it needs all elements of "
            f"{what}. A transformation of gradients alone, such as clip_by_global_norm, is "
            f"supported before one with a state. Otherwise leave `{setting}` out, or use an "
            "elementwise transformation, for example adamw"
        )


def applied(param: jax.Array, update: jax.Array) -> jax.Array:
    """As `optax.apply_updates`, of one leaf."""
    return (param + update).astype(param.dtype)


def logical_of(x: jax.Array, cut: Split) -> jax.Array:
    """An array without the padding it rests with; the gradient of a frozen leaf is a scalar."""
    if not cut.padded or x.ndim == 0:
        return x
    assert cut.dim is not None
    return layout.strip_dim(x, cut.dim, cut.size)


def at_rest(tree: PyTree, cuts: Sequence[Split], mesh: AnyMesh) -> PyTree:
    """Pads a logical tree and pins it to its shards; leaves of other shapes stay whole."""
    rest = layout.at_rest(tree, cuts)
    # The update of a frozen leaf is a scalar, whatever the leaf's shape.
    pairs = zip(cuts, jax.tree.leaves(tree), strict=True)
    placed = [c if c.shape == x.shape else split(x.shape, 1) for c, x in pairs]
    return jax.lax.with_sharding_constraint(rest, layout.shardings(rest, placed, mesh))


def rest_of(x: jax.Array, cut: Split, mesh: AnyMesh) -> jax.Array:
    """As `at_rest`, of one leaf; padding does not show in its type."""
    (rest,) = jax.tree.leaves(at_rest([x], [cut], mesh))
    return rest
