"""Data to train on: batches, what is learned, held out and left out, and data that changes."""

import itertools
import json
import math
import os
import re
import tracemalloc
import unittest.mock

import numpy as np
import pytest
from safetensors.numpy import save_file

import zero_jax
from training import byte_tokenizer, data_files, saving, text
from training.config import Config
from training.corpus import sources_of
from training.data_files import DataChanged, TokenFile
from training.documents import Documents, Source
from training.packing import LOOK, Counts, Document, pack, row_of
from training.records import Records
from training.saving import REFUSE, WARN, Saver, changed_contents, check_settings
from training.text import Text, Tokens, load_tokens
from training.tokenizer import Tokenizer
from zero_jax.commands.command_line import flag


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return with_template(tmp_path_factory.mktemp("tokenizer"), byte_tokenizer.TEMPLATE)


def with_template(path, template):
    """The tokenizer of bytes with another chat template."""
    byte_tokenizer.write(path)
    (path / "chat_template.jinja").write_text(template)
    return Tokenizer(path)


def chat(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}


def records(path, documents):
    """A file of these documents, or of texts."""
    known = [{"text": own} if isinstance(own, str) else own for own in documents]
    path.write_text("".join(json.dumps(own) + "\n" for own in known))
    return Records(path)


def corpus(tokenizer, *sources, **settings):
    known = {"seq": 31, "batch": 4, "seed": 0} | settings
    return Documents([Source(*source) for source in sources], tokenizer, **known)


def texts_of(arrays):
    tokens, _, segments, _ = arrays
    return [
        bytes(row[np.append(seg, seg[-1]) == n][: (seg == n).sum() + 1].clip(0, 255).tolist())
        for row, seg in zip(np.asarray(tokens), np.asarray(segments), strict=True)
        for n in range(1, seg.max() + 1)
    ]


def numbers(source, count):
    return [f"{source}{n:04d}" + "." * (n % 9) for n in range(count)]


def test_the_tokenizer_of_bytes_is_utf_8_and_answers_are_learned_to_their_end(tokenizer, tmp_path):
    text = "Héllo, wörld ✓\n\tx"
    assert list(tokenizer.encode(text)) == list(text.encode())
    messages = chat("Hi", "Yo ✓", "a", "b")["messages"]
    for record, learned in (
        ({"messages": messages}, "Yo ✓<|end|>b<|end|>"), ({"text": "ab"}, "ab<|end|>"),
        ({"prompt": "ab c", "completion": " de"}, " de<|end|>"),
        ({"prompt": messages[:3], "completion": messages[3:]}, "b<|end|>"),
    ):  # fmt: skip
        ids, mask = tokenizer.document(record)
        assert tokenizer.decode(ids[mask]) == learned
        assert tokenizer.document(record, "all")[1].all()
    # The token that ends learned text is found.
    each = "{% for m in messages %}<|user|>{{ m.content }}\n{% endfor %}"
    for template, record, wanted in (
        (byte_tokenizer.TEMPLATE, chat("a", "b"), [252]),
        (byte_tokenizer.TEMPLATE, {"text": "a"}, [252]),
        (each.replace("\n", "<|tool|>\n"), chat("a", "b"), [251]), (each, chat("a", "b"), []),
    ):  # fmt: skip
        own = with_template(tmp_path, template)
        assert corpus(own, (records(tmp_path / "a.jsonl", [record] * 4), 1.0)).ends == wanted


@pytest.mark.parametrize("count", [2, 4])
def test_processes_resume_with_sources_drawn_by_their_weights(tokenizer, tmp_path, count):
    sources = [
        (records(tmp_path / f"{name}.jsonl", numbers(name, size)), weight)
        for name, weight, size in (("a", 3.0, 1000), ("b", 1.0, 100))
    ]
    made = corpus(tokenizer, *sources)
    whole = made.batches(None, 0, 1)
    seen = [text[:1] for _ in range(40) for text in texts_of(next(whole)[0])]
    assert seen.count(b"a") / len(seen) == pytest.approx(0.75, abs=0.05)
    first, second = re.findall(r"([\d.]+) epochs", made.outlook(50))
    assert float(second) / float(first) == pytest.approx(1000 / 100 / 3, rel=0.01)
    held_out = [t for arrays in made.held_out(0, 1) for t in texts_of(arrays) if t.strip(b"\0")]
    kept = [*numbers("a", 1000)[900:], *numbers("b", 100)[90:]]
    assert sorted(text[:5].decode() for text in held_out) == [text[:5] for text in kept]
    place = json.loads(json.dumps(next(whole)[1]))
    parts = [corpus(tokenizer, *sources).batches(place, at, count) for at in range(count)]
    for _ in range(5):
        wanted, found = next(whole)[0], [next(part)[0] for part in parts]
        for array, *own in zip(wanted, *found, strict=True):
            np.testing.assert_array_equal(array, np.concatenate(own))


def trained(made, steps):
    """How many documents the batches of so many steps have."""
    drawn = made.batches(None, 0, 1)
    rows = [row for _ in range(steps) for row in next(drawn)[0][2]]
    return sum(len(set(row[row > 0].tolist())) for row in rows)


def test_long_documents_are_cut_dropped_or_refused_as_asked_and_counted(tokenizer, tmp_path):
    source = records(tmp_path / "a.jsonl", ["x" * (50 if n % 2 else 5) for n in range(40)])
    made = corpus(tokenizer, (source, 1.0))
    said = made.outlook(100)
    assert said.startswith("all 36 documents in rows of 31 tokens: 18 unchanged, 18 truncated")
    assert "longest 51 tokens" in said and str(made.counts) == "none"
    rows = 18 + 4  # of 36: one for each that is cut, five short ones in each of the others
    assert said.endswith(f"100 steps are {100 * 4 / rows:.3g} epochs of a.jsonl"), said
    found = trained(made, 100)
    assert found == made.counts.numbers.total(), "those read ahead are not counted"
    # The 16 documents that wait for a row in each lane are short ones at the end.
    assert found / 36 == pytest.approx(400 / rows, rel=0.05)
    texts = {*texts_of(next(made.batches(None, 0, 1))[0])}
    assert texts == {b"xxxxx\xfc", b"x" * 32}, "cut to a row of seq + 1 tokens"
    dropped = corpus(tokenizer, (source, 1.0), long="drop")
    assert max(map(len, texts_of(next(dropped.batches(None, 0, 1))[0]))) == 6
    assert dropped.counts.numbers["dropped"] and "dropped" in str(dropped.counts)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: 51 tokens.* --seq-len 31 "):
        corpus(tokenizer, (source, 1.0), long="error")
    # A sample begins with a held-out prompt that fits.
    known = [chat("a", "b")] * 18 + [chat("x" * 90, "b"), chat("short", "b")]
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", known), 1.0))
    assert tokenizer.decode(made.prompt(31)) == "<|user|>short<|end|><|assistant|>"
    assert made.prompt(5) is None


def test_conversations_whose_answer_is_cut_off_are_left_out_and_counted(
    tokenizer, tmp_path, monkeypatch
):
    half = [chat("x" * (60 if n % 2 else 3), "yes") for n in range(20)]
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", half), 1.0))
    said = made.outlook(18)  # of 4 rows with 3 documents each: 24 passes over 9
    assert said.endswith("18 steps are 24 epochs of a.jsonl")
    assert "left out" in said and "longest " in said
    assert trained(made, 18) == made.counts.numbers["whole"] == 24 * 9
    assert 0 <= made.counts.numbers["empty"] - 24 * 9 <= 1.1 * 4 * LOOK, "up to those that wait"
    none = records(tmp_path / "b.jsonl", [chat("x" * 60, "yes")] * 20)
    said = corpus(tokenizer, (none, 1.0), (records(tmp_path / "c.jsonl", half), 1.0)).outlook(18)
    assert " 0 epochs of b.jsonl, " in said, said
    reads, made = [], corpus(tokenizer, (none, 1.0))
    read = made.read
    monkeypatch.setattr(made, "read", lambda *place: reads.append(place) or read(*place))
    with pytest.raises(ValueError, match="19 documents in a row have nothing to learn"):
        next(made.batches(None, 0, 1))
    assert len(reads) == 19, "batches that are read ahead are not tried again"


def test_refused_conversations_are_left_out_and_named_or_end_the_run(tmp_path):
    strict = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer = with_template(tmp_path, strict + byte_tokenizer.TEMPLATE)
    refused = {"messages": [*chat("a", "b")["messages"], {"role": "tool", "content": "x"}]}
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", [chat("a", "b"), refused] * 10), 1.0))
    next(made.batches(None, 0, 1))
    assert made.counts.numbers["refused"] and made.counts.numbers["whole"]
    assert re.search("a.jsonl, line .*no tools", str(made.counts), re.DOTALL)
    # A source needs two documents, and a weight above 0.
    for known, said in (([refused] * 3, "a.jsonl, line 1.*no tools"), (["x"], "a.jsonl")):
        with pytest.raises(ValueError, match=said):
            corpus(tokenizer, (records(tmp_path / "a.jsonl", known), 1.0))
    for given in ("a=0,b=1", "a=1,b", "a=x,b=1", "=1,b=2", "a=inf,b=1"):
        with pytest.raises(ValueError, match=f"--data {given}"):
            sources_of(given)
    (named := tmp_path / "x=1.jsonl").write_text("")
    assert sources_of(str(named)) == [(named, 1.0)], "a file that is called so"


@pytest.mark.slow
def test_a_hundred_thousand_rows_stream_in_flat_memory(tokenizer, tmp_path):
    texts = [f"{number:06d}" + "x" * (number % 40) for number in range(100_000)]
    records(path := tmp_path / "a.jsonl", texts)
    import grain  # noqa: F401  the library's own memory is not counted

    tracemalloc.start()
    stream, memory = corpus(tokenizer, (Records(path), 1.0), batch=8).batches(None, 0, 1), []
    for count in (1500, 1500):
        tracemalloc.reset_peak()
        for _ in range(count):
            next(stream)
        memory += tracemalloc.get_traced_memory()
    tracemalloc.stop()
    before, _, now, peak = memory
    assert before < 5.6e6 and now < before + 1e5 and peak < before + 2e6


TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
SEQ = 20


def windows(tokens=TOKENS, batch=12, seq=8, seed=3):
    """A text that trains on all of these tokens, and holds all of them out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "split", lambda tokens, seq: (tokens, tokens))
        return Text(Tokens(tokens, "numbers", False), seq, batch, seed)


def first(n, start=0, index=0, count=1, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    stream = windows(**changed).batches(start, index, count)
    return np.stack([rows for (rows,), _ in itertools.islice(stream, n)])


@pytest.mark.parametrize("count", [1, 4])
def test_an_epoch_has_each_target_once_for_any_number_of_processes_from_any_sample(count):
    assert windows().sizes == [(124, 125)]
    orders = [first(31, batch=4, start=124 * epoch) for epoch in range(3)]
    for rows in orders:
        assert rows.dtype == np.int32 and (np.diff(rows, axis=-1) == 1).all()
        assert sorted(rows[..., 1:].ravel()) == list(range(1, 124 * 8 + 1))
    orders += [first(31, batch=4, seed=4)]  # and neighbouring seeds share no epoch
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))
    whole = first(25)  # 300 samples: three epochs
    parts = [first(14, start=132, index=i, count=count) for i in range(count)]
    assert parts[0].shape[1] == 12 // count
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[11:])
    other = first(80, batch=1, start=36)  # another size of batches
    np.testing.assert_array_equal(other[:, 0], whole.reshape(-1, 9)[36:116])
    assert first(1, start=10**15).shape[1] == 12, "samples before are not read"


def test_evaluation_sees_every_target_once_in_order():
    for n, count in itertools.product((2, 9, 40, 41, 42, 97), (1, 4)):
        tokens = TOKENS[:n] + 1  # no real token is 0, so padding shows
        text = windows(tokens, batch=4, seq=5)
        shards = [list(text.held_out(i, count)) for i in range(count)]
        parts = [part for parts in zip(*shards, strict=True) for part in parts]
        rows, mask = map(np.concatenate, zip(*parts, strict=True))
        assert (rows.dtype, mask.dtype) == (np.int32, np.float32)
        assert (len(rows) % 4, rows.shape[1], mask.shape) == (0, 6, (len(rows), 5))
        np.testing.assert_array_equal(rows[:, 1:] != 0, mask == 1)
        np.testing.assert_array_equal(rows[:, 1:][mask == 1], tokens[1:])
        np.testing.assert_array_equal(rows[:, :-1][mask == 1], tokens[:-1])
        assert len(list(text.held_out(0, count, 3))) == min(3, math.ceil((n - 1) / 5 / 4))


def test_a_text_that_is_too_short_for_a_sample_is_refused():
    with pytest.raises(ValueError, match="--seq-len"):
        Text(Tokens(TOKENS, "numbers", False), seq=1000, batch=12, seed=3)


def document(number, size=None):
    """Tokens that tell the document and the place in it."""
    places = np.arange(size or 2 + 7 * number % 15, dtype=np.int32)
    return 1000 * number + places, places <= len(places) // 2


def lane(end, left_out=(), **options):
    """Rows of documents up to a number; some are left out."""
    known = {n: Document("whole", *document(n)) for n in range(end)}
    known |= dict.fromkeys(left_out, Document("empty"))
    rows = pack(known.get, SEQ, end=end, counts=(counts := Counts()), **options)
    return [row for row, _ in rows], counts


def documents_of(row):
    """Numbers of the documents of a row, each checked to be whole and in its place."""
    tokens, weights, segments, positions = row
    found = []
    for segment in range(1, segments.max(initial=0) + 1):
        at = np.flatnonzero(segments == segment)
        found.append(int(tokens[at[0]]) // 1000)
        ids, mask = document(found[-1])
        end = at[0] + len(ids)
        assert (np.diff(at) == 1).all() and (positions[at] == np.arange(len(at))).all()
        assert (tokens[at[0] : end] == ids).all()
        assert (weights[at[0] : end - 1] == mask[1:]).all(), "the first is predicted by nothing"
        assert not weights[end - 1 : end].any(), "the next document's first"
    return found


def test_every_document_comes_once_and_whole_in_rows_that_are_nearly_full():
    rows, counts = lane(3000)
    seen = [n for row in rows[:300] for n in documents_of(row)]
    assert len(seen) == len(set(seen)) and counts.numbers == {"whole": 3000}
    # Each row takes the one that waits longest, and of others no more than fit.
    assert set(range(max(seen) - LOOK * (SEQ + 1) // 2)) <= set(seen), "none is left behind"
    assert np.mean([(row[2] > 0).mean() for row in rows[:300]]) > 0.97
    # A pass ends when its documents do.
    assert sorted(n for row in lane(50)[0] for n in documents_of(row)) == list(range(50))
    # A row may be one document, and one may be empty.
    ids, mask = document(3, SEQ + 1)
    tokens, weights, segments, _ = row_of([(ids, mask)], SEQ)
    assert (tokens == ids).all() and (segments == 1).all() and weights.sum() == mask[1:].sum()
    assert not any(part.any() for part in row_of([], SEQ))
    # An order in which nothing can be learned ends with an error.
    with pytest.raises(ValueError, match="31 documents.*--seq-len"):
        lane(100, range(100), patience=30)
    # One that waited, and was edited since, is counted.
    assert lane(9, [3], following=9, former=[3])[1].numbers == {"empty": 1}


DIR = "DIR, step 4"
CONTENT = np.random.default_rng(0).integers(97, 123, 5000)


def hellos(count, word="hello"):
    return "".join(f'{{"text": "document {n} says {word}"}}\n' for n in range(count))


def overwritten(path, content):
    """Writes in place: a reader in another thread never sees the file shorter than after that."""
    path.touch()
    with path.open("r+b") as file:
        file.write(content)


def replaced(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


CHANGES = [(lambda path: os.truncate(path, 900), "now 900 bytes"),
           (lambda path: path.write_text(""), "now 0"), (lambda path: path.unlink(), "is gone"),
           (lambda path: overwritten(path, hellos(60, "adieu").encode()), "written 2"),
           (lambda path: replaced(path, hellos(60)[99:]), r"now [\d,]+ bytes")]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_documents_that_change_end_the_run(tokenizer, tmp_path, change, said):
    (path := tmp_path / "a.jsonl").write_text(hellos(60))
    made = corpus(tokenizer, (Records(path), 1.0))
    next(stream := made.batches(None, 0, 1))
    change(path)
    with pytest.raises(DataChanged, match=rf"a\.jsonl, line \d+ .*{said}.*--data"):
        for _ in range(60):
            next(stream)
    assert made.counts.numbers["refused"] == 0
    with pytest.raises(DataChanged, match=r"a\.jsonl, line 5[5-9]"):  # the last tenth
        list(made.held_out(0, 1))


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
    for said in ("now 10 bytes", "now 0 bytes", "written 2"):
        saved(path, CONTENT)
        text = Text(load_tokens(path, vocab=256), seq=16, batch=4, seed=0)
        next(stream := text.batches(None, 0, 1))
        os.utime(path, ns=(0, 0))  # so that the next writing has another time, however soon
        next(stream)
        if "now" in said:
            os.truncate(path, int(said.split()[1]))
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
    assert "--data" in changed_contents(other.contents, text.contents, DIR)[0]


def test_data_with_the_content_it_had_is_read_and_no_pipe_in_its_place(tmp_path):
    (path := tmp_path / "a.jsonl").write_text(hellos(60).rstrip("\n"))
    known = Records(path)
    before = [known[at] for at in range(60)]
    for change in (
        lambda: os.utime(path, ns=(0, 0)), lambda: replaced(path, path.read_text()),
        lambda: path.write_text(path.read_text() + "\n" + hellos(9)),
    ):  # fmt: skip
        change()
        assert [known[at] for at in range(len(known))] == before
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=re.escape(str(path))):  # and is not waited for
        known[0]
    # Tokens are an array that is read by slices.
    CONTENT.astype("<u2").tofile(path := tmp_path / "ids")
    tokens = TokenFile(path, "<u2")
    np.testing.assert_array_equal(tokens.part(100, 300).part(10, 20)[2:-1], CONTENT[112:119])
    path.write_bytes(path.read_bytes() + b"more")
    np.testing.assert_array_equal(tokens[:], CONTENT)
    replaced(path, path.read_text())
    np.testing.assert_array_equal(tokens[:], CONTENT)
    for change, said in ((lambda: replaced(path, "o" * 10**4), "written"), (path.unlink, "gone")):
        change()
        with pytest.raises(DataChanged, match=f"{re.escape(str(path))} .*{said}"):
            tokens[:]


def test_another_template_is_a_warning_and_another_vocabulary_an_error(tmp_path):
    def contents(end="", token=None):
        template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
        tokenizer = with_template(tmp_path, template)
        tokenizer._backend.add_tokens([token] if token else [])
        return corpus(tokenizer, (records(tmp_path / "a.jsonl", ["a", "b"]), 1.0)).contents

    first, other = contents(), contents(" ")
    assert changed_contents(contents(), first, DIR) == changed_contents(first, {}, DIR) == []
    (said,) = changed_contents(other, first, DIR)
    assert all(x in said for x in ("--tokenizer", first["chat template"], other["chat template"]))
    with pytest.raises(ValueError, match=f"--tokenizer .*{DIR}"):
        changed_contents(contents(token="<|more|>"), first, DIR)


RUN = vars(Config(learning_rate=1e-3, warmup_steps=2)) | {"hf_config": {"hidden_size": 32}}
LORA, FREE = {**RUN, "lora_rank": 4, "init_from": "A"}, {**RUN, "max_grad_norm": 0.0}
OTHER = {
    "optimizer": "lion", "vocab_size": 512, "expert_capacity_factor": 1.5, "compute_dtype": "bf16",
    "reduce_dtype": "bf16", "param_comm_dtype": "int8", "grad_comm_dtype": "int4",
    "matmul_dtype": "fp8", "fp8_params": "mlp",
    "learning_rate": 1e-2, "warmup_steps": 1, "max_steps": 9, "max_grad_norm": 0.5,
    "weight_decay": 0.0, "lora_rank": 8, "lora_alpha": 400.0, "lora_targets": "q",
    "lora_base_dtype": "nf4"}  # fmt: skip
OTHERWISE = [
    (LORA, RUN, "no --lora-rank .*--lora-rank 4"), (RUN, LORA, "--lora-rank 4 .*no --lora-rank"),
    (RUN, FREE, "--max-grad-norm 0.0 .*norm 1.0"), (FREE, RUN, "--max-grad-norm 1.0 .*norm 0.0"),
    (LORA, {**LORA, "init_from": None}, "no --init-from .*--init-from A"),
    (RUN, {**RUN, "model": "124m", "hf_config": {"hidden_size": 768}},
     "--model 124m .*--model nano.*hidden_size 768 instead of 32")]  # fmt: skip


def test_settings_that_change_the_state_are_refused_by_flag_and_others_are_free():
    for before, now, said in OTHERWISE:
        with pytest.raises(ValueError, match=f"{said}.*--output-dir"):
            check_settings(now, before, DIR)
    known = {**LORA, "hf_config": {"sizes": [1, 2]}}
    same = known | {"hf_config": {"sizes": (1, 2)}, "stage": 1, "init_from": "B"}
    same |= {"lora_alpha": 8.0, "lora_base_dtype": "bf16"}
    assert check_settings(same, known, DIR) == []
    (said,) = check_settings(same | {"max_steps": 9, "warmup_steps": 3}, known, DIR)
    assert said.startswith("--max-steps 9 ")
    for name in (*REFUSE, *WARN):  # with both values
        before = LORA if "lora" in name else RUN
        now = before | {name: OTHER[name]}
        assert check_settings(before, before, DIR) == []
        assert check_settings(now, {"lora_rank": now["lora_rank"]}, DIR) == []  # fewer settings
        former = {"lora_base_dtype": "bf16", "lora_alpha": 8.0}.get(name, before[name])
        given = f"no {flag(name)}" if former is None else f"{flag(name)} {former}"
        given = f"{flag(name)} {OTHER[name]} .*{DIR}.*{given}"
        if name in REFUSE:
            with pytest.raises(ValueError, match=f"{given}.*--output-dir"):
                check_settings(now, before, DIR)
        else:
            (said,) = check_settings(now, before, DIR)
            assert re.search(given, said)


def test_the_weights_of_a_frozen_base_are_compared_not_its_path(tmp_path):
    def checksum(name, value, files=("model",)):
        (tmp_path / name).mkdir()
        index = {"weight_map": {file: f"{file}.safetensors" for file in files}}
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps(index))
        for file in files:
            save_file({"w": np.full(9, value, np.float32)}, tmp_path / name / f"{file}.safetensors")
        return saving.base_checksum(Config(init_from=str(tmp_path / name), lora_rank=4))

    first = checksum("first", 1)
    assert checksum("moved", 1) == first == {"base": "a3d429683d41"}  # as earlier runs saved
    assert checksum("two", 1, "ab") == checksum("last", 1, "ac") != first
    with pytest.raises(ValueError, match="--init-from .*--lora-init-from"):
        changed_contents(checksum("other", 2), first, DIR)
    assert saving.base_checksum(Config(init_from=str(tmp_path / "first"))) == {}  # all are saved


def test_a_checkpoint_that_train_py_did_not_write_is_named(tmp_path):
    old = {"config": {"steps": 4, "order": {}, "contents": {}}, "extra": {"sample": 0}}
    for at, more in enumerate(({}, {"config": old["config"]}, {"extra": {"sample": 0}}, old)):
        with zero_jax.Checkpoints(tmp_path / f"{at}" / "checkpoints") as checkpoints:
            checkpoints.save(1, {"w": np.ones(3)}, **more)
        with pytest.raises(ValueError, match="--output-dir.* train.py .*step 1"):
            saving.check_resume(Config(output_dir=str(tmp_path / f"{at}")), {})
    with pytest.raises(ValueError, match="--resume-step 3"):
        trainer = unittest.mock.Mock(out=tmp_path, **{"plan.config": Config(resume_step=3)})
        Saver(trainer, {})
