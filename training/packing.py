"""Documents side by side in rows, in constant memory, the same for any number of processes.

A global batch has B rows, and row j of every batch is fed by lane j, which takes documents j,
j + B, j + 2B and so on of one endless order and packs them by itself. So what a row holds follows
from B alone; a process works off its own lanes and reads no others' documents. Of a lane a few
documents wait: a row takes the first of them, then the largest that still fits, and so on. Where a
lane is, is which document comes next and which wait: with that a run goes on to the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from training.tokenizer import Ids, Mask

LOOK = 16  # documents of a lane that wait to be packed
Document = tuple[Ids, Mask]
# The document of a number, or None for one that is left out.
Read = Callable[[int], Document | None]
# Tokens (S + 1), weights of what is predicted, documents and places of what is read, (S) each.
Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Ids, Ids]


def row_of(documents: Sequence[Document], seq: int) -> Row:
    """Documents side by side.

    Args:
        documents: Tokens of each and which are learned, of `seq + 1` tokens together at most.
        seq: S.

    >>> first = np.array([5, 6, 7]), np.array([False, True, True])
    >>> second = np.array([8, 9]), np.array([True, True])
    >>> tokens, weights, segments, positions = row_of([first, second], seq=5)
    >>> tokens.tolist(), weights.tolist()
    ([5, 6, 7, 8, 9, 0], [1.0, 1.0, 0.0, 1.0, 0.0])
    >>> segments.tolist(), positions.tolist()
    ([1, 1, 1, 2, 2], [0, 1, 2, 0, 1])
    """
    tokens, learned = np.zeros(seq + 1, np.int32), np.zeros(seq + 1, bool)
    segments, positions = np.zeros(seq + 1, np.int32), np.zeros(seq + 1, np.int32)
    at = 0
    for number, (ids, mask) in enumerate(documents, start=1):
        here = slice(at, at + len(ids))
        tokens[here], learned[here] = ids, mask
        learned[at] = False  # nothing of its own document stands before it
        segments[here], positions[here] = number, np.arange(len(ids))
        at += len(ids)
    return tokens, learned[1:].astype(np.float32), segments[:-1], positions[:-1]


@dataclasses.dataclass
class Lane:
    """Documents `first`, `first + step` and so on, as rows.

    Attributes:
        read: Gives a document of at most `seq + 1` tokens.
        seq: S.
        following: Number of the document that is read next.
        step: From one document of the lane to its next.
        waiting: Numbers of documents that wait. A document that is left out now, because it was
            edited since, waits no more.
        end: Number that none of them reaches; None for an endless order.
        patience: How many may be left out in a row.
        used: Is told the number of each document that is put in a row.
    """

    read: Read
    seq: int
    following: int
    step: int
    waiting: list[int] = dataclasses.field(default_factory=list)
    end: int | None = None
    patience: int = 10**6
    used: Callable[[int], None] = lambda number: None

    def __post_init__(self) -> None:
        found = {number: self.read(number) for number in self.waiting}
        self._known = {number: own for number, own in found.items() if own is not None}
        self.waiting = [number for number in self.waiting if number in self._known]

    @property
    def place(self) -> list[int]:
        """What comes next, and what waits."""
        return [self.following, *self.waiting]

    def row(self) -> Row | None:
        """The next row; None once there is nothing left."""
        self._fill()
        if not self.waiting:
            return None
        taken, room = [self._take(0)], self.seq + 1
        room -= len(taken[0][0])
        while True:
            self._fill()
            sizes = [len(self._known[number][0]) for number in self.waiting]
            fitting = [(size, -at) for at, size in enumerate(sizes) if size <= room]
            if not fitting:
                return row_of(taken, self.seq)
            size, at = max(fitting)
            taken.append(self._take(-at))
            room -= size

    def _take(self, at: int) -> Document:
        number = self.waiting.pop(at)
        self.used(number)
        return self._known.pop(number)

    def _fill(self) -> None:
        left_out = 0
        while len(self.waiting) < LOOK and (self.end is None or self.following < self.end):
            found = self.read(self.following)
            if found is not None:
                self._known[self.following] = found
                self.waiting.append(self.following)
                left_out = 0
            elif (left_out := left_out + 1) > self.patience:
                raise ValueError(
                    f"{left_out} documents in a row have nothing to learn within {self.seq + 1} "
                    "tokens: use a longer --seq-len"
                )
            self.following += self.step


def batches(lanes: Sequence[Lane]) -> Iterator[tuple[tuple[npt.NDArray[np.generic], ...], object]]:
    """Batches of a row from each lane, and where the lanes are after it; endless lanes only."""
    while True:
        rows = [lane.row() for lane in lanes]
        yield (
            tuple(np.stack(part) for part in zip(*rows, strict=True)),
            [lane.place for lane in lanes],
        )
