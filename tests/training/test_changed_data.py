"""Data, templates and settings that change while a run reads them, or before it resumes."""

import os
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_documents import corpus, records, tokenizer, with_template

import zero_jax
from training import data_files
from training.config import Config, flag
from training.corpus import Text
from training.data_files import DataChanged, TokenFile
from training.records import Records
from training.resuming import REFUSE, WARN, base_checksum, check_settings
from training.saving import Saver, _changed_contents, check_resume
from training.text import load_tokens

__all__ = ["tokenizer"]  # a fixture
DIR = "DIR, step 4"
CONTENT = np.random.default_rng(0).integers(97, 123, 5000)


def lines(count, word="hello"):
    return "".join(f'{{"text": "document {n} says {word}"}}\n' for n in range(count))


def overwritten(path, content):
    """In place: a reader in another thread never sees the file shorter than it is after that."""
    path.touch()
    with path.open("r+b") as file:
        file.write(content)


def replaced(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


# fmt: off
CHANGES = [
    (lambda path: os.truncate(path, 900), r"size [\d,]+ bytes, now 900"),
    (lambda path: path.write_text(""), "now 0"),
    (lambda path: overwritten(path, lines(60, "adieu").encode()), "written 2"),
    (lambda path: replaced(path, lines(60)[99:]), r"inode \d+, now \d+"),
    (lambda path: path.unlink(), "is gone"),
]
# fmt: on


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_documents_that_change_end_the_run(tokenizer, tmp_path, change, said):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(60))
    data = corpus(tokenizer, (Records(path), 1.0))
    stream = data.batches(None, 0, 1)
    next(stream)
    change(path)
    with pytest.raises(DataChanged, match=rf"a\.jsonl, line \d+ .*{said}.*--data"):
        for _ in range(60):
            next(stream)
    assert data.counts.refused == 0
    with pytest.raises(DataChanged, match=r"a\.jsonl, line 5[5-9]"):  # the last tenth
        list(data.held_out(0, 1))


def saved(path, content):
    """Writes token ids, or the letters of a text, in a file of this kind, in place."""
    if path.suffix == ".npy":
        np.save(path.with_name("own.npy"), content.astype(np.int64))
        overwritten(path, path.with_name("own.npy").read_bytes())
    else:
        overwritten(path, content.astype({".bin": "<u2"}.get(path.suffix, "u1")).tobytes())


@pytest.mark.parametrize("exact", [True, False])  # the checksum is of the whole file, or of samples
@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_a_text_that_changes_ends_the_run(tmp_path, monkeypatch, exact, name):
    """A mapped file that shrinks would end the process by SIGBUS."""
    if not exact:
        monkeypatch.setattr(data_files, "EXACT", 1 << 9)
        monkeypatch.setattr(data_files, "SAMPLE", 1 << 6)
    path = tmp_path / name
    for said in ("size .* bytes, now 10", "now 0", "written 2"):
        saved(path, CONTENT)
        text = Text(load_tokens(path, vocab=256), seq=16, batch=4, seed=0)
        stream = text.batches(None, 0, 1)
        next(stream)
        os.utime(path, ns=(0, 0))  # so that the next writing has another time, however soon
        next(stream)
        if "now" in said:
            os.truncate(path, int(said.split()[-1]))
        else:
            saved(path, CONTENT[::-1])
        with pytest.raises(DataChanged, match=rf"{re.escape(name)} .*{said}.*--data"):
            for _ in range(9):
                next(stream)
        with pytest.raises(DataChanged):
            list(text.held_out(0, 1))
    # The same length and other content: other checksums, with which a run is compared.
    other = Text(load_tokens(path, vocab=256), seq=16, batch=4, seed=0)
    assert other.order == text.order
    assert "--data" in _changed_contents(other.contents, text.contents, DIR)[0]


def test_data_with_the_content_it_had_is_read_and_no_pipe_in_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(60).rstrip("\n"))
    known = Records(path)
    before = [known[at] for at in range(60)]
    for change in (
        lambda: os.utime(path, ns=(0, 0)),
        lambda: replaced(path, path.read_text()),
        lambda: path.write_text(path.read_text() + "\n" + lines(9)),
    ):
        change()
        assert [known[at] for at in range(len(known))] == before
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=re.escape(str(path))):  # and is not waited for
        known[0]
    # Tokens are an array that is read by slices.
    path = tmp_path / "ids"
    CONTENT.astype("<u2").tofile(path)
    tokens = TokenFile(path, "<u2")
    part = tokens.part(100, 300)
    assert len(tokens) == tokens.size == 5000 and part.size == 200 and part[200:300].size == 0
    np.testing.assert_array_equal(part.part(10, 20)[2:-1], CONTENT[112:119])
    np.testing.assert_array_equal(part[150:999], CONTENT[250:300])
    with pytest.raises(ValueError, match="step=2"):
        part[::2]
    path.write_bytes(path.read_bytes() + b"more")
    np.testing.assert_array_equal(tokens, CONTENT)
    path.unlink()
    path.write_bytes(b"other")  # the run has the former open
    np.testing.assert_array_equal(tokens, CONTENT)


def test_another_template_is_a_warning_and_another_vocabulary_an_error(tmp_path):
    def contents(end="", token=None):
        template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
        tokenizer = with_template(tmp_path, template)
        tokenizer._own.add_tokens([token] if token else [])
        return corpus(tokenizer, (records(tmp_path / "a.jsonl", ["a", "b"]), 1.0)).contents

    first, other = contents(), contents(" ")
    assert _changed_contents(contents(), first, DIR) == []
    assert _changed_contents(first, {}, DIR) == [], "of a release without checksums"
    (said,) = _changed_contents(other, first, DIR)
    assert all(x in said for x in ("--tokenizer", first["chat template"], other["chat template"]))
    with pytest.raises(ValueError, match=f"--tokenizer .*{DIR}"):
        _changed_contents(contents(token="<|more|>"), first, DIR)


RUN = vars(Config(lr=1e-3, warmup=2, steps=8, clip=1.0)) | {"hf_config": {"hidden_size": 32}}
LORA = {**RUN, "lora": 4, "hf": "A"}
# fmt: off
OTHER = {
    "optimizer": "lion", "vocab": 512, "capacity": 1.5, "compute": "bf16", "reduce": "bf16",
    "gather": "int8", "scatter": "int4", "lr": 1e-2, "warmup": 1, "clip": 0.5, "weight_decay": 0.0,
    "lora": 8, "lora_alpha": 400.0, "lora_targets": "q", "base": "nf4",
}
OTHERWISE = [
    (LORA, RUN, "no --lora .*--lora 4"), (RUN, LORA, "--lora 4 .*no --lora"),
    (LORA, {**LORA, "hf": None}, "no --hf .*--hf A"),
    (RUN, {**RUN, "clip": 0.0}, "--clip 0.0 .*--clip 1.0"),
    ({**RUN, "clip": 0.0}, RUN, "--clip 1.0 .*--clip 0.0"),
    (RUN, {**RUN, "model": "124m", "hf_config": {"hidden_size": 768}},
     "--model 124m .*--model nano.*hidden_size 768, before 32"),
]
# fmt: on


def test_settings_that_change_the_state_are_refused_by_flag_and_others_are_free():
    for before, now, said in OTHERWISE:
        with pytest.raises(ValueError, match=f"{said}.*--out"):
            check_settings(now, before, DIR)
    known = {**LORA, "hf_config": {"sizes": [1, 2]}}
    same = known | {"hf_config": {"sizes": (1, 2)}, "stage": 1, "hf": "B", "steps": 9, "warmup": 3}
    for free in ({"lora_alpha": 8.0}, {"base": "bf16"}):
        assert check_settings(same | free, known, DIR) == []
    for name in (*REFUSE, *WARN):  # with both values
        before = LORA if name == "base" or "lora" in name else RUN
        now = before | {name: OTHER[name]}
        assert check_settings(before, before, DIR) == []
        assert check_settings(now, {"lora": now["lora"]}, DIR) == []  # of an older release
        former = {"base": "bf16", "lora_alpha": 8.0}.get(name, before[name])
        given = f"no {flag(name)}" if former is None else f"{flag(name)} {former}"
        given = f"{flag(name)} {OTHER[name]} .*{DIR}.*{given}"
        if name in REFUSE:
            with pytest.raises(ValueError, match=f"{given}.*--out"):
                check_settings(now, before, DIR)
        else:
            (said,) = check_settings(now, before, DIR)
            assert re.search(given, said)


def test_the_weights_of_a_frozen_base_are_compared_not_its_path(tmp_path):
    def checksum(name, value, files=("model.safetensors",)):
        (tmp_path / name).mkdir()
        for file in files:
            save_file({"w": np.full(9, value, np.float32)}, tmp_path / name / file)
        return base_checksum(Config(hf=str(tmp_path / name), lora=4))

    first = checksum("first", 1)
    assert checksum("moved", 1) == first
    two = checksum("two", 1, ["a.safetensors", "b.safetensors"])
    assert two != first and checksum("last", 1, ["a.safetensors", "c.safetensors"]) == two
    with pytest.raises(ValueError, match="--hf .*--adapter"):
        _changed_contents(checksum("other", 2), first, DIR)
    assert base_checksum(Config(hf=str(tmp_path / "first"))) == {}  # all weights are saved


def test_a_checkpoint_that_train_py_did_not_write_is_named(tmp_path):
    for at, more in enumerate(({}, {"config": {"lr": 1}}, {"extra": {"sample": 0}})):
        with zero_jax.Checkpoints(tmp_path / f"{at}" / "checkpoints") as checkpoints:
            checkpoints.save(1, {"w": np.ones(3)}, **more)
        with pytest.raises(ValueError, match="--out.* train.py .*step 1"):
            check_resume(tmp_path / f"{at}", {}, {}, {})
    with pytest.raises(ValueError, match="--from-step 3"):
        Saver(tmp_path, 1, 1, None, {}, {}, {}, from_step=3)
    with Saver(tmp_path / "none", 0, 1, None, {}, {}, {}) as saver:
        saver.save(1, {"w": np.ones(3)}, lambda: 0)
    assert not (tmp_path / "none").exists()
