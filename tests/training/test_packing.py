"""Rows of documents: each document once, within a row, alike for every number of processes."""

import numpy as np
import pytest

from training.packing import LOOK, Lane, batches, row_of

SEQ = 20


def document(number, size=None):
    """Tokens that tell the document and the place in it."""
    size = 2 + 7 * number % 15 if size is None else size
    ids = 1000 * number + np.arange(size, dtype=np.int32)
    return ids, np.arange(size) >= size // 2


def lanes(places, rows=4):
    """Lanes of these numbers, or of places to resume from."""
    known = [[place] if isinstance(place, int) else place for place in places]
    return [Lane(document, SEQ, first, rows, waiting) for first, *waiting in known]


def documents_of(row):
    """Numbers of the documents of a row, each checked to be whole and in its place."""
    tokens, weights, segments, positions = row
    found = []
    for segment in range(1, segments.max(initial=0) + 1):
        at = np.flatnonzero(segments == segment)
        first = tokens[at[0]]
        assert first % 1000 == 0 and (np.diff(at) == 1).all()
        assert (positions[at] == np.arange(len(at))).all()
        number = first // 1000
        ids, mask = document(number)
        end = at[0] + len(ids)
        assert (tokens[at[0] : end] == ids).all()
        assert (weights[at[0] : end - 1] == mask[1:]).all(), "the first is predicted by nothing"
        if end - 1 < len(weights):
            assert weights[end - 1] == 0, "the next document's first"
        found.append(int(number))
    return found


def test_every_document_comes_once_and_whole_in_rows_that_are_nearly_full():
    (lane,) = lanes([0], rows=1)
    rows = [lane.row() for _ in range(300)]
    seen = [n for row in rows for n in documents_of(row)]
    assert len(seen) == len(set(seen))
    # Each row takes the one that waits longest, and of others no more than fit.
    assert set(range(max(seen) - LOOK * (SEQ + 1) // 2)) <= set(seen), "none is left behind"
    filled = np.mean([(row[2] > 0).mean() for row in rows])
    assert filled > 0.97, filled


def test_batches_are_those_of_any_number_of_processes_from_any_place():
    whole = batches(lanes(range(4)))
    place = list(range(4))
    for _ in range(3):
        halves = [batches(lanes(place[at : at + 2])) for at in (0, 2)]
        for _ in range(5):
            (wanted, place), parts = next(whole), [next(half)[0] for half in halves]
            for at, array in enumerate(wanted):
                np.testing.assert_array_equal(
                    array, np.concatenate([arrays[at] for arrays in parts])
                )


def test_a_pass_ends_when_its_documents_do():
    lane = Lane(document, SEQ, 0, 1, end=50)
    rows = []
    while (row := lane.row()) is not None:
        rows.append(row)
    assert sorted(n for row in rows for n in documents_of(row)) == list(range(50))
    # A row may be one document, and one may be empty.
    ids, mask = document(3, SEQ + 1)
    tokens, weights, segments, _ = row_of([(ids, mask)], SEQ)
    assert (tokens == ids).all() and (segments == 1).all() and weights.sum() == mask.sum()
    assert not any(part.any() for part in row_of([], SEQ))
    # An order in which nothing can be learned ends with an error.
    lane = Lane(lambda number: None, SEQ, 0, 1, patience=30)
    with pytest.raises(ValueError, match="31 documents.*--seq"):
        lane.row()
