"""Learned tokens of conversations: subword tokenizers, tools, weights, ends, hostile templates."""

import json
import random
import re
import resource
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import subwords

from training import byte_tokenizer
from training.answers import match_between
from training.documents import Documents, Source
from training.records import Records, check
from training.show import printable
from training.templates import TRIES
from training.tokenizer import Tokenizer

CHATML = subwords.TEMPLATES["chatml"]
QWEN = subwords.TEMPLATES["qwen with tools"]


def chat(*texts, **flags):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} | flags for at, text in enumerate(texts)]


def learned(tokenizer, record, loss_on="assistant"):
    ids, mask = tokenizer.document(record, loss_on)
    return tokenizer.decode(ids[mask])


def read(tmp_path, record):
    """The record as it is read from a file."""
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return Records(path)[0]


# ------------------------------------------------------------------ the first token of an answer


@pytest.mark.parametrize("kind", subwords.KINDS)
@pytest.mark.parametrize("name", ["mistral", "vicuna", "deepseek", "phi"])
def test_both_ways_to_find_answers_learn_them_from_their_first_token(name, kind, tmp_path):
    """A first token that contains the space before the answer is predicted as one."""
    template = subwords.TEMPLATES[name]
    turns = ["is it so", "yes", "is it", "positive", "is it", "no"]
    end = "<|eot|>\n" if name == "phi" else "</s>"
    masks = []
    for way, source in (("marked", template), ("plain", subwords.unmarked(template))):
        tokenizer = subwords.KINDS[kind](tmp_path / way, source)
        ids, mask = tokenizer.document({"messages": chat(*turns)})
        masks.append(mask)
        words = tokenizer.decode(ids[mask]).split(end)
        closing = words.pop().replace("</s>", "")  # Phi's text ends with an end of its own
        assert ([word.strip() for word in words], closing) == (["yes", "positive", "no"], "")
    np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize("kind", subwords.KINDS)
def test_the_first_token_is_learned_after_a_prompt_that_ends_with_a_space(kind, tmp_path):
    tokenizer = subwords.KINDS[kind](tmp_path, None)
    record = {"prompt": "is it so: ", "completion": "positive"}
    assert learned(tokenizer, record).strip() == "positive</s>"
    ids, mask = tokenizer.document(record)
    assert not mask[:3].any() and "positive" in tokenizer.decode(ids[mask][:1])
    spaced = subwords.unmarked(subwords.TEMPLATES["mistral"]).replace("[/INST]'", "[/INST] '")
    spaced = subwords.KINDS[kind](tmp_path / "chat", spaced.replace("' ' + m", "m"))
    assert learned(spaced, {"messages": chat("is it", "yes")}).strip() == "yes</s>"


def test_offsets_without_the_space_give_the_same_mask(tmp_path):
    """Llama 3's tokenizer trims offsets: transformers then loses every answer with a space."""
    masks = []
    for trim in (False, True):
        for template in (subwords.TEMPLATES["mistral"], subwords.unmarked(CHATML)):
            own = subwords.byte_level(tmp_path / f"{trim}{len(masks)}", template, trim=trim)
            masks.append(own.document({"messages": chat("is it", "yes  no", "so", "  no")})[1])
    np.testing.assert_array_equal(masks[0], masks[2])
    np.testing.assert_array_equal(masks[1], masks[3])
    assert masks[0].sum() > 4


ODD_ORDERS = [
    [("assistant", "yes"), ("assistant", " no"), ("user", "is it"), ("assistant", "so")],
    [("user", "is it"), ("tool", "yes"), ("assistant", "no"), ("assistant", ""), ("user", "so")],
    [("user", "is it"), ("assistant", "</s>"), ("user", "USER: so"), ("assistant", "\n")],
]


@pytest.mark.parametrize("name", ["chatml", "llama 2", "vicuna", "deepseek"])
def test_both_ways_agree_in_any_order_of_roles(name, tmp_path):
    template = subwords.TEMPLATES[name]
    ways = [
        subwords.byte_level(tmp_path / f"{len(source)}", source, special=False)
        for source in (template, subwords.unmarked(template))
    ]
    for order in ODD_ORDERS:
        for weight in (1, 0):
            turns = [
                {"role": role, "content": text, "weight": weight if role == "assistant" else 1}
                for role, text in order
            ]
            for loss_on in ("assistant", "all"):
                marked, plain = (own.document({"messages": turns}, loss_on) for own in ways)
                np.testing.assert_array_equal(marked[0], plain[0])
                np.testing.assert_array_equal(marked[1], plain[1])
                assert marked[1].any() == (weight == 1 or loss_on == "all")
                assert marked[1].all() == (weight == 1 and loss_on == "all")


# ------------------------------------------------------------------ equal turns


@pytest.mark.parametrize(("user", "role"), [("go on", "user"), ("ok", "tool"), ("", "user")])
def test_equal_turns_take_time_in_proportion(user, role, tmp_path):
    tokenizer = subwords.byte_level(tmp_path, subwords.unmarked(CHATML))
    turns = [{"role": role, "content": user}, {"role": "assistant", "content": "yes"}] * 60
    before = time.monotonic()
    assert learned(tokenizer, {"messages": turns}) == "yes<|im_end|>\n" * 60
    assert time.monotonic() - before < 60, "2^60 tries would never end"


def test_gaps_are_those_of_two_regular_expressions():
    """The first match of a lazy and of a greedy pattern, where both are the same."""
    rng = random.Random(0)
    found = 0
    for _ in range(3000):
        literals = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(4)]
        whole = "".join(own + "".join(rng.choices("abc", k=rng.randrange(3))) for own in literals)
        parts = [re.escape(own) for own in literals]
        lazy, greedy = (re.fullmatch(gap.join(parts), whole) for gap in ("(.*?)", "(.*)"))
        places = [[m.span(at) for at in range(1, 4)] for m in (lazy, greedy) if m]
        want = places[0] if len(places) == 2 and places[0] == places[1] else None
        assert match_between(literals, whole) == want, (literals, whole)
        found += want is not None
    assert 100 < found < 2900


# ------------------------------------------------------------------ tools


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"name": "weather", "arguments": {"city": "Oslo", "n": 1}}
AS_TEXT = "{{ c.function.arguments }}"


def calling(call):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call}],
    }


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "text"])
def test_tools_reach_the_template(as_text, tmp_path):
    tokenizer = subwords.byte_level(tmp_path / "t", QWEN)
    tools = json.dumps(TOOLS) if as_text else TOOLS
    messages = chat("is it", "yes")
    for record in (
        {"messages": messages, "tools": tools},
        {"prompt": messages[:1], "completion": messages[1:], "tools": tools},
    ):
        ids, _ = tokenizer.document(read(tmp_path, record))
        assert tokenizer.decode(ids).startswith("<|im_start|>system\nTools: weather<|im_end|>")
    table = pyarrow.Table.from_pylist([{"messages": messages, "tools": tools}] * 2)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    records = Records(tmp_path / "a.parquet")
    assert "weather" in tokenizer.decode(tokenizer.document(records[1])[0])
    data = Documents([Source(records, 1.0)], tokenizer, seq=127, batch=1, seed=0)
    assert "weather" in tokenizer.decode(data.prompt(127)), "a sample's prompt has them too"


def test_other_variables_reach_the_template(tmp_path):
    template = "{% if shout is defined %}{{ shout }}: {% endif %}" + CHATML
    tokenizer = subwords.byte_level(tmp_path / "t", template)
    record = {"messages": chat("is it", "yes"), "chat_template_kwargs": {"shout": "so"}}
    assert tokenizer.decode(tokenizer.document(read(tmp_path, record))[0]).startswith("so: <|im")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("wanted", ["object", "text"])
@pytest.mark.parametrize("given", ["object", "text"])
def test_arguments_of_calls_are_encoded_once(given, wanted, marked, tmp_path):
    """OpenAI's files have them as JSON text; some templates take an object and some a text."""
    template = QWEN if marked else subwords.unmarked(QWEN)
    if wanted == "text":
        template = template.replace("{{ c.function.arguments | tojson }}", AS_TEXT)
    tokenizer = subwords.byte_level(tmp_path / "t", template)
    call = CALL if given == "object" else CALL | {"arguments": json.dumps(CALL["arguments"])}
    result = {"role": "tool", "content": "positive"}
    messages = [*chat("is it"), calling(call), result, *chat("", "so")[1:]]
    record = read(tmp_path, {"messages": messages, "tools": TOOLS})
    written = json.dumps(CALL["arguments"])
    assert learned(tokenizer, record) == (
        f"\n<call>weather {written}</call><|im_end|>\nso<|im_end|>\n"
    )


def test_a_template_that_adds_a_text_to_arguments_gets_text(tmp_path):
    template = QWEN.replace(
        "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
    )
    tokenizer = subwords.byte_level(tmp_path / "t", template)
    said = learned(tokenizer, {"messages": [*chat("is it"), calling(CALL)]})
    assert json.dumps(CALL["arguments"]) in said


def test_a_call_without_text_is_found_where_the_template_writes_it_otherwise(tmp_path):
    """Qwen2.5's has a line break before a text only, Llama 3.1's leaves out the text of a call."""
    ask = "<|im_start|>assistant"
    body = "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    call = "{% if m.tool_calls %}{{ '\\n<call>' + m.tool_calls[0].function.name }}{% endif %}"
    plain = subwords.unmarked(CHATML)
    answer = plain[plain.index("{{ '<|im_start|>assistant") : plain.index("{% endif %}{% endfor")]
    for written in (
        body + call,
        "{% if m.tool_calls %}" + call + "{% else %}" + body + "{% endif %}",
    ):
        template = plain.replace(answer, f"{{{{ '{ask}' }}}}{written}{{{{ '<|im_end|>\\n' }}}}")
        tokenizer = subwords.byte_level(tmp_path / f"{len(template)}", template)
        for content in (None, "" if "else" not in written else "yes"):
            message = calling(CALL) | {"content": content}
            record = {"messages": [*chat("is it"), message, *chat("is it", "so")]}
            said = learned(tokenizer, record)
            assert said == "<call>weather<|im_end|>\nso<|im_end|>\n", (written, content)


def test_the_template_in_use_decides_how_answers_are_found(tmp_path):
    """Several named templates: the default, and "tool_use" where a conversation has tools."""
    plain = subwords.unmarked(QWEN)
    for number, (default, tool_use) in enumerate([(plain, QWEN), (QWEN, plain)]):
        named = {"default": default, "tool_use": tool_use}
        tokenizer = subwords.byte_level(tmp_path / f"{number}", named)
        for tools in ({}, {"tools": TOOLS}):
            said = learned(tokenizer, {"messages": chat("is it", "yes", "is it", "no"), **tools})
            assert said == "yes<|im_end|>\nno<|im_end|>\n"
    tokenizer = subwords.byte_level(tmp_path / "none", {"rag": QWEN})
    with pytest.raises(ValueError, match=r"multiple chat templates"):
        tokenizer.document({"messages": chat("is it", "yes")})


# ------------------------------------------------------------------ weights, empty turns


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("flag", "off", "on"), [("weight", 0, 1), ("train", False, True), ("training", False, None)]
)
def test_an_answer_of_weight_0_is_context_only(flag, off, on, marked, tmp_path):
    tokenizer = subwords.byte_level(tmp_path / "t", CHATML if marked else subwords.unmarked(CHATML))
    messages = chat("is it", "no", "so", "positive")
    messages[1][flag], messages[3][flag] = off, on
    record = read(tmp_path, {"messages": messages})
    assert learned(tokenizer, record) == "positive<|im_end|>\n"
    assert learned(tokenizer, record, "all") == tokenizer.decode(
        tokenizer.document(record)[0]
    ).replace("no<|im_end|>\n", "", 1)
    messages[3][flag] = off
    assert learned(tokenizer, {"messages": messages}) == ""


def test_all_tokens_can_not_leave_out_a_users_message(tmp_path):
    tokenizer = subwords.byte_level(tmp_path, CHATML)
    messages = chat("is it", "no", weight=0)
    with pytest.raises(ValueError, match=r'"weight": 0 of a user message.*--loss-on'):
        tokenizer.document({"messages": messages}, "all")
    assert learned(tokenizer, {"messages": messages}) == ""


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("first", ["", "yes"])
def test_an_empty_answer_costs_no_other_its_own(first, marked, tmp_path):
    """Covers templates that write an empty answer and that leave it out."""
    for number, template in enumerate(
        (CHATML.replace(" + '<|im_end|>\\n' }}{% endgen", " }}{% endgen"), _skipping(CHATML))
    ):
        template = template if marked else subwords.unmarked(template)
        tokenizer = subwords.byte_level(tmp_path / f"{number}", template)
        messages = chat("is it", first, "so", "positive", "so", "no")
        record = {"prompt": messages[:3], "completion": messages[3:]}
        assert learned(tokenizer, record).replace("<|im_end|>\n", "") == "positiveno"


def _skipping(template):
    start, end = template.index("{{ '<|im_start|>assistant"), template.index("{% endif %}{% endfor")
    answer = "{% if m.content %}" + template[start:end] + "{% endif %}"
    return template[:start] + answer + template[end:]


def test_several_blocks_of_one_answer_belong_to_it(tmp_path):
    """A template may mark thoughts and text apart."""
    answer = "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    thoughts = "{% generation %}{{ '<think>' + m.content + '</think>' }}{% endgeneration %}\n"
    template = CHATML.replace(
        answer, "{% if m.content != 'no' %}" + thoughts + "{% endif %}" + answer
    )
    tokenizer = subwords.byte_level(tmp_path, template)
    messages = chat("is it", "yes", "is it", "no")
    messages[0 + 1]["weight"] = 0
    assert learned(tokenizer, {"messages": messages}) == "no<|im_end|>\n"
    messages[1]["weight"], messages[3]["weight"] = 1, 0
    assert learned(tokenizer, {"messages": messages}) == "<think>yes</think>yes<|im_end|>\n"


def test_a_marked_end_of_the_text_belongs_to_the_last_answer(tmp_path):
    tokenizer = subwords.byte_level(tmp_path, subwords.TEMPLATES["phi"])
    messages = chat("is it", "yes", "is it", "no")
    messages[1]["weight"] = 0
    assert learned(tokenizer, {"messages": messages}) == "no<|eot|>\n</s>"
    messages[1]["weight"], messages[3]["weight"] = 1, 0
    assert learned(tokenizer, {"messages": messages}) == "yes<|eot|>\n"


def test_a_template_that_leaves_out_the_text_of_answers_is_refused(tmp_path):
    """Some of models of images write content in parts alone, and nothing for a text."""
    template = subwords.unmarked(CHATML).replace(
        "assistant\\n' }}{{ m.content + ", "assistant\\n' }}{{ "
    )
    assert template != subwords.unmarked(CHATML)
    tokenizer = subwords.byte_level(tmp_path, template)
    with pytest.raises(ValueError, match=r"chat template in .*--loss-on all"):
        tokenizer.document({"messages": chat("is it", "yes")})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": chat("a", "b", weight=0.5)}, '"weight" of a message is 0.5'),
        ({"messages": chat("a", "b", train="no")}, '"train" of a message is "no"'),
        ({"messages": chat("a", "b", train=True)}, '"train" of a user message'),
        ({"messages": chat("a", "b", train_detail=[])}, '"train_detail"'),
        ({"messages": chat("a", "b"), "tools": "{"}, '"tools" is .* not JSON'),
        ({"messages": chat("a", "b"), "tools": {"a": 1}}, '"tools" is .* not a list'),
        ({"messages": chat("a", "b"), "functions": []}, '"functions" .* give "tools"'),
        ({"messages": chat("a", "b"), "chat_template_kwargs": 1}, '"chat_template_kwargs"'),
        ({"messages": chat("a", "b"), "chat_template_kwargs": {"tools": 1}}, "chat_template_kw"),
        ({"messages": [calling({"name": "f", "arguments": "{"})]}, '"arguments" is .* not JSON'),
        ({"messages": [calling({"name": "f", "arguments": "[1]"})]}, '"arguments" of a tool call'),
        ({"messages": [calling("f")]}, '"function" of a tool call'),
        ({"messages": [calling({}) | {"tool_calls": "f"}]}, '"tool_calls" is "f"'),
        ({"messages": chat("a", "b", function_call={})}, '"function_call" .* "tool_calls"'),
    ],
)
def test_fields_that_can_not_be_heeded_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        check(record)


# ------------------------------------------------------------------ thoughts


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.last %}{{ '<think>' }}"
    "{{ parts[0].split('<think>')[-1] if parts | length > 1 }}{{ '</think>' }}{% endif %}"
    "{{ parts[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_thoughts_in_the_last_answer_are_learned(tmp_path):
    """A template that moves thoughts out of the text, and drops those of earlier turns."""
    tokenizer = subwords.byte_level(tmp_path, THINKING)
    thought = "<think>so</think>yes"
    assert learned(tokenizer, {"messages": chat("is it", thought)}) == thought + "<|im_end|>\n"
    said = learned(tokenizer, {"messages": chat("is it", thought, "is it", thought)})
    assert said == f"yes<|im_end|>\n{thought}<|im_end|>\n"


# ------------------------------------------------------------------ beginnings and ends


BEGIN, END = 1, 2  # <s>, </s>


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "is it", "completion": " so"},
        {"prompt": "is it", "completion": " so</s>"},
        {"prompt": "<s>is it", "completion": " so</s>\n"},
        {"text": "is it so"},
        {"text": "<s>is it so</s>"},
        {"text": "<s>is it so</s>\n"},
    ],
    ids=str,
)
def test_a_text_has_one_beginning_and_one_end_which_is_learned(record, ends, tmp_path):
    tokenizer = subwords.metaspace(tmp_path, ends=ends)
    ids, mask = tokenizer.document(record)
    assert (ids == BEGIN).sum() == (ids == END).sum() == 1
    assert ids[0] == BEGIN and mask[ids == END].all()
    assert learned(tokenizer, record).replace("</s>", "").split()[-1] == "so"


def test_a_question_begins_as_the_texts_that_were_learned(tmp_path):
    tokenizer = subwords.metaspace(tmp_path / "t", ends=True)
    text = tokenizer.document({"text": "is it so"})[0]
    np.testing.assert_array_equal(tokenizer.asked("is it so"), text[:-1])
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "is it", "completion": " so"}\n' * 2)
    data = Documents([Source(Records(path), 1.0)], tokenizer, seq=31, batch=1, seed=0)
    asked, _ = tokenizer.document({"prompt": "is it", "completion": " so"})
    np.testing.assert_array_equal(data.prompt(31), asked[: len(data.prompt(31))])
    assert data.prompt(31)[0] == BEGIN and END not in data.prompt(31)


# ------------------------------------------------------------------ hostile folders


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU"),
        ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "memory"),
        ("{{ 'x' * 10**11 }}", "memory"),
        (
            "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}"
            "{% endfor %}{{ n.x | length }}",
            "(memory|CPU)",  # a slow machine has used its second before its gigabyte
        ),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", "CPU"),
    ],
    ids=["nested ranges", "long text", "one long text", "doubled", "macro"],
)
def test_a_template_can_not_take_all_time_or_memory(body, limit, tmp_path, monkeypatch):
    monkeypatch.setattr("training.templates.SECONDS", 1)
    tokenizer = subwords.byte_level(tmp_path, body)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for known in (limit, *["it takes more than"] * (TRIES - 1)):  # one alone refuses no others
        with pytest.raises(ValueError, match=f"chat template in .*{known}"):
            tokenizer.document({"messages": chat("a", "b")})
    start = time.monotonic()
    with pytest.raises(ValueError, match="in a row"):  # no further document waits for it
        tokenizer.document({"messages": chat("c", "d")})
    assert time.monotonic() - start < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "kB"


def test_a_renderer_that_was_ended_is_started_again(tmp_path):
    tokenizer = subwords.byte_level(tmp_path, CHATML)
    record = {"messages": chat("is it", "yes")}
    first = tokenizer.document(record)
    tokenizer._renderer._process.kill()
    tokenizer._renderer._process.wait()
    np.testing.assert_array_equal(tokenizer.document(record), first)


def test_escapes_of_templates_and_answers_do_not_reach_a_terminal(tmp_path):
    escape = "\x1b]0;owned\x07\u202e"
    tokenizer = subwords.byte_level(tmp_path, f"{{{{ raise_exception('{escape}') }}}}")
    with pytest.raises(ValueError, match=r"\\x1b\]0;owned\\x07\\u202e") as raised:
        tokenizer.document({"messages": chat("a", "b")})
    assert "\x1b" not in str(raised.value)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": "y"}\n')
    data = Documents([Source(Records(path), 1.0)], tokenizer, seq=7, batch=1, seed=0)
    shown = data.show(tokenizer.encode(escape), 0)
    assert "\\x1b]0;owned\\x07" in shown and printable(shown) == shown
    assert printable("üß✓\n\t👨‍👩‍👧 سلام") == "üß✓\n\t👨‍👩‍👧 سلام"


def test_python_code_of_a_folder_is_never_run(tmp_path, monkeypatch):
    """transformers asks on standard input if it may, unless it is told that it may not."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    byte_tokenizer.write(tmp_path)
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"], "AutoConfig": "evil.Evil"}}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w').close()\n")
    for file, content in (
        ("config.json", {"model_type": "evil"} | named),  # its tokenizer is one of transformers'
        ("tokenizer_config.json", own | named),
        ("tokenizer_config.json", own | named | {"tokenizer_class": "Evil"}),
    ):
        (tmp_path / file).write_text(json.dumps(content))
        if "tokenizer_class" in content and content["tokenizer_class"] == "Evil":
            with pytest.raises(ValueError, match=r"`auto_map` in tokenizer_config.json"):
                Tokenizer(tmp_path)
        else:
            assert list(Tokenizer(tmp_path).encode("ab")) == [97, 98]
    assert not asked and not (tmp_path / "EXECUTED").exists()
