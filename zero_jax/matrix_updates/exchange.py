"""Matrices sent to their assigned devices, and results sent back. Runs inside `shard_map`.

Each device has a piece of every matrix. It sends a row to each device, with its pieces of the
matrices assigned to that device, and receives a row of results: two all-to-alls of N rows, as long
as the longest. Only the matrices that a device computes are full.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.matrix_updates.pieces import Pieces

Arrays = list[Any]
# Rows of all devices by dtype, (N, length).
Rows = dict[Any, jax.Array]


@dataclass(frozen=True)
class Kind:
    """Matrices with the same computation.

    Attributes:
      one: The computation for one matrix: (index, sharded, replicated) to results.
      sharded: Partition of the sharded inputs.
      results: Partition of the results.
      counts: Number of matrices of each device.
    """

    one: Callable[[Any, Arrays, Arrays], Arrays]
    sharded: tuple[Pieces, ...]
    results: tuple[Pieces, ...]
    counts: tuple[int, ...]

    def first(self, device: int) -> int:
        """Returns the first matrix of a device."""
        return sum(self.counts[:device])


def exchange(
    kinds: Sequence[Kind], axes: tuple[str, ...], sharded: list[Arrays], replicated: list[Arrays]
) -> list[Arrays]:
    """Computes all matrices, each on its assigned device.

    Args:
      kinds: The kinds of matrices.
      axes: The mesh axes that number devices.
      sharded: For each kind, this device's pieces of its matrices, stacked.
      replicated: For each kind, the inputs that each device has in full.

    Returns:
      For each kind, this device's pieces of the results, stacked.
    """
    loads = list(zip(*(kind.counts for kind in kinds), strict=True))
    there, back = (
        RowLayout([k.sharded for k in kinds], loads),
        RowLayout([k.results for k in kinds], loads),
    )
    received = _to_all(there.sent(sharded), axes)
    me = jax.lax.axis_index(axes)
    firsts = [jnp.asarray([k.first(o) for o in range(len(loads))])[me] for k in kinds]

    def work(load: tuple[int, ...], received: Rows) -> Rows:
        given = there.received(received, load)
        parts = zip(kinds, firsts, given, replicated, strict=True)
        return back.answered([_each(*part) for part in parts])

    # Devices with equal numbers of each kind run the same program.
    alike = sorted(set(loads))
    branches = [functools.partial(work, load) for load in alike]
    which = jnp.asarray([alike.index(load) for load in loads])[me]
    made = jax.lax.switch(which, branches, received)
    return back.returned(_to_all(made, axes))


def _to_all(rows: Rows, axes: tuple[str, ...]) -> Rows:
    """Sends row i to device i; row i of the result is from device i."""
    return {
        dtype: jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        for dtype, x in rows.items()
    }


def _each(kind: Kind, first: Any, given: Arrays, replicated: Arrays) -> Arrays:
    """Computes a kind's matrices of this device, from and to the pieces of all (count, N, size)."""

    def one(numbered: tuple[Any, Arrays]) -> Arrays:
        index, pieces = numbered
        whole = [p.join(x) for p, x in zip(kind.sharded, pieces, strict=True)]
        made = kind.one(index, whole, replicated)
        return [p.part(x) for p, x in zip(kind.results, made, strict=True)]

    count, devices = given[0].shape[:2]
    if count == 0:
        return [jnp.zeros((0, devices, p.size), p.dtype) for p in kind.results]
    return jax.lax.map(one, (first + jnp.arange(count), given))


def _some(stack: Any, first: int, count: int) -> Any:
    return jax.lax.slice_in_dim(stack, first, first + count).reshape(-1)


class RowLayout:
    """The content of a row: the matrices of a device, by kind and array.

    Args:
      pieces: For each kind, the partition of its arrays.
      loads: For each device, the number of matrices of each kind.
    """

    def __init__(self, pieces: Sequence[Sequence[Pieces]], loads: Sequence[tuple[int, ...]]):
        self._pieces, self._loads = pieces, loads
        self._lengths: dict[Any, int] = {}
        for load in loads:
            for dtype, end in self._ends(load).items():
                self._lengths[dtype] = max(end, self._lengths.get(dtype, 0))

    @property
    def length(self) -> int:
        """Elements of a row, of all dtypes."""
        return sum(self._lengths.values())

    def _places(self, load: tuple[int, ...]) -> Iterator[tuple[int, int, Pieces, slice]]:
        """Yields kind, array, its partition, and its slice in the row of its dtype."""
        ends: dict[Any, int] = {}
        for kind, (arrays, count) in enumerate(zip(self._pieces, load, strict=True)):
            for at, pieces in enumerate(arrays):
                start = ends.get(pieces.dtype, 0)
                ends[pieces.dtype] = start + count * pieces.size
                yield kind, at, pieces, slice(start, ends[pieces.dtype])

    def _ends(self, load: tuple[int, ...]) -> dict[Any, int]:
        return {pieces.dtype: part.stop for _, _, pieces, part in self._places(load)}

    def _joined(self, parts: Sequence[tuple[Any, Any]], load: tuple[int, ...]) -> Rows:
        """Concatenates parts (dtype, (..., n)), padded to the longest row."""
        made = {}
        for dtype, length in self._lengths.items():
            own = [x for kind, x in parts if kind == dtype]
            fill = length - self._ends(load).get(dtype, 0)
            made[dtype] = jnp.concatenate(
                [*own, jnp.zeros((*own[0].shape[:-1], fill), dtype)], axis=-1
            )
        return made

    def sent(self, sharded: Sequence[Arrays]) -> Rows:
        """Returns a row for each device, of this device's pieces of all matrices."""
        first, rows = [0] * len(self._pieces), []
        for load in self._loads:
            parts = [
                (p.dtype, _some(sharded[kind][at], first[kind], load[kind]))
                for kind, at, p, _ in self._places(load)
            ]
            rows.append(self._joined(parts, load))
            first = [a + b for a, b in zip(first, load, strict=True)]
        return {dtype: jnp.stack([row[dtype] for row in rows]) for dtype in self._lengths}

    def received(self, rows: Rows, load: tuple[int, ...]) -> list[Arrays]:
        """Returns the pieces (count, N, size) of a device's matrices, by kind and array."""
        found: list[Arrays] = [[] for _ in self._pieces]
        for kind, _, p, part in self._places(load):
            own = rows[p.dtype][:, part].reshape(len(self._loads), load[kind], p.size)
            found[kind].append(jnp.swapaxes(own, 0, 1))
        return found

    def answered(self, made: Sequence[Arrays]) -> Rows:
        """Inverts `received`: returns a row for each device."""
        load = tuple(arrays[0].shape[0] for arrays in made)
        parts = [
            (p.dtype, jnp.swapaxes(made[kind][at], 0, 1).reshape(len(self._loads), -1))
            for kind, at, p, _ in self._places(load)
        ]
        return self._joined(parts, load)

    def returned(self, rows: Rows) -> list[Arrays]:
        """Returns this device's pieces of the results, from a row of each device, by kind."""
        found: list[list[Arrays]] = [[[] for _ in arrays] for arrays in self._pieces]
        for device, load in enumerate(self._loads):
            for kind, at, p, part in self._places(load):
                found[kind][at].append(rows[p.dtype][device, part])
        return [
            [jnp.concatenate(x).reshape(-1, *p.piece) for p, x in zip(arrays, own, strict=True)]
            for arrays, own in zip(self._pieces, found, strict=True)
        ]
