"""One leaf of a state in fewer bits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.sharding.cuts import Split
from zero_jax.states import codes, rounding


@dataclasses.dataclass(frozen=True)
class Coding:
    """How a leaf is kept, whichever piece of it is at hand.

    Attributes:
      shape: the leaf's logical shape.
      kind: "8bit" or "bf16".
      leaf: its number among those of the state, which its rounding depends on.
    """

    shape: tuple[int, ...]
    kind: str
    leaf: int

    @property
    def block_dim(self) -> int | None:
        """Along which dim blocks run, if there are any."""
        return codes.block_dim(self.shape) if self.kind == "8bit" else None

    def open(self, parts: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
        """A piece in fp32, of its codes, and of their scales if there are any.

        Args:
          parts: its codes, of whole blocks, and the blocks' scales.
          starts: where it begins in the leaf.
        """
        if self.block_dim is None:
            return parts[0].astype(jnp.float32)
        return codes.open(parts[0], parts[1], self.block_dim)

    def close(
        self, piece: jax.Array, starts: Sequence[Any], step: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The inverse.

        Args:
          piece: fp32; of whole blocks.
          starts: where it begins in the leaf.
          step: how often the state was updated before.
        """
        piece = rounding.without_padding(piece, starts, self.shape)
        noise = rounding.noise(piece.shape, starts, self.shape, self.leaf, step)
        if self.block_dim is None:
            return (rounding.to_bfloat16(piece, noise),)
        scales = codes.scales_of(piece, self.block_dim)
        return codes.close(piece, scales, self.block_dim, noise), scales


@dataclasses.dataclass(frozen=True)
class Straddling(Coding):
    """The same of a leaf whose blocks lie on several devices, each of which has all scales of them.

    A device's blocks begin before its piece does. Devices send each other what they know of the
    scales of the dim's blocks, two words each, by one all-reduce, and no element. Inside
    `shard_map`.

    Attributes:
      axis: the mesh axes that the blocks' dim is cut over.
    """

    axis: str | tuple[str, ...]

    def open(self, parts: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
        dim, size = self._dim, parts[0].shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        aligned = self._aligned(parts[0], before)
        opened = codes.open(aligned, self._own(parts[1], aligned, first), dim)
        return jax.lax.dynamic_slice_in_dim(opened, before, size, dim)

    def close(
        self, piece: jax.Array, starts: Sequence[Any], step: jax.Array
    ) -> tuple[jax.Array, ...]:
        dim, size = self._dim, piece.shape[self._dim]
        first, before = starts[dim] // codes.BLOCK, starts[dim] % codes.BLOCK
        piece = rounding.without_padding(piece, starts, self.shape)
        aligned = self._aligned(piece, before)
        begins = [*starts[:dim], first * codes.BLOCK, *starts[dim + 1 :]]
        noise = rounding.noise(aligned.shape, begins, self.shape, self.leaf, step)
        own = codes.scales_of(aligned, dim)
        blocks = codes.scales_shape(self.shape)[dim]
        none = jnp.zeros((*own.shape[:dim], blocks, *own.shape[dim + 1 :]), own.dtype)
        none = self._with_room(none, aligned)
        parts = jax.lax.dynamic_update_slice_in_dim(none, own, first, dim)
        scales = codes.larger(jax.lax.slice_in_dim(parts, 0, blocks, axis=dim), self.axis)
        closed = codes.close(aligned, self._own(scales, aligned, first), dim, noise)
        return jax.lax.dynamic_slice_in_dim(closed, before, size, dim), scales

    @property
    def _dim(self) -> int:
        return codes.block_dim(self.shape)

    def _aligned(self, piece: jax.Array, before: jax.Array) -> jax.Array:
        """A piece with zeros before and behind it, of whole blocks."""
        shape = list(piece.shape)
        shape[self._dim] = (-(-shape[self._dim] // codes.BLOCK) + 1) * codes.BLOCK
        empty = jnp.zeros(shape, piece.dtype)
        return jax.lax.dynamic_update_slice_in_dim(empty, piece, before, self._dim)

    def _own(self, scales: jax.Array, aligned: jax.Array, first: jax.Array) -> jax.Array:
        """Those of a piece, of the scales of all of its blocks."""
        blocks = aligned.shape[self._dim] // codes.BLOCK
        room = self._with_room(scales, aligned)
        return jax.lax.dynamic_slice_in_dim(room, first, blocks, self._dim)

    def _with_room(self, scales: jax.Array, aligned: jax.Array) -> jax.Array:
        """Scales with some behind them: a slice that is too long would begin earlier."""
        more = aligned.shape[self._dim] // codes.BLOCK
        return jnp.pad(scales, [(0, more * (d == self._dim)) for d in range(scales.ndim)])


def on_devices(how: Coding, cut: Split) -> Coding:
    """How the pieces of a leaf are kept that is cut like this."""
    if how.block_dim is None or not straddles(cut):
        return how
    spec = [*cut.spec_at_rest, *[None] * len(cut.shape)]
    return Straddling(how.shape, how.kind, how.leaf, spec[how.block_dim])


def straddles(cut: Split) -> bool:
    """Whether blocks of a leaf that is cut like this lie on several devices.

    >>> from zero_jax.sharding.cuts import split
    >>> straddles(split((64, 8192), 4)), straddles(split((50257, 1600), 3))
    (False, True)
    """
    dim = codes.block_dim(cut.shape) - len(cut.shape)
    return dim in (cut.dim, cut.model) and cut.device_shape[dim] % codes.BLOCK > 0


def scales_cut(cut: Split) -> Split:
    """How the scales of a leaf are cut: as the leaf, but not along a dim whose blocks straddle."""
    scales = dataclasses.replace(cut, shape=codes.scales_shape(cut.shape))
    if not straddles(cut):
        return scales
    dim = codes.block_dim(cut.shape) - len(cut.shape)
    return dataclasses.replace(
        scales,
        dim=None if cut.dim == dim else cut.dim,
        model=None if cut.model == dim else cut.model,
    )
