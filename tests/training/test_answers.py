"""Learned tokens of conversations: subword tokenizers, tools, weights, ends, hostile templates."""

import functools
import json
import resource
import time

import numpy as np
import pytest
import subwords
from test_documents import corpus, records

from training import byte_tokenizer, templates
from training.show import printable
from training.tokenizer import Tokenizer

CHATML, QWEN = (subwords.TEMPLATES[name] for name in ("chatml", "qwen with tools"))
PLAIN = subwords.unmarked(CHATML)  # without {% generation %}


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def learned(tokenizer, record, loss_on="assistant"):
    ids, mask = tokenizer.document(record, loss_on)
    return tokenizer.decode(ids[mask])


@pytest.fixture(scope="module")
def tokenizer_for(tmp_path_factory):
    """Makes the tokenizer of a template and a kind, each once, with one renderer."""
    renderer = templates.Renderer()
    kinds = subwords.KINDS | {"trimmed": functools.partial(subwords.byte_level, trim=True)}

    @functools.cache
    def make(template, kind="special"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("training.tokenizer.Renderer", lambda: renderer)
            return kinds[kind](tmp_path_factory.mktemp("tokenizer"), template)

    return make


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
BARE += "{% if add_generation_prompt %}assistant: {% endif %}"
DIALOGUE = "x\n\nuser: b\n\nassistant: y"  # two ways to read the text, and one to write it
OPEN = CHATML.replace(" + '<|im_end|>\\n' }}{% endgen", " }}{% endgen")
SKIPPING = CHATML.replace("{% else %}", "{% else %}{% if m.content %}")
SKIPPING = SKIPPING.replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
# Moves thoughts out of the text, and drops those of earlier turns.
THOUGHT = "<think>so</think>yes"
PARTS = (
    "{% set parts = m.content.split('</think>') %}{% if loop.last %}{{ '<think>' }}"
    "{{ parts[0].split('<think>')[-1] if parts | length > 1 }}{{ '</think>' }}{% endif %}"
)
ANSWER = "\\n' }}{{ m.content + '<|im_end|>"
THINKING = PLAIN.replace(ANSWER, "\\n' }}" + PARTS + "{{ parts[-1] + '<|im_end|>")
# Qwen 2.5's has a line break before a text only, Llama 3.1's leaves out the text of a call.
TEXT = "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
CALLED = "{% if m.tool_calls %}{{ '\\n<call>' + m.tool_calls[0].function.name }}{% endif %}"
BREAKING = PLAIN.replace(ANSWER, "' }}" + TEXT + CALLED + "{{ '<|im_end|>")
EITHER = "{% if m.tool_calls %}" + CALLED + "{% else %}" + TEXT + "{% endif %}"
EXCLUSIVE = PLAIN.replace(ANSWER, "' }}" + EITHER + "{{ '<|im_end|>")
NAMED = "('<call>' + m.tool_calls[0].function.name if m.tool_calls else ' ' + m.content) + eos"
NAMED = subwords.TEMPLATES["mistral"].replace("' ' + m.content + eos", NAMED)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"name": "weather", "arguments": {"city": "Oslo", "n": 1}}
ARGUMENTS = json.dumps(CALL["arguments"])
END = "<|im_end|>\n"


def calling(content=None, call=CALL):
    calls = [{"type": "function", "function": call}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def flagged(flag, off, on):
    messages = chat("is it", "no", "so", "positive")
    messages[1][flag], messages[3][flag] = off, on
    return messages


# Answers to train on after a first one that is context, and empty in one of two conversations.
AFTER = [chat("is it", first, "so", "positive", "so", "no") for first in ("", "yes")]
AFTER = [{"prompt": messages[:3], "completion": messages[3:]} for messages in AFTER]
THREE = chat("is it so", "yes", "is it", "positive", "is it", "no")
KINDS = ("byte-level", "metaspace", "no prefix", "trimmed")
LEARNED = [  # template, conversation, and what is learned of it, in tokenizers of which kinds
    # Llama 3's tokenizer trims offsets: transformers then loses every answer with a space.
    (subwords.TEMPLATES["mistral"], THREE, "yes</s>positive</s>no</s>", *KINDS),
    (subwords.TEMPLATES["vicuna"], THREE, "yes</s>positive</s>no</s>", *KINDS),
    (subwords.TEMPLATES["phi"], THREE, "yes<|eot|>\npositive<|eot|>\nno<|eot|>\n</s>"),
    (CHATML, chat("is it"), ""), (CHATML, flagged("weight", 0, 0), ""),
    (CHATML, {"messages": chat("Hi", "Yo")[1:], "prompt": "Hi"}, "Yo" + END),
    (CHATML, [*chat("is it", "yes"), *chat("", " no", "so", "")[1:]], f"yes{END} no{END}{END}"),
    # Equal turns: 2^60 tries would never end.
    *((PLAIN, [{"role": role, "content": x}, *THREE[1:2]] * 60, f"yes{END}" * 60)
      for role, x in (("user", "more"), ("tool", "ok"), ("user", ""))),
    (THINKING, chat("is it", THOUGHT), THOUGHT + END),
    (THINKING, chat("is it", THOUGHT, "is it", THOUGHT), f"yes{END}{THOUGHT}{END}"),
    # What ends an answer may be within it.
    (BARE, chat("a", "one\n\ntwo"), "one\n\ntwo\n\n"),
    (BARE, chat("a", "x\n\ny", "b", "z"), "x\n\ny\n\nz\n\n"),
    (BARE, chat("a", DIALOGUE, "b", "z"), f"{DIALOGUE}\n\nz\n\n"),
    *((CHATML, flagged(*own), "positive" + END)
      for own in (("weight", 0, 1), ("train", False, True), ("training", False, None))),
    *((OPEN, record, "positiveno") for record in AFTER),
    *((SKIPPING, record, f"positive{END}no{END}") for record in AFTER),
    *((own, [*chat("is it"), calling(x), *chat("is it", "so")], f"<call>weather{END}so{END}")
      for own, x in ((BREAKING, None), (BREAKING, ""), (EXCLUSIVE, None), (EXCLUSIVE, "yes"))),
    (NAMED, [*chat("is it"), calling(), *chat("is it", "so")], "<call>weather</s>so</s>", *KINDS),
    # OpenAI's files have arguments as JSON text; some templates take an object and some a text.
    *((QWEN.replace("c.function.arguments | tojson", written),
       {"messages": [*chat("is it"), calling(call=CALL | {"arguments": given}),
                     {"role": "tool", "content": "positive"}, *chat("", "so")[1:]], "tools": TOOLS},
       f"\n<call>weather {ARGUMENTS}</call>{END}so{END}")
      for written in ("c.function.arguments | tojson", "c.function.arguments",
                      "'' + c.function.arguments")
      for given in (CALL["arguments"], ARGUMENTS)),
]  # fmt: skip


@pytest.mark.parametrize("case", LEARNED)
def test_answers_are_learned_from_their_first_token_to_their_end(case, tokenizer_for):
    template, record, wanted, *kinds = case
    record = record if isinstance(record, dict) else {"messages": record}
    for source in dict.fromkeys((template, subwords.unmarked(template))):
        for kind in kinds or ["special"]:
            said = learned(tokenizer_for(source, kind), record)
            exact = kind == "special" and "</s>" not in wanted
            assert said == wanted if exact else said.replace(" ", "") == wanted.replace(" ", "")


def test_tools_and_other_variables_reach_the_template(tokenizer_for, tmp_path):
    tokenizer = tokenizer_for("{% if shout is defined %}{{ shout }}: {% endif %}" + QWEN)
    messages = chat("is it", "yes")
    known = {"messages": messages, "tools": TOOLS}
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", [known] * 2), 1.0), seq=127)
    pair = {"prompt": messages[:1], "completion": messages[1:], "tools": TOOLS}
    ways = [tokenizer.document(x)[0] for x in (known | {"tools": json.dumps(TOOLS)}, pair)]
    for ids in (*ways, data.prompt(127)):
        assert tokenizer.decode(ids).startswith("<|im_start|>system\nTools: weather<|im_end|>")
    empty = [message | {"tool_calls": "[]"} for message in messages]
    none = {"messages": empty, "tools": "null", "chat_template_kwargs": "null"}
    assert [*tokenizer.document(none)[0]] == [*tokenizer.document({"messages": messages})[0]]
    record = {"messages": messages, "chat_template_kwargs": {"shout": "so"}}
    for _ in range(2):
        assert tokenizer.decode(tokenizer.document(record)[0]).startswith("so: <|im")
        tokenizer._renderer._process.kill()  # and is started again
        tokenizer._renderer._process.wait()
    # Of several named templates "tool_use" is for conversations with tools.
    named = {"default": subwords.unmarked(QWEN), "tool_use": QWEN}
    tokenizer = subwords.byte_level(tmp_path / "named", named)
    assert learned(tokenizer, {"messages": messages}) == learned(tokenizer, known) == f"yes{END}"
    with pytest.raises(ValueError, match="chat template"):
        subwords.byte_level(tmp_path, {"rag": QWEN}).document({"messages": messages})
    upper = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}{% endfor %}"
    assert learned(tokenizer_for(upper), {"messages": messages}) == "YES"
    # As of models of images: content in parts alone, and nothing for a text.
    parts = PLAIN.replace("assistant\\n' }}{{ m.content + ", "assistant\\n' }}{{ ")
    twice = upper.replace("{{ m.content", "{{ m.content + m.content")
    for template in (twice, parts):  # from which answers can not be told
        with pytest.raises(ValueError, match="--loss-on all"):
            tokenizer_for(template).document({"messages": messages})
        ids, mask = tokenizer_for(template).document({"messages": messages}, "all")
        assert mask.all() and len(ids) > 3


def test_an_answer_of_weight_0_leaves_all_tokens_but_its_own(tokenizer_for):
    for tokenizer in map(tokenizer_for, (CHATML, PLAIN)):
        record = {"messages": flagged("weight", 0, 1)}
        whole = tokenizer.decode(tokenizer.document(record)[0])
        assert learned(tokenizer, record, "all") == whole.replace("no<|im_end|>\n", "", 1)
        record["messages"][0]["weight"] = 0  # all tokens can't leave out a user's message
        with pytest.raises(ValueError, match='"weight": 0 .*--loss-on'):
            tokenizer.document(record, "all")
    answer = "{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    thoughts = "{% generation %}{{ '<think>' + m.content + '</think>' }}{% endgeneration %}\n"
    both = CHATML.replace(answer, "{% if m.content == 'no' %}" + thoughts + "{% endif %}" + answer)
    for template, weights, wanted in (
        (both, (0, 1), f"positive{END}"), (both, (1, 0), f"<think>no</think>no{END}"),
        (subwords.TEMPLATES["phi"], (0, 1), "positive<|eot|>\n</s>"),
        (subwords.TEMPLATES["phi"], (1, 0), "no<|eot|>\n"),
    ):  # fmt: skip
        record = {"messages": flagged("weight", *weights)}
        assert learned(tokenizer_for(template), record) == wanted


@pytest.mark.parametrize("ends", [False, True])
def test_a_text_has_one_beginning_and_one_end_which_is_learned(ends, tmp_path):
    tokenizer = subwords.metaspace(tmp_path, ends=ends)
    pairs = [("is it", " so"), ("is it", " so</s>"), ("<s>is it", " so</s>\n")]
    cases = [{"text": prompt + completion} for prompt, completion in pairs]
    cases += [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    for record in cases:
        ids, mask = tokenizer.document(record)
        assert (ids == 1).sum() == (ids == 2).sum() == 1, record
        assert ids[0] == 1 and mask[ids == 2].all()
        assert learned(tokenizer, record).replace("</s>", "").split()[-1] == "so"
    ids = tokenizer.document({"text": "is it so"})[0]
    np.testing.assert_array_equal(tokenizer.asked("is it so"), ids[:-1])
    known = records(tmp_path / "a.jsonl", [cases[3]] * 2)
    prompt = corpus(tokenizer, (known, 1.0)).prompt(31)
    np.testing.assert_array_equal(prompt, ids[: len(prompt)])
    assert prompt[0] == 1 and 2 not in prompt


@pytest.mark.parametrize("limit", ["CPU", "memory"])
def test_a_template_can_not_take_all_time_or_memory(limit, tmp_path, monkeypatch):
    slow = "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"
    body = slow if limit == "CPU" else "{{ 'x' * 10**11 }}"
    monkeypatch.setattr(templates, "SECONDS", 0)  # and one that every text has
    monkeypatch.setattr(templates, "TRIES", 2)
    tokenizer = subwords.byte_level(tmp_path, body)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):  # one alone refuses no others
        with pytest.raises(ValueError, match=f"chat template in .*takes .*{limit}"):
            tokenizer.document({"messages": chat("a", "b")})
    start = time.monotonic()
    with pytest.raises(ValueError, match="in a row"):  # no further document waits for it
        tokenizer.document({"messages": chat("c", "d")})
    assert time.monotonic() - start < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "kB"


def test_escapes_of_a_folder_reach_no_terminal_and_its_code_is_never_run(tmp_path, monkeypatch):
    escape = "\x1b]0;owned\x07\u202e"
    tokenizer = subwords.byte_level(tmp_path, f"{{{{ raise_exception('{escape}') }}}}")
    with pytest.raises(ValueError, match=r"\\x1b\]0;owned\\x07\\u202e") as raised:
        tokenizer.document({"messages": chat("a", "b")})
    assert "\x1b" not in str(raised.value)
    data = corpus(tokenizer, (records(tmp_path / "a.jsonl", ["x", "y"]), 1.0), seq=7)
    shown = data.show(tokenizer.encode(escape), 0)
    assert "\\x1b]0;owned\\x07" in shown and printable(shown) == shown
    assert printable("üß✓\n\t👨‍👩‍👧 سلام") == "üß✓\n\t👨‍👩‍👧 سلام"
    # Python code of a folder is never run: transformers asks on standard input if it may.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    byte_tokenizer.write(tmp_path)
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"auto_map": {"AutoTokenizer": [None, "evil.Evil"], "AutoConfig": "evil.Evil"}}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil"} | named))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | named))
    assert list((known := Tokenizer(tmp_path)).encode("ab")) == [97, 98]  # one of transformers'
    # Answers end with the end token, and may have other special ones, as before a tool call.
    assert known.to_end([249, 97, 251, 98, 252, 99], 1) == [249, 97, 251, 98, 252]
    evil = own | named | {"tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(evil))
    with pytest.raises(ValueError, match="`auto_map`"):
        Tokenizer(tmp_path)
    assert not (tmp_path / "EXECUTED").exists()
