"""Files of documents: what is read, and what is refused with its file and line."""

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

USER, ASSISTANT = {"role": "user"}, {"role": "assistant"}
CHAT = {"messages": [USER | {"content": "Hi"}, ASSISTANT | {"content": "Ho"}]}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_lines_are_read_by_number_and_empty_ones_are_none(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second, third = map(json.dumps, (CHAT, {"text": "ü ✓"}, PAIR))
    path.write_text(f"{first}\n\n  \n{second}\n{third}")
    records = Records(path)
    assert [records[at] for at in range(len(records))] == [CHAT, {"text": "ü ✓"}, PAIR]
    assert records[1] == {"text": "ü ✓"}
    assert records.where(2) == f"{path}, line 5"


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "z.ndjson", {"text": "3"})
    write(tmp_path / "a.jsonl", {"text": "1"}, {"text": "2"})
    records = Records(tmp_path)
    assert [records[at]["text"] for at in range(3)] == ["1", "2", "3"]
    assert records.where(2) == f"{tmp_path / 'b' / 'z.ndjson'}, line 1"
    assert is_documents(tmp_path)
    (tmp_path / ".hidden").write_text("x")
    assert is_documents(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds documents .* and other files, notes.txt among"):
        is_documents(tmp_path)


def test_json_is_not_learned_as_text_but_what_lies_beside_text_is(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"messages": []}')
    for path in (tmp_path, tmp_path / "b.json"):
        with pytest.raises(ValueError, match=r"braces and quotes.* \.jsonl .* name it [ab]\.txt"):
            is_documents(path)
    (tmp_path / "code.py").write_text("pass")
    assert not is_documents(tmp_path)


def test_files_behind_links_are_read_too(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "a.jsonl", {"text": "1"})
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert Records(tmp_path / "here")[0] == {"text": "1"}


def test_parquet_has_the_same_documents_as_lines(tmp_path):
    rows = [CHAT if n % 2 else {"messages": [USER | {"content": f"{n}"}]} for n in range(3000)]
    # Columns that lines do not have, and can't, are not looked at.
    dated = [row | {"when": datetime.datetime(2026, 1, 1)} for row in rows]
    table = pyarrow.Table.from_pylist(dated)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    records = Records(tmp_path / "a.parquet")
    assert [records[at] for at in range(len(records))] == rows
    assert records.where(2999) == f"{tmp_path / 'a.parquet'}, row 3000"


PAIRS = [PAIR, {"prompt": '007, "NA"\nü', "completion": "true"}, PAIR]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def delimited(delimiter):
    def content(records):
        out = io.StringIO()
        names = ["number", "completion", "prompt"]  # a column that is left out, and another order
        writer = csv.DictWriter(out, names, delimiter=delimiter)
        writer.writeheader()
        writer.writerows({"number": n, **row} for n, row in enumerate(records))
        return out.getvalue().encode()

    return content


def table(write):
    def content(records):
        sink = pyarrow.BufferOutputStream()
        write(pyarrow.Table.from_pylist(records), sink)
        return sink.getvalue().to_pybytes()

    return content


def arrow(new):
    def write(rows, sink):
        with new(sink, rows.schema) as writer:
            writer.write_table(rows)

    return table(write)


def zstd(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("names", "content"),
    [
        (["a.JSONL", "a.jsonlines", "a.jl", "a.Ndjson"], jsonl),
        (["a.csv", "a.CSV"], delimited(",")),
        (["a.csv"], lambda records: "\ufeff".encode() + delimited(",")(records)),
        (["a.tsv"], delimited("\t")),
        (["a.parquet", "a.PARQUET"], table(pyarrow.parquet.write_table)),
        (["a.arrow", "a.feather"], arrow(pyarrow.ipc.new_file)),
        (["a.arrow"], arrow(pyarrow.ipc.new_stream)),
        (["a.jsonl.gz", "a.JSONL.GZ"], lambda records: gzip.compress(jsonl(records))),
        (["a.jsonl.bz2"], lambda records: bz2.compress(jsonl(records))),
        (["a.jl.xz"], lambda records: lzma.compress(jsonl(records))),
        (["a.jsonl.zst"], lambda records: zstd(jsonl(records))),
        (["a.csv.gz"], lambda records: gzip.compress(delimited(",")(records))),
    ],
)
def test_a_file_of_documents_is_known_by_its_name_in_any_case(tmp_path, names, content):
    for name in names:
        (tmp_path / name).write_bytes(content(PAIRS))
        assert is_documents(tmp_path / name), name
        records = Records(tmp_path / name)
        assert [records[at] for at in range(len(records))] == PAIRS, name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"question,answer\nis it,so\n", r"columns 'question', 'answer'.* rename"),
        ("a.csv", b"prompt;completion\nis it;so\n", r"columns 'prompt;completion'"),
        ("a.csv", b"prompt,completion\nis it,so,no\n", r"can't be read as \.csv"),
        ("a.csv", b"", r"can't be read as \.csv"),
        ("a.csv", b"text\n", "holds no documents"),
        ("a.csv", b"text\n\xff\xfe\n", "can't be read"),
        ("a.csv", b'messages\n"[{}]"\n', 'row 1: "messages" is'),
        ("a.arrow", b"no arrow", "can't be read as Arrow"),
        ("a.parquet", table(pyarrow.parquet.write_table)([{"question": "x"}]), "'question'"),
        ("a.jsonl.gz", b"no gzip", r"can't be unpacked as \.gz"),
        ("a.jsonl.gz", gzip.compress(jsonl(PAIRS))[:-9], r"can't be unpacked as \.gz"),
        ("a.jsonl.zst", b"no zstd", r"can't be unpacked as \.zst"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_table_of_no_use_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert is_documents(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        Records(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat", jsonl(PAIRS)),
        ("chat.log", b"\xef\xbb\xbf\n" + jsonl([{"question": "is it"}] * 2)),
        ("chat.data", json.dumps(PAIRS, indent=1).encode()),
        ("chat.JSON", json.dumps(PAIRS).encode()),
        ("chat.json.gz", gzip.compress(jsonl(PAIRS))),
        ("book.gz", gzip.compress(b"a book")),
        ("book.txt.zst", b"a book"),
        ("chat.xlsx", b"PK a sheet"),
        ("book.PDF", b"%PDF-1.4 a page"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_what_is_no_text_is_not_learned_as_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        is_documents(tmp_path / name)
    (tmp_path / "book.txt").write_text("a book")
    with pytest.raises(ValueError, match=re.escape(name)):
        is_documents(tmp_path)


def test_text_that_only_looks_like_documents_is_text(tmp_path):
    names = {"chat.txt": jsonl(PAIRS), "a.md": b"[a list](x) {of} links", "README": b"{not JSON}"}
    names |= {"package.json": b'{"name": "a"}', "list.json": b'[{"name": "a"}]', "empty": b""}
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    assert not is_documents(tmp_path)
    assert not is_documents(tmp_path / "chat.txt") and not is_documents(tmp_path / "README")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: a document is an object with"),
        ('{"txt": "x"}', 'line 2: a document is an object with "text"'),
        ('{"text": 3}', 'line 2: "text" is 3, not a text'),
        ('{"messages": []}', "line 2: .*at least one message"),
        ('{"messages": [{"role": "usr", "content": "x"}]}', "line 2: role 'usr' is none of system"),
        ('{"messages": [{"content": "x"}]}', 'line 2: a message has "role"'),
        ('{"messages": [{"role": "user", "content": 3}]}', 'line 2: "content" is 3'),
        ('{"text": "a \\ud83d"}', 'line 2: "text" has half of a character'),
        ('{"prompt": "x"}', 'line 2: "prompt" and "completion" are two texts'),
        ('{"prompt": "x", "completion": []}', 'line 2: "prompt" and "completion" are two texts'),
        ("[" * 100_000, "line 2: "),
        ("\xff\xfe", "line 2: "),
    ],
)
def test_a_line_that_is_no_document_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(PAIR).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=message):
        Records(path)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        Records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no documents"):
        Records(tmp_path / "empty.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="can't be read as Parquet"):
        Records(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("make", ["pipe", "device", "socket"])
def test_pipes_and_devices_are_not_waited_for(tmp_path, monkeypatch, name, make):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path(name)
    if make == "pipe":
        os.mkfifo(path)
    elif make == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    for given in (path, tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            Records(given) if is_documents(given) else load_tokens(given, 256)
