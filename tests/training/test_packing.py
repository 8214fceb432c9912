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


def lanes(count, places=None, rows=4):
    of = range(rows) if places is None else places
    return [
        Lane(document, SEQ, rest[0], rows, rest[1:])
        for rest in ([lane] if isinstance(lane, int) else list(lane) for lane in of)
    ]


def documents_of(row):
    """(number, size) of each document of a row, checked to be whole and in its place."""
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


def test_every_document_comes_once_and_whole():
    (lane,) = lanes(1, rows=1)
    seen = [n for _ in range(200) for n in documents_of(lane.row())]
    assert len(seen) == len(set(seen))
    # Each row takes the one that waits longest, and of others no more than fit.
    assert set(range(max(seen) - LOOK * (SEQ + 1) // 2)) <= set(seen), "none is left behind"


def test_rows_are_nearly_full():
    (lane,) = lanes(1, rows=1)
    rows = [lane.row() for _ in range(300)]
    filled = np.mean([(row[2] > 0).mean() for row in rows])
    assert filled > 0.97, filled


def test_a_batch_is_the_same_however_many_processes_make_it():
    whole = batches(lanes(4))
    halves = [batches(lanes(2, places=range(at, at + 2))) for at in (0, 2)]
    for _ in range(10):
        (wanted, _), parts = next(whole), [next(half) for half in halves]
        for at, array in enumerate(wanted):
            np.testing.assert_array_equal(
                array, np.concatenate([arrays[at] for arrays, _ in parts])
            )


def test_it_goes_on_from_a_place_in_another_number_of_processes():
    stream = batches(lanes(4))
    for _ in range(7):
        _, place = next(stream)
    on = [batches(lanes(2, places=place[at : at + 2])) for at in (0, 2)]
    for _ in range(5):
        (wanted, _), parts = next(stream), [next(half) for half in on]
        for at, array in enumerate(wanted):
            np.testing.assert_array_equal(
                array, np.concatenate([arrays[at] for arrays, _ in parts])
            )


def test_a_pass_ends_when_its_documents_do():
    lane = Lane(document, SEQ, 0, 1, end=50)
    rows = []
    while (row := lane.row()) is not None:
        rows.append(row)
    assert sorted(n for row in rows for n in documents_of(row)) == list(range(50))


def test_a_row_may_be_one_document_and_one_may_be_empty():
    ids, mask = document(3, SEQ + 1)
    tokens, weights, segments, _ = row_of([(ids, mask)], SEQ)
    assert (tokens == ids).all() and (segments == 1).all() and weights.sum() == mask.sum()
    assert not any(part.any() for part in row_of([], SEQ))


def test_an_order_in_which_nothing_can_be_learned_ends_with_a_word():
    lane = Lane(lambda number: None, SEQ, 0, 1, patience=30)
    with pytest.raises(ValueError, match="31 documents in a row"):
        lane.row()
