"""Data, templates and schedules that change while a run reads them, or before it resumes."""

import itertools
import json
import os
import re

import numpy as np
import pytest
from test_documents import chat, documents, folder, tokenizer, with_template

from training import data_files
from training.corpus import Text
from training.data_files import DataChanged, TokenFile
from training.packing import LOOK
from training.records import Records
from training.saving import _changed_contents
from training.text import load_tokens

__all__ = ["folder", "tokenizer"]  # fixtures


def lines(count, word="hello"):
    return "".join(json.dumps({"text": f"document {n} says {word}"}) + "\n" for n in range(count))


def rewritten(path, text):
    """In place: a reader in another thread never sees the file shorter than it is after that."""
    with path.open("r+") as file:
        file.write(text)


def replaced(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


# While a run reads them.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 900), r"size [\d,]+ bytes, now 900"),
        (lambda path: path.write_text(""), "now 0"),
        (lambda path: rewritten(path, lines(60, "adieu")), "written 2"),
        (lambda path: replaced(path, lines(60)[99:]), r"inode \d+, now \d+"),
        (lambda path: path.unlink(), "is gone"),
    ],
)
def test_documents_that_change_end_the_run(tokenizer, tmp_path, change, said):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(60))
    data = documents(tokenizer, (Records(path), 1.0))
    stream = data.batches(None, 0, 1)
    next(stream)
    change(path)
    with pytest.raises(DataChanged, match=rf"a\.jsonl, line \d+ changed.*{said}.*--data"):
        for _ in range(60):
            next(stream)
    assert data.counts.refused == 0
    with pytest.raises(DataChanged, match=r"a\.jsonl, line 5[5-9]"):  # the last tenth
        list(data.held_out(0, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path, ns=(0, 0)),
        lambda path: replaced(path, path.read_text()),
        lambda path: path.write_text(path.read_text() + "\n" + lines(9)),
    ],
)
def test_documents_with_the_content_they_had_go_on(tokenizer, tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(60).rstrip("\n"))
    records = Records(path)
    before = [records[at] for at in range(60)]
    change(path)
    assert [records[at] for at in range(len(records))] == before


def test_a_pipe_in_place_of_documents_is_not_waited_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(2))
    records = Records(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        records[0]


def saved(path, content):
    """Token ids, or the letters of a text, in a file of this kind, which is written in place."""
    path.touch()
    with path.open("r+b") as file:
        if path.suffix == ".npy":
            np.save(file, content.astype(np.int64))
        else:
            file.write(content.astype({".bin": "<u2"}.get(path.suffix, "u1")).tobytes())


CONTENT = np.random.default_rng(0).integers(97, 123, 5000)
KINDS = ["a.txt", "a.bin", "a.npy"]


@pytest.mark.parametrize("exact", [data_files.EXACT, 0])  # fingerprinted whole, or by samples
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 10), "size .* bytes, now 10"),
        (lambda path: path.write_bytes(b""), "now 0"),
        (lambda path: saved(path, CONTENT[::-1]), "written 2"),
    ],
)
def test_a_text_that_changes_ends_the_run(tmp_path, monkeypatch, exact, name, change, said):
    """A mapped file that shrinks would end the process by SIGBUS."""
    if not exact:
        monkeypatch.setattr(data_files, "EXACT", 1 << 9)
        monkeypatch.setattr(data_files, "SAMPLE", 1 << 6)
    path = tmp_path / name
    saved(path, CONTENT)
    text = Text(load_tokens(path, vocab=256), seq=16, batch=4, seed=0)
    stream = text.batches(None, 0, 1)
    next(stream)
    os.utime(path, ns=(0, 0))  # so that the next writing has another time, however soon
    next(stream)
    change(path)
    with pytest.raises(DataChanged, match=rf"{re.escape(name)} changed.*{said}.*--data"):
        for _ in range(9):
            next(stream)
    with pytest.raises(DataChanged):
        list(text.held_out(0, 1))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path, ns=(0, 0)),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: (path.unlink(), path.write_bytes(b"other")),  # the run has the former open
    ],
)
def test_a_text_with_the_content_it_had_goes_on(tmp_path, name, change):
    path = tmp_path / name
    saved(path, CONTENT)
    tokens = load_tokens(path, vocab=256).tokens
    change(path)
    np.testing.assert_array_equal(tokens[:], CONTENT)


def test_a_token_file_is_an_array_that_is_read_by_slices(tmp_path):
    path = tmp_path / "ids"
    CONTENT.astype("<u2").tofile(path)
    tokens = TokenFile(path, "<u2")
    part = tokens.part(100, 300)
    assert len(tokens) == tokens.size == 5000 and part.size == 200
    np.testing.assert_array_equal(tokens, CONTENT)
    np.testing.assert_array_equal(part.part(10, 20)[2:-1], CONTENT[112:119])
    np.testing.assert_array_equal(part[150:999], CONTENT[250:300])
    assert part[200:300].size == 0
    with pytest.raises(ValueError, match="step=2"):
        part[::2]


# Before a run resumes.


def corpus(tokenizer, path, records, **settings):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return documents(tokenizer, (Records(path), 1.0), **settings)


def test_documents_that_were_edited_are_read_anew_and_those_left_out_wait_no_more(
    tokenizer, tmp_path
):
    path = tmp_path / "a.jsonl"
    records = [chat(f"{n}", "yes and no") for n in range(200)]
    before = corpus(tokenizer, path, records, seq=64)
    (*_, (_, place)) = itertools.islice(before.batches(None, 0, 1), 3)
    for record in records[::3]:
        record["messages"].pop()  # nothing is left to learn
    after = corpus(tokenizer, path, records, seq=64)
    assert after.order == before.order
    stream = after.batches(place, 0, 1)
    for (tokens, weights, *_), _ in itertools.islice(stream, 5):
        assert tokens.shape == (4, 65) and weights.any(axis=1).all()
    assert after.counts.empty >= 4 * LOOK / 6  # about a third of what waited
    (said,) = _changed_contents(after.contents, before.contents, "DIR, step 3")
    assert "--data" in said and all(c.contents["data"] in said for c in (before, after))


def test_a_run_is_told_of_another_template_and_refuses_another_vocabulary(folder, tmp_path):
    def own(name, template="{% for m in messages %}{{ m.content }}{% endfor %}", **tokens):
        (tmp_path / name).mkdir()
        made = with_template(folder, tmp_path / name, template)
        made._own.add_tokens(list(tokens.values()))
        path = tmp_path / name / "a.jsonl"
        return corpus(made, path, [{"text": "a"}, {"text": "b"}]).contents

    first = own("first")
    assert _changed_contents(own("same"), first, "DIR, step 3") == []
    assert _changed_contents(first, {}, "DIR, step 3") == [], "of a release without checksums"
    other = own("other", "{% for m in messages %}{{ m.content }} {% endfor %}")
    (said,) = _changed_contents(other, first, "DIR, step 3")
    assert "template of --tokenizer" in said
    assert first["chat template"] in said and other["chat template"] in said
    with pytest.raises(
        ValueError, match="--tokenizer .* has another vocabulary than in DIR, step 3"
    ):
        _changed_contents(own("more", token="<|more|>"), first, "DIR, step 3")


@pytest.mark.parametrize("name", KINDS)
def test_a_text_of_the_same_length_is_told_from_the_former(tmp_path, name):
    saved(tmp_path / name, CONTENT)
    texts = [Text(load_tokens(tmp_path / name, vocab=256), seq=16, batch=4, seed=0)]
    saved(tmp_path / name, np.where(np.arange(5000) == 4321, 96, CONTENT))
    texts.append(Text(load_tokens(tmp_path / name, vocab=256), seq=16, batch=4, seed=0))
    assert texts[0].order == texts[1].order
    first, second = (text.contents for text in texts)
    assert "--data" in _changed_contents(second, first, "DIR, step 3")[0]
