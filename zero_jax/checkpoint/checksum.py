"""Checksums of arrays that do not depend on partitioning, padding or placement.

A checksum is a sum over elements modulo 2^64. A term is the bits of an element as an unsigned
integer, times an odd factor for each of its indices. Checksums of disjoint pieces add up to that
of the full array, so every process sums the pieces it stores. One changed element always changes
the sum, because odd factors are invertible; another change is missed with a probability of 2^-64.
"""

from collections.abc import Iterable

import numpy as np
from jax.experimental import multihost_utils

_SLAB = 1 << 20  # elements widened to 64 bits at a time
MODULUS = 1 << 64


def as_unsigned(piece: np.ndarray) -> np.ndarray:
    """Returns the same bits as unsigned integers.

    >>> as_unsigned(np.array([1.0, -0.0], np.float32)).tolist()
    [1065353216, 2147483648]
    """
    # `ascontiguousarray` gives a number one dim.
    return np.ascontiguousarray(piece).reshape(piece.shape).view(f"u{piece.dtype.itemsize}")


def checksum(piece: np.ndarray, starts: tuple[int, ...]) -> int:
    """Returns the checksum of a piece that begins at an index of the full array.

    >>> full = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> parts = checksum(full[:2], (0, 0)) + checksum(full[2:], (2, 0))
    >>> parts % 2**64 == checksum(full, (0, 0))
    True
    """
    if piece.size > _SLAB:
        dim = next(d for d, n in enumerate(piece.shape) if n > 1)
        half = piece.shape[dim] // 2
        first, second = np.split(piece, [half], dim)
        middle = (*starts[:dim], starts[dim] + half, *starts[dim + 1 :])
        return (checksum(first, starts) + checksum(second, middle)) % MODULUS
    total = as_unsigned(piece).astype(np.uint64)
    for dim in reversed(range(piece.ndim)):
        total = total @ factors(dim, starts[dim], piece.shape[dim])
    return int(total)


def factors(dim: int, start: int, count: int) -> np.ndarray:
    """Returns pseudo-random odd factors, one for each index (the finaliser of SplitMix64)."""
    x = np.arange(start, start + count, dtype=np.uint64)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(dim << 56)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def total(pieces: Iterable[tuple[tuple[int, ...], np.ndarray]]) -> int:
    """Returns the checksum of pieces, each with its start."""
    return sum(checksum(piece, starts) for starts, piece in pieces) % MODULUS


def sum_over_processes(values: list[int]) -> list[int]:
    """Adds up each number over all processes, modulo 2^64."""
    halves = np.array(values, np.uint64).view(np.uint32)  # JAX has no 64 bits by default
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(halves))
    return gathered.view(np.uint64).sum(axis=0).tolist()
