"""The update of an optimizer in pieces: of states in host memory, and of those in fewer bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from zero_jax.collectives.norms import unless_skipped
from zero_jax.engine.transformations import Frozen
from zero_jax.offload import tiers
from zero_jax.offload.piecewise import Piecewise
from zero_jax.offload.update_in_pieces import Parts, UpdateInPieces
from zero_jax.sharding import layout, paths
from zero_jax.sharding.cuts import Splitter, mirrors, state_splits
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.states.coded import Coding
from zero_jax.states.narrow import NarrowState

PyTree = Any


@dataclass(frozen=True)
class Given:
    """What an update is given, at rest.

    Attributes:
      grads: the gradients.
      state: the state, a `NarrowState` where it is kept in fewer bits.
      params: the parameters, None where they are not given.
      splitter: how they are cut.
      frozen: which are not trained, as for `Zero`.
      mesh: the mesh.
    """

    grads: PyTree
    state: PyTree
    params: PyTree | None
    splitter: Splitter
    frozen: Frozen
    mesh: AnyMesh

    def run(
        self,
        update: Callable[..., tuple[PyTree, PyTree]],
        finite: jax.Array | bool,
        apply: bool,
        piece_bytes: int,
    ) -> tuple[PyTree, PyTree]:
        """(updates, state), or with `apply` (parameters, state); see `UpdateInPieces`."""
        narrow = self.state if isinstance(self.state, NarrowState) else None
        parts = _single(self.state) if narrow is None else narrow.parts()
        grads, params, codings = _single(self.grads), _single(self.params), self._codings()
        job = UpdateInPieces(
            self._told_apart(update, parts, codings),
            [*grads, *parts, *params],
            {len(grads) + at: how for at, how in codings.items()},
            finite,
            apply,
            0 if narrow is None else narrow.count,
        )
        first, new = job.run(piece_bytes)
        made = jax.tree.unflatten(jax.tree.structure(self.params if apply else self.grads), first)
        if narrow is None:
            return made, jax.tree.unflatten(jax.tree.structure(self.state), [x for (x,) in new])
        return made, narrow.with_parts(new, unless_skipped(finite, narrow.count + 1, narrow.count))

    def _codings(self) -> dict[int, Coding]:
        """How leaves of the state are kept that are in fewer bits."""
        if not isinstance(self.state, NarrowState):
            return {}
        found = self.state.codings(jax.eval_shape(layout.unpad, self.state.inner))
        return {at: how for at, how in enumerate(found) if how is not None}

    def _told_apart(
        self,
        update: Callable[..., tuple[PyTree, PyTree]],
        parts: list[Parts],
        codings: dict[int, Coding],
    ) -> Piecewise:
        """The update of fp32; with one state of a parameter all of them come in pieces."""
        trees = self.grads, self.state, self.params
        # Shapes alone: types of newer JAX say that a state rests in host memory, and there nothing
        # can be computed, not even in a trace.
        grads, state, params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(layout.unpad, trees)
        )
        if isinstance(state, NarrowState):
            state = jax.eval_shape(NarrowState.wide, state)
        like = grads if params is None else params
        cuts = self.splitter(like)
        state_cuts = state_splits(state, like, cuts)
        owner = mirrors(state_cuts, cuts)
        coded = {owner[at] for at in codings}
        pairs = zip(parts, owner, strict=True)
        return Piecewise(
            update,
            (grads, state, params),
            mesh=self.mesh,
            cuts=cuts,
            state_cuts=state_cuts,
            state_held=[at in coded or tiers.is_on_host(x[0]) for x, at in pairs],
            params_held=[tiers.is_on_host(x) for x in jax.tree.leaves(self.params)],
            frozen=paths.frozen_leaves(like, self.frozen),
        )


def _single(tree: PyTree) -> list[Parts]:
    return [(x,) for x in jax.tree.leaves(tree)]
