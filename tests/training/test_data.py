"""The batches do not depend on the number of processes, nor on where a run was resumed."""

import itertools
import math

import numpy as np
import pytest

from training.data import batches, eval_batches, samples_per_epoch

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
ONE = {"shard_index": 0, "shard_count": 1}


def first(n, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    options = {"batch": 12, "seq": 8, "seed": 3, **ONE, **changed}
    return np.stack(list(itertools.islice(batches(TOKENS, **options), n)))


def test_each_token_but_the_first_is_a_target_once_per_epoch():
    rows = first(3)
    assert (rows.shape, rows.dtype) == ((3, 12, 9), np.int32)
    assert (np.diff(rows, axis=-1) == 1).all() and (rows[..., 0] % 8 == 0).all()
    tokens = TOKENS[: 24 * 8 + 1]  # 24 samples: 2 batches of 12
    for epoch in range(3):
        it = batches(tokens, batch=12, seq=8, seed=3, **ONE, start=24 * epoch)
        targets = np.concatenate([next(it)[:, 1:], next(it)[:, 1:]]).ravel()
        assert sorted(targets) == list(range(1, tokens.size))


def test_every_epoch_and_every_seed_is_another_order():
    per_epoch = samples_per_epoch(TOKENS.size, 8)
    np.testing.assert_array_equal(first(20), first(20))
    orders = [first(5, start=per_epoch * epoch) for epoch in range(3)]
    orders += [first(5, seed=4)]  # and neighbouring seeds share no epoch
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("shard_count", [2, 3, 12])
def test_processes_together_read_the_batches_of_one(shard_count):
    shards = [first(25, shard_index=i, shard_count=shard_count) for i in range(shard_count)]
    assert shards[0].shape[1] == 12 // shard_count
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), first(25))


@pytest.mark.parametrize("shard_count", [1, 4])
def test_resumed_stream_is_the_rest_of_the_stream(shard_count):
    options = {"shard_index": shard_count - 1, "shard_count": shard_count}
    whole = first(30, **options)  # 360 samples: three epochs of 124
    np.testing.assert_array_equal(first(19, **options, start=11 * 12), whole[11:])


@pytest.mark.parametrize("batch", [8, 1])
def test_resuming_with_another_batch_size_reads_on_at_the_same_sample(batch):
    samples = first(10).reshape(-1, 9)
    rest = first(80 // batch, batch=batch, start=36).reshape(-1, 9)
    np.testing.assert_array_equal(rest, samples[36:116])
    assert first(1, batch=batch, start=10**15).shape[1] == batch, "samples before are not read"


@pytest.mark.parametrize("n", [2, 9, 40, 41, 42, 97])
@pytest.mark.parametrize("shard_count", [1, 4])
def test_evaluation_sees_every_target_once_in_order(n, shard_count):
    tokens = TOKENS[:n] + 1  # no real token is 0, so padding shows
    shards = [
        list(eval_batches(tokens, batch=4, seq=5, shard_index=i, shard_count=shard_count))
        for i in range(shard_count)
    ]
    assert len({len(shard) for shard in shards}) == 1  # no process waits for one more batch
    targets = []
    for parts in zip(*shards, strict=True):
        rows, mask = (np.concatenate(half) for half in zip(*parts, strict=True))
        assert (rows.shape, mask.shape) == ((4, 6), (4, 5))
        assert (rows.dtype, mask.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(rows[:, 1:] != 0, mask == 1)
        np.testing.assert_array_equal(rows[:, 1:][mask == 1], rows[:, :-1][mask == 1] + 1)
        targets += rows[:, 1:][mask == 1].tolist()
    assert targets == tokens[1:].tolist()


def test_max_batches_ends_the_evaluation_early():
    options = {"batch": 4, "seq": 5, **ONE}
    whole = list(eval_batches(TOKENS, **options))
    part = list(eval_batches(TOKENS, **options, max_batches=3))
    assert (len(whole), len(part)) == (math.ceil(999 / 5 / 4), 3)
    np.testing.assert_array_equal(part[2][0], whole[2][0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batch": 10, "shard_count": 4}, "--batch 12 or 8"),
        ({"batch": 10, "shard_count": 4, "max_batches": None}, "--batch 12 or 8"),
        ({"shard_index": 4, "shard_count": 4}, "shard_index=4"),
        ({"batch": 0}, "batch=0"),
        ({"seq": 1000}, "--seq"),
        ({"seed": -1}, "seed=-1"),
        ({"max_batches": 0}, "max_batches=0"),
        ({"tokens": TOKENS[:1], "max_batches": None}, "at least 2 tokens"),
    ],
)
def test_batches_that_can_not_be_are_refused(changed, said):
    options = {"tokens": TOKENS, "batch": 12, "seq": 8, **ONE, **changed}
    tokens = options.pop("tokens")
    with pytest.raises(ValueError, match=said):
        if "max_batches" in changed:
            eval_batches(tokens, **options)
        else:
            batches(tokens, **{"seed": 3, **options})
