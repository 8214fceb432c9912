"""Files of documents: lines, tables and compressed files, and files that pass for text."""

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import os
import re
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from training.records import Records, is_documents
from training.text import load_tokens

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}
PAIRS = [PAIR, {"prompt": '007, "NA"\nü', "completion": "true"}, PAIR]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def all_of(records):
    return [records[at] for at in range(len(records))]


def test_lines_and_folders_are_read_by_number_and_empty_lines_are_none(tmp_path):
    there, folder = tmp_path / "there", tmp_path / "here"
    for path in (there, folder / "b"):
        path.mkdir(parents=True)
    first, second, third = map(json.dumps, (CHAT, {"text": "ü ✓"}, PAIR))
    (folder / "a.jsonl").write_text(f"{first}\n\n  \n{second}\n{third}")
    (folder / "b" / "z.ndjson").write_bytes(jsonl([{"text": "3"}]))
    (there / "a.jsonl").write_bytes(jsonl([{"text": "4"}]))
    (folder / "link").symlink_to(there)
    records = Records(folder)
    assert all_of(records) == [CHAT, {"text": "ü ✓"}, PAIR, {"text": "3"}, {"text": "4"}]
    assert records.where(2) == f"{folder / 'a.jsonl'}, line 5"
    assert records.where(3) == f"{folder / 'b' / 'z.ndjson'}, line 1"
    (folder / ".hidden").write_text("x")
    assert is_documents(folder)
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        is_documents(folder)


def test_parquet_has_the_same_documents_as_lines(tmp_path):
    rows = [CHAT if n % 2 else {"messages": CHAT["messages"][:1]} for n in range(3000)]
    # Columns that lines do not have, and can't, are not read.
    dated = [row | {"when": datetime.datetime(2026, 1, 1)} for row in rows]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dated), path, row_group_size=700)
    records = Records(path)
    assert all_of(records) == rows
    assert records.where(2999) == f"{path}, row 3000"


def delimited(delimiter):
    """With a column that is left out, and in another order."""
    out, rows = io.StringIO(), enumerate(PAIRS)
    named = [["number", "completion", "prompt"], *([n, *reversed(row.values())] for n, row in rows)]
    csv.writer(out, delimiter=delimiter).writerows(named)
    return out.getvalue().encode()


def table(new, records=PAIRS):
    sink, rows = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(records)
    with new(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


LINES, PARQUET = jsonl(PAIRS), pyarrow.parquet.ParquetWriter
# fmt: off
FORMATS = [
    ("a.JSONL a.jsonlines a.jl a.Ndjson", LINES), ("a.csv a.CSV", delimited(",")),
    ("a.csv", "\ufeff".encode() + delimited(",")), ("a.tsv", delimited("\t")),
    ("a.parquet a.PARQUET", table(PARQUET)), ("a.arrow a.feather", table(pyarrow.ipc.new_file)),
    ("a.arrow", table(pyarrow.ipc.new_stream)), ("a.jsonl.gz a.JSONL.GZ", gzip.compress(LINES)),
    ("a.jsonl.bz2", bz2.compress(LINES)), ("a.jl.xz", lzma.compress(LINES)),
    ("a.jsonl.zst", pyarrow.compress(LINES, "zstd", asbytes=True)),
    ("a.csv.gz", gzip.compress(delimited(","))),
]
# fmt: on


@pytest.mark.parametrize(("names", "content"), FORMATS, ids=[names for names, _ in FORMATS])
def test_a_file_of_documents_is_known_by_its_name_in_any_case(tmp_path, names, content):
    for name in names.split():
        (tmp_path / name).write_bytes(content)
        assert is_documents(tmp_path / name), name
        assert all_of(Records(tmp_path / name)) == PAIRS, name


# fmt: off
REFUSED = [
    ("a.csv", b"question,answer\nis it,so\n", "'question', 'answer'"),
    ("a.csv", b"prompt;completion\nis it;so\n", "'prompt;completion'"),
    ("a.csv", b"prompt,completion\nis it,so,no\n", "a.csv"), ("a.csv", b"", "a.csv"),
    ("a.csv", b"text\n", "a.csv"), ("a.csv", b"text\n\xff\xfe\n", "a.csv"),
    ("a.csv", b'messages\n"[{}]"\n', 'row 1: "messages"'), ("a.arrow", b"no arrow", "Arrow"),
    ("a.parquet", b"PAR1 and no more", "Parquet"),
    ("a.parquet", table(PARQUET, [{"question": "x"}]), "'question'"),
    ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz .*\.gz"),
    ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"a.jsonl.gz .*\.gz"),
    ("a.jsonl.zst", b"no zstd", r"a.jsonl.zst .*\.zst"), ("a.jsonl", b"\n", "a.jsonl"),
]
BAD_LINES = [
    (b"{", ""), (b"[1]", r"\[1\]"), (b'{"txt": "x"}', '"text"'), (b'{"text": 3}', '"text" is 3'),
    (b'{"messages": []}', '"messages"'), (b'{"messages": [{"content": "x"}]}', '"role"'),
    (b'{"messages": [{"role": "usr", "content": "x"}]}', "'usr'"),
    (b'{"messages": [{"role": "user", "content": 3}]}', '"content" is 3'),
    (b'{"text": "a \\ud83d"}', '"text"'), (b'{"prompt": "x"}', '"completion"'),
    (b'{"prompt": "x", "completion": []}', '"completion"'),
    (b"[" * 100_000, ""), (b"\xff\xfe", ""),
]
# fmt: on


def test_files_with_something_else_are_refused_with_their_line(tmp_path):
    lines = [("a.jsonl", jsonl([PAIR]) + bad + b"\n", f"line 2: .*{x}") for bad, x in BAD_LINES]
    for name, content, said in REFUSED + lines:
        (tmp_path / name).write_bytes(content)
        assert is_documents(tmp_path / name)
        with pytest.raises(ValueError, match=said):
            Records(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        Records(tmp_path / "none.jsonl")


OTHERS = {
    "chat": LINES,
    "chat.log": b"\xef\xbb\xbf\n" + jsonl([{"question": "is it"}] * 2),
    "chat.data": json.dumps(PAIRS, indent=1).encode(),
    "chat.JSON": json.dumps(PAIRS).encode(),
    "chat.json.gz": gzip.compress(LINES),
    "book.txt.zst": b"a book",
    "chat.xlsx": b"PK a sheet",
    "book.PDF": b"%PDF-1.4 a page",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_not_learned_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(OTHERS[name])
    with pytest.raises(ValueError, match=re.escape(name)):
        is_documents(tmp_path / name)
    (tmp_path / "book.txt").write_text("a book")
    with pytest.raises(ValueError, match=re.escape(name)):
        is_documents(tmp_path)


def test_json_is_no_text_but_beside_text_and_if_it_only_looks_like_documents(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"messages": []}')
    for path in (tmp_path, tmp_path / "b.json"):
        with pytest.raises(ValueError, match=r"\.jsonl .* [ab]\.txt"):
            is_documents(path)
    names = {"chat.txt": LINES, "a.md": b"[a list](x) {of} links", "README": b"{not JSON}"}
    names |= {"package.json": b'{"name": "a"}', "list.json": b'[{"name": "a"}]', "empty": b""}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / "chat.txt", tmp_path / "README"):
        assert not is_documents(path)


@pytest.mark.parametrize("make", ["pipe", "device", "socket"])
def test_pipes_and_devices_are_not_waited_for(tmp_path, monkeypatch, make):
    for name in ("a", "a.txt", "a.bin", "a.npy", "a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # the path of a socket must be short
        if make == "pipe":
            os.mkfifo(name)
        elif make == "device":
            os.symlink("/dev/zero", name)
        else:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(name)
        for given in (Path(name), tmp_path / name):
            with pytest.raises(ValueError, match=re.escape(name)):
                Records(given) if is_documents(given) else load_tokens(given, 256)
