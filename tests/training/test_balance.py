"""Rows dealt to devices by their attention work: each once, in shares that are nearly equal."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import small_runs as runs
from small_runs import folder
from test_train import tune

from training.balance import imbalance, order_of, work_of
from training.packing import Counts, Document, pack
from zero_jax.models import decoder, gpt

__all__ = ["folder", "tune"]  # fixtures
SEQ = 2048
ONE = gpt.GPTConfig(layers=1, width=8, heads=1)


def packed_work(seed, rows):
    """The work of rows that are packed with documents of lognormal lengths."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(5, 1.5, size=20 * rows).astype(int) + 1, SEQ)
    read = lambda n: Document("whole", np.zeros(sizes[n], np.int32), np.ones(sizes[n], bool))  # noqa: E731
    made = pack(read, SEQ, counts=Counts(), end=len(sizes))
    positions = np.stack([row[-1] for row, _ in (next(made) for _ in range(rows))])
    return work_of(positions, ONE)


@pytest.mark.parametrize(("devices", "parts", "each"), [(1, 1, 1), (8, 1, 4), (4, 3, 2), (2, 8, 1)])
def test_every_row_is_dealt_once_and_shares_are_nearly_equal(devices, parts, each):
    found = []
    for seed in range(5):
        work = packed_work(seed, devices * parts * each)
        order = order_of(work, devices, parts)
        assert sorted(order) == list(range(len(work)))
        found.append([float(imbalance(w, devices, parts)) for w in (work, work[order])])
    before, after = np.mean(found, axis=0)
    assert 1 <= after <= before
    if devices > 1 and parts * each > 1:
        assert after - 1 < 0.35 * (before - 1)


def test_micro_batches_of_several_processes_are_alike_although_none_knows_the_others():
    work, devices, parts = packed_work(1, 64), 8, 8
    alone = work.reshape(devices, -1)
    dealt = np.concatenate([own[order_of(own, 1, parts)] for own in alone])
    before, after = (float(imbalance(w, devices, parts)) for w in (work, dealt))
    assert after - 1 < 0.6 * (before - 1)


def test_work_is_the_number_of_pairs_of_tokens_that_attend():
    positions = np.array([[0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 0, 1]])
    config = dataclasses.replace(decoder.preset("gemma-3-1b"), layers=3, window=2, sliding=())
    pairs = [sum(range(1, 6)) + 1, 1 + 6 + 3]
    assert work_of(positions, dataclasses.replace(ONE, layers=2)).tolist() == [2 * n for n in pairs]
    windowed = [1 + 2 * 4 + 1, 1 + 1 + 2 * 2 + 1 + 2]
    assert work_of(positions, config).tolist() == [3 * n for n in windowed]
    mixed = work_of(positions, dataclasses.replace(config, sliding=(True, False, True)))
    assert mixed.tolist() == [a + 2 * b for a, b in zip(pairs, windowed, strict=True)]
    assert work_of(jnp.asarray(positions), config).tolist() == [3 * n for n in windowed]


def test_train_py_says_the_imbalance_that_is_left(tune, capsys):
    assert tune("--max-steps", "2", "--grad-accum-steps", "1", "--output-dir", "out") == 0
    found = runs.metrics("out", "attention_imbalance")
    assert len(found) == 2 and all(1 <= x < 8 for x in found)
    said = f"the busiest devices have {np.mean(found):.2f} times the mean work"
    assert said in capsys.readouterr().out
