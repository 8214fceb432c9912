"""Documents to train on: masks, mixtures, what is held out, and an order that nothing changes."""

import json
import pathlib
import re
import tracemalloc

import numpy as np
import pytest

from training import byte_tokenizer
from training.config import Config
from training.corpus import load
from training.documents import Documents, Source, sources_of
from training.records import Records
from training.tokenizer import Tokenizer

USER, ASSISTANT, SYSTEM = ({"role": role} for role in ("user", "assistant", "system"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.write(made)
    return made


@pytest.fixture(scope="session")
def tokenizer(folder):
    return Tokenizer(folder)


def chat(*turns):
    kinds = [USER, ASSISTANT]
    return {"messages": [kinds[at % 2] | {"content": text} for at, text in enumerate(turns)]}


def learned(tokenizer, record, loss_on="assistant"):
    ids, mask = tokenizer.document(record, loss_on)
    return tokenizer.decode(ids[mask])


def test_the_tokenizer_of_bytes_is_utf_8(tokenizer):
    text = "Héllo, wörld ✓\n\tx"
    assert list(tokenizer.encode(text)) == list(text.encode())
    tokenizer.check_fits(256)
    with pytest.raises(ValueError, match="tokens up to 252, and the model's embedding 200 rows"):
        tokenizer.check_fits(200)


def test_the_assistants_tokens_are_learned_and_the_end_of_its_turn(tokenizer):
    record = chat("Hi", "Yo ✓", "a", "b")
    assert learned(tokenizer, record) == "Yo ✓<|end|>b<|end|>"
    assert learned(tokenizer, record, "all").startswith("<|user|>Hi")
    assert learned(tokenizer, {"text": "ab"}) == "ab<|end|>"
    assert learned(tokenizer, {"prompt": "ab c", "completion": " de"}) == " de<|end|>"
    answer = [ASSISTANT | {"content": "b"}]
    both = {"prompt": chat("Hi", "Yo", "a")["messages"], "completion": answer}
    assert learned(tokenizer, both) == "b<|end|>"


MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As the templates of today: thoughts before the last answer alone, an end after the whole text.
ODD = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|end|>{% endif %}"
)
CONVERSATIONS = [
    chat("Hi", "Ho"),
    chat(" Hi ", " Ho\n", "a b", "c"),
    {"messages": [SYSTEM | {"content": "s"}, *chat("a", "b", "c", "d", "e", "f")["messages"]]},
    chat("a", "a", "a", "a"),
    chat("a"),
]


@pytest.mark.parametrize("record", CONVERSATIONS)
def test_a_template_without_marks_gives_the_mask_of_one_with(folder, tmp_path, record):
    """Answers are told from the rest by what the template writes around them."""
    masks = []
    for name, template in (("marks", MARKS), ("plain", MARKS)):
        own = tmp_path / name
        own.mkdir()
        for file in folder.iterdir():
            (own / file.name).write_bytes(file.read_bytes())
        if name == "plain":
            template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        (own / "chat_template.jinja").write_text(template)
        masks.append(Tokenizer(own).document(record))
    for marked, plain in zip(*masks, strict=True):
        np.testing.assert_array_equal(marked, plain)


def with_template(folder, path, template):
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(template)
    return Tokenizer(path)


def test_thoughts_and_the_end_of_the_text_are_told_from_the_turns(folder, tmp_path):
    own = with_template(folder, tmp_path, ODD)
    wanted = "b<|end|>\n<think>\n\n</think>\n\nd<|end|>\n"
    assert learned(own, chat("a", "b", "c", "d")) == wanted + "<|end|>"


def test_all_tokens_can_be_learned_where_answers_can_not_be_told(folder, tmp_path):
    shouting = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}{% endfor %}"
    own = with_template(folder, tmp_path, shouting)
    assert learned(own, chat("a", "b"), "all") == "<|user|>A<|assistant|>B"


def test_an_answer_may_have_what_ends_it_within(folder, tmp_path):
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    own = with_template(folder, tmp_path, bare)
    assert learned(own, chat("a", "one\n\ntwo")) == "one\n\ntwo\n\n"
    assert learned(own, chat("a", "x\n\ny", "b", "z")) == "x\n\ny\n\nz\n\n"
    dialogue = "x\n\nuser: b\n\nassistant: y"  # two ways to read the text, and one to write it
    assert learned(own, chat("a", dialogue, "b", "z")) == f"{dialogue}\n\nz\n\n"


def test_a_conversation_may_begin_with_the_assistant_and_have_a_prompt_beside_it(tokenizer):
    record = {"messages": chat("Hi", "Yo")["messages"][1:], "prompt": "Hi"}
    assert learned(tokenizer, record) == "Yo<|end|>"


def test_what_a_template_refuses_is_left_out_and_said(folder, tmp_path):
    strict = MARKS.replace(
        "<|{{", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|{{", 1
    )
    own = with_template(folder, tmp_path, strict)
    tool = {"role": "tool", "content": "x"}
    records = [chat("a", "b"), {"messages": [*chat("a", "b")["messages"], tool]}] * 10
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = documents(own, (Records(path), 1.0))
    next(data.batches(None, 0, 1))
    assert data.counts.refused and data.counts.whole
    assert "a.jsonl, line" in str(data.counts) and "no tools" in str(data.counts)


def test_a_sample_begins_with_a_held_out_prompt_that_fits(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    records = [chat("a", "b")] * 18 + [chat("x" * 90, "b"), chat("short", "b")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = documents(tokenizer, (Records(path), 1.0))
    assert tokenizer.decode(data.prompt(31)) == "<|user|>short<|end|><|assistant|>"
    assert documents(tokenizer, (Records(path), 1.0)).prompt(5) is None


def test_an_answer_that_can_not_be_told_from_the_rest_is_refused(folder, tmp_path):
    shouting = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="can't be told from the rest.*generation"):
        with_template(folder, tmp_path, shouting).document(chat("a", "b"))
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        with_template(folder, tmp_path, strict).document(chat("a", "b"))


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Records(path)


def documents(tokenizer, *sources, **settings):
    known = {"seq": 31, "batch": 4, "seed": 0} | settings
    return Documents([Source(*own) for own in sources], tokenizer, **known)


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


def test_a_pass_has_every_document_once_but_those_held_out(tokenizer, tmp_path):
    texts = numbers("a", 400)
    data = documents(tokenizer, (write(tmp_path / "a.jsonl", texts), 1.0))
    seen = starts(data.batches(None, 0, 1), 200)
    # Each of 4 lanes is ahead of the others by at most what waits in it.
    assert len(set(seen[:290])) == 290
    assert set(seen) == {text[:5] for text in texts[:360]}
    held_out = [t for arrays in data.held_out(0, 1) for t in texts_of(arrays) if t.strip(b"\0")]
    assert sorted(text[:5].decode() for text in held_out) == [t[:5] for t in texts[360:]]


def test_sources_are_drawn_by_their_weights(tokenizer, tmp_path):
    a, b = (write(tmp_path / f"{name}.jsonl", numbers(name, 100)) for name in "ab")
    data = documents(tokenizer, (a, 3.0), (b, 1.0))
    seen = starts(data.batches(None, 0, 1), 40)
    part = sum(text[0] == "a" for text in seen) / len(seen)
    assert abs(part - 0.75) < 0.05, part


@pytest.mark.parametrize("count", [2, 4])
def test_a_run_that_goes_on_in_another_number_of_processes_sees_the_same_documents(
    tokenizer, tmp_path, count
):
    records = write(tmp_path / "a.jsonl", numbers("a", 200))
    whole = documents(tokenizer, (records, 1.0)).batches(None, 0, 1)
    place = None
    for _ in range(5):
        _, place = next(whole)
    place = json.loads(json.dumps(place))
    parts = [documents(tokenizer, (records, 1.0)).batches(place, at, count) for at in range(count)]
    for _ in range(5):
        wanted, _ = next(whole)
        found = [next(part)[0] for part in parts]
        for at, array in enumerate(wanted):
            np.testing.assert_array_equal(array, np.concatenate([own[at] for own in found]))


def test_long_documents_are_cut_dropped_or_refused_as_asked_and_counted(tokenizer, tmp_path):
    records = write(tmp_path / "a.jsonl", ["x" * (50 if n % 2 else 5) for n in range(40)])
    cut = documents(tokenizer, (records, 1.0))
    next(cut.batches(None, 0, 1))
    assert cut.counts.cut and cut.counts.whole and not cut.counts.dropped
    dropped = documents(tokenizer, (records, 1.0), long="drop")
    arrays, _ = next(dropped.batches(None, 0, 1))
    assert dropped.counts.dropped and max(map(len, texts_of(arrays))) == 6
    assert "dropped" in str(dropped.counts)
    with pytest.raises(
        ValueError, match=r"a.jsonl, line 2: 51 tokens, of which --seq 31 has room for 32"
    ):
        documents(tokenizer, (records, 1.0), long="refuse")


def trained(data, steps):
    """Documents of each batch, by their segments; the counts are those that `data` has after it."""
    found = 0
    drawn = data.batches(None, 0, 1)
    for _ in range(steps):
        (_, _, segments, _), _ = next(drawn)
        found += sum(len(set(row[row > 0].tolist())) for row in segments)
    return found


def test_what_will_be_cut_and_how_often_it_is_trained_on_is_said_before_a_run(tokenizer, tmp_path):
    """Of 40 documents 36 are trained on; a short one has 6 tokens, a row room for 32."""
    a = write(tmp_path / "a.jsonl", ["x" * (50 if n % 2 else 5) for n in range(40)])
    data = documents(tokenizer, (a, 1.0))
    said = data.outlook(100)
    assert said.startswith("all 36 documents in rows of 31 tokens: 18 whole, 18 cut, the longest")
    assert "the longest of 51 tokens; 100 steps" in said and str(data.counts) == "none"
    rows = 18 + 4  # one for each that is cut, five short ones in each of the others
    assert said.endswith(f"100 steps train on a.jsonl {100 * 4 / rows:.3g} times"), said
    found = trained(data, 100)
    assert found == data.counts.whole + data.counts.cut, "those read ahead are not counted"
    # The 16 documents that wait for a row in each lane are short ones at the end.
    assert found / 36 == pytest.approx(400 / rows, rel=0.05)


def test_documents_that_are_left_out_are_no_part_of_a_pass(tokenizer, tmp_path):
    """Every second one is; 18 steps of 4 rows with 3 of the others each are 24 passes over 9."""
    path = tmp_path / "a.jsonl"
    records = [chat("x" * (60 if n % 2 else 3), "yes") for n in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = documents(tokenizer, (Records(path), 1.0))
    assert data.outlook(18).endswith("18 steps train on a.jsonl 24 times")
    assert trained(data, 18) == data.counts.whole == 24 * 9
    assert data.counts.empty == pytest.approx(24 * 9, rel=0.05), "those read ahead are not counted"


def test_a_source_of_which_all_is_left_out_is_trained_on_0_times(tokenizer, tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, length in zip(paths, (60, 3), strict=True):
        lines = [json.dumps(chat("x" * length, "yes")) for _ in range(20)]
        path.write_text("\n".join(lines))
    given = [(Records(path), 1.0) for path in paths]
    said = documents(tokenizer, *given).outlook(18)
    assert "train on a.jsonl 0 times, b.jsonl" in said, said


def test_each_source_of_a_mixture_is_foretold_by_its_weight(tokenizer, tmp_path):
    a, b = (
        write(tmp_path / f"{name}.jsonl", numbers(name, n)) for name, n in (("a", 3000), ("b", 100))
    )
    said = documents(tokenizer, (a, 3.0), (b, 1.0)).outlook(50)
    first, second = (float(t) for t in re.findall(r"jsonl ([\d.]+) times", said))
    assert said.startswith("the first 1,000 documents") and second / first == pytest.approx(
        10, 0.01
    )


def test_a_conversation_whose_answer_is_cut_off_is_left_out_and_counted(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    records = [chat("x" * (60 if n % 2 else 3), "yes") for n in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = documents(tokenizer, (Records(path), 1.0))
    arrays, _ = next(data.batches(None, 0, 1))
    assert data.counts.empty and arrays[1].sum() > 0
    assert "left out, with nothing to learn within a row, the longest of" in data.outlook(1)


def test_too_few_documents_and_weights_that_are_none_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="has one document: at least 2"):
        documents(tokenizer, (write(tmp_path / "a.jsonl", ["x"]), 1.0))
    for given in ("a=0,b=1", "a=1,b", "a=x,b=1", "=1,b=2", "a=inf,b=1"):
        with pytest.raises(ValueError, match="no path with a weight above 0"):
            sources_of(given)
    named = pathlib.Path(tmp_path / "x=1.jsonl")
    named.write_text("")
    assert sources_of(str(named)) == [(named, 1.0)], "a file that is called so"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        Tokenizer(tmp_path)


@pytest.mark.slow
def test_a_hundred_thousand_rows_stream_in_flat_memory(tokenizer, tmp_path):
    """What is held grows by the eight bytes of where a line begins, and its number's eight."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(json.dumps({"text": f"{number:06d}" + "x" * (number % 40)}) + "\n")
    import grain  # noqa: F401  what a library takes is not what rows take

    tracemalloc.start()
    data = documents(tokenizer, (Records(path), 1.0), batch=8)
    stream = data.batches(None, 0, 1)
    for _ in range(50):
        next(stream)
    before, _ = tracemalloc.get_traced_memory()
    assert before < 100_000 * 16 + 4e6
    tracemalloc.reset_peak()
    for _ in range(1500):
        next(stream)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < before + 2e5 and peak < before + 2e6


def test_text_among_documents_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ["x", "y"])
    (tmp_path / "b.txt").write_text("a book")
    for data in ("a.jsonl=1,b.txt=1", "b.txt=1,a.jsonl=1"):
        with pytest.raises(ValueError, match=r"--data .*: b\.txt is text"):
            load(Config(data=data), None, 16)


@pytest.mark.parametrize(
    ("template", "record", "wanted"),
    [
        (None, chat("a", "b"), [252]),
        (
            "{% for m in messages %}<|user|>{{ m.content }}<|tool|>\n{% endfor %}",
            chat("a", "b"),
            [251],
        ),
        ("{% for m in messages %}<|user|>{{ m.content }}\n{% endfor %}", chat("a", "b"), []),
        (None, {"text": "a"}, [252]),
        (None, {"prompt": "a", "completion": "b"}, [252]),
    ],
)
def test_the_token_that_ends_what_is_learned_is_found(folder, tmp_path, template, record, wanted):
    own = with_template(folder, tmp_path, template or byte_tokenizer.TEMPLATE)
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(record) + "\n") * 4)
    found = Documents([Source(Records(path), 1.0)], own, seq=16, batch=2, seed=0)
    assert found.ends == wanted
