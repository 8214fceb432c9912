"""The storage of one state leaf in 8 or 16 bits, for any of its pieces."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

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

    Where blocks span devices, each device stores the scales of their dim. One all-reduce of two
    numbers per scale makes them; no element is sent.

    Attributes:
      shape: The leaf's full shape.
      kind: "8bit" or "bf16".
      seed: Determines its rounding.
      axis: The mesh axes that its blocks span, for use inside `shard_map`, or None.
    """

    shape: tuple[int, ...]
    kind: str
    seed: int
    axis: Axis | None = None

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
        return codes.decode(parts[0], *self._of_blocks(parts[1], parts[0].shape, starts))

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
        scales = self._scales(piece, starts[self.block_dim], self.block_dim)
        return codes.encode(piece, *self._of_blocks(scales, piece.shape, starts), noise), scales

    def _scales(self, piece: jax.Array, start: int | jax.Array, dim: int) -> jax.Array:
        """Returns the scales of a piece, or of the whole dim if blocks span devices."""
        if self.axis is None:
            return codes.scales_of(piece, dim)

        def zeros(size: int, dtype: jnp.dtype) -> jax.Array:
            return jnp.zeros((*piece.shape[:dim], size, *piece.shape[dim + 1 :]), dtype)

        # A device's first block begins before its shard.
        parts, count = -(-piece.shape[dim] // codes.BLOCK) + 1, codes.scales_shape(self.shape)[dim]
        empty = zeros(parts * codes.BLOCK, piece.dtype)
        aligned = jax.lax.dynamic_update_slice_in_dim(empty, piece, start % codes.BLOCK, dim)
        scales = codes.scales_of(aligned, dim)
        # With room for all parts: an update that exceeds the array would begin earlier.
        none = zeros(count + parts, scales.dtype)
        known = jax.lax.dynamic_update_slice_in_dim(none, scales, start // codes.BLOCK, dim)
        return codes.larger(jax.lax.slice_in_dim(known, 0, count, axis=dim), self.axis)

    def _of_blocks(
        self, scales: jax.Array, shape: tuple[int, ...], starts: Starts
    ) -> tuple[jax.Array, int | None]:
        """Returns the scales of a piece and the dim of their blocks, None if one per element."""
        dim = self.block_dim
        if self.axis is None or dim is None:
            return scales, dim
        # Beyond the last block is padding, which is zero.
        at = (starts[dim] + jnp.arange(shape[dim])) // codes.BLOCK
        return jnp.take(scales, at, dim, mode="clip"), None


def on_devices(coding: Coding, split: Partition) -> Coding:
    """Returns the storage of the shards of a leaf."""
    if coding.block_dim is None or not blocks_span(split):
        return coding
    spec = [*split.stored_spec, *[None] * len(split.shape)]
    return dataclasses.replace(coding, axis=spec[coding.block_dim])


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
    blocks = codes.block_dim(split.shape) - len(split.shape) if blocks_span(split) else None
    data, model = (None if dim == blocks else dim for dim in (split.dim, split.model))
    return dataclasses.replace(split, shape=codes.scales_shape(split.shape), dim=data, model=model)


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


def boxes(split: Partition, most: int, coding: Coding | None) -> Iterator[tuple[Box, Box]]:
    """Splits a shard into pieces of full blocks: the box of elements and that of scales.

    Where blocks span devices, a piece has all elements of a device along their dim.

    Args:
      split: The partition of the leaf.
      most: The maximum number of elements of a piece.
      coding: The storage of its states on a device, None if they are in fp32.

    >>> for box, scales in boxes(Partition((2, 300), None, 1), 256, Coding((2, 300), "8bit", 0)):
    ...     print(box, scales)
    ((0, 0), (1, 256)) ((0, 0), (1, 2))
    ((0, 256), (1, 300)) ((0, 2), (1, 3))
    ((1, 0), (2, 256)) ((1, 0), (2, 2))
    ((1, 256), (2, 300)) ((1, 2), (2, 3))
    """
    shape, length, scales = split.device_shape, 1, 1
    dim = None if coding is None else coding.block_dim
    if coding is not None and dim is not None:
        length = codes.BLOCK
        if coding.axis is not None:
            length, scales = shape[dim], codes.scales_shape(split.shape)[dim]

    def times(position: Sequence[int], factor: int) -> tuple[int, ...]:
        return tuple(n * factor if d == dim else n for d, n in enumerate(position))

    counted = [-(-n // length) if d == dim else n for d, n in enumerate(shape)]
    for starts, stops in _boxes(counted, max(1, most // length)):
        last = tuple(map(min, times(stops, length), shape))
        yield (times(starts, length), last), (times(starts, scales), times(stops, scales))
