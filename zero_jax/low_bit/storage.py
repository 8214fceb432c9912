"""The storage of one state leaf in 8 or 16 bits, for any of its pieces."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.low_bit import codes
from zero_jax.sharding.partition import Partition


@dataclasses.dataclass(frozen=True)
class Coding:
    """How a leaf is stored.

    Attributes:
      shape: The leaf's full shape.
      kind: "8bit" or "bf16".
      leaf: The leaf's number in the state, which its rounding depends on.
    """

    shape: tuple[int, ...]
    kind: str
    leaf: int

    @property
    def block_dim(self) -> int | None:
        """The dim of its blocks, or None."""
        return codes.block_dim(self.shape) if self.kind == "8bit" else None

    def decode(self, parts: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
        """Returns a piece in fp32.

        Args:
          parts: Its codes, of full blocks, and their scales if there are any.
          starts: Where it begins in the leaf.
        """
        if self.block_dim is None:
            return parts[0].astype(jnp.float32)
        return codes.decode(parts[0], parts[1], self.block_dim)

    def encode(
        self, piece: jax.Array, starts: Sequence[Any], step: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Returns the codes of a piece, and their scales if there are any.

        Args:
          piece: fp32, of full blocks.
          starts: Where it begins in the leaf.
          step: Number of earlier updates.
        """
        piece = codes.without_padding(piece, starts, self.shape)
        noise = codes.noise(piece.shape, starts, self.shape, self.leaf, step)
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

    axis: str | tuple[str, ...]

    def decode(self, parts: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
        dim, size = self._dim, parts[0].shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        aligned = self._aligned(parts[0], before)
        decoded = codes.decode(aligned, self._local(parts[1], aligned, first), dim)
        return jax.lax.dynamic_slice_in_dim(decoded, before, size, dim)

    def encode(
        self, piece: jax.Array, starts: Sequence[Any], step: jax.Array
    ) -> tuple[jax.Array, ...]:
        dim, size = self._dim, piece.shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        piece = codes.without_padding(piece, starts, self.shape)
        aligned = self._aligned(piece, before)
        begins = [*starts[:dim], first * codes.BLOCK, *starts[dim + 1 :]]
        noise = codes.noise(aligned.shape, begins, self.shape, self.leaf, step)
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

    def _aligned(self, piece: jax.Array, before: jax.Array) -> jax.Array:
        """Returns a piece with zeros before and after it, of full blocks."""
        shape = list(piece.shape)
        shape[self._dim] = (-(-shape[self._dim] // codes.BLOCK) + 1) * codes.BLOCK
        empty = jnp.zeros(shape, piece.dtype)
        return jax.lax.dynamic_update_slice_in_dim(empty, piece, before, self._dim)

    def _local(self, scales: jax.Array, aligned: jax.Array, first: jax.Array) -> jax.Array:
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
    return SpanningCoding(coding.shape, coding.kind, coding.leaf, spec[coding.block_dim])


def blocks_span(cut: Partition) -> bool:
    """Returns True if blocks of a leaf with this partition span devices.

    >>> from zero_jax.sharding.partition import partition
    >>> blocks_span(partition((64, 8192), 4)), blocks_span(partition((50257, 1600), 3))
    (False, True)
    """
    dim = codes.block_dim(cut.shape) - len(cut.shape)
    return dim in (cut.dim, cut.model) and cut.device_shape[dim] % codes.BLOCK > 0


def scales_split(split: Partition) -> Partition:
    """Returns the partition of scales: that of the leaf, but not along a dim whose blocks span."""
    scales = dataclasses.replace(split, shape=codes.scales_shape(split.shape))
    if not blocks_span(split):
        return scales
    dim = codes.block_dim(split.shape) - len(split.shape)
    return dataclasses.replace(
        scales,
        dim=None if split.dim == dim else split.dim,
        model=None if split.model == dim else split.model,
    )
