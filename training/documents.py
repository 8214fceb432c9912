"""Documents to train on: files, folders and weighted mixtures, tokenized and packed when used.

The order is one endless stream, the same for any number of processes: each source is shuffled in
every epoch, and sources are drawn by their weights. The last tenth of each source is held out and
packed in its own order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from training.packing import Document, Lane, Row, row_of
from training.records import Record, Records, conversations, template_options
from training.show import human_count, printable
from training.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

Arrays = tuple[Any, ...]
DESCRIPTIONS = {
    "whole": "unchanged",
    "cut": "truncated",
    "dropped": "dropped",
    "empty": "left out, with nothing to learn within a row",
    "refused": "left out, not accepted by the tokenizer",
}
HELD_OUT = 10  # every so many documents one
TRIED = 100  # held-out documents that are tried as the prompt of a sample
LOOKED = 1000  # documents that the outlook of a run reads
ENDS_LOOKED = 8  # documents of each source in which `ends` looks for end tokens
AHEAD = 2  # batches that are made while the devices work


class Tokenized(NamedTuple):
    """A document in tokens, or the reason to leave it out."""

    document: Document | None
    kind: str
    size: int = 0
    reason: str = ""


@dataclasses.dataclass
class Counts:
    """Numbers of documents by their treatment, each counted as often as it is read.

    Attributes:
        whole, cut, dropped, empty, refused: Numbers; `DESCRIPTIONS` says of which documents.
        reason: Message of the first document that was refused.
        longest: Tokens of the longest document.
    """

    whole: int = 0
    cut: int = 0
    dropped: int = 0
    empty: int = 0
    refused: int = 0
    reason: str = ""
    longest: int = 0

    def count(self, document: Tokenized) -> None:
        """Counts a document."""
        self.add(Counts(**{document.kind: 1}, reason=document.reason, longest=document.size))

    def add(self, other: Counts) -> None:
        """Adds the documents that another counted."""
        for kind in DESCRIPTIONS:
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.reason = self.reason or other.reason
        self.longest = max(self.longest, other.longest)

    def __str__(self) -> str:
        numbers = ((getattr(self, kind), text) for kind, text in DESCRIPTIONS.items())
        text = ", ".join(f"{n:,} {text}" for n, text in numbers if n) or "none"
        if self.cut or self.dropped or self.empty:
            text += f", longest {self.longest:,} tokens"
        return text + (f" ({self.reason})" if self.reason else "")


class Source(NamedTuple):
    """Documents, and how often they are drawn relative to those of other sources."""

    records: Records
    weight: float


def sources_of(data: str) -> list[tuple[Path, float]]:
    """Splits the value of `--data` into paths and weights.

    Raises:
        ValueError: A weight is not a number above 0.

    >>> sources_of("chat.jsonl=3,more=1")
    [(PosixPath('chat.jsonl'), 3.0), (PosixPath('more'), 1.0)]
    """
    if Path(data).exists() or "=" not in data:
        return [(Path(data), 1.0)]
    sources = []
    for part in data.split(","):
        path, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0  # raises below
        if not path or not 0 < weight < float("inf"):
            raise ValueError(
                f"--data {data}: {part!r} must be a path and a weight above 0, for example "
                "chat.jsonl=3,more.parquet=1"
            )
        sources.append((Path(path), weight))
    return sources


class Documents:
    """Documents as batches of rows.

    Args:
        sources: At least one, each of two documents or more.
        tokenizer: Tokenizer of the model.
        seq: Sequence length S.
        batch: Rows B of the global batch.
        seed: Seed of the order.
        loss_on: "assistant", or "all" tokens.
        long: Treatment of documents of more than S + 1 tokens: "truncate", "drop" or "error".

    Raises:
        ValueError: A source has fewer than two documents, or none that the tokenizer accepts; or
            a document is longer than a row and `long` is "error".
    """

    unit = "token"
    byte_level = False
    temperature = 0.0  # of generated samples: the likeliest answer

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        seq: int,
        batch: int,
        seed: int,
        loss_on: str = "assistant",
        long: str = "truncate",
    ) -> None:
        self._sources, self._tokenizer = sources, tokenizer
        self._seq, self._batch, self._seed = seq, batch, seed
        self._loss_on, self._long = loss_on, long
        self.counts = Counts()
        for records, _ in sources:
            if len(records) < 2:
                raise ValueError(
                    f"{records.name} has one document, and at least 2 are needed because one "
                    "is held out: add documents"
                )
        self._train = [len(s.records) - max(1, len(s.records) // HELD_OUT) for s in sources]
        self._epoch = sum(self._train)
        self.name = ", ".join(source.records.name for source in sources)
        held_out = sum(len(source.records) for source in sources) - self._epoch
        self.facts = {"train_documents": self._epoch, "held_out_documents": held_out}
        self.held_out_size = f"{held_out:,} held-out documents"
        self.order: dict[str, Any] = {  # settings that determine the order of documents
            "corpus": self.name,
            "weights": [source.weight for source in sources],
            **self.facts,
            "seq_len": seq,
            "global_batch_size": batch,
            "seed": seed,
            "loss_on": loss_on,
            "long_documents": long,
        }
        self._stream = self._endless()
        for records, _ in sources:
            self._check(records)

    @functools.cached_property
    def held_out_documents(self) -> list[tuple[int, int]]:
        """Source and number of each held-out document."""
        return [
            (number, at)
            for number, (source, size) in enumerate(zip(self._sources, self._train, strict=True))
            for at in range(size, len(source.records))
        ]

    @property
    def contents(self) -> dict[str, str]:
        """Checksums of the documents, the vocabulary and the chat template, by their flags."""
        data = " ".join(source.records.fingerprint for source in self._sources)
        return {"data": data, **self._tokenizer.fingerprints()}

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text or a turn in the first documents of each source."""
        ends: dict[int, None] = {}
        for source in self._sources:
            for at in range(min(ENDS_LOOKED, len(source.records))):
                try:
                    ids, mask = self._tokenizer.document(source.records[at], self._loss_on)
                except ValueError:  # counted as refused when training reads it
                    continue
                end = self._tokenizer.end_of(ids, mask)
                if end is not None:
                    ends[end] = None
        return list(ends)

    def outlook(self, steps: int) -> str:
        """Describes which documents a run truncates or leaves out, and the epochs of each source.

        The estimate packs the first documents of the run's order, at most one epoch of them. A
        source whose documents are all left out counts 0 epochs.
        """
        looked, counts = min(LOOKED, self._epoch), Counts()
        accepted = [False] * len(self._sources)

        def read(number: int) -> Document | None:
            source, at = self._stream[number]
            tokenized = self._read(source, at)
            counts.count(tokenized)
            accepted[source] |= tokenized.document is not None
            return tokenized.document

        rows = len(_rows(Lane(read, self._seq, 0, 1, end=looked), looked))
        drawn = steps * self._batch * looked / max(rows, 1)
        total = sum(source.weight for source in self._sources)
        epochs = []
        for source, size, some in zip(self._sources, self._train, accepted, strict=True):
            number = drawn * source.weight / total / size if some else 0
            epochs.append(f"{human_count(number)} epochs of {source.records.name}")
        which = "all" if looked == self._epoch else "the first"
        return (
            f"{which} {looked:,} documents in rows of {self._seq} tokens: {counts}; "
            f"{steps:,} steps are {', '.join(epochs)}"
        )

    def batches(self, place: Any, index: int, count: int) -> Iterator[tuple[Arrays, Any]]:
        """Yields this process's rows of each batch, and the place of its lanes after it.

        `counts` has the documents of the batches that were returned, not those read ahead.

        Args:
            place: Place of all lanes to resume from; None for the beginning.
            index: Index of this process.
            count: Number of processes.

        Returns:
            An endless iterator of ((tokens, weights, segments, positions), place).
        """
        rows, counts = self._batch // count, Counts()
        lanes = [
            self._lane(place[number] if place else [number], counts)
            for number in range(index * rows, (index + 1) * rows)
        ]

        def packed() -> Iterator[tuple[Arrays, Any, Counts]]:
            while True:
                arrays = _stacked([row for lane in lanes if (row := lane.row()) is not None])
                yield arrays, [lane.place for lane in lanes], dataclasses.replace(counts)

        made = packed()  # a generator: after an error, what is queued behind it ends at once
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            waiting = [thread.submit(next, made) for _ in range(AHEAD)]
            while True:
                waiting.append(thread.submit(next, made))
                arrays, after, self.counts = waiting.pop(0).result()
                yield arrays, after

    def _lane(self, place: Sequence[int], counts: Counts) -> Lane:
        """A lane of the endless stream. A document is counted when it is packed, and those that
        are left out with the next one that is not."""
        left_out = Counts()
        uncounted: dict[int, Counts] = {}

        def read(number: int) -> Document | None:
            nonlocal left_out
            tokenized = self._read(*self._stream[number])
            left_out.count(tokenized)
            if tokenized.document is not None:
                uncounted[number], left_out = left_out, Counts()
            return tokenized.document

        def used(number: int) -> None:
            counts.add(uncounted.pop(number))

        following, *waiting = place
        return Lane(
            *(read, self._seq, following, self._batch, waiting), patience=self._epoch, used=used
        )

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """Yields this process's rows of one pass over the held-out documents, in order.

        Args:
            index: Index of this process.
            count: Number of processes.
            most: Number of batches to stop after; None for all.
        """
        order = self.held_out_documents
        lane = Lane(lambda at: self._read(*order[at]).document, self._seq, 0, 1, end=len(order))
        each, done = self._batch // count, 0
        while (most is None or done < most) and (rows := _rows(lane, self._batch)):
            rows += [row_of([], self._seq)] * (self._batch - len(rows))
            yield _stacked(rows[index * each : (index + 1) * each])
            done += 1

    def held_out_batches(self) -> int | None:
        """Returns None: only packing tells the number of batches of such a pass."""
        return None

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns no losses: tokens of documents are not counted."""
        return {}

    def prompt(self, most: int) -> np.ndarray | None:
        """Returns the first held-out document, up to its last answer, that fits in `most` tokens.

        None if there is none.
        """
        for source, at in self.held_out_documents[:TRIED]:
            try:
                prompt = self._prompt(self._sources[source].records[at], most)
            except ValueError:  # the template does not accept it
                continue
            if 1 <= len(prompt) <= most:
                return prompt
        return None

    def _prompt(self, record: Record, most: int) -> np.ndarray:
        messages = conversations(record)
        if messages is not None:
            answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            asked = messages[: answers[-1]] if answers else messages
            return self._tokenizer.prompt(asked, template_options(record))
        if "prompt" in record:
            return self._tokenizer.opening(record["prompt"])
        return self._tokenizer.opening(record["text"])[: most // 2]

    def show(self, tokens: Sequence[int], prompt_size: int) -> str:
        """Returns the text up to the end of the answer, which begins after `prompt_size` tokens."""
        return printable(self._tokenizer.decode(self._tokenizer.to_end(tokens, prompt_size)))

    def _endless(self) -> grain.MapDataset[Any]:
        import grain

        seeds = np.random.SeedSequence(self._seed).generate_state(len(self._sources))
        streams = [
            grain.MapDataset.range(size)
            .shuffle(seed=int(seed))
            .repeat()
            .map(lambda at, source=source: (source, int(at)))
            for source, (size, seed) in enumerate(zip(self._train, seeds, strict=True))
        ]
        if len(streams) == 1:
            return streams[0]
        return grain.MapDataset.mix(streams, weights=[source.weight for source in self._sources])

    def _read(self, source: int, at: int) -> Tokenized:
        """Tokenizes a document, and truncates it or leaves it out if it is longer than a row."""
        try:
            ids, mask = self._tokenized(self._sources[source].records, at)
        except ValueError as error:
            return Tokenized(None, "refused", reason=str(error))
        size, kind = len(ids), "whole"
        if size > self._seq + 1:
            if self._long != "truncate":
                return Tokenized(None, "dropped", size)
            kind, ids, mask = "cut", ids[: self._seq + 1], mask[: self._seq + 1]
        if not mask[1:].any():
            return Tokenized(None, "empty", size)
        return Tokenized((ids, mask), kind, size)

    def _tokenized(self, records: Records, at: int) -> Document:
        try:
            return self._tokenizer.document(records[at], self._loss_on)
        except ValueError as error:
            raise ValueError(f"{records.where(at)}: {error}") from error

    def _check(self, records: Records) -> None:
        """Raises ValueError if the tokenizer accepts none of the first documents.

        If `long` is "error", raises it if any document is refused or longer than a row.
        """
        first: ValueError | None = None
        for at in range(min(TRIED, len(records))):
            try:
                self._tokenized(records, at)
                break
            except ValueError as error:
                first = first or error
        else:
            assert first is not None
            raise first
        for at in range(len(records) if self._long == "error" else 0):
            ids, _ = self._tokenized(records, at)
            if len(ids) > self._seq + 1:
                raise ValueError(
                    f"{records.where(at)}: {len(ids)} tokens, and --seq-len {self._seq} allows "
                    f"{self._seq + 1}: use a longer --seq-len, or --long-documents truncate or drop"
                )


def _rows(lane: Lane, most: int) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < most and (row := lane.row()) is not None:
        rows.append(row)
    return rows


def _stacked(rows: Sequence[Row]) -> Arrays:
    return tuple(np.stack(part) for part in zip(*rows, strict=True))
