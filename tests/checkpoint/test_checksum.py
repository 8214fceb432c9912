"""Checksums of arrays, comparisons of replicas by them, and the shapes of chunks."""

import itertools

import jax
import jax.numpy as jnp
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
@pytest.mark.parametrize("shape", [(), (0,), (1,), (37,), (1, 37), (3, 0), (7, 5), (2, 3, 1, 9)])
def test_the_checksum_is_that_of_all_elements(shape, dtype, slab, monkeypatch):
    monkeypatch.setattr(checksum, "_SLAB", slab)
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


def states(stage, **axes):
    zero = zero_jax.Zero(zero_jax.make_mesh(**axes), stage)
    params = zero.shard({"w": np.ones((24, 5), np.float32), "b": np.ones(3, np.float32)})
    return params, zero.optimizer(optax.adam(1e-3)).init(params)


def test_equal_replicas_pass():
    every = len(jax.tree.leaves(states(0)))
    assert check_replicas(states(0)) > every * 0.9
    assert 0 < check_replicas(states(3)) < every  # without the sharded matrices
    for stage, replica in ((1, 2), (3, 4)):
        assert check_replicas(states(stage, replica=replica)) > every * 0.9


@pytest.mark.parametrize(("stage", "axes"), [(0, {}), (3, {"replica": 2})])
def test_one_bit_on_one_device_is_found_and_named(stage, axes):
    params, state = states(stage, **axes)
    parts = []
    for shard in params["w"].addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == 5:
            part.reshape(-1).view(np.uint32)[0] ^= 1
        parts.append(jax.device_put(part, shard.device))
    old = params["w"]
    changed = jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)
    with pytest.raises(ReplicasDiffer, match=r"w.*\b5\b") as error:
        check_replicas((params | {"w": changed}, state))
    if stage == 0:
        assert "[5]" in str(error.value) and "[0, 1, 2, 3, 4, 6, 7]" in str(error.value)


def test_chunks_are_even_parts_of_a_shard():
    for shape, shards in itertools.product(
        [(36, 4096, 4096), (50304, 4096), (101,), (3, 50021, 999), (1 << 28,), (7, 5)], [1, 2, 3, 8]
    ):
        split = int(np.argmax(shape))
        held = [-(-n // shards) if d == split else n for d, n in enumerate(shape)]
        chunk = arrays.chunk_shape(shape, held, jnp.dtype("float32").itemsize)
        assert all(c <= h for c, h in zip(chunk, held, strict=True))
        assert shards == 1 or held[split] % chunk[split] == 0, "or two processes write one chunk"
        assert np.prod(chunk) * 4 <= 1.2 * arrays.CHUNK_BYTES
