"""Byte-level tokenizer in the format of transformers: a token is a byte of UTF-8.

Bytes that UTF-8 does not use are the special tokens that begin and end messages, so that a model of
256 ids that was trained on text learns conversations without another row in its embedding.
"""

import json
from pathlib import Path

END = 252, "<|end|>"
SPECIAL = {248: "<|system|>", 249: "<|user|>", 250: "<|assistant|>", 251: "<|tool|>"} | dict([END])
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END[1]}
CONFIG |= {"clean_up_tokenization_spaces": False}


def write(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    added = [{"id": id, "content": text, "special": True, **flags} for id, text in SPECIAL.items()]
    same = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    same |= {"use_regex": False}
    # The printable character of each byte, as GPT-2 defines it.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {b: 256 + at for at, b in enumerate(others)}
    vocab = {chr(codes[byte]): byte for byte in range(min(SPECIAL))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": same,
        "decoder": same,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
