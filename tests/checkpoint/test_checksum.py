"""The sum itself, against the same sum in Python's integers, however the array is cut."""

import itertools

import numpy as np
import pytest

from zero_jax.checkpoint import checksum


def by_hand(piece, starts):
    total = 0
    for index in itertools.product(*map(range, piece.shape)):
        term = int(checksum.words(piece)[index])
        for dim, (start, at) in enumerate(zip(starts, index, strict=True)):
            term *= int(checksum.factors(dim, start + at, 1)[0])
        total += term
    return total % checksum.MODULUS


@pytest.mark.parametrize("slab", [1, 5, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (37,), (1, 37), (3, 0), (7, 5), (2, 3, 1, 9)])
def test_the_sum_is_that_of_all_elements_in_slabs_of_any_size(shape, dtype, slab, monkeypatch):
    monkeypatch.setattr(checksum, "_SLAB", slab)
    piece = np.asarray(np.random.default_rng(0).integers(0, 200, shape)).astype(dtype)
    starts = tuple(range(3, 3 + len(shape)))
    assert checksum.checksum(piece, starts) == by_hand(piece, starts)


def test_an_element_that_moves_or_changes_changes_the_sum():
    piece = np.arange(12, dtype=np.float32).reshape(3, 4)
    sums = {checksum.checksum(piece, (0, 0)), checksum.checksum(piece, (0, 1))}
    sums.add(checksum.checksum(np.ascontiguousarray(piece[::-1]), (0, 0)))
    for index in np.ndindex(piece.shape):
        other = piece.copy()
        other[index] = -other[index] - 1
        sums.add(checksum.checksum(other, (0, 0)))
    assert len(sums) == 3 + piece.size
