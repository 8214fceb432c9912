"""Updates states in pieces; those in host memory go to the device and back, and change in place.

Inside `jit`, each device works on its own shards. Leaves are dealt to two lanes of about equal
bytes. A lane is a chain: a piece is fetched once the one before has been stored, which an
`optimization_barrier` holds XLA to; while one lane computes or stores, the other fetches. So the
device holds two pieces, whatever the model's size, and the host nothing twice: XLA slices the
donated host array and writes the slice back into it (read from the H100's program).

Bytes moved per step: all that is in host memory, once to the device and once back. Sends nothing.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.sharding.mesh import AnyMesh

LANES = 2
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays of a leaf.

    Attributes:
      array: at rest.
      spec: its partition spec.
      on_host: whether it rests in host memory.
      by_block: whether it has scales of blocks of the others.
      joined: whether it is joined from its pieces at the end. Others are written into, which XLA
        does in place where it computes a piece as it writes it; of pieces that were in memory
        before, it copies the whole array each time.
    """

    array: jax.Array
    spec: PartitionSpec
    on_host: bool = False
    by_block: bool = False
    joined: bool = False


class Blocks(NamedTuple):
    """What pieces of a leaf are made of.

    Attributes:
      dim: along which blocks run.
      length: how many elements one has.
      scales: and how many scales.
    """

    dim: int
    length: int
    scales: int = 1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter with all that is updated beside it.

    Attributes:
      parts: of the same global shape and split, but for those by block.
      blocks: what pieces are made of, if not of elements.
      element_bytes: what an element takes while it is updated, in all parts together.
      scalars: global values that `run` needs.
      run: takes pieces of the parts, the scalars, and where the pieces begin in the global arrays;
        returns for each part its new piece, or None where it is only read.
    """

    parts: list[Part]
    blocks: Blocks | None
    element_bytes: int
    scalars: list[jax.Array]
    run: Callable[
        [Sequence[jax.Array], Sequence[jax.Array], Sequence[Any]], Sequence[jax.Array | None]
    ]


def stream(leaves: Sequence[Leaf], mesh: AnyMesh, piece_bytes: int) -> list[list[jax.Array]]:
    """Runs every leaf's update in pieces.

    Args:
      leaves: what is to be updated.
      mesh: the mesh that the arrays are spread over.
      piece_bytes: most bytes that one piece of a leaf takes on a device.

    Returns:
      For each leaf its arrays, new or as they were, in the memory where they rest.
    """
    if not leaves:
        return []
    arrays = [[part.array for part in leaf.parts] for leaf in leaves]
    scalars = [leaf.scalars for leaf in leaves]
    specs = [[part.spec for part in leaf.parts] for leaf in leaves]

    def local(
        arrays: list[list[jax.Array]], scalars: list[list[jax.Array]]
    ) -> list[list[jax.Array]]:
        arrays = [list(group) for group in arrays]
        for lane in lanes([sum(x.nbytes for x in group) for group in arrays]):
            _run_lane(lane, leaves, arrays, scalars, piece_bytes)
        return arrays

    whole: Any = PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, whole), out_specs=specs, check_vma=False
    )
    return mapped(arrays, scalars)


def lanes(sizes: Sequence[int]) -> list[list[int]]:
    """Deals leaves to lanes, the largest first, each to the lane that has least.

    >>> lanes([5, 4, 3, 2])
    [[0, 3], [1, 2]]
    """
    dealt: list[list[int]] = [[] for _ in range(LANES)]
    load = [0] * LANES
    for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lane = load.index(min(load))
        dealt[lane].append(at)
        load[lane] += sizes[at]
    return dealt


Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and stops
Piece = tuple[tuple[int, ...], jax.Array]  # where it starts, and what it is


def boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cuts a shape into contiguous pieces of at most so many elements: (starts, stops).

    >>> list(boxes((3, 4), 8))
    [((0, 0), (2, 4)), ((2, 0), (3, 4))]
    >>> len(list(boxes((3, 4), 2)))
    6
    """
    shape = tuple(shape)
    if math.prod(shape) <= most or not shape:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    rows = max(1, most // row)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        if row <= most:
            yield (start, *(0,) * (len(shape) - 1)), (stop, *shape[1:])
            continue
        for starts, stops in boxes(shape[1:], most):
            yield (start, *starts), (stop, *stops)


def boxes_of_blocks(
    shape: Sequence[int], most: int, blocks: Blocks | None
) -> Iterator[tuple[Box, Box]]:
    """As `boxes`, of whole blocks; each with where its scales are.

    >>> for box, scales in boxes_of_blocks((2, 5), 4, Blocks(1, 2)):
    ...     print(box, scales)
    ((0, 0), (1, 4)) ((0, 0), (1, 2))
    ((0, 4), (1, 5)) ((0, 2), (1, 3))
    ((1, 0), (2, 4)) ((1, 0), (2, 2))
    ((1, 4), (2, 5)) ((1, 2), (2, 3))
    """
    dim, length, scales = blocks or Blocks(0, 1)

    def times(place: Sequence[int], factor: int) -> tuple[int, ...]:
        return tuple(n * factor if d == dim else n for d, n in enumerate(place))

    counted = [-(-n // length) if d == dim else n for d, n in enumerate(shape)]
    for starts, stops in boxes(counted, max(1, most // length)):
        last = tuple(map(min, times(stops, length), shape))
        yield (times(starts, length), last), (times(starts, scales), times(stops, scales))


def _run_lane(
    lane: Sequence[int],
    leaves: Sequence[Leaf],
    arrays: list[list[jax.Array]],
    scalars: list[list[jax.Array]],
    piece_bytes: int,
) -> None:
    before: int | None = None
    for at in lane:
        leaf, own = leaves[at], arrays[at]
        most = max(1, piece_bytes // leaf.element_bytes)
        offsets = _offsets(own[0].shape, leaf.parts[0].spec)
        joined: dict[int, list[Piece]] = {}
        for box, of_scales in boxes_of_blocks(own[0].shape, most, leaf.blocks):
            if before is not None:
                _wait(arrays, before, at)
            before = at
            places = [of_scales if part.by_block else box for part in leaf.parts]
            pieces = [
                _fetch(x, place, part.on_host)
                for x, place, part in zip(own, places, leaf.parts, strict=True)
            ]
            starts = [offset + start for offset, start in zip(offsets, box[0], strict=True)]
            made: dict[int, jax.Array] = {}
            for i, result in enumerate(leaf.run(pieces, scalars[at], starts)):
                if result is not None and leaf.parts[i].joined:
                    made[i] = result.astype(own[i].dtype)
                elif result is not None:
                    own[i] = _store(own[i], result, places[i][0], leaf.parts[i].on_host)
            if made:  # before the next piece is begun, as what is stored
                own[:], made = jax.lax.optimization_barrier((own, made))
                for i, piece in made.items():
                    joined.setdefault(i, []).append((places[i][0], piece))
        for i, found in joined.items():
            own[i] = _joined(found, leaf.blocks).reshape(own[i].shape)


def _joined(pieces: Sequence[Piece], blocks: Blocks | None) -> jax.Array:
    """An array of its pieces, which `boxes_of_blocks` cut: flat.

    Where dims behind that of the blocks are cut, those of one block are side by side first; the
    others are contiguous.
    """
    dim = blocks.dim if blocks else 0
    rows = [
        [piece for _, piece in group]
        for _, group in itertools.groupby(pieces, lambda own: own[0][: dim + 1])
    ]
    return jnp.concatenate(
        [
            jnp.concatenate([x.reshape(x.shape[dim], -1) for x in row], 1).ravel()
            if len(row) > 1
            else row[0].ravel()
            for row in rows
        ]
    )


def _offsets(shape: Sequence[int], spec: PartitionSpec) -> list[Any]:
    """Where a device's part of an array begins along each dim; inside `shard_map`."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    pairs = zip(axes, shape, strict=True)
    return [0 if axis is None else jax.lax.axis_index(axis) * n for axis, n in pairs]


def _wait(arrays: list[list[jax.Array]], before: int, at: int) -> None:
    """What is read from here on of leaf `at` comes after all that was stored of `before`."""
    both = [before] if before == at else [before, at]
    held = jax.lax.optimization_barrier([arrays[i] for i in both])
    for i, group in zip(both, held, strict=True):
        arrays[i][:] = group


def _fetch(x: jax.Array, place: Box, host: bool) -> jax.Array:
    piece = jax.lax.slice(x, *place)
    return jax.device_put(piece, _DEVICE) if host else piece


def _store(x: jax.Array, piece: jax.Array, starts: Sequence[int], host: bool) -> jax.Array:
    piece = piece.astype(x.dtype)
    moved = jax.device_put(piece, _HOST) if host else piece
    return jax.lax.dynamic_update_slice(x, moved, starts)
