"""Documents packed in rows, in constant memory and the same for any number of processes.

A global batch has B rows. Lane j feeds row j of every batch: it takes documents j, j + B, j + 2B
and so on of one endless order, so a row depends on B alone and a process reads only the documents
of its lanes. A few documents of a lane wait: a row takes the first of them, then the largest that
fits, and so on. The number of the next document and those that wait are all that resuming needs.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

T = TypeVar("T")
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Arrays = tuple[np.ndarray, ...]
Place = int | list[list[int]]  # number of samples that were used; or the place of each lane

AHEAD = 2  # batches that are made while the devices work
LOOK = 16  # documents of a lane that wait to be packed
TREATMENTS = {
    "whole": "unchanged",
    "cut": "truncated",
    "dropped": "dropped",
    "empty": "left out, with nothing to learn within a row",
    "refused": "left out, not accepted by the tokenizer",
}


class Document(NamedTuple):
    """A document as training reads it; without tokens if it is left out."""

    treatment: str  # one of `TREATMENTS`
    ids: Ids = np.zeros(0, np.int32)
    mask: Mask = np.zeros(0, bool)  # tokens that are learned
    size: int = 0  # number of tokens before truncation
    reason: str = ""  # of the tokenizer, for not accepting it


@dataclasses.dataclass
class Counts:
    """Numbers of documents by their treatment, each counted as often as it is read."""

    numbers: Counter[str] = dataclasses.field(default_factory=Counter)
    reason: str = ""  # message of the first document that was refused
    longest: int = 0  # tokens of the longest document

    def add(self, document: Document) -> None:
        self.numbers[document.treatment] += 1
        self.reason = self.reason or document.reason
        self.longest = max(self.longest, document.size)

    def __str__(self) -> str:
        numbers = ((self.numbers[name], text) for name, text in TREATMENTS.items())
        text = ", ".join(f"{n:,} {text}" for n, text in numbers if n) or "none"
        if self.numbers.keys() & {"cut", "dropped", "empty"}:
            text += f", longest {self.longest:,} tokens"
        return text + (f" ({self.reason})" if self.reason else "")


def row_of(documents: Sequence[tuple[Ids, Mask]], seq: int) -> Arrays:
    """Packs tokens and masks of documents, of together at most `seq + 1` tokens, in a row.

    Returns tokens (S + 1), then weights of the targets, documents and positions of the inputs (S).

    >>> first = np.array([5, 6, 7]), np.array([False, True, True])
    >>> second = np.array([8, 9]), np.array([True, True])
    >>> tokens, weights, segments, positions = row_of([first, second], seq=5)
    >>> tokens.tolist(), weights.tolist()
    ([5, 6, 7, 8, 9, 0], [1.0, 1.0, 0.0, 1.0, 0.0])
    >>> segments.tolist(), positions.tolist()
    ([1, 1, 1, 2, 2], [0, 1, 2, 0, 1])
    """
    tokens, segments, positions = np.zeros((3, seq + 1), np.int32)
    learned = np.zeros(seq + 1, np.float32)
    at = 0
    for number, (ids, mask) in enumerate(documents, start=1):
        here = slice(at, at + len(ids))
        tokens[here], learned[here] = ids, mask
        learned[at] = 0  # no token of its document precedes it
        segments[here], positions[here] = number, np.arange(len(ids))
        at += len(ids)
    return tokens, learned[1:], segments[:-1], positions[:-1]


@dataclasses.dataclass
class Lane:
    """Documents `following`, `following + step` and so on, packed in rows."""

    read: Callable[[int], Document]  # of at most S + 1 tokens, by number
    seq: int  # sequence length S
    following: int  # number of the document that is read next
    step: int  # difference of the numbers of neighbouring documents
    former: Sequence[int] = ()  # numbers of documents that wait when a run resumes
    look: int = LOOK  # number of documents that may wait
    end: int | None = None  # number that no document reaches; None for an endless order
    patience: int = 10**6  # number of documents in a row that may be left out
    # Documents that are packed, and those that are left out: up to `look` documents earlier.
    counts: Counts = dataclasses.field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._waiting: dict[int, Document] = {}

    @property
    def place(self) -> list[int]:
        """Number of the next document, and of those that wait after a row."""
        return [self.following, *self._waiting]

    def row(self) -> Arrays | None:
        """Returns the next row; None if no document is left."""
        packed: list[tuple[Ids, Mask]] = []
        room = self.seq + 1
        while True:
            self._fill()
            sizes = {number: len(document.ids) for number, document in self._waiting.items()}
            fitting = [number for number, size in sizes.items() if size <= room]
            if not fitting:
                return row_of(packed, self.seq) if packed else None
            # max returns the first of equal ones.
            number = max(fitting, key=sizes.__getitem__) if packed else fitting[0]
            document = self._waiting.pop(number)
            self.counts.add(document)
            packed.append((document.ids, document.mask))
            room -= sizes[number]

    def _fill(self) -> None:
        """Reads documents until enough wait; those that are left out are only counted."""
        left_out = 0
        while len(self._waiting) < self.look:
            if self.former:
                number, *self.former = self.former
            elif self.end is None or self.following < self.end:
                number, self.following = self.following, self.following + self.step
            else:
                return
            document = self.read(number)
            if len(document.ids):
                self._waiting[number], left_out = document, 0
                continue
            self.counts.add(document)
            left_out += 1
            if left_out > self.patience:
                raise ValueError(
                    f"{left_out} documents in a row have nothing to learn within {self.seq + 1} "
                    "tokens: use a longer --seq-len"
                )


class Batches:
    """Batches of rows, of documents that a subclass reads from one or several sources.

    The order of training is one endless stream, the same for any number of processes: each source
    is shuffled in every epoch, and sources are drawn by their weights. Held-out documents come
    once, in their own order.
    """

    seq: int  # sequence length S
    batch: int  # rows B of the global batch, a multiple of the number of processes
    seed: int  # of the order
    read: Callable[[int, int], Document]  # of a source, by number; the held-out ones are the last
    sizes: Sequence[tuple[int, int]]  # of each source: documents to train on, and held-out ones
    weights: Sequence[float] = (1.0,)  # of each source

    packed: ClassVar[bool] = True  # False: each document fills a row
    counts: Counts | None = None  # of the rows so far, if they are packed
    ends: Sequence[int] = ()  # tokens that end a text or a turn

    def batches(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place]]:
        """Yields rows of process `index` of `count`, without end, and the place after them.

        Packed rows are (tokens, weights, segments, positions), others are (tokens,). They begin at
        a place of all processes; None is the beginning. `counts` has the documents of the batches
        that were returned, not those read ahead.
        """
        for arrays, after, counts in read_ahead(self._rows(place, index, count)):
            self.counts = counts
            yield arrays, after

    def _rows(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place, Counts | None]]:
        each, counts, start = self.batch // count, Counts(), place or 0
        lanes = []
        for number in range(index * each, (index + 1) * each):
            following, *former = [start + number] if isinstance(start, int) else start[number]
            lanes.append(self._lane(self.numbered, following, self.batch, former, counts=counts))
        for done in itertools.count(1):
            arrays = stacked([row for lane in lanes if (row := lane.row()) is not None])
            if self.packed:
                yield arrays, [lane.place for lane in lanes], copy.deepcopy(counts)
            else:
                assert isinstance(start, int)
                yield arrays[:1], start + done * self.batch, None

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """Yields this process's rows of one pass, at most `most` batches, in order.

        Rows that are not packed are (tokens, weights). The last batch is padded by rows of weight
        0, and all processes have the same number of batches.
        """

        def read(number: int) -> Document:
            for source, (train, held_out) in enumerate(self.sizes):
                if number < held_out:
                    return self.read(source, train + number)
                number -= held_out
            raise IndexError(number)

        lane = self._lane(read, 0, 1, end=sum(held_out for _, held_out in self.sizes))
        rows, each = iter(lane.row, None), self.batch // count
        batches = iter(lambda: list(itertools.islice(rows, self.batch)), [])
        for batch in itertools.islice(batches, most):
            batch += [row_of([], self.seq)] * (self.batch - len(batch))
            yield stacked(batch[index * each : (index + 1) * each])[: None if self.packed else 2]

    def held_out_batches(self) -> int | None:
        """Returns the number of batches of such a pass; None if only packing tells it."""
        return None if self.packed else -(-self.sizes[0][1] // self.batch)

    def marks(self, vocab: int) -> dict[str, float]:
        """Returns losses to compare with, in nats per token, by name."""
        return {}

    def numbered(self, number: int) -> Document:
        """Reads a document of the endless order."""
        return self.read(*self.stream[number])

    def _lane(self, read: Callable[[int], Document], *place: Any, **options: Any) -> Lane:
        look, patience = LOOK if self.packed else 1, sum(train for train, _ in self.sizes)
        return Lane(read, self.seq, *place, look=look, patience=patience, **options)

    @functools.cached_property
    def stream(self) -> grain.MapDataset[Any]:
        """The endless order of training: source and number of each document."""
        import grain

        # grain shuffles epoch e with seed + e: neighbouring seeds would share their epochs.
        seeds = np.random.SeedSequence(self.seed).generate_state(len(self.sizes))
        streams = [
            grain.MapDataset.range(size)
            .shuffle(seed=int(seed))
            .repeat()
            .map(lambda at, source=source: (source, int(at)))
            for source, ((size, _), seed) in enumerate(zip(self.sizes, seeds, strict=True))
        ]
        if len(streams) == 1:
            return streams[0]
        return grain.MapDataset.mix(streams, weights=self.weights)


def read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yields batches that a thread makes while the devices work, in their order."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # From one generator: after an error the batches that are queued behind it end at once.
        ahead = [thread.submit(next, batches) for _ in range(AHEAD)]
        while True:
            ahead.append(thread.submit(next, batches))
            yield ahead.pop(0).result()


def stacked(rows: Sequence[Arrays]) -> Arrays:
    """Returns arrays of rows as one array for each of their parts."""
    return tuple(np.stack(part) for part in zip(*rows, strict=True))
