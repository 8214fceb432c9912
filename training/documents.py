"""Documents to train on: files, folders and weighted mixtures, tokenized and packed when used.

The last tenth of each source is held out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from training.answers import answers_in
from training.packing import Batches, Counts, Document, Ids, Mask, pack
from training.records import Completion, Records, parse
from training.show import human_count, printable
from training.tokenizer import Tokenizer

HELD_OUT = 10  # every so many documents one
TRIED = 100  # documents that are tried until the tokenizer accepts one, or one fits as a prompt
LOOKED = 1000  # documents that the outlook of a run reads
ENDS_LOOKED = 8  # documents of each source in which end tokens are looked for


class Source(NamedTuple):
    """Documents, and how often they are drawn relative to those of other sources."""

    records: Records
    weight: float


@dataclasses.dataclass(eq=False)
class Documents(Batches):
    """Documents as batches of packed rows."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    seq: int
    batch: int
    seed: int
    loss_on: str = "assistant"  # or "all" tokens
    long: str = "truncate"  # documents of more than S + 1 tokens; or "drop", "error"

    unit: ClassVar[str] = "token"
    byte_level: ClassVar[bool] = False
    temperature: ClassVar[float] = 0.0  # of generated samples: the likeliest answer

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns no losses to compare with."""
        return {}

    def __post_init__(self) -> None:
        self.counts, self.sizes = Counts(), []
        for records, _ in self.sources:
            if len(records) < 2:
                raise ValueError(
                    f"{records.name} has 1 document, and at least 2 are needed: add one"
                )
            held_out = max(1, len(records) // HELD_OUT)
            self.sizes.append((len(records) - held_out, held_out))
        self.weights = [source.weight for source in self.sources]
        train, held_out = map(sum, zip(*self.sizes, strict=True))
        self.name = ", ".join(source.records.name for source in self.sources)
        self.facts = {"train_documents": train, "held_out_documents": held_out}
        self.held_out_size = f"{held_out:,} held-out documents"
        self.order: dict[str, Any] = {  # settings that determine the order of documents
            "corpus": self.name,
            "weights": self.weights,
            **self.facts,
            "seq_len": self.seq,
            "global_batch_size": self.batch,
            "seed": self.seed,
            "loss_on": self.loss_on,
            "long_documents": self.long,
        }
        ends: dict[int | None, None] = {}
        for source, (records, _) in enumerate(self.sources):
            self._check(source)
            for at in range(min(ENDS_LOOKED, len(records))):
                with contextlib.suppress(ValueError):  # counted when training reads it
                    ends[self.tokenizer.end_of(*self._tokenized(records, at))] = None
        self.ends = [end for end in ends if end is not None]

    @property
    def contents(self) -> dict[str, str]:
        """Checksums of the documents, the vocabulary and the chat template, by their flags."""
        data = " ".join(source.records.fingerprint for source in self.sources)
        return {"data": data, **self.tokenizer.fingerprints()}

    def outlook(self, steps: int) -> str:
        """Describes which documents a run truncates or leaves out, and the epochs of each source.

        The estimate packs the first documents of the run's order, at most one epoch of them.
        """
        epoch = sum(train for train, _ in self.sizes)
        looked = min(LOOKED, epoch)
        counts = Counts()
        rows = sum(1 for _ in pack(self.numbered, self.seq, end=looked, counts=counts))
        drawn = steps * self.batch * looked / rows / sum(self.weights) if rows else 0.0
        epochs = ", ".join(
            f"{human_count(drawn * weight / train)} epochs of {records.name}"
            for (records, weight), (train, _) in zip(self.sources, self.sizes, strict=True)
        )
        which = "all" if looked == epoch else "the first"
        return (
            f"{which} {looked:,} documents in rows of {self.seq} tokens: {counts}; "
            f"{steps:,} steps are {epochs}"
        )

    def prompt(self, most: int) -> Ids | None:
        """Returns the first held-out document, up to its last answer, that fits in `most` tokens.

        None if there is none.
        """
        for (records, _), (train, held_out) in zip(self.sources, self.sizes, strict=True):
            for at in range(train, train + min(TRIED, held_out)):
                content = parse(records[at])
                if isinstance(content, Completion):
                    prompt = self.tokenizer.opening(content.prompt or content.completion)
                    prompt = prompt if content.prompt else prompt[: most // 2]
                else:
                    messages, _, options = content
                    last = max(answers_in(messages), default=len(messages))
                    try:
                        prompt = self.tokenizer.prompt(messages[:last], options)
                    except ValueError:  # the template does not accept it
                        continue
                if 1 <= len(prompt) <= most:
                    return prompt
        return None

    def show(self, tokens: Sequence[int], prompt_size: int) -> str:
        """Returns the text up to the end of the answer, which begins after `prompt_size` tokens."""
        return printable(self.tokenizer.decode(self.tokenizer.to_end(tokens, prompt_size)))

    def read(self, source: int, at: int) -> Document:
        """Tokenizes a document, and truncates it or leaves it out if it is longer than a row."""
        try:
            ids, mask = self._tokenized(self.sources[source].records, at)
        except ValueError as error:
            return Document("refused", reason=str(error))
        size, treatment = len(ids), "whole"
        if size > self.seq + 1:
            if self.long != "truncate":
                return Document("dropped", size=size)
            treatment, ids, mask = "cut", ids[: self.seq + 1], mask[: self.seq + 1]
        if not mask[1:].any():
            return Document("empty", size=size)
        return Document(treatment, ids, mask, size)

    def _tokenized(self, records: Records, at: int) -> tuple[Ids, Mask]:
        try:
            return self.tokenizer.document(records[at], self.loss_on)
        except ValueError as error:
            raise ValueError(f"{records.where(at)}: {error}") from error

    def _check(self, source: int) -> None:
        """Raises ValueError if the tokenizer accepts none of the first documents.

        If `long` is "error", raises it if any document is refused or longer than a row.
        """
        records, strict = self.sources[source].records, self.long == "error"
        tried = range(len(records) if strict else min(TRIED, len(records)))
        documents = (self.read(source, at) for at in tried)
        if not strict:
            if all(document.reason for document in documents):
                raise ValueError(self.read(source, 0).reason)
            return
        for at, document in enumerate(documents):
            if document.reason:
                raise ValueError(document.reason)
            if document.size > self.seq + 1:
                raise ValueError(
                    f"{records.where(at)}: {document.size} tokens, and --seq-len {self.seq} allows "
                    f"{self.seq + 1}: use a longer --seq-len, or --long-documents truncate or drop"
                )
