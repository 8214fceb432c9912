"""Documents to train on: files, folders and weighted mixtures, tokenized and packed when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from training.answers import answers_in
from training.packing import Batches, Counts, Document, Ids, Mask, pack
from training.records import Completion, Records, parse
from training.show import human_count, printable
from training.tokenizer import Tokenizer

HELD_OUT = 10  # the last tenth of each source
TRIED = 100  # documents that are tried until the tokenizer accepts one, or one fits as a prompt
ENDS_LOOKED = 8  # accepted documents of each source in which end tokens are looked for
LOOKED = 1000  # documents that the outlook of a run reads


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
                raise ValueError(f"{records.name} has 1 document: add at least one to hold out")
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
        ends: dict[int | None, None] = {}  # tokens that end a text or a turn, in their order
        for records, _ in self.sources:
            if self.long == "error":
                for at in range(len(records)):
                    ids, _ = self._tokenized(records, at)
                    if len(ids) > self.seq + 1:
                        raise ValueError(
                            f"{records.where(at)}: {len(ids)} tokens, and --seq-len {self.seq} "
                            f"allows {self.seq + 1}: use a longer one, or --long-documents truncate"
                        )
            accepted, problems = 0, []
            for at in range(min(TRIED, len(records))):
                if accepted < ENDS_LOOKED:
                    try:
                        ids, mask = self._tokenized(records, at)
                        ends[self.tokenizer.end_of(ids[mask])] = None
                        accepted += 1
                    except ValueError as error:
                        problems.append(error)
            if not accepted:
                raise problems[0]
        self.ends = [end for end in ends if end is not None]

    @property
    def contents(self) -> dict[str, str]:
        """Checksums of the documents, the vocabulary and the chat template, by their flags."""
        data = " ".join(source.records.fingerprint for source in self.sources)
        return {"data": data, **self.tokenizer.fingerprints()}

    def outlook(self, steps: int) -> str:
        """Describes what a run truncates or leaves out, and its epochs, by its first documents."""
        epoch = sum(train for train, _ in self.sizes)
        looked, counts = min(LOOKED, epoch), Counts()
        accepted = set()  # sources; 0 epochs of those whose documents are all left out

        def read(number: int) -> Document:
            document = self.numbered(number)
            if len(document.ids):
                accepted.add(self.stream[number][0])
            return document

        rows = sum(1 for _ in pack(read, self.seq, end=looked, counts=counts))
        drawn = steps * self.batch * looked / rows / sum(self.weights) if rows else 0.0
        epochs = ", ".join(
            f"{human_count(drawn * weight / train * (at in accepted))} epochs of {records.name}"
            for at, ((records, weight), (train, _)) in enumerate(
                zip(self.sources, self.sizes, strict=True)
            )
        )
        which = "all" if looked == epoch else "the first"
        return (
            f"{which} {looked:,} documents in rows of {self.seq} tokens: {counts}; "
            f"{steps:,} steps are {epochs}"
        )

    def prompt(self, most: int) -> Ids | None:
        """Returns the first held-out document, up to its last answer, of at most `most` tokens."""
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
