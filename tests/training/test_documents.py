"""Batches of texts and documents: what is learned, held out, cut, left out, and in which order."""

import functools
import itertools
import json
import math
import re
import tracemalloc

import numpy as np
import pytest

from training import byte_tokenizer, data
from training.documents import Documents, Source, sources_of
from training.packing import LOOK, Lane, row_of
from training.records import Records, check
from training.tokenizer import Tokenizer


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
    """The documents of a batch's rows, as text."""
    tokens, _, segments, _ = arrays
    return [
        bytes(row[np.append(seg, seg[-1]) == n][: (seg == n).sum() + 1].clip(0, 255).tolist())
        for row, seg in zip(np.asarray(tokens), np.asarray(segments), strict=True)
        for n in range(1, seg.max() + 1)
    ]


def numbers(source, count):
    return [f"{source}{n:04d}" + "." * (n % 9) for n in range(count)]


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
    first, second = (float(t) for t in re.findall(r"jsonl ([\d.]+) times", made.outlook(50)))
    assert second / first == pytest.approx(1000 / 100 / 3, rel=0.01)
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
    assert said.startswith("all 36 documents in rows of 31 tokens: 18 whole, 18 cut")
    assert "longest of 51 tokens" in said and str(made.counts) == "none"
    rows = 18 + 4  # of 36: one for each that is cut, five short ones in each of the others
    assert said.endswith(f"100 steps train on a.jsonl {100 * 4 / rows:.3g} times"), said
    found = trained(made, 100)
    assert found == made.counts.whole + made.counts.cut, "those read ahead are not counted"
    # The 16 documents that wait for a row in each lane are short ones at the end.
    assert found / 36 == pytest.approx(400 / rows, rel=0.05)
    sizes = {len(text) for text in texts_of(next(made.batches(None, 0, 1))[0])}
    assert sizes == {6, 32}, "cut to a row of seq + 1 tokens"
    dropped = corpus(tokenizer, (source, 1.0), long="drop")
    arrays, _ = next(dropped.batches(None, 0, 1))
    assert dropped.counts.dropped and max(map(len, texts_of(arrays))) == 6
    assert "dropped" in str(dropped.counts)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: 51 tokens.* --seq 31 "):
        corpus(tokenizer, (source, 1.0), long="refuse")
    # A sample begins with a held-out prompt that fits.
    known = [chat("a", "b")] * 18 + [chat("x" * 90, "b"), chat("short", "b")]
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", known), 1.0))
    assert tokenizer.decode(made.prompt(31)) == "<|user|>short<|end|><|assistant|>"
    assert made.prompt(5) is None


def test_conversations_whose_answer_is_cut_off_are_left_out_and_counted(tokenizer, tmp_path):
    half = [chat("x" * (60 if n % 2 else 3), "yes") for n in range(20)]
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", half), 1.0))
    said = made.outlook(18)  # of 4 rows with 3 documents each: 24 passes over 9
    assert said.endswith("18 steps train on a.jsonl 24 times")
    assert "left out" in said and "the longest of" in said
    assert trained(made, 18) == made.counts.whole == 24 * 9
    assert made.counts.empty == pytest.approx(24 * 9, rel=0.05)
    none = records(tmp_path / "b.jsonl", [chat("x" * 60, "yes")] * 20)
    said = corpus(tokenizer, (none, 1.0), (records(tmp_path / "c.jsonl", half), 1.0)).outlook(18)
    assert "train on b.jsonl 0 times, c.jsonl" in said, said


def test_refused_conversations_are_left_out_and_named_or_end_the_run(tmp_path):
    strict = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer = with_template(tmp_path, strict + byte_tokenizer.TEMPLATE)
    refused = {"messages": [*chat("a", "b")["messages"], {"role": "tool", "content": "x"}]}
    made = corpus(tokenizer, (records(tmp_path / "a.jsonl", [chat("a", "b"), refused] * 10), 1.0))
    next(made.batches(None, 0, 1))
    assert made.counts.refused and made.counts.whole
    assert "a.jsonl, line" in str(made.counts) and "no tools" in str(made.counts)
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


def test_the_token_that_ends_learned_text_is_found(tmp_path):
    each = "{% for m in messages %}<|user|>{{ m.content }}END\n{% endfor %}"
    for template, record, wanted in (
        *((byte_tokenizer.TEMPLATE, record, [252]) for record in (chat("a", "b"), {"text": "a"})),
        (each.replace("END", "<|tool|>"), chat("a", "b"), [251]),
        (each.replace("END", ""), chat("a", "b"), []),
    ):
        tokenizer = with_template(tmp_path, template)
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


TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
ONE = {"shard_index": 0, "shard_count": 1}
SEQ = 20


def first(n, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    options = {"batch": 12, "seq": 8, "seed": 3, **ONE, **changed}
    return np.stack(list(itertools.islice(data.batches(TOKENS, **options), n)))


@pytest.mark.parametrize("count", [1, 4])
def test_an_epoch_has_each_target_once_for_any_number_of_processes_from_any_sample(count):
    assert data.samples_per_epoch(TOKENS.size, 8) == 124
    orders = [first(31, batch=4, start=124 * epoch) for epoch in range(3)]
    for rows in orders:
        assert rows.dtype == np.int32 and (np.diff(rows, axis=-1) == 1).all()
        assert sorted(rows[..., 1:].ravel()) == list(range(1, 124 * 8 + 1))
    orders += [first(31, batch=4, seed=4)]  # and neighbouring seeds share no epoch
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))
    whole = first(25)  # 300 samples: three epochs
    parts = [first(14, shard_index=i, shard_count=count, start=132) for i in range(count)]
    assert parts[0].shape[1] == 12 // count
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[11:])
    other = first(80, batch=1, start=36)  # another size of batches
    np.testing.assert_array_equal(other[:, 0], whole.reshape(-1, 9)[36:116])
    assert first(1, start=10**15).shape[1] == 12, "samples before are not read"


@pytest.mark.parametrize("count", [1, 4])
def test_evaluation_sees_every_target_once_in_order(count):
    for n in (2, 9, 40, 41, 42, 97):
        tokens = TOKENS[:n] + 1  # no real token is 0, so padding shows
        known = {"batch": 4, "seq": 5, "shard_count": count}
        shards = [list(data.eval_batches(tokens, **known, shard_index=i)) for i in range(count)]
        targets = []
        for parts in zip(*shards, strict=True):  # no process waits for one more batch
            rows, mask = (np.concatenate(half) for half in zip(*parts, strict=True))
            assert (rows.shape, mask.shape) == ((4, 6), (4, 5))
            assert (rows.dtype, mask.dtype) == (np.int32, np.float32)
            np.testing.assert_array_equal(rows[:, 1:] != 0, mask == 1)
            np.testing.assert_array_equal(rows[:, 1:][mask == 1], rows[:, :-1][mask == 1] + 1)
            targets += rows[:, 1:][mask == 1].tolist()
        assert targets == tokens[1:].tolist()
        part = list(data.eval_batches(tokens, **known, shard_index=0, max_batches=3))
        assert len(part) == min(3, math.ceil((n - 1) / 5 / 4))


# fmt: off
REFUSED = [
    ({"batch": 10, "shard_count": 4}, "--batch 12 or 8"),
    ({"batch": 10, "shard_count": 4, "max_batches": None}, "--batch 12 or 8"),
    ({"shard_index": 4, "shard_count": 4}, "shard_index=4"), ({"batch": 0}, "batch=0"),
    ({"seq": 1000}, "--seq"), ({"seed": -1}, "seed=-1"), ({"max_batches": 0}, "max_batches=0"),
    ({"tokens": TOKENS[:1], "max_batches": None}, "at least 2 tokens"),
]
# fmt: on


def test_batches_that_can_not_be_are_refused():
    for changed, said in REFUSED:
        known = {"tokens": TOKENS, "batch": 12, "seq": 8, **ONE, **changed}
        seeded = functools.partial(data.batches, seed=3)
        make = data.eval_batches if "max_batches" in changed else seeded
        with pytest.raises(ValueError, match=said):
            make(**known)


def document(number, size=None):
    """Tokens that tell the document and the place in it."""
    size = 2 + 7 * number % 15 if size is None else size
    ids = 1000 * number + np.arange(size, dtype=np.int32)
    return ids, np.arange(size) <= size // 2


def documents_of(row):
    """Numbers of the documents of a row, each checked to be whole and in its place."""
    tokens, weights, segments, positions = row
    found = []
    for segment in range(1, segments.max(initial=0) + 1):
        at = np.flatnonzero(segments == segment)
        number = tokens[at[0]] // 1000
        ids, mask = document(number)
        end = at[0] + len(ids)
        assert (np.diff(at) == 1).all() and (positions[at] == np.arange(len(at))).all()
        assert (tokens[at[0] : end] == ids).all()
        assert (weights[at[0] : end - 1] == mask[1:]).all(), "the first is predicted by nothing"
        assert not weights[end - 1 : end].any(), "the next document's first"
        found.append(int(number))
    return found


def test_every_document_comes_once_and_whole_in_rows_that_are_nearly_full():
    lane = Lane(document, SEQ, 0, 1)
    rows = [lane.row() for _ in range(300)]
    seen = [n for row in rows for n in documents_of(row)]
    assert len(seen) == len(set(seen))
    # Each row takes the one that waits longest, and of others no more than fit.
    assert set(range(max(seen) - LOOK * (SEQ + 1) // 2)) <= set(seen), "none is left behind"
    assert np.mean([(row[2] > 0).mean() for row in rows]) > 0.97
    # A pass ends when its documents do.
    lane = Lane(document, SEQ, 0, 1, end=50)
    rows = iter(lane.row, None)
    assert sorted(n for row in rows for n in documents_of(row)) == list(range(50))
    # A row may be one document, and one may be empty.
    ids, mask = document(3, SEQ + 1)
    tokens, weights, segments, _ = row_of([(ids, mask)], SEQ)
    assert (tokens == ids).all() and (segments == 1).all() and weights.sum() == mask[1:].sum()
    assert not any(part.any() for part in row_of([], SEQ))
    # An order in which nothing can be learned ends with an error.
    lane = Lane(lambda number: None, SEQ, 0, 1, patience=30)
    with pytest.raises(ValueError, match="31 documents.*--seq"):
        lane.row()
