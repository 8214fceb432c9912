"""Files of documents, of text and of tokens: read whole, or refused with the place."""

import bz2
import datetime
import functools
import gzip
import json
import math
import os
import pickle
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from training import text
from training.data_files import TokenFile
from training.records import Records, is_documents
from training.text import decode, entropies, load_tokens, split

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}
PAIRS = [PAIR, {"prompt": '007, "NA"\nü', "completion": "true"}, PAIR]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def test_documents_are_read_by_number_and_empty_lines_are_none(tmp_path):
    first, second, third = map(json.dumps, (CHAT, {"text": "ü ✓"}, PAIR))
    for path in (tmp_path / "there", (folder := tmp_path / "here") / "b"):
        path.mkdir(parents=True)
        (path / "z.ndjson").write_bytes(jsonl([{"text": path.name}]))
    (folder / "a.jsonl").write_text(f"{first}\n\n  \n{second}\n{third}")
    (folder / "link").symlink_to(tmp_path / "there")
    records = Records(folder)
    assert [*records] == [CHAT, {"text": "ü ✓"}, PAIR, {"text": "b"}, {"text": "there"}]
    assert records.where(2) == f"{folder / 'a.jsonl'}, line 5"
    assert records.where(3) == f"{folder / 'b' / 'z.ndjson'}, line 1"
    (folder / ".hidden").write_text("x")
    assert is_documents(folder) and [*Records(folder)] == [*records], "a hidden file"
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        is_documents(folder)
    # Columns of a table that lines do not have, and can't, are not read.
    rows = [CHAT if n % 2 else {"messages": CHAT["messages"][:1]} for n in range(3000)]
    dated = pyarrow.Table.from_pylist([row | {"on": datetime.date(2026, 1, 1)} for row in rows])
    pyarrow.parquet.write_table(dated, path := tmp_path / "a.parquet", row_group_size=700)
    assert [*Records(path)] == rows and Records(path).where(2999) == f"{path}, row 3000"


def table(new, records=PAIRS):
    sink, rows = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(records)
    with new(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


LINES, PARQUET = jsonl(PAIRS), pyarrow.parquet.ParquetWriter
FORMATS = [
    ("a.JSONL a.jsonlines a.jl a.Ndjson", LINES), ("a.jsonl.gz a.JSONL.GZ", gzip.compress(LINES)),
    ("a.jsonl.zst", pyarrow.compress(LINES, "zstd", asbytes=True)),
    ("a.jsonl.lz4", pyarrow.compress(LINES, "lz4", asbytes=True)),
    ("a.parquet a.PARQUET", table(PARQUET)), ("a.jsonl.bz2", bz2.compress(LINES))]  # fmt: skip
REFUSED = [
    ("a.parquet", table(PARQUET, [{"question": "x"}]), '"question"'),
    ("a.parquet", table(PARQUET, [PAIR, {"prompt": "x"}]), 'a.parquet, row 2: .*"completion"'),
    ("a.parquet", b"PAR1 and no more", "Parquet"), ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz .*\.gz"),
    ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"a.jsonl.gz .*\.gz"), ("a.jsonl", b"\n", "a.jsonl"),
    ("a.jsonl.zst", b"no zstd", r"a.jsonl.zst .*\.zst")]  # fmt: skip
BAD_LINES = [
    (b"{", ""), (b"[1]", r"\[1\]"), (b'{"txt": "x"}', '"text"'), (b'{"text": 3}', '"text" is 3'),
    (b'{"messages": []}', '"messages"'), (b'{"messages": [{"content": "x"}]}', '"role"'),
    (b'{"messages": [{"role": "usr", "content": "x"}]}', "'usr'"),
    (b'{"messages": [{"role": "user", "content": 3}]}', '"content" is 3'),
    (b'{"text": "a \\ud83d"}', '"text"'), (b'{"prompt": "x"}', '"completion"'),
    (b'{"prompt": "x", "completion": []}', '"completion"'), (b"[" * 100_000, ""), (b"\xff\xfe", ""),
]  # fmt: skip
FIELDS = [  # of messages, of the record, and what is said
    ({"weight": 0.5}, {}, '"weight" .* 0.5'), ({"train": "no"}, {}, '"train" .* "no"'),
    ({"train": True}, {}, '"train" of a user message'), ({"train_detail": []}, {}, "train_detail"),
    ({"function_call": {}}, {}, '"function_call" .* "tool_calls"'),
    ({"tool_calls": "f"}, {}, '"tool_calls" is "f"'), ({}, {"tools": "{"}, '"tools"'),
    ({}, {"tools": {"a": 1}}, '"tools"'), ({}, {"functions": []}, '"functions" .* "tools"'),
    ({}, {"chat_template_kwargs": 1}, '"chat_template_kwargs"'),
    ({}, {"chat_template_kwargs": {"tools": 1}}, '"chat_template_kwargs"'),
    *(({"content": None, "tool_calls": [{"type": "function", "function": call}]}, {}, said)
      for call, said in (({"name": "f", "arguments": "{"}, '"arguments"'), ("f", '"function"'),
                         ({"name": "f", "arguments": "[1]"}, '"arguments"'),
                         ({"name": "f", "arguments": []}, '"arguments" is .*object'))),
]  # fmt: skip


def test_documents_are_known_by_the_name_and_refused_with_their_line(tmp_path, monkeypatch):
    for names, content in FORMATS:
        for name in names.split():
            (tmp_path / name).write_bytes(content)
            assert is_documents(tmp_path / name) and [*Records(tmp_path / name)] == PAIRS, name
    lines = [("a.jsonl", jsonl([PAIR]) + bad + b"\n", f"line 2: .*{x}") for bad, x in BAD_LINES]
    for flags, more, said in FIELDS:
        messages = [message | flags for message in CHAT["messages"]]
        lines.append(("a.jsonl", jsonl([PAIR, {"messages": messages} | more]), f"line 2: .*{said}"))
    for name, content, said in REFUSED + lines:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=said):
            Records(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        Records(tmp_path / "none.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a\.parquet .*pyarrow: pip"):
        Records(tmp_path / "a.parquet")


def test_other_formats_are_not_learned_as_text(tmp_path):
    (tmp_path / "book.txt").write_text("a book")
    others = {"chat": LINES, "chat.log": b"\xef\xbb\xbf\n" + jsonl([{"question": "is it"}] * 2)}
    others |= {"chat.JSON": json.dumps(PAIRS, indent=1).encode(), "chat.xlsx": b"PK a sheet"}
    others |= {"chat.json.gz": gzip.compress(LINES), "book.txt.zst": b"a", "book.PDF": b"%PDF-1.4"}
    others |= {"chat.csv": b"text\nis it\n", "chat.arrow": b"a", "chat.jsonl.xz": b"a"}
    for name, content in (others | {"chat.data": others["chat.JSON"]}).items():
        (tmp_path / name).write_bytes(content)
        for path in (tmp_path / name, tmp_path):
            with pytest.raises(ValueError, match=re.escape(name)):
                is_documents(path)
        (tmp_path / name).unlink()
    # JSON is text beside text, or where it only looks like documents.
    (folder := tmp_path / "b").mkdir()
    (folder / "a.json").write_text('{"messages": []}')
    for path in (folder, folder / "a.json"):
        with pytest.raises(ValueError, match=r"\.jsonl .* a\.txt"):
            is_documents(path)
    names = {"chat.txt": LINES, "a.md": b"[a list](x) {of} links", "README": b"{not JSON}"}
    names |= {"package.json": b'{"name": "a"}', "list.json": b'[{"name": "a"}]', "empty": b""}
    for name, content in names.items():
        (folder / name).write_bytes(content)
    assert not any(map(is_documents, (folder, folder / "chat.txt", folder / "README")))


@pytest.mark.parametrize("make", [os.mkfifo, functools.partial(os.symlink, "/dev/zero")])
def test_pipes_and_devices_are_not_waited_for(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a.txt", "a.bin", "a.npy", "a.jsonl", "a.parquet", "a.jsonl.gz"):
        make(name)
        with pytest.raises(OSError, match=re.escape(name)):
            Records(Path(name)) if is_documents(Path(name)) else load_tokens(Path(name), 256)


def test_text_is_its_bytes_and_a_folder_its_files_in_the_order_of_their_paths(tmp_path):
    (path := tmp_path / "a.txt").write_text("héllo\n", encoding="utf-8")
    corpus = load_tokens(path, vocab=256)
    assert (corpus.name, corpus.byte_level) == ("a.txt", True)
    assert corpus.tokens[:].tolist() == list("héllo\n".encode())
    for folder in ("b", "../away"):
        (tmp_path / folder).mkdir()
    for name, content in {"b/x": "2", "c.md": "3", "empty": "", "../away/deep.txt": "4"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "z").symlink_to(tmp_path.parent / "away")
    assert decode(load_tokens(tmp_path, vocab=256).tokens) == "héllo\n234"
    known = load_tokens(None, vocab=256).tokens  # English text
    assert " the " in decode(known[:2000]) and known.size > 100_000
    assert decode([27, 91, 50, 74, 0xFF, 300, -1]) == "\\x1b[2J\ufffd\ufffd\ufffd"
    unigram, bigram = entropies(known, 256).values()
    assert 0 < bigram < unigram < math.log(256)


def npy_of(descr, shape, content=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header + content


def npy(array):
    return npy_of(array.dtype.str, array.shape, array.tobytes())


MADE = Path(tempfile.gettempdir(), f"made-{os.getpid()}")
EVIL = f"cos\nmkdir\n(V{MADE}\ntR.".encode()  # a pickle that calls os.mkdir
TYPES = [
    ("t.bin", "<u2"), ("t.u32.bin", "<u4"), ("t.npy", "uint16"), ("t.npy", "uint32"),
    ("t.npy", "int64"), ("t.npy", ">i4")]  # fmt: skip
NO_TOKENS = [
    *((f"t.{kind}", b"", f"t.{kind}", {}) for kind in ("txt", "bin", "npy")),
    ("t.txt", b"abc\0d", "t.txt .*2 to 4", {}), ("t.pkl", pickle.dumps("letters"), "t.pkl", {}),
    *(("t.npy", npy_of("<u2", shape), r"t\.npy", {})
      for shape in ("(-3,)", "(9223372036854775807, 9)", "((((((", "(2,)" * 9999, "(0,)")),
    *(("t.npy", npy(array), r"t\.npy", {})
      for array in (np.ones(3), np.ones((2, 2), np.uint16), np.ones(3, bool))),
    ("t.npy", EVIL, r"t\.npy", {}), ("t.npy", npy_of("|O", (1,), EVIL), r"t\.npy", {}),
    ("t.npy", npy(np.array([1, -7])), "token -7 at position 1", {"vocab": 10}),
    ("t.npy", npy(np.array([1, 2, 3, 10, 4, 11])), "token 10 at position 3 .*--vocab-size",
     {"vocab": 10}),
    ("t.bin", b"abc", "t.bin .*3 bytes", {}), ("t.txt", b"abcd", "--vocab-size", {"vocab": 64}),
    ("t.txt", b"abcd", "vocab=2147483648", {"vocab": 2**31})]  # fmt: skip


def test_token_files_are_read_as_their_type_and_other_files_are_refused(tmp_path, monkeypatch):
    for name, dtype in TYPES:
        ids = np.array([0, 1, 513, 60000], dtype)
        (tmp_path / name).write_bytes(npy(ids) if name.endswith(".npy") else ids.tobytes())
        corpus = load_tokens(tmp_path / name, vocab=60001)
        assert isinstance(corpus.tokens, TokenFile) and corpus.tokens[:].tolist() == ids.tolist()
        assert not corpus.byte_level
    monkeypatch.setattr(text, "CHUNK", 2)  # so that positions span chunks
    for name, content, said, options in NO_TOKENS:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=said):
            load_tokens(tmp_path / name, **{"vocab": 2**16, **options})
    assert not MADE.exists(), "a pickle is never opened"
    tokens = np.arange(1000, dtype=np.uint16)
    train, held_out = split(tokens, seq=99)
    assert [*train, *held_out] == [*tokens] and held_out.size == 100
    with pytest.raises(ValueError, match="900 .* 100 .*--seq-len"):
        split(tokens, seq=100)


def test_other_encodings_files_broken_links_and_rings_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("binary", "broken", "one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "good.txt").write_text("abc")
    (tmp_path / "binary/image.png").write_bytes(b"\0\0")
    (tmp_path / "binary/ids.bin").write_bytes(b"abcd")
    for name, there in (("broken", "gone"), ("one", "two"), ("two", "one")):
        (tmp_path / name / "link").symlink_to(tmp_path / there)
    known = {"binary": r"ids\.bin", "broken": "link", "one": "link/link"}
    for name, said in (known | {"empty": "empty"}).items():
        with pytest.raises((ValueError, OSError), match=said):
            load_tokens(tmp_path / name, vocab=256)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tokens("nowhere", vocab=256)
    for chunk in (1, 3, 100):
        monkeypatch.setattr(text, "CHUNK", chunk)
        (tmp_path / "t.txt").write_bytes("häß".encode() + b"\xe4 latin-1")
        with pytest.raises(ValueError, match="t.txt .*UTF-8"):
            load_tokens(tmp_path / "t.txt", vocab=256)
        (tmp_path / "t.txt").write_bytes("häß€".encode()[:-1])  # as `head -c` leaves it
        assert load_tokens(tmp_path / "t.txt", vocab=256).tokens.size == 7


@pytest.mark.parametrize("vocab", [256, 50_000])
def test_entropies_are_those_of_the_counts(vocab):
    def measured(*ids):
        return [*entropies(np.array(ids, np.uint16), vocab).values()]

    assert measured(0, 0, 1, 2)[0] == pytest.approx(1.5 * math.log(2))
    assert measured(*[0, 1] * 50)[1] == 0
    # Pairs of 0 0 0 1 0: 00, 00, 01, 10. After 0 (3 of 4 times): 2/3 against 1/3; after 1: sure.
    expected = 3 / 4 * (2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    assert measured(0, 0, 0, 1, 0)[1] == pytest.approx(expected)
