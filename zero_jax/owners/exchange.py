"""Matrices sent to their owners, and what is made of them sent back. Runs inside `shard_map`.

Each device has a piece of every matrix. To each owner it sends a row of its pieces of that owner's
matrices, and gets a row of theirs back: two all-to-alls of N rows, as long as the longest. Nothing
is ever whole but the matrices that an owner is working on.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.owners.pieces import Pieces

Arrays = list[Any]
# Rows of all owners by dtype, (N, length).
Rows = dict[Any, jax.Array]


@dataclass(frozen=True)
class Kind:
    """Matrices that are computed alike.

    Attributes:
      one: of (index, dealt, same) to what is made, of one matrix.
      dealt: how what they are made of is cut.
      made: how results are.
      counts: how many matrices each owner has.
    """

    one: Callable[[Any, Arrays, Arrays], Arrays]
    dealt: tuple[Pieces, ...]
    made: tuple[Pieces, ...]
    counts: tuple[int, ...]

    def first(self, owner: int) -> int:
        """The first matrix of an owner."""
        return sum(self.counts[:owner])


def exchange(
    kinds: Sequence[Kind], axes: tuple[str, ...], dealt: list[Arrays], same: list[Arrays]
) -> list[Arrays]:
    """What is made of all matrices, each by its owner.

    Args:
      kinds: what is computed.
      axes: the mesh axes that number devices.
      dealt: of each kind, this device's pieces of its matrices, stacked.
      same: of each kind, what each device has whole.

    Returns:
      The same of what is made.
    """
    loads = list(zip(*(kind.counts for kind in kinds), strict=True))
    there, back = Layout([k.dealt for k in kinds], loads), Layout([k.made for k in kinds], loads)
    received = _to_all(there.sent(dealt), axes)
    me = jax.lax.axis_index(axes)
    firsts = [jnp.asarray([k.first(o) for o in range(len(loads))])[me] for k in kinds]

    def work(load: tuple[int, ...], received: Rows) -> Rows:
        given = there.received(received, load)
        parts = zip(kinds, firsts, given, same, strict=True)
        return back.answered([_each(*part) for part in parts])

    # Owners of as many of each kind run the same program.
    alike = sorted(set(loads))
    branches = [functools.partial(work, load) for load in alike]
    which = jnp.asarray([alike.index(load) for load in loads])[me]
    made = jax.lax.switch(which, branches, received)
    return back.returned(_to_all(made, axes))


def _to_all(rows: Rows, axes: tuple[str, ...]) -> Rows:
    """Row i goes to device i; what comes back as row i is from device i."""
    return {
        dtype: jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        for dtype, x in rows.items()
    }


def _each(kind: Kind, first: Any, given: Arrays, same: Arrays) -> Arrays:
    """Of a kind's matrices here all devices' pieces (count, N, size) to those of what is made."""

    def one(numbered: tuple[Any, Arrays]) -> Arrays:
        index, pieces = numbered
        whole = [p.join(x) for p, x in zip(kind.dealt, pieces, strict=True)]
        made = kind.one(index, whole, same)
        return [p.part(x) for p, x in zip(kind.made, made, strict=True)]

    count, devices = given[0].shape[:2]
    if count == 0:
        return [jnp.zeros((0, devices, p.size), p.dtype) for p in kind.made]
    return jax.lax.map(one, (first + jnp.arange(count), given))


def _some(stack: Any, first: int, count: int) -> Any:
    return jax.lax.slice_in_dim(stack, first, first + count).reshape(-1)


class Layout:
    """What a row holds: of each kind and array an owner's matrices, one after the other.

    Args:
      pieces: of each kind, how its arrays are cut.
      loads: of each owner, how many matrices of each kind it has.
    """

    def __init__(self, pieces: Sequence[Sequence[Pieces]], loads: Sequence[tuple[int, ...]]):
        self._pieces, self._loads = pieces, loads
        self._lengths: dict[Any, int] = {}
        for load in loads:
            for dtype, end in self._ends(load).items():
                self._lengths[dtype] = max(end, self._lengths.get(dtype, 0))

    @property
    def length(self) -> int:
        """Elements of a row, of whatever dtype."""
        return sum(self._lengths.values())

    def _places(self, load: tuple[int, ...]) -> Iterator[tuple[int, int, Pieces, slice]]:
        """Kind, array, how it is cut, and where it is in the row of its dtype."""
        ends: dict[Any, int] = {}
        for kind, (arrays, count) in enumerate(zip(self._pieces, load, strict=True)):
            for at, pieces in enumerate(arrays):
                start = ends.get(pieces.dtype, 0)
                ends[pieces.dtype] = start + count * pieces.size
                yield kind, at, pieces, slice(start, ends[pieces.dtype])

    def _ends(self, load: tuple[int, ...]) -> dict[Any, int]:
        return {pieces.dtype: part.stop for _, _, pieces, part in self._places(load)}

    def _joined(self, parts: Sequence[tuple[Any, Any]], load: tuple[int, ...]) -> Rows:
        """Parts (dtype, (..., n)) in their order, filled up to the longest row."""
        made = {}
        for dtype, length in self._lengths.items():
            own = [x for kind, x in parts if kind == dtype]
            fill = length - self._ends(load).get(dtype, 0)
            made[dtype] = jnp.concatenate(
                [*own, jnp.zeros((*own[0].shape[:-1], fill), dtype)], axis=-1
            )
        return made

    def sent(self, dealt: Sequence[Arrays]) -> Rows:
        """A row for each owner, of this device's pieces of all matrices."""
        first, rows = [0] * len(self._pieces), []
        for load in self._loads:
            parts = [
                (p.dtype, _some(dealt[kind][at], first[kind], load[kind]))
                for kind, at, p, _ in self._places(load)
            ]
            rows.append(self._joined(parts, load))
            first = [a + b for a, b in zip(first, load, strict=True)]
        return {dtype: jnp.stack([row[dtype] for row in rows]) for dtype in self._lengths}

    def received(self, rows: Rows, load: tuple[int, ...]) -> list[Arrays]:
        """Of each kind and array all devices' pieces of an owner's matrices, (count, N, size)."""
        found: list[Arrays] = [[] for _ in self._pieces]
        for kind, _, p, part in self._places(load):
            own = rows[p.dtype][:, part].reshape(len(self._loads), load[kind], p.size)
            found[kind].append(jnp.swapaxes(own, 0, 1))
        return found

    def answered(self, made: Sequence[Arrays]) -> Rows:
        """The inverse: a row for each device."""
        load = tuple(arrays[0].shape[0] for arrays in made)
        parts = [
            (p.dtype, jnp.swapaxes(made[kind][at], 0, 1).reshape(len(self._loads), -1))
            for kind, at, p, _ in self._places(load)
        ]
        return self._joined(parts, load)

    def returned(self, rows: Rows) -> list[Arrays]:
        """Of each kind this device's pieces of what was made, of rows from each owner."""
        found: list[list[Arrays]] = [[[] for _ in arrays] for arrays in self._pieces]
        for owner, load in enumerate(self._loads):
            for kind, at, p, part in self._places(load):
                found[kind][at].append(rows[p.dtype][owner, part])
        return [
            [jnp.concatenate(x).reshape(-1, *p.piece) for p, x in zip(arrays, own, strict=True)]
            for arrays, own in zip(self._pieces, found, strict=True)
        ]
