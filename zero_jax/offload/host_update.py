"""An optimizer's update with states that rest in host memory: what is global first, then pieces.

Exact for every transformation that is elementwise but for global values of gradients (a norm, a
schedule, a step counter); all others are refused by name. Per device during the update: the
gradients, into whose memory the updates go, and two pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from zero_jax.offload.piece_stream import Leaf, stream
from zero_jax.offload.piecewise import Piecewise, Values, applied, rest_of
from zero_jax.offload.tiers import is_on_host


@dataclass(frozen=True)
class HostUpdate:
    """One update of states in host memory; its methods run inside `jit`.

    Attributes:
      update: what is done.
      arrays: its inputs at rest: gradients, states and parameters, if there are any.
      finite: whether the step counts.
      apply: whether parameters are updated, in place of their updates being returned.
    """

    update: Piecewise
    arrays: Sequence[jax.Array]
    finite: jax.Array | bool
    apply: bool

    def run(self, piece_bytes: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """(updates, states), or with `apply` (parameters, states), at rest as they came."""
        update, arrays, count = self.update, self.arrays, len(self.update.cuts)
        given = {at: x for at, x in enumerate(arrays) if not is_on_host(x)}
        values = update.values(given)
        jobs = [self._job(at, values) for at in update.recipes]
        done = stream([job.leaf for job in jobs], update.mesh, piece_bytes)
        new = update.outputs(values, given, self.finite, apply=self.apply)
        for job, streamed in zip(jobs, done, strict=True):
            new.update({output: streamed[i] for output, i in job.writes.items()})
        still = arrays[update.first_param :]  # the frozen ones
        first = [new[at] if at in new else still[at] for at in range(count)]
        return first, [new[at] for at in range(count, update.first_param)]

    def _job(self, at: int, values: Values) -> "_Job":
        """What is streamed for one leaf."""
        update, recipe = self.update, self.update.recipes[at]
        states = recipe.outputs[1:]
        # Outputs are updates and states, inputs gradients, states and parameters: the places of
        # gradients and states are the same.
        own = [update.first_param + at] if self.apply else []
        places = sorted({at, *recipe.inputs, *states, *own})
        arrays = [self.arrays[i] for i in places] + update.wholes(at, values)
        target = places.index(own[0] if own else at)
        dtype = update.program.dtype_of(at)
        if arrays[target].dtype != dtype and not self.apply:
            target = len(arrays)
            arrays.append(
                rest_of(jnp.zeros(update.cuts[at].shape, dtype), update.cuts[at], update.mesh)
            )

        def run(
            pieces: Sequence[jax.Array], scalars: Sequence[jax.Array]
        ) -> list[jax.Array | None]:
            finite, *others = scalars
            named = dict(zip(places, pieces, strict=False))
            wholes = pieces[len(places) : len(places) + len(recipe.wholes)]
            made, new = update.on_piece(at, finite, named, wholes, others)
            results: list[jax.Array | None] = [None] * len(arrays)
            for state, value in zip(states, new, strict=True):
                results[places.index(state)] = value
            results[target] = applied(pieces[target], made) if self.apply else made
            return results

        on_host = [i < len(places) and is_on_host(x) for i, x in enumerate(arrays)]
        writes = {at: target, **{state: places.index(state) for state in states}}
        scalars = [jnp.asarray(self.finite), *update.scalars(at, values)]
        spec = update.cuts[at].spec_at_rest
        return _Job(Leaf(arrays, on_host, spec, scalars, run), writes)


@dataclass(frozen=True)
class _Job:
    leaf: Leaf
    writes: dict[int, int]  # outputs of the program to arrays of the leaf
