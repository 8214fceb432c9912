"""A checksum of an array that does not depend on how it is cut, padded or placed.

It is a sum over elements: the bits of an element, as an unsigned number, times an odd number for
each of its indices, modulo 2^64. Sums of disjoint pieces add up to that of the whole, so every
process adds what it holds. A single element that differs always changes the sum, since an odd
factor can be undone; any other difference goes unseen once in 2^64.
"""

from collections.abc import Iterator

import numpy as np

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SLAB = 1 << 20  # elements widened to 64 bits at a time
MODULUS = 1 << 64


def words(piece: np.ndarray) -> np.ndarray:
    """The same bits as unsigned integers.

    >>> words(np.array([1.0, -0.0], np.float32)).tolist()
    [1065353216, 2147483648]
    """
    return np.ascontiguousarray(piece).reshape(piece.shape).view(_WORDS[piece.dtype.itemsize])


def checksum(piece: np.ndarray, starts: tuple[int, ...]) -> int:
    """The sum over a piece of an array, modulo 2^64.

    Args:
      piece: of any dtype with elements of 1, 2, 4 or 8 bytes.
      starts: where the piece begins in the whole array.

    >>> whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> parts = checksum(whole[:2], (0, 0)) + checksum(whole[2:], (2, 0))
    >>> parts % 2**64 == checksum(whole, (0, 0))
    True
    """
    if piece.size > _SLAB:
        return sum(checksum(part, at) for part, at in _slabs(piece, starts)) % MODULUS
    total = words(piece).astype(np.uint64)
    for dim in reversed(range(piece.ndim)):
        total = total @ factors(dim, starts[dim], piece.shape[dim])
    return int(total)


def _slabs(
    piece: np.ndarray, starts: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Contiguous parts along the outermost dim that can be cut, and where each starts."""
    dim = next(d for d, n in enumerate(piece.shape) if n > 1)
    step = max(1, _SLAB * piece.shape[dim] // piece.size)
    for at in range(0, piece.shape[dim], step):
        part = piece[(slice(None),) * dim + (slice(at, at + step),)]
        yield part, (*starts[:dim], starts[dim] + at, *starts[dim + 1 :])


def factors(dim: int, start: int, count: int) -> np.ndarray:
    """Odd numbers without a pattern, one for each index (the finaliser of SplitMix64)."""
    x = np.arange(start, start + count, dtype=np.uint64)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(dim << 56)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
