"""What is learned of conversations, beside TRL: its training templates mark answers, those of the
models do not, and both have the same masks."""

import importlib.metadata
import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "name", ["llama3", "gemma3", "phi3", "qwen3_instruct_2507", "lfm2", "cohere"]
)
def test_masks_are_those_of_trls_templates(name, tmp_path):
    plain, marked = (
        tokenizer(tmp_path / kind, template)
        for kind, template in zip(("plain", "marked"), templates(name), strict=True)
    )
    for messages in conversations():
        ours, theirs = (own.document({"messages": messages}) for own in (plain, marked))
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
        assert theirs[1].any() and not theirs[1].all()


def test_trl_learns_the_line_break_before_an_answer_of_qwen2_5_too(tmp_path):
    plain, marked = (
        tokenizer(tmp_path / kind, template)
        for kind, template in zip(("plain", "marked"), templates("qwen2_5"), strict=True)
    )
    for messages in conversations():
        (ids, ours), (_, theirs) = (own.document({"messages": messages}) for own in (plain, marked))
        more = np.flatnonzero(ours != theirs)
        assert (ids[more] == ord("\n")).all() and ours[more + 1].all()
        assert len(more) == sum(message["role"] == "assistant" for message in messages)
