"""Checksums of arrays, comparisons of replicas by them, and the shapes of chunks."""

import itertools

import jax
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.checkpoint import arrays, checksum
from zero_jax.checkpoint.replicas import ReplicasDiffer, check_replicas


def by_hand(piece, starts):
    """The same sum in Python's integers."""
    total = 0
    for index in itertools.product(*map(range, piece.shape)):
        term = int(checksum.words(piece)[index])
        for dim, (start, at) in enumerate(zip(starts, index, strict=True)):
            term *= int(checksum.factors(dim, start + at, 1)[0])
        total += term
    return total % checksum.MODULUS


@pytest.mark.parametrize("slab", [1, 5, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_the_checksum_is_that_of_all_elements(dtype, slab, monkeypatch):
    monkeypatch.setattr(checksum, "_SLAB", slab)
    for shape in [(), (0,), (1,), (37,), (1, 37), (3, 0), (7, 5), (2, 3, 1, 9)]:
        piece = np.asarray(np.random.default_rng(0).integers(0, 200, shape)).astype(dtype)
        starts = tuple(range(3, 3 + len(shape)))
        assert checksum.checksum(piece, starts) == by_hand(piece, starts)


def test_an_element_that_moves_or_changes_changes_the_checksum():
    piece = np.arange(12, dtype=np.float32).reshape(3, 4)
    sums = {checksum.checksum(piece, (0, 0)), checksum.checksum(piece, (0, 1))}
    sums.add(checksum.checksum(np.ascontiguousarray(piece[::-1]), (0, 0)))
    for index in np.ndindex(piece.shape):
        other = piece.copy()
        other[index] = -other[index] - 1
        sums.add(checksum.checksum(other, (0, 0)))
    assert len(sums) == 3 + piece.size


@pytest.mark.parametrize(("stage", "replica"), [(0, 1), (1, 2), (3, 1), (3, 2)])
def test_one_bit_on_one_device_is_found_and_named(stage, replica):
    zero = zero_jax.Zero(zero_jax.make_mesh(replica=replica), stage)
    params = zero.shard({"w": np.ones((24, 5), np.float32), "b": np.ones(3, np.float32)})
    state, old = zero.optimizer(optax.adam(1e-3)).init(params), params["w"]
    every, found = len(jax.tree.leaves((params, state))), check_replicas((params, state))
    parts = [np.array(shard.data) for shard in old.addressable_shards]
    parts[5].reshape(-1).view(np.uint32)[0] ^= 1
    placed = [
        jax.device_put(x, s.device) for x, s in zip(parts, old.addressable_shards, strict=True)
    ]
    changed = jax.make_array_from_single_device_arrays(old.shape, old.sharding, placed)
    if (stage, replica) == (3, 1):  # the matrices have no replicas
        assert 0 < found <= every - 3 == check_replicas((params | {"w": changed}, state))
        return
    assert found == every
    with pytest.raises(ReplicasDiffer, match=r"w.*\b5\b") as error:
        check_replicas((params | {"w": changed}, state))
    if stage == 0:
        assert "[5]" in str(error.value) and "[0, 1, 2, 3, 4, 6, 7]" in str(error.value)


def test_chunks_are_even_parts_of_a_shard():
    shapes = [(36, 4096, 4096), (50304, 4096), (101,), (3, 50021, 999), (1 << 28,), (7, 5)]
    for shape, shards in itertools.product(shapes, [1, 2, 3, 8]):
        split = int(np.argmax(shape))
        held = [-(-n // shards) if d == split else n for d, n in enumerate(shape)]
        chunk = arrays.chunk_shape(shape, held, 4)
        assert all(c <= h for c, h in zip(chunk, held, strict=True))
        assert shards == 1 or held[split] % chunk[split] == 0, "or two processes write one chunk"
        assert np.prod(chunk) * 4 <= 1.2 * arrays.CHUNK_BYTES
