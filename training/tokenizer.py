"""Tokenizer and chat template of a folder: documents as tokens, with a mask of the learned ones.

Learned are the assistant's answers of a conversation, with the tokens that end their turns, the
completion of a prompt, and all of a text. transformers is used without PyTorch.
"""

import copy
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.answers import Integers, Span, answers_in, spans_of, tokens_in
from training.data_files import checksum
from training.packing import Ids, Mask
from training.records import (
    Completion,
    Conversation,
    Messages,
    Record,
    functions,
    is_learned,
    parse,
)
from training.show import printable
from training.templates import Renderer

Options = Mapping[str, Any]  # `tools` and other variables of a template
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer has one of them


def has_tokenizer(folder: Path) -> bool:
    """Returns True if a folder has a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


class Tokenizer:
    """A tokenizer of transformers and its chat template, from a folder.

    Raises ValueError if a model of `vocab` tokens has no embedding for one of them. Added tokens
    may lie beyond where a model of text never uses them (Gemma's image tokens): a document that has
    one raises an error.
    """

    def __init__(self, folder: str | Path, vocab: int | None = None) -> None:
        self._folder, self._vocab = Path(folder), vocab
        # transformers warns that PyTorch is missing, which tokenizers do not need.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                f"the tokenizer in {folder} requires transformers: pip install 'zero_jax[chat]'"
            ) from error
        if not has_tokenizer(self._folder):
            raise ValueError(f"{folder} has no tokenizer ({FILES[0]}): give --tokenizer DIR")
        try:
            self._backend: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            if not self._backend.is_fast:
                raise ValueError("a slow tokenizer has no offsets of tokens")
        except Exception as error:  # transformers raises many types for malformed files
            raise ValueError(
                f"the tokenizer in {folder} can't be read: {printable(str(error))}. Save it as "
                "tokenizer.json, with a tokenizer_config.json without `auto_map`: Python code of "
                "the folder is never run"
            ) from error
        self._lock = threading.Lock()
        self._renderer = Renderer()
        end = self._backend.eos_token_id
        self._end = [] if end is None else [int(end)]
        # Tokens that the tokenizer puts before and after each text.
        text, full = self._backend.encode("a", add_special_tokens=False), self._backend.encode("a")
        places = range(len(full) - len(text) + 1)
        at = next((at for at in places if full[at : at + len(text)] == text), len(full))
        self._before, self._after = full[:at], full[at + len(text) :]
        added = self._backend.added_tokens_decoder.items()
        self._special = {at for at, token in added if token.special}
        self._stops = frozenset(
            self._backend.all_special_ids
        )  # answers may have other special ones
        self._special.update(self._stops)
        largest = max(self._backend.vocab_size - 1, *self._end, 0)
        if vocab is not None and largest >= vocab:
            raise ValueError(
                f"the tokenizer in {folder} has tokens up to {largest}, and the model's embedding "
                f"has {vocab} rows: use the tokenizer that the model was trained with"
            )

    def fingerprints(self) -> dict[str, str]:
        """Checksums of the vocabulary and of the chat template."""
        vocab = sorted(self._backend.get_vocab().items(), key=lambda item: item[1])
        parts = {"tokenizer": vocab, "chat template": self._backend.chat_template}
        texts = {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}
        return {name: checksum(text.encode()) for name, text in texts.items()}

    def encode(self, text: str) -> Ids:
        """Returns the tokens of a text, without those that the tokenizer adds around it."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(map(int, tokens))))

    def end_of(self, learned: Ids) -> int | None:
        """Returns the special token that ends learned tokens, except for spaces; or None."""
        for token in map(int, learned[::-1]):
            if token in self._special:
                return token
            if self.decode([token]).strip():
                break
        return None

    def to_end(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        """Returns the tokens up to the first that ends a text or a turn, from `start` on."""
        ends = (at for at in range(start, len(tokens)) if int(tokens[at]) in self._stops)
        return tokens[: next(ends, len(tokens) - 1) + 1]

    def opening(self, text: str) -> Ids:
        """Returns the tokens of a text to continue, after the beginning token of training."""
        return self._begun(self.encode(text))

    def prompt(self, messages: Messages, options: Options | None = None) -> Ids:
        """Returns a conversation with the generation prompt, after which the assistant answers."""
        if not messages:
            raise ValueError("a prompt needs at least one message before the answer")
        with self._lock:
            messages, _, _ = self._written(messages, options or {})
            return self.encode(self._render(messages, options or {}, prompt=True)[0])

    def asked(self, question: str) -> Ids:
        """Returns a question as the user's turn, or unchanged if there is no chat template."""
        if self._backend.chat_template is None:
            return self.opening(question)
        return self.prompt([{"role": "user", "content": question}])

    def document(self, record: Record, loss_on: str = "assistant") -> tuple[Ids, Mask]:
        """Returns tokens and mask; raises ValueError if the template does not accept a record."""
        content, everything = parse(record), loss_on == "all"
        with self._lock:  # training and held-out batches are made in different threads
            if isinstance(content, Conversation):
                ids, mask = self._chat(content, everything)
            else:
                ids, mask = self._continued(content, everything)
        if self._vocab is not None and ids.size and ids.max() >= self._vocab:
            raise ValueError(
                f"token {ids.max()} ({printable(self.decode([ids.max()]))!r}) has no row in the "
                f"model's embedding of {self._vocab} rows: remove it from the data"
            )
        return ids, mask

    def _continued(self, content: Completion, everything: bool) -> tuple[Ids, Mask]:
        """Returns the tokens from beginning to end token, and the mask of the completion."""
        text = content.prompt + content.completion
        ids, starts, ends = self._offsets(text)
        learned = tokens_in(Span(len(content.prompt), len(text)), starts, ends)
        after: list[int] = []
        if not (self._end and text.rstrip().endswith(self._backend.eos_token)):
            after = self._after if self._after[-1:] == self._end else [*self._after, *self._end]
        begun = self._begun(ids)
        mask = np.full(len(begun) + len(after), everything or not content.prompt)
        mask[len(begun) - len(ids) :][learned] = True
        mask[len(begun) :] = True
        return np.asarray([*begun, *after], np.int32), mask

    def _begun(self, ids: Ids) -> Ids:
        """Adds the tokens that the tokenizer puts before a text, unless the text has them."""
        begins = list(ids[: len(self._before)]) == self._before
        return ids if begins else np.asarray([*self._before, *ids], np.int32)

    def _chat(self, conversation: Conversation, everything: bool) -> tuple[Ids, Mask]:
        """Returns the tokens, and the mask of the answers after the context."""
        options = conversation.options
        messages, full_text, blocks = self._written(conversation.messages, options)
        ids, starts, ends = self._offsets(full_text)
        answers = answers_in(messages)
        off = {at for at, message in enumerate(messages) if not is_learned(message)}
        if everything and (others := off.difference(answers)):
            raise ValueError(
                f'"weight": 0 of a {messages[min(others)]["role"]} message can\'t be combined with '
                "--loss-on all: remove the weight, or use --loss-on assistant"
            )
        # Answers of weight 0 are removed from a full mask; the others are added to an empty one.
        mask, context = np.full(len(ids), everything), conversation.context
        changed = [at in off if everything else at not in off and at >= context for at in answers]
        if not any(changed):  # the template may write answers in any way
            return ids, mask
        spans = blocks
        if blocks is None or not all(changed):

            def render(some: Messages, prompt: bool) -> str:
                return self._render(some, options, prompt=prompt)[0]

            groups = spans_of(messages, full_text, blocks, render)
            if groups is None:
                raise ValueError(
                    "the answers of this conversation can't be located in the chat template in "
                    f"{self._folder}: put {{% generation %}} and {{% endgeneration %}} around each "
                    "answer in the template, or use --loss-on all"
                )
            pairs = zip(changed, groups, strict=True)
            spans = [span for is_changed, group in pairs if is_changed for span in group]
        for span in spans or ():
            mask[tokens_in(self._certain(full_text, span), starts, ends)] = not everything
        return ids, mask

    def _certain(self, full_text: str, span: Span) -> Span:
        """Ends a span before the first token that depends on what follows the turn."""
        if not span.ending:
            return span
        ids, _, _ = self._offsets(full_text[span.start : span.end] + span.ending)
        others, _, ends = self._offsets(full_text[span.start : span.end + len(span.ending)])
        pairs = enumerate(zip(ids, others, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(ids), len(others)))
        length = int(ends[same - 1]) if same else 0
        return span._replace(end=min(span.end, span.start + length))

    def _offsets(self, text: str) -> tuple[Ids, Integers, Integers]:
        """Returns the tokens of a text, and the characters at which each begins and ends."""
        encoding = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(encoding["input_ids"], np.int32), offsets[:, 0], offsets[:, 1]

    def _written(
        self, messages: Messages, options: Options
    ) -> tuple[Messages, str, list[Span] | None]:
        """Returns the messages as the template accepts them, their text, and its blocks.

        Most templates take the arguments of a tool call as an object, some as JSON text; the latter
        fail on an object or write it as Python does.
        """
        called = functions(messages)
        try:
            text, blocks = self._render(messages, options)
            if not any(x["arguments"] and repr(x["arguments"]) in text for x in called):
                return messages, text, blocks
        except ValueError:
            if not called:
                raise
        messages = copy.deepcopy(messages)
        for function in functions(messages):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return messages, *self._render(messages, options)

    def _render(
        self, messages: Messages, options: Options, *, prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Returns a text and its {% generation %} blocks; None if the template has none."""
        if self._backend.chat_template is None:
            raise ValueError(
                f"{self._folder} has no chat template, which conversations require: add "
                "chat_template.jinja, or use prompts and completions"
            )
        variables = {**self._backend.special_tokens_map, **options, "add_generation_prompt": prompt}
        try:
            # Of named templates "tool_use" is for conversations with tools, else "default".
            template = str(self._backend.get_chat_template(None, options.get("tools")))
            text, blocks = self._renderer.render(template, messages, variables)
        except ValueError as error:
            message = f"the chat template in {self._folder}: {printable(str(error))}"
            raise ValueError(message) from error
        return text, None if blocks is None else [Span(*block) for block in blocks]
