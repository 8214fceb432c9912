"""Updates states that rest in host memory, in pieces: to the device, updated, back, in place.

Inside `jit`, each device works on its own shards. Leaves are dealt to two lanes of about equal
bytes. A lane is a chain: a piece is fetched once the one before has been stored, which an
`optimization_barrier` holds XLA to; while one lane computes or stores, the other fetches. So the
device holds two pieces, whatever the model's size, and the host nothing twice: XLA slices the
donated host array and writes the slice back into it (read from the H100's program).

Bytes moved per step: all that streams, once to the device and once back. Sends nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from zero_jax.sharding.mesh import AnyMesh

LANES = 2
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter with all that is updated beside it.

    Attributes:
      arrays: at rest, all of the same global shape and split.
      on_host: which of them rest in host memory.
      spec: their partition spec.
      scalars: global values that `run` needs.
      run: takes pieces of `arrays` and the scalars; returns for each array its new piece, or None
        where it is only read.
    """

    arrays: list[jax.Array]
    on_host: list[bool]
    spec: PartitionSpec
    scalars: list[jax.Array]
    run: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array | None]]


def stream(leaves: Sequence[Leaf], mesh: AnyMesh, piece_bytes: int) -> list[list[jax.Array]]:
    """Runs every leaf's update in pieces.

    Args:
      leaves: what is to be updated.
      mesh: the mesh that the arrays are spread over.
      piece_bytes: most bytes of all arrays of a leaf together that one piece has on a device.

    Returns:
      For each leaf its arrays, new or as they were, in the memory where they rest.
    """
    arrays = [leaf.arrays for leaf in leaves]
    scalars = [leaf.scalars for leaf in leaves]
    specs = [[leaf.spec] * len(leaf.arrays) for leaf in leaves]

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


def boxes(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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


def _run_lane(
    lane: Sequence[int],
    leaves: Sequence[Leaf],
    arrays: list[list[jax.Array]],
    scalars: list[list[jax.Array]],
    piece_bytes: int,
) -> None:
    before: int | None = None
    for at in lane:
        own = arrays[at]
        element = sum(np.dtype(x.dtype).itemsize for x in own)
        for starts, stops in boxes(own[0].shape, max(1, piece_bytes // element)):
            if before is not None:
                _wait(arrays, before, at)
            before = at
            pieces = [
                _fetch(x, starts, stops, host)
                for x, host in zip(own, leaves[at].on_host, strict=True)
            ]
            results = leaves[at].run(pieces, scalars[at])
            for i, result in enumerate(results):
                if result is not None:
                    own[i] = _store(own[i], result, starts, leaves[at].on_host[i])


def _wait(arrays: list[list[jax.Array]], before: int, at: int) -> None:
    """What is read from here on of leaf `at` comes after all that was stored of `before`."""
    both = [before] if before == at else [before, at]
    held = jax.lax.optimization_barrier([arrays[i] for i in both])
    for i, group in zip(both, held, strict=True):
        arrays[i][:] = group


def _fetch(x: jax.Array, starts: Sequence[int], stops: Sequence[int], host: bool) -> jax.Array:
    piece = jax.lax.slice(x, starts, stops)
    return jax.device_put(piece, _DEVICE) if host else piece


def _store(x: jax.Array, piece: jax.Array, starts: Sequence[int], host: bool) -> jax.Array:
    piece = piece.astype(x.dtype)
    moved = jax.device_put(piece, _HOST) if host else piece
    return jax.lax.dynamic_update_slice(x, moved, starts)
