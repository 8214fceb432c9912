"""Documents packed in rows, in constant memory and the same for any number of processes.

A global batch has B rows. Lane j feeds row j of every batch: it takes documents j, j + B, j + 2B
and so on of one endless order, so a row depends on B alone and a process reads only the documents
of its lanes. A few documents of a lane wait: a row takes the first of them, then the largest that
fits, and so on. The number of the next document and those that wait are all that resuming needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from training.tokenizer import Ids, Mask

LOOK = 16  # documents of a lane that wait to be packed
Document = tuple[Ids, Mask]
# Tokens (S + 1), then weights of the targets, documents and positions of the inputs, (S) each.
Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Ids, Ids]


def row_of(documents: Sequence[Document], seq: int) -> Row:
    """Packs documents in a row.

    Args:
        documents: Tokens and mask of the learned tokens of each, together at most `seq + 1` tokens.
        seq: Sequence length S.

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


class Lane:
    """Documents `following`, `following + step` and so on, packed in rows.

    Args:
        read: Returns the document of a number, of at most `seq + 1` tokens; None to leave it out.
        seq: Sequence length S.
        following: Number of the document that is read next.
        step: Difference of the numbers of neighbouring documents.
        waiting: Numbers of documents that wait. One that is left out, because it was edited since
            then, waits no longer.
        end: Number that no document reaches; None for an endless order.
        patience: Number of documents in a row that may be left out.
        used: Called with the number of each document that is packed.
    """

    def __init__(
        self,
        read: Callable[[int], Document | None],
        seq: int,
        following: int,
        step: int,
        waiting: Sequence[int] = (),
        *,
        end: int | None = None,
        patience: int = 10**6,
        used: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._read, self._seq, self._step, self._end = read, seq, step, end
        self._patience, self._used = patience, used
        self.following = following
        documents = {number: read(number) for number in waiting}
        self._waiting = {n: document for n, document in documents.items() if document is not None}

    @property
    def place(self) -> list[int]:
        """Number of the next document, and of those that wait."""
        return [self.following, *self._waiting]

    def row(self) -> Row | None:
        """Returns the next row; None if no document is left."""
        packed: list[Document] = []
        room = self._seq + 1
        while True:
            self._fill()
            fitting = [n for n, (ids, _) in self._waiting.items() if len(ids) <= room]
            if not fitting:
                return row_of(packed, self._seq) if packed else None
            # max returns the first of equal ones.
            number = max(fitting, key=lambda n: len(self._waiting[n][0])) if packed else fitting[0]
            self._used(number)
            packed.append(self._waiting.pop(number))
            room -= len(packed[-1][0])

    def _fill(self) -> None:
        left_out = 0
        while len(self._waiting) < LOOK and (self._end is None or self.following < self._end):
            document = self._read(self.following)
            if document is not None:
                self._waiting[self.following] = document
                left_out = 0
            elif (left_out := left_out + 1) > self._patience:
                raise ValueError(
                    f"{left_out} documents in a row have nothing to learn within {self._seq + 1} "
                    "tokens: use a longer --seq-len"
                )
            self.following += self._step
