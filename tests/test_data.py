"""The text is read whole and measured exactly; the batches do not depend on the process count."""

import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training import text
from training.data import batches, eval_batches, samples_per_epoch
from training.text import bigram_entropy, decode, load_tokens, split, unigram_entropy

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
ONE = {"shard_index": 0, "shard_count": 1}


def first(n, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    options = {"batch": 12, "seq": 8, "seed": 3, **ONE, **changed}
    return np.stack(list(itertools.islice(batches(TOKENS, **options), n)))


# Text in, tokens out.


def test_default_corpus_is_english_text_and_the_same_each_time():
    corpus = load_tokens(None, vocab=256)
    again = load_tokens(None, vocab=256)
    assert corpus.byte_level
    assert corpus.bytes_per_token == 1.0
    assert " the " in decode(corpus.tokens[:2000])
    assert corpus.tokens.size > 100_000
    np.testing.assert_array_equal(corpus.tokens, again.tokens)


def test_text_file_is_its_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("héllo\n", encoding="utf-8")
    corpus = load_tokens(path, vocab=256)
    assert corpus.name == "a.txt"
    assert corpus.byte_level
    assert corpus.tokens.tolist() == list("héllo\n".encode())


def test_folder_joins_all_its_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("2")
    (tmp_path / "c.md").write_text("3")
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "empty").write_text("")
    assert decode(load_tokens(tmp_path, vocab=256).tokens) == "123"


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("t.bin", "<u2", {}),
        ("t.u32.bin", "<u4", {}),
        ("t.bin", "<u4", {"token_dtype": "uint32"}),
        ("t.u32.bin", "<u2", {"token_dtype": np.uint16}),
    ],
)
def test_bin_file_is_mapped_little_endian(tmp_path, name, dtype, options):
    ids = [0, 1, 513, 60000]
    (tmp_path / name).write_bytes(np.array(ids, dtype).tobytes())
    corpus = load_tokens(tmp_path / name, vocab=60001, **options)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == ids
    assert corpus.bytes_per_token is None
    assert not corpus.byte_level


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64", ">i4"])
def test_npy_file_of_any_integers_is_mapped(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.array([3, 1, 2], dtype))
    corpus = load_tokens(tmp_path / "t.npy", vocab=4)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == [3, 1, 2]


def test_missing_source_is_named():
    with pytest.raises(FileNotFoundError, match="no file or folder at nowhere"):
        load_tokens("nowhere", vocab=256)


@pytest.mark.parametrize("name", ["t.txt", "t.bin", "t.npy"])
def test_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty|No data"):
        load_tokens(tmp_path / name, vocab=256)


def test_npy_of_no_tokens_and_folder_of_no_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        load_tokens(tmp_path, vocab=256)
    np.save(tmp_path / "t.npy", np.zeros(0, np.uint16))
    with pytest.raises(ValueError, match=r"t\.npy"):
        load_tokens(tmp_path / "t.npy", vocab=256)


def test_binary_file_is_refused_with_the_place_of_its_nul(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"abc\0d")
    with pytest.raises(ValueError, match="NUL byte at 3"):
        load_tokens(tmp_path / "t.txt", vocab=256)


def test_folder_with_a_binary_file_is_refused_and_the_file_named(tmp_path):
    (tmp_path / "good.txt").write_text("abc")
    (tmp_path / "image.png").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"1 are not.*(\n|.)*image\.png"):
        load_tokens(tmp_path, vocab=256)


def test_folder_with_a_broken_link_is_refused(tmp_path):
    (tmp_path / "good.txt").write_text("abc")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="link is not a regular file"):
        load_tokens(tmp_path, vocab=256)


def test_token_outside_the_vocabulary_tells_position_value_and_needed_vocab(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK", 2)  # so that the position spans chunks
    np.save(tmp_path / "t.npy", np.array([1, 2, 3, 10, 4, 11], np.uint16))
    with pytest.raises(ValueError, match=r"token 10 at position 3 .*--vocab 12 or more"):
        load_tokens(tmp_path / "t.npy", vocab=10)


def test_negative_token_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.array([1, -7]))
    with pytest.raises(ValueError, match="token -7 at position 1"):
        load_tokens(tmp_path / "t.npy", vocab=10)


def test_byte_text_needs_a_vocab_that_holds_its_bytes():
    with pytest.raises(ValueError, match="--vocab"):
        load_tokens(None, vocab=64)


def test_bin_file_of_odd_size_is_refused(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes, not a multiple of 2"):
        load_tokens(tmp_path / "t.bin", vocab=2**16)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_bin_file_of_other_types_is_refused(tmp_path, dtype):
    (tmp_path / "t.bin").write_bytes(b"abcd")
    with pytest.raises(ValueError, match="holds uint16 or uint32"):
        load_tokens(tmp_path / "t.bin", vocab=2**16, token_dtype=dtype)


def test_token_dtype_is_for_bin_files_only():
    with pytest.raises(ValueError, match=r"for \.bin files"):
        load_tokens(None, vocab=256, token_dtype="uint16")


@pytest.mark.parametrize("array", [np.ones(3), np.ones((2, 2), np.uint16), np.ones(3, bool)])
def test_npy_file_of_other_arrays_is_refused(tmp_path, array):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ValueError, match="one-dimensional array of an integer type"):
        load_tokens(tmp_path / "t.npy", vocab=256)


@pytest.mark.parametrize("bare", [True, False])  # a pickle alone, or an array of objects
def test_pickle_in_a_npy_file_is_never_opened(tmp_path, bare):
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self):
            return Path.touch, (touched,)

    path = tmp_path / "t.npy"
    if bare:
        path.write_bytes(pickle.dumps(Evil()))
    else:
        np.save(path, np.array([Evil()], object), allow_pickle=True)
    with pytest.raises(ValueError, match="no pickles"):
        load_tokens(path, vocab=256)
    assert not touched.exists()


def test_split_holds_out_the_end_and_loses_nothing():
    train, held_out = split(TOKENS, 0.1)
    assert (train.size, held_out.size) == (900, 100)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), TOKENS)


def test_split_too_short_for_a_sequence_names_both_lengths():
    with pytest.raises(ValueError, match=r"900 to train on and 100 held out.*seq \+ 1 = 101"):
        split(TOKENS, 0.1, seq=100)
    split(TOKENS, 0.1, seq=99)


def test_decode_prints_text_and_never_control_characters():
    assert decode(np.frombuffer("né\n".encode(), np.uint8)) == "né\n"
    assert decode([27, 91, 50, 74, 0xFF, 300, -1]) == "\\x1b[2J\ufffd\ufffd\ufffd"


# Entropies.


def test_unigram_entropy_is_that_of_the_counts():
    # a, a, b, c: p = 1/2, 1/4, 1/4, so H = 1.5 bits
    assert unigram_entropy(np.array([0, 0, 1, 2]), 256) == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("vocab", [256, 50_000])  # counted densely and sparsely
def test_bigram_entropy_by_hand(vocab):
    assert bigram_entropy(np.array([0, 1] * 50), vocab) == 0
    # Pairs of 0 0 1 1 0: 00, 01, 11, 10. Either token is followed by both alike: log 2.
    assert bigram_entropy(np.array([0, 0, 1, 1, 0]), vocab) == pytest.approx(math.log(2))
    # Pairs of 0 0 0 1 0: 00, 00, 01, 10. After 0 (3 of 4 times): 2/3 against 1/3; after 1: sure.
    expected = 3 / 4 * (2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    assert bigram_entropy(np.array([0, 0, 0, 1, 0]), vocab) == pytest.approx(expected)


def test_independent_uniform_tokens_have_log_vocab_of_both():
    vocab, n = 8, 100_000
    tokens = np.random.default_rng(0).integers(0, vocab, n)
    # A count estimate of k cells is low by about k / 2n nats (Miller 1955): 64 / 2e5 = 3e-4.
    assert unigram_entropy(tokens, vocab) == pytest.approx(math.log(vocab), abs=1e-3)
    assert bigram_entropy(tokens, vocab) == pytest.approx(math.log(vocab), abs=1e-3)


@pytest.mark.parametrize("vocab", [256, 50_000])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_entropies_do_not_depend_on_the_chunks(monkeypatch, vocab, chunk):
    tokens = np.random.default_rng(1).geometric(0.3, 500).astype(np.uint16)
    whole = unigram_entropy(tokens, vocab), bigram_entropy(tokens, vocab)
    monkeypatch.setattr(text, "CHUNK", chunk)
    chunked = unigram_entropy(tokens, vocab), bigram_entropy(tokens, vocab)
    assert chunked == pytest.approx(whole, rel=1e-12)  # sums of the same counts


def test_english_is_more_predictable_with_a_token_of_context():
    tokens = load_tokens(None, 256).tokens
    assert 0 < bigram_entropy(tokens, 256) < unigram_entropy(tokens, 256) < math.log(256)


# Batches.


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


def test_mapped_token_file_feeds_batches(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "t.bin")
    mapped = load_tokens(tmp_path / "t.bin", vocab=1000).tokens
    it = batches(mapped, batch=12, seq=8, seed=3, **ONE)
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
    code = (
        "import sys, training.text, training.data, training.report; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
