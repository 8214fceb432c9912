"""Documents to train on: masks, mixtures, what is held out, cut and left out, and their order."""

import json
import re
import tracemalloc

import numpy as np
import pytest

from training import byte_tokenizer
from training.documents import Documents, Source, sources_of
from training.records import Records, check
from training.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.write(made)
    return made


@pytest.fixture(scope="session")
def tokenizer(byte_folder):
    return Tokenizer(byte_folder)


def with_template(byte_folder, path, template):
    """The tokenizer of bytes with another chat template."""
    for file in byte_folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
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
    """The documents of a batch's rows, as text."""
    tokens, _, segments, _ = arrays
    return [
        bytes(row[np.append(seg, seg[-1]) == n][: (seg == n).sum() + 1].clip(0, 255).tolist())
        for row, seg in zip(np.asarray(tokens), np.asarray(segments), strict=True)
        for n in range(1, seg.max() + 1)
    ]


def numbers(source, count):
    return [f"{source}{n:04d}" + "." * (n % 9) for n in range(count)]


def starts(batches, count):
    return [text[:5].decode() for _ in range(count) for text in texts_of(next(batches)[0])]


def test_the_tokenizer_of_bytes_is_utf_8_and_answers_are_learned(tokenizer):
    text = "Héllo, wörld ✓\n\tx"
    assert list(tokenizer.encode(text)) == list(text.encode())
    messages = chat("Hi", "Yo ✓", "a", "b")["messages"]
    for record, learned in (
        ({"messages": messages}, "Yo ✓<|end|>b<|end|>"),
        ({"text": "ab"}, "ab<|end|>"),
        ({"prompt": "ab c", "completion": " de"}, " de<|end|>"),
        ({"prompt": messages[:3], "completion": messages[3:]}, "b<|end|>"),
    ):
        check(record)
        ids, mask = tokenizer.document(record)
        assert tokenizer.decode(ids[mask]) == learned
        assert tokenizer.document(record, "all")[1].all()


def test_a_pass_has_every_document_once_but_those_held_out(tokenizer, tmp_path):
    texts = numbers("a", 400)
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", texts), 1.0))
    seen = starts(data.batches(None, 0, 1), 200)
    # Each of 4 lanes is ahead of the others by at most what waits in it.
    assert len(set(seen[:290])) == 290
    assert set(seen) == {text[:5] for text in texts[:360]}
    held_out = [t for arrays in data.held_out(0, 1) for t in texts_of(arrays) if t.strip(b"\0")]
    assert sorted(text[:5].decode() for text in held_out) == [t[:5] for t in texts[360:]]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_resume_with_sources_drawn_by_their_weights(tokenizer, tmp_path, count):
    known = (("a", 3.0, 1000), ("b", 1.0, 100))
    made = [(records(tmp_path / f"{name}.jsonl", numbers(name, n)), w) for name, w, n in known]
    data = corpus(tokenizer, *made)
    whole = data.batches(None, 0, 1)
    seen = starts(whole, 40)
    assert sum(text[0] == "a" for text in seen) / len(seen) == pytest.approx(0.75, abs=0.05)
    first, second = (float(t) for t in re.findall(r"jsonl ([\d.]+) times", data.outlook(50)))
    assert second / first == pytest.approx(1000 / 100 / 3, rel=0.01)
    _, place = next(whole)
    place = json.loads(json.dumps(place))
    parts = [corpus(tokenizer, *made).batches(place, at, count) for at in range(count)]
    for _ in range(5):
        wanted, found = next(whole)[0], [next(part)[0] for part in parts]
        for array, *own in zip(wanted, *found, strict=True):
            np.testing.assert_array_equal(array, np.concatenate(own))


def trained(data, steps):
    """How many documents the batches of so many steps have."""
    drawn = data.batches(None, 0, 1)
    rows = [row for _ in range(steps) for row in next(drawn)[0][2]]
    return sum(len(set(row[row > 0].tolist())) for row in rows)


def test_long_documents_are_cut_dropped_or_refused_as_asked_and_counted(tokenizer, tmp_path):
    """Of 40 documents 36 are trained on; a short one has 6 tokens, a row room for 32."""
    source = records(tmp_path / "a.jsonl", ["x" * (50 if n % 2 else 5) for n in range(40)])
    data = corpus(tokenizer, (source, 1.0))
    said = data.outlook(100)
    assert said.startswith("all 36 documents in rows of 31 tokens: 18 whole, 18 cut")
    assert "longest of 51 tokens" in said and str(data.counts) == "none"
    rows = 18 + 4  # one for each that is cut, five short ones in each of the others
    assert said.endswith(f"100 steps train on a.jsonl {100 * 4 / rows:.3g} times"), said
    found = trained(data, 100)
    assert found == data.counts.whole + data.counts.cut, "those read ahead are not counted"
    # The 16 documents that wait for a row in each lane are short ones at the end.
    assert found / 36 == pytest.approx(400 / rows, rel=0.05)
    drawn = data.batches(None, 0, 1)
    sizes = {len(text) for _ in range(9) for text in texts_of(next(drawn)[0])}
    assert sizes == {6, 32}, "cut to a row of seq + 1 tokens"
    dropped = corpus(tokenizer, (source, 1.0), long="drop")
    arrays, _ = next(dropped.batches(None, 0, 1))
    assert dropped.counts.dropped and max(map(len, texts_of(arrays))) == 6
    assert "dropped" in str(dropped.counts)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: 51 tokens.* --seq 31 "):
        corpus(tokenizer, (source, 1.0), long="refuse")
    # A sample begins with a held-out prompt that fits.
    known = [chat("a", "b")] * 18 + [chat("x" * 90, "b"), chat("short", "b")]
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", known), 1.0))
    assert tokenizer.decode(data.prompt(31)) == "<|user|>short<|end|><|assistant|>"
    assert data.prompt(5) is None


def test_conversations_whose_answer_is_cut_off_are_left_out_and_counted(tokenizer, tmp_path):
    """Every second one is; 18 steps of 4 rows with 3 of the others each are 24 passes over 9."""
    half = [chat("x" * (60 if n % 2 else 3), "yes") for n in range(20)]
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", half), 1.0))
    said = data.outlook(18)
    assert said.endswith("18 steps train on a.jsonl 24 times")
    assert "left out" in said and "the longest of" in said
    assert trained(data, 18) == data.counts.whole == 24 * 9
    assert data.counts.empty == pytest.approx(24 * 9, rel=0.05)
    none = records(tmp_path / "b.jsonl", [chat("x" * 60, "yes")] * 20)
    said = corpus(tokenizer, (none, 1.0), (records(tmp_path / "c.jsonl", half), 1.0)).outlook(18)
    assert "train on b.jsonl 0 times, c.jsonl" in said, said


STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_refused_conversations_are_left_out_and_named_or_end_the_run(byte_folder, tmp_path):
    tokenizer = with_template(byte_folder, tmp_path, STRICT)
    tool = {"role": "tool", "content": "x"}
    refused = {"messages": [*chat("a", "b")["messages"], tool]}
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", [chat("a", "b"), refused] * 10), 1.0))
    next(data.batches(None, 0, 1))
    assert data.counts.refused and data.counts.whole
    assert "a.jsonl, line" in str(data.counts) and "no tools" in str(data.counts)
    with pytest.raises(ValueError, match="a.jsonl, line 1.*no tools"):
        corpus(tokenizer, (records(tmp_path / "a.jsonl", [refused] * 3), 1.0))
    # A source needs two documents, and a weight above 0.
    with pytest.raises(ValueError, match="a.jsonl"):
        corpus(tokenizer, (records(tmp_path / "a.jsonl", ["x"]), 1.0))
    for given in ("a=0,b=1", "a=1,b", "a=x,b=1", "=1,b=2", "a=inf,b=1"):
        with pytest.raises(ValueError, match=f"--data {given}"):
            sources_of(given)
    (named := tmp_path / "x=1.jsonl").write_text("")
    assert sources_of(str(named)) == [(named, 1.0)], "a file that is called so"


def test_the_token_that_ends_learned_text_is_found(byte_folder, tmp_path):
    each = "{% for m in messages %}<|user|>{{ m.content }}END\n{% endfor %}"
    for template, record, wanted in (
        (byte_tokenizer.TEMPLATE, chat("a", "b"), [252]),
        (byte_tokenizer.TEMPLATE, {"text": "a"}, [252]),
        (byte_tokenizer.TEMPLATE, {"prompt": "a", "completion": "b"}, [252]),
        (each.replace("END", "<|tool|>"), chat("a", "b"), [251]),
        (each.replace("END", ""), chat("a", "b"), []),
    ):
        tokenizer = with_template(byte_folder, tmp_path, template)
        assert corpus(tokenizer, (records(tmp_path / "a.jsonl", [record] * 4), 1.0)).ends == wanted


@pytest.mark.slow
def test_a_hundred_thousand_rows_stream_in_flat_memory(tokenizer, tmp_path):
    texts = [f"{number:06d}" + "x" * (number % 40) for number in range(100_000)]
    records(own_path := tmp_path / "a.jsonl", texts)
    import grain  # noqa: F401  the library's own memory is not counted

    tracemalloc.start()
    stream = corpus(tokenizer, (Records(own_path), 1.0), batch=8).batches(None, 0, 1)
    for _ in range(50):
        next(stream)
    before, _ = tracemalloc.get_traced_memory()
    assert before < 5.6e6
    tracemalloc.reset_peak()
    for _ in range(1500):
        next(stream)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < before + 2e5 and peak < before + 2e6
