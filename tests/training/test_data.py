"""The batches do not depend on the number of processes, nor on where a run was resumed."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.data import batches, eval_batches, samples_per_epoch
from training.text import load_tokens

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
ONE = {"shard_index": 0, "shard_count": 1}


def first(n, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    options = {"batch": 12, "seq": 8, "seed": 3, **ONE, **changed}
    return np.stack(list(itertools.islice(batches(TOKENS, **options), n)))


def test_batches_are_int32_rows_of_consecutive_tokens():
    rows = first(3)
    assert rows.shape == (3, 12, 9)
    assert rows.dtype == np.int32
    assert (np.diff(rows, axis=-1) == 1).all()  # tokens are positions
    assert (rows[..., 0] % 8 == 0).all()


def test_each_token_but_the_first_is_a_target_once_per_epoch():
    tokens = TOKENS[: 24 * 8 + 1]  # 24 samples: 2 batches of 12
    for epoch in range(3):
        it = batches(tokens, batch=12, seq=8, seed=3, **ONE, start=24 * epoch)
        targets = np.concatenate([next(it)[:, 1:], next(it)[:, 1:]]).ravel()
        assert sorted(targets) == list(range(1, tokens.size))


def test_every_epoch_is_a_new_order():
    per_epoch = samples_per_epoch(TOKENS.size, 8)
    orders = [first(5, start=per_epoch * epoch) for epoch in range(3)]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))


def test_the_seed_decides_the_stream():
    np.testing.assert_array_equal(first(20), first(20))
    assert not np.array_equal(first(20), first(20, seed=4))


def test_neighbouring_seeds_share_no_epoch():
    per_epoch = samples_per_epoch(TOKENS.size, 8)
    assert not np.array_equal(first(5, seed=3, start=per_epoch), first(5, seed=4))


@pytest.mark.parametrize("shard_count", [2, 3, 4, 12])
def test_processes_together_read_the_batches_of_one(shard_count):
    shards = [first(25, shard_index=i, shard_count=shard_count) for i in range(shard_count)]
    assert shards[0].shape[1] == 12 // shard_count
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), first(25))


@pytest.mark.parametrize("shard_count", [1, 4])
def test_resumed_stream_is_the_rest_of_the_stream(shard_count):
    options = {"shard_index": shard_count - 1, "shard_count": shard_count}
    whole = first(30, **options)  # 360 samples: three epochs of 124
    np.testing.assert_array_equal(first(19, **options, start=11 * 12), whole[11:])


def test_resuming_with_another_batch_size_goes_on_at_the_same_sample():
    samples = first(10).reshape(-1, 9)
    np.testing.assert_array_equal(first(10, batch=8, start=36).reshape(-1, 9), samples[36:116])


def test_batches_of_one_row_work_too():
    np.testing.assert_array_equal(first(24, batch=1)[:, 0], first(2).reshape(24, 9))


def test_resuming_far_out_reads_no_sample_before():
    class Counted(np.ndarray):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    it = batches(TOKENS.view(Counted), batch=4, seq=8, seed=0, **ONE, start=10**15)
    next(it)
    # One batch is asked for, and at most three more are read ahead.
    assert 4 <= Counted.reads <= 16


def test_a_token_file_feeds_batches(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "t.bin")
    tokens = load_tokens(tmp_path / "t.bin", vocab=1000).tokens
    it = batches(tokens, batch=12, seq=8, seed=3, **ONE)
    np.testing.assert_array_equal(next(it), first(1)[0])


@pytest.mark.parametrize("make", [batches, eval_batches])
def test_batch_that_does_not_divide_over_the_processes_is_refused_at_once(make):
    extra = {"seed": 0} if make is batches else {}
    with pytest.raises(ValueError, match=r"10 rows .* 4 processes; take --batch 12 or 8"):
        make(TOKENS, batch=10, seq=8, shard_index=0, shard_count=4, **extra)
    with pytest.raises(ValueError, match=r"shard_index=4.*\[0, 4\)"):
        make(TOKENS, batch=8, seq=8, shard_index=4, shard_count=4, **extra)


def test_text_shorter_than_one_sample_is_refused():
    with pytest.raises(ValueError, match=r"1000 tokens .* seq \+ 1 = 1001"):
        first(1, seq=1000)


# Evaluation.


@pytest.mark.parametrize("n", [2, 5, 9, 40, 41, 42, 97])
@pytest.mark.parametrize("shard_count", [1, 2, 4])
def test_evaluation_sees_every_target_once_in_order(n, shard_count):
    tokens = TOKENS[:n] + 1  # no real token is 0, so padding shows
    shards = [
        list(eval_batches(tokens, batch=4, seq=5, shard_index=i, shard_count=shard_count))
        for i in range(shard_count)
    ]
    assert len({len(shard) for shard in shards}) == 1  # nobody waits for a batch that never comes
    targets = []
    for parts in zip(*shards, strict=True):
        rows, mask = (np.concatenate(half) for half in zip(*parts, strict=True))
        assert rows.shape == (4, 6)
        assert mask.shape == (4, 5)
        assert (rows.dtype, mask.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(rows[:, 1:] != 0, mask == 1)
        np.testing.assert_array_equal(rows[:, 1:][mask == 1], rows[:, :-1][mask == 1] + 1)
        targets += rows[:, 1:][mask == 1].tolist()
    assert targets == tokens[1:].tolist()


def test_max_batches_ends_the_evaluation_early():
    options = {"batch": 4, "seq": 5, **ONE}
    whole = list(eval_batches(TOKENS, **options))
    part = list(eval_batches(TOKENS, **options, max_batches=3))
    assert len(whole) == math.ceil(999 / 5 / 4)
    assert len(part) == 3
    np.testing.assert_array_equal(part[2][0], whole[2][0])
    with pytest.raises(ValueError, match="max_batches=0"):
        eval_batches(TOKENS, **options, max_batches=0)


def test_importing_the_modules_does_not_import_jax():
    modules = "training.text, training.entropy, training.data, training.run_folder, training.show"
    code = f"import sys, {modules}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
