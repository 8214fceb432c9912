"""Documents to train on: files, folders and weighted mixtures, tokenised and packed as they come.

The order is one endless stream, the same for every number of processes: each source shuffled anew
in every pass, and sources drawn by their weights. The last tenth of each source is held out, and
packed in its own order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.packing import Document, Lane, Row, batches, row_of
from training.records import Record, Records, conversations, template_options
from training.show import human_count, printable
from training.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

Arrays = tuple[Any, ...]
SAID = {
    "whole": "unchanged",
    "cut": "truncated",
    "empty": "left out, with nothing to learn within a row",
    "refused": "left out, not accepted by the tokenizer",
}
HELD_OUT = 10  # every so many documents one
TRIED = 100  # of what is held out, for one to begin a sample with
LOOKED = 1000  # documents that are read before a run, to say what it will meet
ENDS_LOOKED = 8  # documents of each source in which `ends` looks for end tokens
AHEAD = 2  # batches that are made while the devices work


@dataclasses.dataclass
class Counts:
    """Documents by what became of them, each counted as often as it was read.

    Attributes:
        whole: Taken as they are.
        cut: Longer than a row, and cut.
        dropped: Longer than a row, and left out.
        empty: With nothing to learn within a row, and left out.
        refused: That the tokenizer or its template does not take, and left out.
        why: The first of those, and why.
        longest: Tokens of the longest.
    """

    whole: int = 0
    cut: int = 0
    dropped: int = 0
    empty: int = 0
    refused: int = 0
    why: str = ""
    longest: int = 0

    def add(self, other: Counts) -> None:
        """Adds those of other documents."""
        for kind, n in vars(other).items():
            if isinstance(n, int) and kind != "longest":
                setattr(self, kind, getattr(self, kind) + n)
        self.why = self.why or other.why
        self.longest = max(self.longest, other.longest)

    def __str__(self) -> str:
        kinds = {k: n for k, n in vars(self).items() if n and k not in ("why", "longest")}
        said = ", ".join(f"{n:,} {SAID.get(kind, kind)}" for kind, n in kinds.items()) or "none"
        if self.cut or self.dropped or self.empty:
            said += f", longest {self.longest:,} tokens"
        return said + (f" ({self.why})" if self.why else "")


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents, and how often they are drawn beside those of others."""

    records: Records
    weight: float


def sources_of(given: str) -> list[tuple[Path, float]]:
    """Splits the value of `--data` into paths and weights.

    Raises:
        ValueError: A weight is not a number above 0.
    >>> sources_of("chat.jsonl=3,more=1")
    [(PosixPath('chat.jsonl'), 3.0), (PosixPath('more'), 1.0)]
    """
    if Path(given).exists() or "=" not in given:
        return [(Path(given), 1.0)]
    found = []
    for part in given.split(","):
        path, _, weight = part.rpartition("=")
        try:
            found.append((Path(path), float(weight)))
        except ValueError:
            found.append((Path(path), 0.0))
        if not path or not 0 < found[-1][1] < float("inf"):
            raise ValueError(
                f"--data {given}: {part!r} must be a path and a weight above 0, for example "
                "chat.jsonl=3,more.parquet=1"
            )
    return found


class Documents:
    """Documents as batches of rows.

    Args:
        sources: At least one, each of two documents or more.
        tokenizer: Of the model.
        seq: S, tokens of a row.
        batch: B, rows of the global batch.
        seed: Of the order.
        loss_on: "assistant", or "all" tokens.
        long: What becomes of documents of more than S + 1 tokens: "truncate", "drop" or "error".

    Raises:
        ValueError: A source has one document only, or none that the tokenizer takes; a name is
            none; or a document is longer than a row and is to be refused.
    """

    unit = "token"
    byte_level = False
    temperature = 0.0  # the likeliest answer

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
        for own in sources:
            if len(own.records) < 2:
                raise ValueError(
                    f"{own.records.name} has one document, and at least 2 are needed because one "
                    "is held out: add documents"
                )
        self._kept = [len(s.records) - max(1, len(s.records) // HELD_OUT) for s in sources]
        self._stream = self._endless()
        for own in sources:
            self._check_taken(own.records)
        if long == "error":
            self._refuse_long()

    @property
    def name(self) -> str:
        return ", ".join(own.records.name for own in self._sources)

    @functools.cached_property
    def held_out_documents(self) -> list[tuple[int, int]]:
        """Source and number of each."""
        return [
            (s, at)
            for s, (own, kept) in enumerate(zip(self._sources, self._kept, strict=True))
            for at in range(kept, len(own.records))
        ]

    @property
    def facts(self) -> dict[str, Any]:
        """For a report."""
        held_out = len(self.held_out_documents)
        return {"train_documents": sum(self._kept), "held_out_documents": held_out}

    @property
    def held_out_size(self) -> str:
        """Describes the amount of held-out data."""
        return f"{len(self.held_out_documents):,} held-out documents"

    @property
    def order(self) -> dict[str, Any]:
        """Settings that determine the order of documents."""
        return {
            "corpus": self.name,
            "weights": [own.weight for own in self._sources],
            **self.facts,
            "seq_len": self._seq,
            "global_batch_size": self._batch,
            "seed": self._seed,
            "loss_on": self._loss_on,
            "long_documents": self._long,
        }

    @property
    def contents(self) -> dict[str, str]:
        """Checksums of the documents and of what makes tokens of them, by the flags."""
        data = " ".join(own.records.fingerprint for own in self._sources)
        return {"data": data, **self._tokenizer.fingerprints()}

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text or a turn in the first documents of each source."""
        found: dict[int, None] = {}
        for source in self._sources:
            for at in range(min(ENDS_LOOKED, len(source.records))):
                try:
                    ids, mask = self._tokenizer.document(source.records[at], self._loss_on)
                except ValueError:  # refused, and counted, where it is trained on
                    continue
                end = self._tokenizer.end_of(ids, mask)
                if end is not None:
                    found[end] = None
        return list(found)

    def outlook(self, steps: int) -> str:
        """Describes which documents a run truncates or leaves out, and the epochs of each source.

        The estimate packs the first documents of the run's order, at most one epoch of them. A
        source whose documents are all left out counts 0 epochs.
        """
        looked, counts = min(LOOKED, self._pass), Counts()
        taken = [Counts() for _ in self._sources]

        def read(at: int) -> Document | None:
            source, own = self._stream[at]
            before = counts.whole + counts.cut
            document = self._read(source, own, counts)
            taken[source].whole += counts.whole + counts.cut - before
            return document

        rows = len(_some(Lane(read, self._seq, 0, 1, end=looked), looked))
        drawn = steps * self._batch * looked / max(rows, 1)
        weights = sum(own.weight for own in self._sources)
        passes = [
            drawn * own.weight / weights / kept if found.whole else 0
            for own, kept, found in zip(self._sources, self._kept, taken, strict=True)
        ]
        times = [
            f"{human_count(often)} epochs of {own.records.name}"
            for own, often in zip(self._sources, passes, strict=True)
        ]
        which = "all" if looked == self._pass else "the first"
        return (
            f"{which} {looked:,} documents in rows of {self._seq} tokens: {counts}; "
            f"{steps:,} steps are {', '.join(times)}"
        )

    def batches(self, place: Any, index: int, count: int) -> Iterator[tuple[Arrays, Any]]:
        """This process's rows of each batch, and the place of its lanes after it.

        `counts` has the documents of the batches that were returned, not those read ahead.

        Args:
            place: Of all lanes, to go on from; None for the beginning.
            index: This process, of `count`.

        Returns:
            An endless iterator of ((tokens, weights, segments, positions), place).
        """
        each, counts = self._batch // count, Counts()
        lanes = []
        for number in range(index * each, (index + 1) * each):
            following, *waiting = place[number] if place else [number]
            own = _Counted(lambda at, into: self._read(*self._stream[at], into), counts)
            lane = Lane(own.read, self._seq, following, self._batch, waiting, used=own.used)
            lane.patience = self._pass
            lanes.append(lane)

        def counted() -> Iterator[tuple[Arrays, Any, Counts]]:
            for arrays, after in batches(lanes):
                yield arrays, after, dataclasses.replace(counts)

        for arrays, after, self.counts in ahead(counted()):
            yield arrays, after

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """This process's rows of one pass over what is held out, in order.

        Args:
            index: This process, of `count`.
            most: Stop after so many batches; None for all.
        """
        wanted = self.held_out_documents
        lane = Lane(lambda at: self._read(*wanted[at], Counts()), self._seq, 0, 1, end=len(wanted))
        each, empty = self._batch // count, row_of([], self._seq)
        done = 0
        while (most is None or done < most) and (rows := _some(lane, self._batch)):
            rows += [empty] * (self._batch - len(rows))
            mine = rows[index * each : (index + 1) * each]
            yield tuple(np.stack(part) for part in zip(*mine, strict=True))
            done += 1

    def held_out_batches(self) -> int | None:
        """Of how many batches such a pass is: not known before it is made."""
        return None

    def marks(self, vocab: int) -> dict[str, float]:
        """What counting alone would reach: nothing is counted of documents."""
        return {}

    def prompt(self, most: int) -> np.ndarray | None:
        """What a sample begins with: a held-out document up to its last answer, of at most so many
        tokens; None if there is none."""
        for source, at in self.held_out_documents[:TRIED]:
            try:
                found = self._prompt(self._sources[source].records[at], most)
            except ValueError:  # its template does not take it
                continue
            if 1 <= len(found) <= most:
                return found
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

    def show(self, tokens: Sequence[int], given: int) -> str:
        """Text up to the end of the answer, which begins after `given` tokens."""
        return printable(self._tokenizer.decode(self._tokenizer.to_end(tokens, given)))

    @property
    def _pass(self) -> int:
        return sum(self._kept)

    def _endless(self) -> grain.MapDataset[Any]:
        import grain

        seeds = np.random.SeedSequence(self._seed).generate_state(len(self._sources))
        each = [
            grain.MapDataset.range(kept).shuffle(seed=int(seed)).repeat()
            for kept, seed in zip(self._kept, seeds, strict=True)
        ]
        named = [own.map(lambda at, s=s: (s, int(at))) for s, own in enumerate(each)]
        if len(named) == 1:
            return named[0]
        return grain.MapDataset.mix(named, weights=[own.weight for own in self._sources])

    def _read(self, source: int, at: int, counts: Counts) -> Document | None:
        """A document of at most a row, or None if it is left out; it is counted."""
        records = self._sources[source].records
        try:
            ids, mask = self._tokenized(records, at)
        except ValueError as error:
            counts.refused += 1
            counts.why = counts.why or str(error)
            return None
        counts.longest = max(counts.longest, len(ids))
        kind = "whole" if len(ids) <= self._seq + 1 else "dropped"
        if kind == "dropped" and self._long == "truncate":
            kind, ids, mask = "cut", ids[: self._seq + 1], mask[: self._seq + 1]
        if kind != "dropped" and not mask[1:].any():
            kind = "empty"
        setattr(counts, kind, getattr(counts, kind) + 1)
        return (ids, mask) if kind in ("whole", "cut") else None

    def _tokenized(self, records: Records, at: int) -> Document:
        try:
            return self._tokenizer.document(records[at], self._loss_on)
        except ValueError as error:
            raise ValueError(f"{records.where(at)}: {error}") from error

    def _check_taken(self, records: Records) -> None:
        """Raises, with the reason of the first, if the tokenizer takes none of some documents."""
        first: ValueError | None = None
        for at in range(min(TRIED, len(records))):
            try:
                self._tokenized(records, at)
                return
            except ValueError as error:
                first = first or error
        assert first is not None
        raise first

    def _refuse_long(self) -> None:
        for own in self._sources:
            for at in range(len(own.records)):
                ids, _ = self._tokenized(own.records, at)
                if len(ids) > self._seq + 1:
                    raise ValueError(
                        f"{own.records.where(at)}: {len(ids)} tokens, and --seq-len {self._seq} "
                        f"allows {self._seq + 1}: use a longer --seq-len, or --long-documents "
                        "truncate or drop"
                    )


class _Counted:
    """Reads the documents of a lane, and counts them when they are used.

    Those that are left out count with the next one that is not.

    Args:
        read: Reads the document of a number, and counts it in the `Counts` that it is given.
        counts: Of the documents that were used.
    """

    def __init__(self, read: Callable[[int, Counts], Document | None], counts: Counts) -> None:
        self._read, self._counts = read, counts
        self._unused: dict[int, Counts] = {}
        self._left_out = Counts()

    def read(self, number: int) -> Document | None:
        document = self._read(number, self._left_out)
        if document is not None:
            self._unused[number], self._left_out = self._left_out, Counts()
        return document

    def used(self, number: int) -> None:
        self._counts.add(self._unused.pop(number))


def _some(lane: Lane, most: int) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < most and (row := lane.row()) is not None:
        rows.append(row)
    return rows


def ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same, made by a thread while those before are used."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = [thread.submit(next, items) for _ in range(AHEAD)]
        while True:
            waiting.append(thread.submit(next, items))
            yield waiting.pop(0).result()
