"""Quantised leaves read from files: each device reads and quantises its own piece.

Blocks follow logical indices, so the rows of a device's piece are extended to whole blocks.
"""

import dataclasses
import functools

import numpy as np

from zero_jax.adapters.quantised import BLOCK, Quantised, quantise
from zero_jax.checkpoint.leaves import Read

Bounds = tuple[int, ...]


class Packed:
    """A leaf that is quantised as it is read.

    Quantised rows are cached, because codes and scales of a piece come from the same rows.

    Args:
      read: Reads a part of the matrix, in fp32.
      leaf: The quantised leaf, or its shapes.

    >>> matrix = np.linspace(-1, 1, 256, dtype=np.float32).reshape(128, 2)
    >>> like = quantise(matrix, "nf4", -2)
    >>> packed = Packed(lambda a, b: matrix[a[0] : b[0], a[1] : b[1]], like)
    >>> bool((packed.part("codes")((40, 1), (64, 2)) == like.codes[40:64, 1:]).all())
    True
    """

    def __init__(self, read: Read, leaf: Quantised):
        self._leaf = leaf
        self._quantised = functools.cache(functools.partial(_quantised, read, leaf))

    def part(self, name: str) -> Read:
        """Returns a function that reads a part of "codes" or "scales"."""
        array = getattr(self._leaf, name)
        at = self._leaf.dim % len(array.shape)
        each = array.shape[at] // max(1, self._leaf.scales.shape[at])  # rows of a block

        def read(starts: Bounds, stops: Bounds) -> np.ndarray:
            first, last = starts[at] // each, -(-stops[at] // each)
            rows = first * BLOCK, max(first * BLOCK, min(last * BLOCK, self._leaf.rows))
            quantised = self._quantised(_with(starts, at, rows[0]), _with(stops, at, rows[1]))
            skipped = first * each
            box = (slice(None),) * at + (slice(starts[at] - skipped, stops[at] - skipped),)
            part: np.ndarray = getattr(quantised, name)[box]
            return part

        return read


def _quantised(read: Read, leaf: Quantised, starts: Bounds, stops: Bounds) -> Quantised:
    """Reads a stack one layer after the other: only one is in fp32 at a time."""
    if leaf.dim == -len(starts) or starts[0] == stops[0]:
        return quantise(read(starts, stops), leaf.kind, leaf.dim)
    layers = [
        quantise(read((at, *starts[1:]), (at + 1, *stops[1:])), leaf.kind, leaf.dim)
        for at in range(starts[0], stops[0])
    ]
    codes, scales = (np.concatenate([getattr(x, n) for x in layers]) for n in ("codes", "scales"))
    return dataclasses.replace(layers[0], codes=codes, scales=scales)


def _with(bounds: Bounds, at: int, value: int) -> Bounds:
    return (*bounds[:at], value, *bounds[at + 1 :])
