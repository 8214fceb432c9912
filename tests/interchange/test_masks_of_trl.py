"""Learned tokens of conversations compared with TRL's.

TRL masks by {% generation %} marks alone. Its own training templates have them and those of the
models do not; both give the same masks. The formats of `subwords.TEMPLATES`, with and without
marks, give the masks of TRL's own preparation of a dataset in four kinds of tokenizers.
"""

import importlib
import importlib.metadata
import json
import os
import shutil
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import subwords

from training import byte_tokenizer
from training.tokenizer import Tokenizer

pytestmark = pytest.mark.interchange
WORDS = ["the", "quick", "Brown", "fox,", "jumps.", "over!\nlazy", "dogs", "✓", "'x'"]
TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
TOKENS += ("<start_of_turn>", "<end_of_turn>", "<bos>")


def conversations():
    """Twenty, of one to four turns, some with a system message."""
    rng = np.random.default_rng(0)

    def text(count):
        return " ".join(rng.choice(WORDS, count))

    for number in range(20):
        system = [{"role": "system", "content": text(4)}] if number % 3 == 0 else []
        turns = [
            {"role": role, "content": text(1 + (number + at) % 6)}
            for at in range(1 + number % 4)
            for role in ("user", "assistant")
        ]
        yield system + turns


def tokenizer(folder, template):
    """Of bytes, with the special tokens of all these templates."""
    folder.mkdir()
    byte_tokenizer.write(folder)
    known = json.loads((folder / "tokenizer.json").read_text())
    for at, text in enumerate(TOKENS):
        one = known["added_tokens"][0] | {"id": 253 + at, "content": text}
        known["added_tokens"].append(one)
    (folder / "tokenizer.json").write_text(json.dumps(known, ensure_ascii=False))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def templates(name):
    """The model's own, and TRL's; the files alone, since TRL itself needs much more."""
    files = importlib.metadata.files("trl") or []
    found = {f.name: f for f in files if f.parent.name == "chat_templates"}
    return [found[f"{name}{kind}.jinja"].read_text() for kind in ("", "_training")]


NAMES = ["llama3", "gemma3", "phi3", "phi3_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2", "cohere"]


@pytest.mark.parametrize("name", [*NAMES, "cohere2", "qwen2_5"])
def test_masks_are_those_of_trls_templates(name, tmp_path):
    pair = zip(("plain", "marked"), templates(name), strict=True)
    plain, marked = (tokenizer(tmp_path / kind, template) for kind, template in pair)
    for messages in conversations():
        (ids, ours), (their_ids, theirs) = (
            own.document({"messages": messages}) for own in (plain, marked)
        )
        np.testing.assert_array_equal(ids, their_ids)
        assert theirs.any() and not theirs.all()
        more = np.flatnonzero(ours != theirs)
        if name == "qwen2_5":  # TRL learns the line break before an answer too
            assert (ids[more] == ord("\n")).all() and ours[more + 1].all()
            assert len(more) == sum(message["role"] == "assistant" for message in messages)
        else:
            assert not len(more)


def subword_conversations():
    """Conversations of one to four turns: equal ones, with outer spaces, of several lines."""
    rng = np.random.default_rng(1)

    def text(count):
        return " ".join(rng.choice(subwords.WORDS, count))

    for number in range(6):
        system = [{"role": "system", "content": text(3)}] if number % 2 else []
        first = ["yes", f" {text(2)}", f"{text(1)} \n"][number // 2]
        turns = [
            {"role": role, "content": first + text(at)}
            for at in range(1 + number % 4)
            for role in ("user", "assistant")
        ]
        yield system + turns


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes a tokenizer of a kind with a template; each kind is trained once."""
    folders = {kind: tmp_path_factory.mktemp("kind") / "own" for kind in subwords.KINDS}
    for kind, folder in folders.items():
        subwords.KINDS[kind](folder)

    def made(kind, folder, template):
        shutil.copytree(folders[kind], folder)
        (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder)

    return made


@pytest.fixture(scope="module")
def trl_tokenize():
    """TRL's function that prepares a dataset, by which it masks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("trl.data_utils")._tokenize


def masks_of_trl(trl_tokenize, own, record):
    """Tokens and mask as TRL's SFTTrainer prepares them with assistant_only_loss."""
    messages = record["messages"] if "messages" in record else record["prompt"]
    found = trl_tokenize(
        own._own,
        [*messages, *record.get("completion", [])],
        tools=record.get("tools"),
        return_assistant_tokens_mask=True,
    )
    return np.asarray(found["input_ids"]), np.asarray(found["assistant_masks"], bool)


@pytest.mark.parametrize("kind", subwords.KINDS)
@pytest.mark.parametrize("name", subwords.TEMPLATES)
def test_masks_are_trls_in_tokenizers_of_subwords(name, kind, tmp_path, trl_tokenize, trained):
    template = subwords.TEMPLATES[name]
    marked = trained(kind, tmp_path / "marked", template)
    plain = trained(kind, tmp_path / "plain", subwords.unmarked(template))
    for messages in subword_conversations():
        ids, mask = masks_of_trl(trl_tokenize, marked, {"messages": messages})
        assert mask.any() and not mask.all()
        for own in (marked, plain):
            ours = own.document({"messages": messages})
            np.testing.assert_array_equal(ours[0], ids)
            np.testing.assert_array_equal(ours[1], mask)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize("kind", subwords.KINDS)
def test_masks_are_trls_with_tools(kind, tmp_path, trl_tokenize, trained):
    template = subwords.TEMPLATES["qwen with tools"]
    marked = trained(kind, tmp_path / "marked", template)
    plain = trained(kind, tmp_path / "plain", subwords.unmarked(template))
    messages = [
        {"role": "user", "content": "is it so"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": "yes"},
    ]
    record = {"messages": messages, "tools": [CALL]}
    ids, mask = masks_of_trl(trl_tokenize, marked, record)
    for own in (marked, plain):
        for found, wanted in zip(own.document(record), (ids, mask), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", subwords.KINDS)
def test_answers_without_weight_are_masked_which_trl_does_not_read(kind, tmp_path, trained):
    turns = [
        {"role": role, "content": text, "weight": weight}
        for text, weight in (("yes", 1), ("no", 0), ("positive", 1))
        for role, text in (("user", "is it"), ("assistant", text))
    ]
    own = trained(kind, tmp_path / "own", subwords.unmarked(subwords.TEMPLATES["mistral"]))
    ids, mask = own.document({"messages": turns})
    assert own.decode(ids[mask]).replace(" ", "") == "yes</s>positive</s>"


@pytest.mark.parametrize(("name", "trim"), [("mistral", True), ("content alone", False)])
def test_masks_where_those_of_transformers_lack_tokens(name, trim, tmp_path, trl_tokenize):
    """transformers loses answers whose block begins with a space that is in no token's offsets
    (Llama 3's trim them), and the last bytes of a block that ends with a character of several
    tokens. The right text is the answers', with what the block has around them."""
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    others = {"content alone": f"{{% for m in messages %}}{{{{ m.role }}}}: {mark}\n{{% endfor %}}"}
    template = (others | subwords.TEMPLATES)[name]
    own = subwords.byte_level(tmp_path, template, trim=trim)
    messages = [{"role": "user", "content": "is it"}, {"role": "assistant", "content": "so ✓"}]
    if name == "content alone":
        messages = messages[1:]
    theirs = masks_of_trl(trl_tokenize, own, {"messages": messages})
    ids, mask = own.document({"messages": messages})
    np.testing.assert_array_equal(ids, theirs[0])
    wanted = {"mistral": " so ✓</s>", "content alone": " so ✓"}[name]
    assert own.decode(ids[mask]) == wanted
    assert own.decode(ids[theirs[1]]) != wanted, "mended in transformers: compare the masks"
