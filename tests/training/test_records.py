"""Files of documents: what is read, and what is refused with its file and line."""

import datetime
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from training.records import Records, is_documents

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
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="not a regular file"):
        Records(tmp_path / "pipe.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="can't be read as Parquet"):
        Records(tmp_path / "a.parquet")
