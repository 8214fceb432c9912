"""Documents to train on: files, folders and weighted mixtures, tokenized and packed when used.

The order is one endless stream, the same for any number of processes: each source is shuffled in
every epoch, and sources are drawn by their weights. The last tenth of each source is held out and
packed in its own order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from training.answers import answers_in
from training.data_files import Arrays, read_ahead, stacked
from training.packing import Counts, Document, Lane, Row, row_of
from training.records import Completion, Records, parse
from training.show import human_count, printable
from training.tokenizer import Ids, Tokenizer

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

Place = list[list[int]]  # of each lane
HELD_OUT = 10  # every so many documents one
TRIED = 100  # documents that are tried until the tokenizer accepts one, or one fits as a prompt
LOOKED = 1000  # documents that the outlook of a run reads
ENDS_LOOKED = 8  # documents of each source in which `ends` looks for end tokens


class Source(NamedTuple):
    """Documents, and how often they are drawn relative to those of other sources."""

    records: Records
    weight: float


@dataclasses.dataclass(eq=False)
class Documents:
    """Documents as batches of rows.

    Raises ValueError if a source has fewer than two documents, or none that the tokenizer accepts;
    or a document is longer than a row and `long` is "error".
    """

    sources: Sequence[Source]
    tokenizer: Tokenizer
    seq: int  # sequence length S
    batch: int  # rows B of the global batch, a multiple of the number of processes
    seed: int  # of the order
    loss_on: str = "assistant"  # or "all" tokens
    long: str = "truncate"  # documents of more than S + 1 tokens; or "drop", "error"

    unit: ClassVar = "token"
    byte_level: ClassVar = False
    temperature: ClassVar = 0.0  # of generated samples: the likeliest answer

    def __post_init__(self) -> None:
        sources, self.counts = self.sources, Counts()
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
            "seq_len": self.seq,
            "global_batch_size": self.batch,
            "seed": self.seed,
            "loss_on": self.loss_on,
            "long_documents": self.long,
        }
        self._stream = self._endless()
        for records, _ in sources:
            self._check(records)

    @functools.cached_property
    def held_out_documents(self) -> list[tuple[int, int]]:
        """Source and number of each held-out document."""
        return [
            (number, at)
            for number, (source, size) in enumerate(zip(self.sources, self._train, strict=True))
            for at in range(size, len(source.records))
        ]

    @property
    def contents(self) -> dict[str, str]:
        """Checksums of the documents, the vocabulary and the chat template, by their flags."""
        data = " ".join(source.records.fingerprint for source in self.sources)
        return {"data": data, **self.tokenizer.fingerprints()}

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text or a turn in the first documents of each source."""
        ends: dict[int, None] = {}
        for records, _ in self.sources:
            for at in range(min(ENDS_LOOKED, len(records))):
                try:
                    end = self.tokenizer.end_of(*self._tokenized(records, at))
                except ValueError:  # counted as refused when training reads it
                    continue
                if end is not None:
                    ends[end] = None
        return list(ends)

    def outlook(self, steps: int) -> str:
        """Describes which documents a run truncates or leaves out, and the epochs of each source.

        The estimate packs the first documents of the run's order, at most one epoch of them. A
        source whose documents are all left out counts 0 epochs.
        """
        looked, counts = min(LOOKED, self._epoch), Counts()
        accepted = set()

        def read(number: int) -> tuple[Document | None, Counts]:
            nonlocal counts
            document, count = self._numbered(number)
            counts += count
            if document is not None:
                accepted.add(self._stream[number][0])
            return document, count

        rows = len(_rows(Lane(read, self.seq, 0, 1, end=looked), looked))
        drawn = steps * self.batch * looked / max(rows, 1)
        total = sum(source.weight for source in self.sources)
        epochs = []
        for number, (records, weight) in enumerate(self.sources):
            passes = drawn * weight / total / self._train[number] if number in accepted else 0
            epochs.append(f"{human_count(passes)} epochs of {records.name}")
        which = "all" if looked == self._epoch else "the first"
        return (
            f"{which} {looked:,} documents in rows of {self.seq} tokens: {counts}; "
            f"{steps:,} steps are {', '.join(epochs)}"
        )

    def batches(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place]]:
        """Yields rows of process `index` of `count`, and the place of its lanes after them.

        The rows are (tokens, weights, segments, positions), without end, from the place of all
        lanes on; None is the beginning. `counts` has the documents of the batches that were
        returned, not those read ahead.
        """
        for arrays, after, counts in read_ahead(self._packed(place, index, count)):
            self.counts = counts
            yield arrays, after

    def _packed(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place, Counts]]:
        each, lanes = self.batch // count, []
        for number in range(index * each, (index + 1) * each):
            following, *waiting = place[number] if place else [number]
            own = (self._numbered, self.seq, following, self.batch, waiting)
            lanes.append(Lane(*own, patience=self._epoch))
        while True:
            arrays = stacked([row for lane in lanes if (row := lane.row()) is not None])
            counts = sum((lane.counts for lane in lanes), Counts())
            yield arrays, [lane.place for lane in lanes], counts

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """Yields this process's rows of one pass, at most `most` batches, in order."""
        order = self.held_out_documents
        lane = Lane(lambda at: self._read(*order[at]), self.seq, 0, 1, end=len(order))
        each, done = self.batch // count, 0
        while (most is None or done < most) and (rows := _rows(lane, self.batch)):
            rows += [row_of([], self.seq)] * (self.batch - len(rows))
            yield stacked(rows[index * each : (index + 1) * each])
            done += 1

    def held_out_batches(self) -> int | None:
        """Returns None: only packing tells the number of batches of such a pass."""
        return None

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns no losses: tokens of documents are not counted."""
        return {}

    def prompt(self, most: int) -> Ids | None:
        """Returns the first held-out document, up to its last answer, that fits in `most` tokens.

        None if there is none.
        """
        for source, at in self.held_out_documents[:TRIED]:
            content = parse(self.sources[source].records[at])
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

    def _endless(self) -> grain.MapDataset[Any]:
        import grain

        seeds = np.random.SeedSequence(self.seed).generate_state(len(self.sources))
        streams = [
            grain.MapDataset.range(size)
            .shuffle(seed=int(seed))
            .repeat()
            .map(lambda at, source=source: (source, int(at)))
            for source, (size, seed) in enumerate(zip(self._train, seeds, strict=True))
        ]
        if len(streams) == 1:
            return streams[0]
        return grain.MapDataset.mix(streams, weights=[source.weight for source in self.sources])

    def _numbered(self, number: int) -> tuple[Document | None, Counts]:
        """Reads a document of the endless order."""
        return self._read(*self._stream[number])

    def _read(self, source: int, at: int) -> tuple[Document | None, Counts]:
        """Tokenizes a document, and truncates it or leaves it out if it is longer than a row."""
        try:
            ids, mask = self._tokenized(self.sources[source].records, at)
        except ValueError as error:
            return None, Counts(refused=1, reason=str(error))
        size, kind = len(ids), "whole"
        if size > self.seq + 1:
            if self.long != "truncate":
                return None, Counts(dropped=1, longest=size)
            kind, ids, mask = "cut", ids[: self.seq + 1], mask[: self.seq + 1]
        if not mask[1:].any():
            return None, Counts(empty=1, longest=size)
        return (ids, mask), Counts(**{kind: 1}, longest=size)

    def _tokenized(self, records: Records, at: int) -> Document:
        try:
            return self.tokenizer.document(records[at], self.loss_on)
        except ValueError as error:
            raise ValueError(f"{records.where(at)}: {error}") from error

    def _check(self, records: Records) -> None:
        """Raises ValueError if the tokenizer accepts none of the first documents.

        If `long` is "error", raises it if any document is refused or longer than a row.
        """
        if self.long != "error":
            problems = []
            for at in range(min(TRIED, len(records))):
                try:
                    self._tokenized(records, at)
                    return
                except ValueError as error:
                    problems.append(error)
            raise problems[0]
        for at in range(len(records)):
            ids, _ = self._tokenized(records, at)
            if len(ids) > self.seq + 1:
                raise ValueError(
                    f"{records.where(at)}: {len(ids)} tokens, and --seq-len {self.seq} allows "
                    f"{self.seq + 1}: use a longer --seq-len, or --long-documents truncate or drop"
                )


def _rows(lane: Lane, most: int) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < most and (row := lane.row()) is not None:
        rows.append(row)
    return rows
