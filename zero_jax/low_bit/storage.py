"""The storage of one state leaf in 8 or 16 bits, for any of its pieces."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.low_bit import codes
from zero_jax.sharding.layout import Partition
from zero_jax.sharding.mesh import Axis

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and stops
Starts = Sequence[int | jax.Array]  # where a piece begins in the leaf


@dataclasses.dataclass(frozen=True)
class Coding:
    """How a leaf is stored.

    Attributes:
      shape: The leaf's full shape.
      kind: "8bit" or "bf16".
      seed: Determines its rounding.
    """

    shape: tuple[int, ...]
    kind: str
    seed: int

    @property
    def block_dim(self) -> int | None:
        """The dim of its blocks, or None."""
        return codes.block_dim(self.shape) if self.kind == "8bit" else None

    def decode(self, parts: Sequence[jax.Array], starts: Starts) -> jax.Array:
        """Returns a piece in fp32.

        Args:
          parts: Its codes, of full blocks, and their scales if there are any.
          starts: Where it begins in the leaf.
        """
        if self.block_dim is None:
            return parts[0].astype(jnp.float32)
        return codes.decode(parts[0], parts[1], self.block_dim)

    def encode(self, piece: jax.Array, starts: Starts, step: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the codes of a piece, and their scales if there are any.

        Args:
          piece: fp32, of full blocks.
          starts: Where it begins in the leaf.
          step: Number of earlier updates.
        """
        piece = codes.without_padding(piece, starts, self.shape)
        noise = codes.noise(piece.shape, starts, self.shape, self.seed, step)
        if self.block_dim is None:
            return (codes.to_bfloat16(piece, noise),)
        scales = codes.scales_of(piece, self.block_dim)
        return codes.encode(piece, scales, self.block_dim, noise), scales


@dataclasses.dataclass(frozen=True)
class SpanningCoding(Coding):
    """The storage of a leaf whose blocks span devices; each device stores the dim's scales.

    A device's first block begins before its shard. One all-reduce of two numbers per scale makes
    the scales; no element is sent. Runs inside `shard_map`.

    Attributes:
      axis: The mesh axes that the dim of the blocks is sharded over.
    """

    axis: Axis

    def decode(self, parts: Sequence[jax.Array], starts: Starts) -> jax.Array:
        dim, size = self._dim, parts[0].shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        aligned = self._aligned(parts[0], before)
        decoded = codes.decode(aligned, self._local(parts[1], aligned, first), dim)
        return jax.lax.dynamic_slice_in_dim(decoded, before, size, dim)

    def encode(self, piece: jax.Array, starts: Starts, step: jax.Array) -> tuple[jax.Array, ...]:
        dim, size = self._dim, piece.shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        piece = codes.without_padding(piece, starts, self.shape)
        aligned = self._aligned(piece, before)
        begins = [*starts[:dim], first * codes.BLOCK, *starts[dim + 1 :]]
        noise = codes.noise(aligned.shape, begins, self.shape, self.seed, step)
        local = codes.scales_of(aligned, dim)
        blocks = codes.scales_shape(self.shape)[dim]
        none = jnp.zeros((*local.shape[:dim], blocks, *local.shape[dim + 1 :]), local.dtype)
        none = self._with_room(none, aligned)
        parts = jax.lax.dynamic_update_slice_in_dim(none, local, first, dim)
        scales = codes.larger(jax.lax.slice_in_dim(parts, 0, blocks, axis=dim), self.axis)
        encoded = codes.encode(aligned, self._local(scales, aligned, first), dim, noise)
        return jax.lax.dynamic_slice_in_dim(encoded, before, size, dim), scales

    @property
    def _dim(self) -> int:
        return codes.block_dim(self.shape)

    def _aligned(self, piece: jax.Array, before: int | jax.Array) -> jax.Array:
        """Returns a piece with zeros before and after it, of full blocks."""
        shape = list(piece.shape)
        shape[self._dim] = (-(-shape[self._dim] // codes.BLOCK) + 1) * codes.BLOCK
        empty = jnp.zeros(shape, piece.dtype)
        return jax.lax.dynamic_update_slice_in_dim(empty, piece, before, self._dim)

    def _local(self, scales: jax.Array, aligned: jax.Array, first: int | jax.Array) -> jax.Array:
        """Returns the scales of a piece, out of those of the dim."""
        blocks = aligned.shape[self._dim] // codes.BLOCK
        room = self._with_room(scales, aligned)
        return jax.lax.dynamic_slice_in_dim(room, first, blocks, self._dim)

    def _with_room(self, scales: jax.Array, aligned: jax.Array) -> jax.Array:
        """Pads scales: a slice that exceeds them would begin earlier."""
        more = aligned.shape[self._dim] // codes.BLOCK
        return jnp.pad(scales, [(0, more * (d == self._dim)) for d in range(scales.ndim)])


def on_devices(coding: Coding, split: Partition) -> Coding:
    """Returns the storage of the shards of a leaf."""
    if coding.block_dim is None or not blocks_span(split):
        return coding
    spec = [*split.stored_spec, *[None] * len(split.shape)]
    return SpanningCoding(coding.shape, coding.kind, coding.seed, spec[coding.block_dim])


def blocks_span(cut: Partition) -> bool:
    """Returns True if blocks of a leaf with this partition span devices.

    >>> from zero_jax.sharding.layout import partition
    >>> blocks_span(partition((64, 8192), 4)), blocks_span(partition((50257, 1600), 3))
    (False, True)
    """
    dim = codes.block_dim(cut.shape) - len(cut.shape)
    return dim in (cut.dim, cut.model) and cut.device_shape[dim] % codes.BLOCK > 0


def scales_split(split: Partition) -> Partition:
    """Returns the partition of scales: that of the leaf, but not along a dim whose blocks span."""
    dims: list[int | None] = [split.dim, split.model]
    if blocks_span(split):
        blocks = codes.block_dim(split.shape) - len(split.shape)
        dims = [None if dim == blocks else dim for dim in dims]
    shape = codes.scales_shape(split.shape)
    return dataclasses.replace(split, shape=shape, dim=dims[0], model=dims[1])


class Blocks(NamedTuple):
    """The units of pieces: elements, or blocks along `dim` with their scales."""

    dim: int = 0
    length: int = 1
    scales: int = 1


def blocks_of(codings: Sequence[Coding], cut: Partition) -> Blocks:
    """Returns the units of pieces of leaves that are updated together.

    Where blocks span devices, one unit is all that a device has.
    """
    dim = next((coding.block_dim for coding in codings), None)
    if dim is None:
        return Blocks()
    if blocks_span(cut):
        return Blocks(dim, cut.device_shape[dim], codes.scales_shape(cut.shape)[dim])
    return Blocks(dim, codes.BLOCK)


def _boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Splits a shape into contiguous pieces of at most `most` elements: (starts, stops).

    >>> list(_boxes((3, 4), 8))
    [((0, 0), (2, 4)), ((2, 0), (3, 4))]
    >>> len(list(_boxes((3, 4), 2)))
    6
    """
    shape = tuple(shape)
    if math.prod(shape) <= most or not shape:
        yield (0,) * len(shape), shape
        return
    rows = max(1, most // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        for starts, stops in _boxes(shape[1:], most):
            yield (start, *starts), (min(start + rows, shape[0]), *stops)


def boxes(shape: Sequence[int], most: int, blocks: Blocks) -> Iterator[tuple[Box, Box]]:
    """Splits a shape into pieces of full blocks: the box of elements and that of scales.

    >>> for box, scales in boxes((2, 5), 4, Blocks(1, 2)):
    ...     print(box, scales)
    ((0, 0), (1, 4)) ((0, 0), (1, 2))
    ((0, 4), (1, 5)) ((0, 2), (1, 3))
    ((1, 0), (2, 4)) ((1, 0), (2, 2))
    ((1, 4), (2, 5)) ((1, 2), (2, 3))
    """
    dim, length, scales = blocks

    def times(position: Sequence[int], factor: int) -> tuple[int, ...]:
        return tuple(n * factor if d == dim else n for d, n in enumerate(position))

    counted = [-(-n // length) if d == dim else n for d, n in enumerate(shape)]
    for starts, stops in _boxes(counted, max(1, most // length)):
        last = tuple(map(min, times(stops, length), shape))
        yield (times(starts, length), last), (times(starts, scales), times(stops, scales))
