"""Small tokenizers of subwords, trained on the spot, and chat templates in the formats in use."""

import json
import string

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from training.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|tail|>")
WORDS = ["yes", "no", "the quick", "Brown fox,", "jumps.", "over!\nlazy", "is it so", "positive"]
TEXT = [f"{a} {b}\n\n### {c}: {a} [/INST] {b}</s>" for a in WORDS for b in WORDS for c in WORDS[:2]]


def byte_level(folder, template=None, *, special=True, trim=False):
    """Like GPT-2's, Llama 3's and Qwen's: a word's token includes the space before it.

    Args:
        folder: A new folder.
        template: The chat template.
        special: The marks of templates are tokens; False reads them as ordinary text.
        trim: Offsets leave out the space, as in Llama 3's.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _saved(made, folder, template, SPECIAL if special else SPECIAL[:3], alphabet)


def metaspace(folder, template=None, *, prefix="first", ends=False):
    """Like Llama 2's and Mistral's: words begin with ▁, merges cross punctuation and lines.

    Args:
        folder: A new folder.
        template: The chat template.
        prefix: Where ▁ is added before a text that begins without a space: "first", "always"
            (after each special token), "never".
        ends: The tokenizer puts </s> after each text.
    """
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix)
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prefix)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return _saved(made, folder, template, SPECIAL, sorted({*string.printable, *"".join(TEXT)}))


KINDS = {"byte-level": lambda folder, template: byte_level(folder, template, special=False),
         "metaspace": lambda folder, template: metaspace(folder, template, prefix="first"),
         "no prefix": lambda folder, template: metaspace(folder, template, prefix="never"),
         "special": byte_level}  # fmt: skip


def _saved(made, folder, template, special, alphabet):
    options = {"special_tokens": list(special), "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **options)
    made.train_from_iterator(TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if isinstance(template, dict):
        config["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def unmarked(template):
    """The same template without its {% generation %} blocks."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _template(user, answer, prompt="", *, first="", system=None, other="", last=""):
    """A format's parts, each an expression of Jinja in which m is the message."""
    known = {"'system'": system or user, "'user'": user, "'tool'": other or user}
    cases = "".join(
        f"{{% {'el' if at else ''}if m.role == {role} %}}{{{{ {text} }}}}"
        for at, (role, text) in enumerate(known.items())
    )
    asked = f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}" if prompt else ""
    return (
        f"{first}{{% for m in messages %}}{cases}{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
        f"{asked}{last}"
    )


def _said(before, text):
    """An answer: its header, then the block that is learned."""
    header = f"{{{{ {before} }}}}" if before else ""
    return f"{header}{{% generation %}}{text}{{% endgeneration %}}"


_CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n<call>' + c.function.name + ' ' }}"
    "{{ c.function.arguments | tojson }}{{ '</call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
)
_IM = "'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n'"
_BOS = "{{ bos_token }}"
_IM_ASK = "'<|im_start|>assistant\\n'"
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for t in tools %}{{ ' ' + t.function.name "
    "}}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
)
# The formats of model families. What differs between them is kept: where spaces and line breaks
# are, if the prompt is part of the text, how a turn ends.
TEMPLATES = {
    "chatml": _template(_IM, _said(_IM_ASK, "{{ m.content + '<|im_end|>\\n' }}"), _IM_ASK),
    "llama 2": _template(
        "'<s>[INST] ' + m.content | trim + ' [/INST]'",
        _said("", "{{ ' ' + m.content | trim + ' </s>' }}"),
        system="'<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n'"),
    "mistral": _template(
        "'[INST] ' + m.content + ' [/INST]'", _said("", "{{ ' ' + m.content + eos_token }}"),
        first=_BOS),
    "llama 3": _template(
        "'<|head|>' + m.role + '<|tail|>\\n\\n' + m.content | trim + '<|eot|>'",
        _said("'<|head|>assistant<|tail|>\\n\\n'", "{{ m.content | trim + '<|eot|>' }}"),
        "'<|head|>assistant<|tail|>\\n\\n'", first=_BOS),
    "gemma": _template(
        "'<|head|>user\\n' + m.content | trim + '<|tail|>\\n'",
        _said("'<|head|>model\\n'", "{{ m.content | trim + '<|tail|>\\n' }}"),
        "'<|head|>model\\n'", first=_BOS),
    "phi": _template(
        "'<|' + m.role + '|>\\n' + m.content + '<|eot|>\\n'",
        _said("'<|assistant|>\\n'", "{{ m.content + '<|eot|>\\n' }}"), "'<|assistant|>\\n'",
        last="{% if not add_generation_prompt %}{% generation %}{{ eos_token }}"
        "{% endgeneration %}{% endif %}"),
    "zephyr": _template(
        "'<|' + m.role + '|>\\n' + m.content + eos_token + '\\n'",
        _said("'<|assistant|>\\n'", "{{ m.content + eos_token + '\\n' }}"), "'<|assistant|>\\n'"),
    "alpaca": _template(
        "'### Instruction:\\n' + m.content + '\\n\\n'",
        _said("'### Response:\\n'", "{{ m.content + '\\n\\n' }}"), "'### Response:\\n'"),
    "vicuna": _template(
        "'USER: ' + m.content", _said("' ASSISTANT:'", "{{ ' ' + m.content + eos_token }}"),
        "' ASSISTANT:'", system="m.content + ' '"),
    "command": _template(
        "'<|head|><|' + m.role + '|>' + m.content | trim + '<|tail|>'",
        _said("'<|head|><|chatbot|>'", "{{ m.content | trim + '<|tail|>' }}"),
        "'<|head|><|chatbot|>'", first=_BOS),
    "deepseek": _template(
        "'<User>' + m.content",
        _said("'<Assistant>'", "{{ m.content.split('</think>')[-1] + eos_token }}"),
        "'<Assistant><think>\\n'", first=_BOS),
    "qwen with tools": _template(
        _IM, _said(_IM_ASK, _CALLS), _IM_ASK, first=_TOOLS,
        other="'<|im_start|>user\\n<result>' + m.content + '</result><|im_end|>\\n'")}  # fmt: skip
