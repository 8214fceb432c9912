"""Documents packed in rows, in constant memory and the same for any number of processes.

A global batch has B rows. Lane j feeds row j of every batch: it takes documents j, j + B, j + 2B
and so on of one endless order, so a row depends on B alone and a process reads only the documents
of its lanes. A few documents of a lane wait: a row takes the first of them, then the largest that
fits, and so on. The number of the next document and those that wait are all that resuming needs.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import grain  # at run time inside the functions: it imports jax

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

    numbers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
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


def pack(
    read: Callable[[int], Document],
    seq: int,
    following: int = 0,
    step: int = 1,
    former: Sequence[int] = (),
    *,
    end: int = sys.maxsize,
    look: int = LOOK,
    patience: int = sys.maxsize,
    counts: Counts,
) -> Iterator[tuple[Arrays, list[int]]]:
    """Yields rows of documents, and the place after each: the next number, and those that wait.

    Reads `range(following, end, step)`, after the `former` ones, which waited at this place. `look`
    documents may wait, and `patience` ones in a row may be left out. `counts` counts documents
    when they are packed, or left out: up to `look` documents earlier.
    """
    numbers = itertools.chain(former, range(following, end, step))
    waiting: dict[int, Document] = {}
    packed: list[tuple[Ids, Mask]] = []
    left_out, room = 0, seq + 1
    while True:
        while len(waiting) < look and (number := next(numbers, None)) is not None:
            following = max(following, number + step)
            document = read(number)
            if len(document.ids):
                waiting[number], left_out = document, 0
                continue
            counts.add(document)
            left_out += 1
            if left_out > patience:
                problem = f"{left_out} documents in a row have nothing to learn"
                raise ValueError(f"{problem} within {seq + 1} tokens: use a longer --seq-len")
        sizes = {number: len(document.ids) for number, document in waiting.items()}
        fitting = [number for number, size in sizes.items() if size <= room]
        if fitting:  # max returns the first of equal ones
            number = max(fitting, key=sizes.__getitem__) if packed else fitting[0]
            document = waiting.pop(number)
            counts.add(document)
            packed.append((document.ids, document.mask))
            room -= sizes[number]
        elif packed:
            yield row_of(packed, seq), [following, *waiting]
            packed, room = [], seq + 1
        else:
            return


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

    def batches(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place]]:
        """Yields rows of process `index` of `count`, without end, and the place after them.

        Packed rows are (tokens, weights, segments, positions), others are (tokens,). They begin at
        a place of all processes; None is the beginning. A thread makes them while the devices work:
        `counts` has the documents of the batches that were returned, not those made ahead.
        """
        batches = self._batches(place, index, count)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            # From one generator: after an error the batches that are queued behind it end at once.
            ahead = [thread.submit(next, batches) for _ in range(AHEAD)]
            while True:
                ahead.append(thread.submit(next, batches))
                arrays, after, self.counts = ahead.pop(0).result()
                yield arrays, after

    def _batches(
        self, place: Place | None, index: int, count: int
    ) -> Iterator[tuple[Arrays, Place, Counts | None]]:
        each, counts, start = self.batch // count, Counts(), place or 0
        lanes = []
        for number in range(index * each, (index + 1) * each):
            following, *former = [start + number] if isinstance(start, int) else start[number]
            lanes.append(self._pack(self.numbered, counts, following, self.batch, former))
        for done in itertools.count(1):
            rows, places = zip(*[next(lane) for lane in lanes], strict=True)
            arrays = tuple(map(np.stack, zip(*rows, strict=True)))
            if self.packed:
                yield arrays, [*places], copy.deepcopy(counts)
            else:
                assert isinstance(start, int)
                yield arrays[:1], start + done * self.batch, None

    def held_out(self, index: int, count: int, most: int | None = None) -> Iterator[Arrays]:
        """Yields this process's rows of one pass in order, at most `most` batches, the last padded.

        Rows that are not packed are (tokens, weights).
        """

        def read(number: int) -> Document:
            for source, (train, held_out) in enumerate(self.sizes):
                if number < held_out:
                    return self.read(source, train + number)
                number -= held_out
            raise IndexError(number)

        lane = self._pack(read, Counts(), end=sum(held_out for _, held_out in self.sizes))
        rows, each = (row for row, _ in lane), self.batch // count
        batches = iter(lambda: list(itertools.islice(rows, self.batch)), [])
        for batch in itertools.islice(batches, most):
            batch += [row_of([], self.seq)] * (self.batch - len(batch))
            own = batch[index * each : (index + 1) * each]
            yield tuple(map(np.stack, zip(*own, strict=True)))[: None if self.packed else 2]

    def _pack(
        self, read: Callable[[int], Document], counts: Counts, *place: Any, **end: int
    ) -> Iterator[tuple[Arrays, list[int]]]:
        patience, look = sum(train for train, _ in self.sizes), LOOK if self.packed else 1
        return pack(read, self.seq, *place, **end, look=look, patience=patience, counts=counts)

    def held_out_batches(self) -> int | None:
        """Returns the number of batches of such a pass; None if only packing tells it."""
        return None if self.packed else -(-self.sizes[0][1] // self.batch)

    def numbered(self, number: int) -> Document:
        """Reads a document of the endless order."""
        return self.read(*self.stream[number])

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
