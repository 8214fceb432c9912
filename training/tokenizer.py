"""A folder's tokenizer and chat template: documents as tokens, and which of them are learned.

By transformers, without PyTorch. What is learned of a conversation is what the assistant says, the
token that ends its turn among it; of prompt and completion the completion, of a text all. Which
tokens those are is asked of the template: by its own {% generation %} marks, and where it has none
by what it writes around the answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data_files import DIGEST
from training.records import Record, conversations

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Messages = Sequence[Mapping[str, Any]]
Spans = Sequence[tuple[int, int]]
_GENERATION = re.compile(r"\{%-?\s*generation\b")
LOSS_ON = ("assistant", "all")
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # of a tokenizer one at least
_MARK = "zq{}answerqz"  # stands for an answer, which no template changes


def has_tokenizer(folder: Path) -> bool:
    """Whether there is one in a folder."""
    return any((folder / name).is_file() for name in FILES)


class Tokenizer:
    """A tokenizer of transformers' and its chat template.

    Args:
        folder: With tokenizer.json, tokenizer_config.json and, if there is one,
            chat_template.jinja.

    Raises:
        ValueError: There is none, or transformers is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        # That there is no PyTorch, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                f"transformers is not installed, which reads the tokenizer in {folder}: pip install"
                " 'zero_jax[chat]'"
            ) from error
        if not has_tokenizer(self._folder):
            raise ValueError(f"{folder} has no tokenizer ({FILES[0]}): give --tokenizer DIR")
        try:
            self._own: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
        except Exception as error:  # whatever it makes of files that are wrong
            raise ValueError(f"the tokenizer in {folder} can't be read: {error}") from error
        if not self._own.is_fast:
            raise ValueError(
                f"the tokenizer in {folder} is of transformers' slow kind, which can't tell where "
                "a token is in its text: save it with tokenizer.json"
            )
        self._vocab: int | None = None
        self._lock = threading.Lock()
        end = self._own.eos_token_id
        self._end = [] if end is None else [int(end)]
        self._special = frozenset(self._own.all_special_ids)

    def check_fits(self, vocab: int) -> None:
        """Raises ValueError if a model has no embedding for one of the tokens.

        Tokens that were added to a vocabulary may lie beyond it where a model of text never meets
        them (Gemma's of images): a document that has one is refused.
        """
        largest = max(self._own.vocab_size - 1, *self._end, 0)
        if largest >= vocab:
            raise ValueError(
                f"the tokenizer in {self._folder} has tokens up to {largest}, and the model's "
                f"embedding {vocab} rows: take the tokenizer that the model was trained with"
            )
        self._vocab = vocab

    def fingerprints(self) -> dict[str, str]:
        """Checksums of the vocabulary and of the chat template."""
        parts = {
            "tokenizer": sorted(self._own.get_vocab().items(), key=lambda item: item[1]),
            "chat template": self._own.chat_template,
        }
        texts = {name: json.dumps(part, sort_keys=True).encode() for name, part in parts.items()}
        return {
            name: hashlib.blake2b(text, digest_size=DIGEST).hexdigest()
            for name, text in texts.items()
        }

    def encode(self, text: str) -> Ids:
        """The tokens of a text, without any around it."""
        return np.asarray(self._own.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._own.decode(list(map(int, tokens))))

    def to_end(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        """These tokens up to the first that ends a text or a turn, from `start` on."""
        ends = (at for at in range(start, len(tokens)) if int(tokens[at]) in self._special)
        return tokens[: next(ends, len(tokens) - 1) + 1]

    def prompt(self, messages: Messages) -> Ids:
        """A conversation up to where the assistant begins to speak."""
        return self.encode(self._rendered(messages, add_generation_prompt=True))

    def asked(self, question: str) -> Ids:
        """A question as the user's turn, or as it is where there is no chat template."""
        if self._own.chat_template is None:
            return self.encode(question)
        return self.prompt([{"role": "user", "content": question}])

    def document(self, record: Record, loss_on: str = "assistant") -> tuple[Ids, Mask]:
        """The tokens of a document and which of them are learned.

        Args:
            record: See `records`.
            loss_on: "assistant", or "all" tokens.

        Raises:
            ValueError: The template does not take the conversation.
        """
        with self._lock:  # batches are made in one thread, what is held out is read in another
            ids, mask = self._document(record, loss_on)
        if self._vocab is not None and ids.size and ids.max() >= self._vocab:
            raise ValueError(
                f"token {ids.max()} ({self.decode([ids.max()])!r}) has no row in the model's "
                f"embedding of {self._vocab}"
            )
        return ids, mask

    def _document(self, record: Record, loss_on: str) -> tuple[Ids, Mask]:
        messages = conversations(record)
        if messages is not None and loss_on == "all":  # no answer need be told from the rest
            ids = self.encode(self._rendered(messages))
            mask = np.ones(len(ids), bool)
        elif messages is not None:
            given = 0 if "messages" in record else len(record["prompt"])
            ids, mask = self._chat(messages, given)
        elif "prompt" in record:
            ids, mask = self._continued(record["prompt"], record["completion"])
        else:
            ids = np.asarray([*self._own.encode(record["text"]), *self._end], np.int32)
            mask = np.ones(len(ids), bool)
        return ids, mask if loss_on == "assistant" else np.ones_like(mask)

    def _continued(self, prompt: str, completion: str) -> tuple[Ids, Mask]:
        found = self._own(prompt + completion, return_offsets_mapping=True)
        ids = np.asarray([*found["input_ids"], *self._end], np.int32)
        # What stands before the text (a token of beginning) has an empty place at 0.
        learned = [start >= len(prompt) for start, _ in found["offset_mapping"]]
        return ids, np.asarray([*learned, *[True] * len(self._end)], bool)

    def _chat(self, messages: Messages, given: int) -> tuple[Ids, Mask]:
        """Tokens, and which the assistant says after so many messages."""
        known = sum(m["role"] == "assistant" for m in messages[:given])
        if _GENERATION.search(self._template()):
            found = self._apply(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = np.asarray(found["input_ids"], np.int32), found["assistant_masks"]
            return ids, _without_runs(np.asarray(mask, bool), known)
        whole = self._rendered(messages)
        ids, starts, ends = self._placed(whole)
        mask = np.zeros(len(ids), bool)
        for start, end in self._answers(messages, whole)[known:]:
            mask |= (starts >= start) & (ends <= end) & (ends > starts)
        return ids, mask

    def _answers(self, messages: Messages, whole: str) -> Spans:
        """Where each answer begins and ends: after what asks for it, with what ends its turn."""
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return []
        marked = list(messages)
        for at in answers:
            marked[at] = {**messages[at], "content": _MARK.format(at)}
        between = re.split("|".join(_MARK.format(at) for at in answers), self._rendered(marked))
        places = _places(between, whole) if len(between) == len(answers) + 1 else None
        spans = []
        for at, before, after, place in zip(
            answers, between, between[1:], places or [], strict=False
        ):
            asked, ended = self._around(marked, at)
            if asked not in before:
                break
            beside = len(before) - before.rindex(asked) - len(asked)  # thoughts, say
            # Some templates end the whole text in another way than a turn.
            spans.append((place[0] - beside, place[1] + _alike(ended, after)))
        if len(spans) < len(answers):
            raise ValueError(
                f"the chat template in {self._folder} writes an answer in another way than any "
                "text, so that it can't be told from the rest: put {% generation %} and "
                "{% endgeneration %} around answers in the template, or learn all tokens "
                "(--loss-on all)"
            )
        return spans

    def _around(self, marked: Messages, at: int) -> tuple[str, str]:
        """What asks for an answer, and what ends its turn."""
        before = self._rendered(marked[:at]) if at else ""
        asked = self._rendered(marked[:at], add_generation_prompt=True) if at else ""
        ended = self._rendered(marked[: at + 1]).partition(_MARK.format(at))[2]
        return asked[_alike(before, asked) :], ended

    def _placed(self, text: str) -> tuple[Ids, Any, Any]:
        """Tokens, and where in the text each begins and ends."""
        found = self._own(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(found["input_ids"], np.int32), places[:, 0], places[:, 1]

    def _template(self) -> str:
        template = self._own.chat_template
        if template is None:
            raise ValueError(
                f"{self._folder} has no chat template, and the data has conversations: add "
                "chat_template.jinja, or give prompts and completions"
            )
        return template if isinstance(template, str) else json.dumps(template)

    def _rendered(self, messages: Messages, **how: Any) -> str:
        self._template()
        return str(self._apply(messages, tokenize=False, **how))

    def _apply(self, messages: Messages, **how: Any) -> Any:
        try:
            return self._own.apply_chat_template(list(messages), **how)
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the chat template in {self._folder}: {error}") from error


def _without_runs(mask: Mask, count: int) -> Mask:
    """The same without the first so many runs of True.

    >>> _without_runs(np.array([True, False, True, True]), 1).tolist()
    [False, False, True, True]
    """
    begins = np.flatnonzero(np.diff(mask, prepend=False) & mask)
    kept = mask.copy()
    kept[: begins[count] if count < len(begins) else len(mask) * bool(count)] = False
    return kept


def _alike(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _places(between: Sequence[str], whole: str) -> list[tuple[int, int]] | None:
    """Where the parts of a text lie of which it is known what stands between them.

    None if they do not, or could lie in two ways.

    >>> _places(["a:", ".b:", "."], "a:x.y.b:z.")
    [(2, 5), (8, 9)]
    >>> _places(["", "-", ""], "x-y-z") is None
    True
    """
    known = [re.escape(text) for text in between]
    found = [re.fullmatch(any_text.join(known), whole, re.DOTALL) for any_text in ("(.*?)", "(.*)")]
    spans = [[m.span(i) for i in range(1, len(between))] for m in found if m is not None]
    return spans[0] if len(spans) == 2 and spans[0] == spans[1] else None
