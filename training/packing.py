"""Documents packed in rows, in constant memory and the same for any number of processes.

A global batch has B rows. Lane j feeds row j of every batch: it takes documents j, j + B, j + 2B
and so on of one endless order, so a row depends on B alone and a process reads only the documents
of its lanes. A few documents of a lane wait: a row takes the first of them, then the largest that
fits, and so on. The number of the next document and those that wait are all that resuming needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from training.tokenizer import Ids, Mask

LOOK = 16  # documents of a lane that wait to be packed
Document = tuple[Ids, Mask]
# Tokens (S + 1), then weights of the targets, documents and positions of the inputs, (S) each.
Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Ids, Ids]
DESCRIPTIONS = {
    "whole": "unchanged",
    "cut": "truncated",
    "dropped": "dropped",
    "empty": "left out, with nothing to learn within a row",
    "refused": "left out, not accepted by the tokenizer",
}


@dataclasses.dataclass
class Counts:
    """Numbers of documents by their treatment, each counted as often as it is read."""

    whole: int = 0
    cut: int = 0
    dropped: int = 0
    empty: int = 0
    refused: int = 0
    reason: str = ""  # message of the first document that was refused
    longest: int = 0  # tokens of the longest document

    def __add__(self, other: Counts) -> Counts:
        numbers = {kind: getattr(self, kind) + getattr(other, kind) for kind in DESCRIPTIONS}
        reason, longest = self.reason or other.reason, max(self.longest, other.longest)
        return Counts(**numbers, reason=reason, longest=longest)

    def __str__(self) -> str:
        numbers = ((getattr(self, kind), text) for kind, text in DESCRIPTIONS.items())
        text = ", ".join(f"{n:,} {text}" for n, text in numbers if n) or "none"
        if self.cut or self.dropped or self.empty:
            text += f", longest {self.longest:,} tokens"
        return text + (f" ({self.reason})" if self.reason else "")


Read = Callable[[int], tuple[Document | None, Counts]]  # None: the document is left out


def row_of(documents: Sequence[Document], seq: int) -> Row:
    """Packs documents, of together at most `seq + 1` tokens, in a row.

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
        learned[at] = False  # no token of its document precedes it
        segments[here], positions[here] = number, np.arange(len(ids))
        at += len(ids)
    return tokens, learned[1:].astype(np.float32), segments[:-1], positions[:-1]


@dataclasses.dataclass
class Lane:
    """Documents `following`, `following + step` and so on, packed in rows.

    A document that waits and is left out, because it was edited since then, waits no longer, and
    is counted.
    """

    read: Read  # returns a document of at most S + 1 tokens, and its count
    seq: int  # sequence length S
    following: int  # number of the document that is read next
    step: int  # difference of the numbers of neighbouring documents
    waiting: dataclasses.InitVar[Sequence[int]] = ()  # numbers of documents that wait
    end: int | None = None  # number that no document reaches; None for an endless order
    patience: int = 10**6  # number of documents in a row that may be left out
    # Documents that are packed; those that are left out are counted with the next one.
    counts: Counts = dataclasses.field(default_factory=Counts)

    def __post_init__(self, waiting: Sequence[int]) -> None:
        self._waiting: dict[int, tuple[Document, Counts]] = {}
        for number in waiting:
            document, counts = self.read(number)
            if document is not None:
                self._waiting[number] = document, counts
            else:
                self.counts += counts

    @property
    def place(self) -> list[int]:
        """Number of the next document, and of those that wait."""
        return [self.following, *self._waiting]

    def row(self) -> Row | None:
        """Returns the next row; None if no document is left."""
        packed: list[Document] = []
        room = self.seq + 1
        while True:
            self._fill()
            sizes = {number: len(ids) for number, ((ids, _), _) in self._waiting.items()}
            fitting = [number for number, size in sizes.items() if size <= room]
            if not fitting:
                return row_of(packed, self.seq) if packed else None
            # max returns the first of equal ones.
            number = max(fitting, key=sizes.__getitem__) if packed else fitting[0]
            document, counts = self._waiting.pop(number)
            self.counts += counts
            packed.append(document)
            room -= sizes[number]

    def _fill(self) -> None:
        left_out, counts = 0, Counts()
        while len(self._waiting) < LOOK and (self.end is None or self.following < self.end):
            document, count = self.read(self.following)
            counts += count
            if document is not None:
                self._waiting[self.following] = document, counts
                left_out, counts = 0, Counts()
            elif (left_out := left_out + 1) > self.patience:
                raise ValueError(
                    f"{left_out} documents in a row have nothing to learn within {self.seq + 1} "
                    "tokens: use a longer --seq-len"
                )
            self.following += self.step
