"""Text is read whole, and measured exactly."""

import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from training import entropy, text
from training.data_files import TokenFile
from training.entropy import bigram_entropy, unigram_entropy
from training.text import decode, load_tokens, split

TOKENS = np.arange(1000, dtype=np.uint16)

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
    assert corpus.tokens[:].tolist() == list("héllo\n".encode())


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
def test_bin_file_is_read_little_endian(tmp_path, name, dtype, options):
    ids = [0, 1, 513, 60000]
    (tmp_path / name).write_bytes(np.array(ids, dtype).tobytes())
    corpus = load_tokens(tmp_path / name, vocab=60001, **options)
    assert isinstance(corpus.tokens, TokenFile)
    assert corpus.tokens[:].tolist() == ids
    assert corpus.bytes_per_token is None
    assert not corpus.byte_level


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64", ">i4"])
def test_npy_file_of_any_integers_is_read(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.array([3, 1, 2], dtype))
    corpus = load_tokens(tmp_path / "t.npy", vocab=4)
    assert isinstance(corpus.tokens, TokenFile)
    assert corpus.tokens[:].tolist() == [3, 1, 2]


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


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_what_is_no_utf8_is_refused_with_its_place(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "CHUNK", chunk)
    (tmp_path / "t.txt").write_bytes("häß".encode() + b"\xe4 latin-1")
    with pytest.raises(ValueError, match="t.txt is not text in UTF-8: byte 5; "):
        load_tokens(tmp_path / "t.txt", vocab=256)
    (tmp_path / "t.txt").write_bytes("häß€".encode()[:-1])  # as `head -c` leaves it
    assert load_tokens(tmp_path / "t.txt", vocab=256).tokens.size == 7


def test_a_pickle_is_no_text(tmp_path):
    (tmp_path / "t.pkl").write_bytes(pickle.dumps("a text of letters", protocol=4))
    with pytest.raises(ValueError, match="not text in UTF-8"):
        load_tokens(tmp_path / "t.pkl", vocab=256)


@pytest.mark.parametrize("name", ["t.txt", "t.bin", "t.npy"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="not a regular file"):
        load_tokens(tmp_path / name, vocab=256)
    with pytest.raises(ValueError, match="not a regular file"):
        load_tokens(tmp_path, vocab=256)


def test_a_ring_of_two_folders_is_refused(tmp_path):
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("words")
        (tmp_path / name / "link").symlink_to(tmp_path / other)
    with pytest.raises(ValueError, match="link/link links to a folder that it is in"):
        load_tokens(tmp_path / "one", vocab=256)


def test_folders_behind_links_are_read_and_rings_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "away" / "deep").mkdir(parents=True)
    (tmp_path / "away" / "deep" / "b.txt").write_text("b")
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "z").symlink_to(tmp_path / "away")
    assert bytes(load_tokens(tmp_path / "data", vocab=256).tokens) == b"ab"
    (tmp_path / "away" / "deep" / "up").symlink_to(tmp_path / "away")
    with pytest.raises(ValueError, match="up links to a folder that it is in"):
        load_tokens(tmp_path / "data", vocab=256)


@pytest.mark.parametrize("shape", ["(-3,)", "(9223372036854775807, 9)", "((((((", "(2,)" * 9999])
def test_npy_with_a_header_of_no_sense_is_refused(tmp_path, shape):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".encode()
    size = len(header).to_bytes(4, "little")
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY\x02\x00" + size + header)
    with pytest.raises(ValueError, match="not a readable .npy"):
        load_tokens(tmp_path / "t.npy", vocab=256)


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
    monkeypatch.setattr(entropy, "CHUNK", chunk)
    chunked = unigram_entropy(tokens, vocab), bigram_entropy(tokens, vocab)
    assert chunked == pytest.approx(whole, rel=1e-12)  # sums of the same counts


def test_english_is_more_predictable_with_a_token_of_context():
    tokens = load_tokens(None, 256).tokens
    assert 0 < bigram_entropy(tokens, 256) < unigram_entropy(tokens, 256) < math.log(256)
