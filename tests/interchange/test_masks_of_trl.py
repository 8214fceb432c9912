"""Learned tokens of conversations compared with TRL's.

TRL masks by {% generation %} marks alone. Its own training templates have them and those of the
models do not; both give the same masks. The formats of `subwords.TEMPLATES`, with and without
marks, give the masks of TRL's own preparation of a dataset in four kinds of tokenizers.
"""

import importlib
import importlib.metadata
import itertools
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
NAMES = ["llama3", "gemma3", "phi3", "phi3_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2", "cohere"]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}


def conversations(count, words, awkward=False):
    """Conversations of one to four turns, some with a system message.

    Some awkward ones have equal texts, outer spaces or several lines.
    """
    rng = np.random.default_rng(0)

    def text(size):
        return " ".join(rng.choice(words, size))

    for number in range(count):
        turns = [{"role": "system", "content": text(4)}] if number % 3 == 0 else []
        for at, role in itertools.product(range(1 + number % 4), ("user", "assistant")):
            before = ["yes", f" {text(2)}", f"{text(1)} \n"][number // 2] if awkward else ""
            content = before + text(at if awkward else 1 + (number + at) % 6)
            turns.append({"role": role, "content": content})
        yield turns


def of_bytes(folder, template):
    """A tokenizer of bytes, with the special tokens of all these templates."""
    folder.mkdir()
    byte_tokenizer.write(folder)
    for file, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "bos_token")):
        known = json.loads((folder / file).read_text())
        ids = enumerate(TOKENS, 253)
        known[key] = (
            "<bos>"
            if key == "bos_token"
            else known[key] + [known[key][0] | {"id": at, "content": text} for at, text in ids]
        )
        (folder / file).write_text(json.dumps(known, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.mark.parametrize("name", [*NAMES, "cohere2", "qwen2_5"])
def test_masks_are_those_of_trls_templates(name, tmp_path):
    """The model's own template and TRL's: the files alone, since TRL itself needs much more."""
    files = importlib.metadata.files("trl") or []
    found = {f.name: f.read_text() for f in files if f.parent.name == "chat_templates"}
    plain = of_bytes(tmp_path / "plain", found[f"{name}.jinja"])
    marked = of_bytes(tmp_path / "marked", found[f"{name}_training.jinja"])
    for messages in conversations(20, WORDS):
        ids, ours = plain.document({"messages": messages})
        their_ids, theirs = marked.document({"messages": messages})
        np.testing.assert_array_equal(ids, their_ids)
        assert theirs.any() and not theirs.all()
        more = np.flatnonzero(ours != theirs)
        if name == "qwen2_5":  # TRL learns the line break before an answer too
            assert (ids[more] == ord("\n")).all() and ours[more + 1].all()
            assert len(more) == sum(message["role"] == "assistant" for message in messages)
        else:
            assert not len(more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of tokenizers by kind: each is trained once."""
    folders = {kind: tmp_path_factory.mktemp("kind") / "own" for kind in subwords.KINDS}
    for kind, folder in folders.items():
        subwords.KINDS[kind](folder, "")
    return folders


def masks_of_trl(own, messages, tools=None):
    """Tokens and mask as TRL's SFTTrainer prepares them with assistant_only_loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenize = importlib.import_module("trl.data_utils")._tokenize
    found = tokenize(own._backend, messages, tools=tools, return_assistant_tokens_mask=True)
    return np.asarray(found["input_ids"]), np.asarray(found["assistant_masks"], bool)


@pytest.mark.parametrize("kind", subwords.KINDS)
@pytest.mark.parametrize("name", subwords.TEMPLATES)
def test_masks_are_trls_in_tokenizers_of_subwords(name, kind, tmp_path, trained):
    template, tokenizers = subwords.TEMPLATES[name], []
    for at, text in enumerate((template, subwords.unmarked(template))):
        folder = shutil.copytree(trained[kind], tmp_path / str(at))
        (folder / "chat_template.jinja").write_text(text)
        tokenizers.append(Tokenizer(folder))
    records = [{"messages": own} for own in conversations(6, subwords.WORDS, awkward=True)]
    if name == "qwen with tools":
        messages = [{"role": "user", "content": "is it so"},
                    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
                    {"role": "tool", "content": "yes"},
                    {"role": "assistant", "content": "yes"}]  # fmt: skip
        records.append({"messages": messages, "tools": [CALL]})
    for record in records:
        wanted = masks_of_trl(tokenizers[0], record["messages"], record.get("tools"))
        assert wanted[1].any() and not wanted[1].all()
        for own in tokenizers:
            for found, want in zip(own.document(record), wanted, strict=True):
                np.testing.assert_array_equal(found, want)
