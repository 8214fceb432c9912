"""An optimizer's update in pieces: what is global first, then leaf by leaf, piece by piece.

For states that rest in host memory, and for those that are kept in fewer bits, whose pieces are
opened, updated and closed. Exact for every transformation that is elementwise but for global values
of gradients (a norm, a schedule, a step counter); all others are refused by name. Per device during
the update: the gradients, into whose memory the updates go, and two pieces; of states in fewer bits
on the device also the new codes of two leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.collectives.norms import unless_skipped
from zero_jax.offload.piece_stream import Blocks, Leaf, Part, stream
from zero_jax.offload.piecewise import Piecewise, Values, applied, rest_of
from zero_jax.offload.tiers import is_on_host
from zero_jax.sharding.cuts import Split
from zero_jax.states.coded import Coding, on_devices, scales_cut, straddles
from zero_jax.states.codes import BLOCK, scales_shape

# An array at rest, or of a state in fewer bits its codes and their scales.
Parts = tuple[jax.Array, ...]


@dataclass(frozen=True)
class UpdateInPieces:
    """One update; its methods run inside `jit`.

    Attributes:
      update: what is done.
      arrays: its inputs at rest: gradients, states and parameters, if there are any.
      codings: how inputs are kept that are in fewer bits, by their number.
      finite: whether the step counts.
      apply: whether parameters are updated, in place of their updates being returned.
      count: how often the state was updated before.
    """

    update: Piecewise
    arrays: Sequence[Parts]
    codings: Mapping[int, Coding]
    finite: jax.Array | bool
    apply: bool
    count: jax.Array | int = 0

    def run(self, piece_bytes: int) -> tuple[list[jax.Array], list[Parts]]:
        """(updates, states), or with `apply` (parameters, states), at rest as they came."""
        update, count = self.update, len(self.update.cuts)
        given = {
            at: x[0]
            for at, x in enumerate(self.arrays)
            if at not in self.codings and not is_on_host(x[0])
        }
        values = update.values(given)
        jobs = {at: self._job(at, values) for at in update.recipes}
        done = stream([job.leaf for job in jobs.values()], update.mesh, piece_bytes)
        made = dict(zip(jobs, done, strict=True))
        outputs = update.outputs(values, given, self.finite, apply=self.apply)
        new: dict[int, Parts] = {at: (x,) for at, x in outputs.items()}
        for at, job in jobs.items():
            new |= {
                output: tuple(made[at][i] for i in places) for output, places in job.writes.items()
            }
        still = self.arrays[update.first_param :]  # the frozen ones
        first = [new[at][0] if at in new else still[at][0] for at in range(count)]
        return first, [new[at] for at in range(count, update.first_param)]

    def _job(self, at: int, values: Values) -> "_Job":
        """What is done for one leaf."""
        update, recipe, cut = self.update, self.update.recipes[at], self.update.cuts[at]
        states = recipe.outputs[1:]
        # Outputs are updates and states, inputs gradients, states and parameters: the numbers of
        # gradients and states are the same.
        own = update.first_param + at if self.apply else at
        parts: list[Part] = []
        places = {
            i: _added(parts, self._parts(i, cut))
            for i in sorted({at, *recipe.inputs, *states, own})
        }
        wholes = _added(parts, [Part(x, cut.spec_at_rest) for x in update.wholes(at, values)])
        (target,) = places[own]
        dtype = update.program.dtype_of(at)
        if parts[target].array.dtype != dtype and not self.apply:
            empty = rest_of(jnp.zeros(cut.shape, dtype), cut, update.mesh)
            (target,) = _added(parts, [Part(empty, cut.spec_at_rest)])

        codings = {i: on_devices(self.codings[i], cut) for i in places if i in self.codings}

        def run(
            pieces: Sequence[jax.Array], scalars: Sequence[jax.Array], starts: Sequence[Any]
        ) -> list[jax.Array | None]:
            finite, count, *others = scalars
            held = {i: [pieces[k] for k in mine] for i, mine in places.items()}
            named = {
                i: codings[i].open(found, starts) if i in codings else found[0]
                for i, found in held.items()
            }
            made, new = update.on_piece(at, finite, named, [pieces[k] for k in wholes], others)
            results: list[jax.Array | None] = [None] * len(pieces)
            for i, value in zip(states, new, strict=True):
                if i not in codings:
                    results[places[i][0]] = value
                    continue
                closed = codings[i].close(value, starts, count)
                for k, part, old in zip(places[i], closed, held[i], strict=True):
                    results[k] = unless_skipped(finite, part, old)
            results[target] = applied(pieces[target], made) if self.apply else made
            return results

        leaf = Leaf(
            parts,
            blocks=next((_blocks(how, cut) for how in codings.values()), None),
            element_bytes=sum(p.array.dtype.itemsize for p in parts if not p.by_block)
            + 4 * len(codings),
            scalars=[
                *(jnp.asarray(self.finite), jnp.asarray(self.count)),
                *update.scalars(at, values),
            ],
            run=run,
        )
        writes = {at: (target,), **{i: places[i] for i in states}}
        return _Job(leaf, writes)

    def _parts(self, number: int, cut: Split) -> list[Part]:
        """An input's arrays."""
        coded, specs = number in self.codings, (cut.spec_at_rest, scales_cut(cut).spec_at_rest)
        return [
            Part(x, spec, is_on_host(x), by_block=k > 0, joined=coded and not is_on_host(x))
            for k, (x, spec) in enumerate(zip(self.arrays[number], specs, strict=False))
        ]


@dataclass(frozen=True)
class _Job:
    leaf: Leaf
    writes: dict[int, tuple[int, ...]]  # outputs of the program to parts of the leaf


def _blocks(how: Coding, cut: Split) -> Blocks | None:
    """What pieces are made of; of blocks that straddle devices one takes all that a device has."""
    if how.block_dim is None:
        return None
    if straddles(cut):
        return Blocks(
            how.block_dim, cut.device_shape[how.block_dim], scales_shape(cut.shape)[how.block_dim]
        )
    return Blocks(how.block_dim, BLOCK)


def _added(parts: list[Part], more: Sequence[Part]) -> tuple[int, ...]:
    """Adds to a list; returns where."""
    parts += more
    return tuple(range(len(parts) - len(more), len(parts)))
