"""Byte-level tokenizer in the format of transformers: a token is a byte of UTF-8.

Bytes that UTF-8 does not use are the special tokens that begin and end messages, so that a model of
256 ids that was trained on text learns conversations without another row in its embedding.
"""

import json
from pathlib import Path

SPECIAL = {248: "<|system|>", 249: "<|user|>", 250: "<|assistant|>", 251: "<|tool|>"}
END = 252, "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def characters() -> dict[int, str]:
    """Returns the printable character of each byte in such files, as GPT-2 defines it.

    >>> characters()[32], characters()[65]
    ('Ġ', 'A')
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {b: 256 + at for at, b in enumerate(others)}
    return {byte: chr(codes[byte]) for byte in range(256)}


def write(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    special = SPECIAL | dict([END])
    vocab = {char: byte for byte, char in characters().items() if byte < min(special)}
    same = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                **{"id": byte, "content": text, "special": True, "normalized": False},
                **{"single_word": False, "lstrip": False, "rstrip": False},
            }
            for byte, text in special.items()
        ],
        "pre_tokenizer": {"type": "ByteLevel", **same},
        "decoder": {"type": "ByteLevel", **same},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END[1],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
