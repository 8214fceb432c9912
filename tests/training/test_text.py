"""Text and token files are read whole, and their entropies are exact."""

import io
import math
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

from training import entropy, text
from training.data_files import TokenFile
from training.entropy import bigram_entropy, unigram_entropy
from training.text import decode, load_tokens, split

TOKENS = np.arange(1000, dtype=np.uint16)


def test_default_corpus_is_english_text_and_the_same_each_time():
    corpus = load_tokens(None, vocab=256)
    assert corpus.byte_level and corpus.bytes_per_token == 1.0
    assert " the " in decode(corpus.tokens[:2000]) and corpus.tokens.size > 100_000
    np.testing.assert_array_equal(corpus.tokens, load_tokens(None, vocab=256).tokens)
    tokens = corpus.tokens
    assert 0 < bigram_entropy(tokens, 256) < unigram_entropy(tokens, 256) < math.log(256)


def test_text_is_its_bytes_and_a_folder_its_files_in_the_order_of_their_paths(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("héllo\n", encoding="utf-8")
    corpus = load_tokens(path, vocab=256)
    assert (corpus.name, corpus.byte_level) == ("a.txt", True)
    assert corpus.tokens[:].tolist() == list("héllo\n".encode())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("2")
    (tmp_path / "c.md").write_text("3")
    (tmp_path / "empty").write_text("")
    (tmp_path.parent / "away").mkdir()
    (tmp_path.parent / "away" / "deep.txt").write_text("4")
    (tmp_path / "z").symlink_to(tmp_path.parent / "away")
    assert decode(load_tokens(tmp_path, vocab=256).tokens) == "héllo\n234"


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("t.bin", "<u2", {}),
        ("t.u32.bin", "<u4", {}),
        ("t.bin", "<u4", {"token_dtype": "uint32"}),
        ("t.u32.bin", "<u2", {"token_dtype": np.uint16}),
        *(("t.npy", dtype, {}) for dtype in ("uint16", "uint32", "int64", ">i4")),
    ],
)
def test_token_files_are_read_as_their_type(tmp_path, name, dtype, options):
    ids = np.array([0, 1, 513, 60000], dtype)
    (tmp_path / name).write_bytes(npy(ids) if name.endswith(".npy") else ids.tobytes())
    corpus = load_tokens(tmp_path / name, vocab=60001, **options)
    assert isinstance(corpus.tokens, TokenFile)
    assert corpus.tokens[:].tolist() == ids.tolist()
    assert corpus.bytes_per_token is None and not corpus.byte_level


def npy(array):
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


TOUCHED = Path(tempfile.gettempdir(), f"touched-{os.getpid()}")


class Evil:
    def __reduce__(self):
        return Path.touch, (TOUCHED,)


def npy_of_shape(shape):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header


# fmt: off
REFUSED = [
    *((f"t.{kind}", b"", {}, f"t.{kind}") for kind in ("txt", "bin", "npy")),
    ("t.npy", npy(np.zeros(0, np.uint16)), {}, "t.npy"), ("t.txt", b"abc\0d", {}, "t.txt .*3"),
    ("t.pkl", pickle.dumps("a text of letters", protocol=4), {}, "t.pkl"),
    *(("t.npy", npy_of_shape(shape), {}, r"t\.npy")
      for shape in ("(-3,)", "(9223372036854775807, 9)", "((((((", "(2,)" * 9999)),
    *(("t.npy", npy(array), {}, r"t\.npy")
      for array in (np.ones(3), np.ones((2, 2), np.uint16), np.ones(3, bool))),
    ("t.npy", pickle.dumps(Evil()), {}, r"t\.npy"),
    ("t.npy", npy(np.array([Evil()], object)), {}, r"t\.npy"),
    ("t.npy", npy(np.array([1, -7])), {"vocab": 10}, "token -7 at position 1"),
    ("t.npy", npy(np.array([1, 2, 3, 10, 4, 11], np.uint16)), {"vocab": 10},
     "token 10 at position 3 .*--vocab 12"),
    ("t.bin", b"abc", {}, "t.bin .*3 bytes"),
    ("t.bin", b"abcd", {"token_dtype": "float32"}, "token_dtype=float32"),
    ("t.bin", b"abcd", {"token_dtype": "int8"}, "token_dtype=int8"),
    ("t.txt", b"abcd", {"token_dtype": "uint16"}, "token_dtype=uint16"),
    ("t.txt", b"abcd", {"vocab": 64}, "--vocab"),
    ("t.txt", b"abcd", {"vocab": 2**31}, "vocab=2147483648"),
]
# fmt: on


def test_files_that_are_no_tokens_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHUNK", 2)  # so that positions span chunks
    for name, content, options, said in REFUSED:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=said):
            load_tokens(tmp_path / name, **{"vocab": 2**16, **options})
    assert not TOUCHED.exists(), "a pickle is never opened"


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_other_encodings_than_utf8_are_refused_with_the_place(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text, "CHUNK", chunk)
    (tmp_path / "t.txt").write_bytes("häß".encode() + b"\xe4 latin-1")
    with pytest.raises(ValueError, match="t.txt .*byte 5"):
        load_tokens(tmp_path / "t.txt", vocab=256)
    (tmp_path / "t.txt").write_bytes("häß€".encode()[:-1])  # as `head -c` leaves it
    assert load_tokens(tmp_path / "t.txt", vocab=256).tokens.size == 7


def test_folders_with_other_files_broken_links_or_rings_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tokens("nowhere", vocab=256)
    for name in ("empty", "binary", "broken", "one", "two"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "good.txt").write_text("abc")
    (tmp_path / "binary" / "image.png").write_bytes(b"\0\0")
    (tmp_path / "binary" / "ids.bin").write_bytes(b"abcd")
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "one" / "link").symlink_to(tmp_path / "two")
    (tmp_path / "two" / "link").symlink_to(tmp_path / "one")
    known = (("empty", "empty"), ("binary", r"(ids\.bin(\n|.)*image\.png)"), ("broken", "link"))
    for name, said in (*known, ("one", "link/link")):
        with pytest.raises(ValueError, match=said):
            load_tokens(tmp_path / name, vocab=256)


def test_split_holds_out_the_end_and_decode_prints_text():
    train, held_out = split(TOKENS, 0.1, seq=99)
    assert (train.size, held_out.size) == (900, 100)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), TOKENS)
    with pytest.raises(ValueError, match="900 .* 100 .*--seq"):
        split(TOKENS, 0.1, seq=100)
    with pytest.raises(ValueError, match="fraction=1"):
        split(TOKENS, 1.0)
    # Text is printed without control characters.
    assert decode(np.frombuffer("né\n".encode(), np.uint8)) == "né\n"
    assert decode([27, 91, 50, 74, 0xFF, 300, -1]) == "\\x1b[2J\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("vocab", [256, 50_000])  # counted densely and sparsely
@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_entropies_are_those_of_the_counts_of_any_chunks(monkeypatch, vocab, chunk):
    monkeypatch.setattr(entropy, "CHUNK", chunk)
    # a, a, b, c: p = 1/2, 1/4, 1/4, so H = 1.5 bits
    assert unigram_entropy(np.array([0, 0, 1, 2]), vocab) == pytest.approx(1.5 * math.log(2))
    assert bigram_entropy(np.array([0, 1] * 50), vocab) == 0
    # Pairs of 0 0 1 1 0: 00, 01, 11, 10. Either token is followed by both alike: log 2.
    assert bigram_entropy(np.array([0, 0, 1, 1, 0]), vocab) == pytest.approx(math.log(2))
    # Pairs of 0 0 0 1 0: 00, 00, 01, 10. After 0 (3 of 4 times): 2/3 against 1/3; after 1: sure.
    expected = 3 / 4 * (2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    assert bigram_entropy(np.array([0, 0, 0, 1, 0]), vocab) == pytest.approx(expected)
    monkeypatch.undo()
    tokens = np.random.default_rng(0).integers(0, 8, 100_000)
    # A count estimate of k cells is low by about k / 2n nats (Miller 1955): 64 / 2e5 = 3e-4.
    for found in (unigram_entropy(tokens, 8), bigram_entropy(tokens, 8)):
        assert found == pytest.approx(math.log(8), abs=1e-3)
