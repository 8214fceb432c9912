"""Batches of texts and rows of documents: alike for all numbers of processes, from any place."""

import itertools
import math

import numpy as np
import pytest

from training import data
from training.packing import LOOK, Lane, batches, row_of

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its position: what is read shows where
ONE = {"shard_index": 0, "shard_count": 1}
SEQ = 20


def first(n, **changed):
    """The first `n` batches of a small stream, `(n, rows, 9)`."""
    options = {"batch": 12, "seq": 8, "seed": 3, **ONE, **changed}
    return np.stack(list(itertools.islice(data.batches(TOKENS, **options), n)))


def test_an_epoch_has_each_target_once_in_an_order_of_its_own():
    assert data.samples_per_epoch(TOKENS.size, 8) == 124
    orders = [first(31, batch=4, start=124 * epoch) for epoch in range(3)]
    for rows in orders:
        assert rows.dtype == np.int32 and (np.diff(rows, axis=-1) == 1).all()
        assert sorted(rows[..., 1:].ravel()) == list(range(1, 124 * 8 + 1))
    orders += [first(31, batch=4, seed=4)]  # and neighbouring seeds share no epoch
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("count", [1, 4])
def test_processes_together_read_the_batches_of_one_from_any_sample(count):
    whole = first(25)  # 300 samples: three epochs
    parts = [first(14, shard_index=i, shard_count=count, start=132) for i in range(count)]
    assert parts[0].shape[1] == 12 // count
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[11:])
    other = first(80, batch=1, start=36)  # another size of batches
    np.testing.assert_array_equal(other[:, 0], whole.reshape(-1, 9)[36:116])
    assert first(1, start=10**15).shape[1] == 12, "samples before are not read"


@pytest.mark.parametrize("count", [1, 4])
def test_evaluation_sees_every_target_once_in_order(count):
    for n in (2, 9, 40, 41, 42, 97):
        tokens = TOKENS[:n] + 1  # no real token is 0, so padding shows
        known = {"batch": 4, "seq": 5, "shard_count": count}
        shards = [list(data.eval_batches(tokens, **known, shard_index=i)) for i in range(count)]
        targets = []
        for parts in zip(*shards, strict=True):  # no process waits for one more batch
            rows, mask = (np.concatenate(half) for half in zip(*parts, strict=True))
            assert (rows.shape, mask.shape) == ((4, 6), (4, 5))
            assert (rows.dtype, mask.dtype) == (np.int32, np.float32)
            np.testing.assert_array_equal(rows[:, 1:] != 0, mask == 1)
            np.testing.assert_array_equal(rows[:, 1:][mask == 1], rows[:, :-1][mask == 1] + 1)
            targets += rows[:, 1:][mask == 1].tolist()
        assert targets == tokens[1:].tolist()
        part = list(data.eval_batches(tokens, **known, shard_index=0, max_batches=3))
        assert len(part) == min(3, math.ceil((n - 1) / 5 / 4))


# fmt: off
REFUSED = [
    ({"batch": 10, "shard_count": 4}, "--batch 12 or 8"),
    ({"batch": 10, "shard_count": 4, "max_batches": None}, "--batch 12 or 8"),
    ({"shard_index": 4, "shard_count": 4}, "shard_index=4"), ({"batch": 0}, "batch=0"),
    ({"seq": 1000}, "--seq"), ({"seed": -1}, "seed=-1"), ({"max_batches": 0}, "max_batches=0"),
    ({"tokens": TOKENS[:1], "max_batches": None}, "at least 2 tokens"),
]
# fmt: on


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_batches_that_can_not_be_are_refused(changed, said):
    make, more = (data.batches, {"seed": 3})
    if "max_batches" in changed:
        make, more = data.eval_batches, {}
    with pytest.raises(ValueError, match=said):
        make(**{"tokens": TOKENS, "batch": 12, "seq": 8, **ONE, **more, **changed})


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
        number = tokens[at[0]] // 1000
        ids, mask = document(number)
        end = at[0] + len(ids)
        assert (np.diff(at) == 1).all() and (positions[at] == np.arange(len(at))).all()
        assert (tokens[at[0] : end] == ids).all()
        assert (weights[at[0] : end - 1] == mask[1:]).all(), "the first is predicted by nothing"
        assert not weights[end - 1 : end].any(), "the next document's first"
        found.append(int(number))
    return found


def test_every_document_comes_once_and_whole_in_rows_that_are_nearly_full():
    (lane,) = lanes([0], rows=1)
    rows = [lane.row() for _ in range(300)]
    seen = [n for row in rows for n in documents_of(row)]
    assert len(seen) == len(set(seen))
    # Each row takes the one that waits longest, and of others no more than fit.
    assert set(range(max(seen) - LOOK * (SEQ + 1) // 2)) <= set(seen), "none is left behind"
    assert np.mean([(row[2] > 0).mean() for row in rows]) > 0.97


def test_rows_are_those_of_any_number_of_processes_from_any_place():
    whole = batches(lanes(range(4)))
    place = list(range(4))
    for _ in range(3):
        halves = [batches(lanes(place[at : at + 2])) for at in (0, 2)]
        for _ in range(5):
            (wanted, place), parts = next(whole), [next(half)[0] for half in halves]
            for array, *found in zip(wanted, *parts, strict=True):
                np.testing.assert_array_equal(array, np.concatenate(found))


def test_a_pass_ends_when_its_documents_do():
    lane = Lane(document, SEQ, 0, 1, end=50)
    rows = iter(lane.row, None)
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
