"""Rows assigned to devices by their attention work: each once, in shares that are nearly equal."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs as runs
from small_runs import folder
from test_train import tune

from training.balance import imbalance, order_of, work_of
from training.config import Config
from training.packing import Counts, Document, pack
from training.trainer import Trainer, load
from zero_jax.models import decoder, gpt

__all__ = ["folder", "tune"]  # fixtures
SEQ = 2048
ONE = gpt.GPTConfig(layers=1, width=8, heads=1)


def packed_rows(seed, rows):
    """Documents of packed rows, with lengths from a lognormal distribution."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(5, 1.5, size=20 * rows).astype(int) + 1, SEQ)
    read = lambda n: Document("whole", np.zeros(sizes[n], np.int32), np.ones(sizes[n], bool))  # noqa: E731
    made = pack(read, SEQ, counts=Counts(), end=len(sizes))
    return np.stack([next(made)[0][2] for _ in range(rows)])


def packed_work(seed, rows):
    return work_of(packed_rows(seed, rows), ONE)


@pytest.mark.parametrize(("devices", "parts", "each"), [(1, 1, 1), (8, 1, 4), (4, 3, 2), (2, 8, 1)])
def test_every_row_is_assigned_once_and_shares_are_nearly_equal(devices, parts, each):
    found = []
    for seed in range(5):
        work = packed_work(seed, devices * parts * each)
        order = order_of(work, devices, parts)
        assert sorted(order) == list(range(len(work)))
        found.append(
            [float(imbalance(jnp.float32(w), devices, parts)) for w in (work, work[order])]
        )
    before, after = np.mean(found, axis=0)
    assert 1 <= after <= before
    if devices > 1 and parts * each > 1:
        assert after - 1 < 0.35 * (before - 1)


def test_micro_batches_of_several_processes_are_alike_although_none_knows_the_others():
    work, devices, parts = packed_work(1, 64), 8, 8
    alone = work.reshape(devices, -1)
    given = np.concatenate([own[order_of(own, 1, parts)] for own in alone])
    before, after = (float(imbalance(jnp.float32(w), devices, parts)) for w in (work, given))
    assert after - 1 < 0.6 * (before - 1)


def test_work_is_the_number_of_pairs_of_tokens_that_attend():
    segments = packed_rows(3, 2)
    segments[1, -300:] = 0  # padding is a document, as in the kernel
    distance = np.arange(SEQ)[:, None] - np.arange(SEQ)
    for window in (None, 100):
        seen = (distance >= 0) & (distance < (window or SEQ))
        pairs = [int((seen & (row[:, None] == row)).sum()) for row in segments]
        if window is None:
            every = pairs
            deep = work_of(segments, dataclasses.replace(ONE, layers=40))
            assert deep.tolist() == [40 * n for n in every]
    config = dataclasses.replace(decoder.preset("gemma-3-1b"), layers=3, window=100, sliding=())
    assert work_of(segments, config).tolist() == [3 * n for n in pairs]
    mixed = dataclasses.replace(config, sliding=(True, False, True))
    assert work_of(segments, mixed).tolist() == [
        a + 2 * b for a, b in zip(every, pairs, strict=True)
    ]


def test_long_rows_of_deep_models_are_counted():
    """A row of 2^20 tokens and 126 layers has 7e13 pairs."""
    row = np.zeros((8, 2**20), np.int32)
    row[:4, 2**19 :] = 1
    work = work_of(row, dataclasses.replace(ONE, layers=126))
    half = 126 * 2**19 * (2**19 + 1)
    assert work.tolist() == [half] * 4 + [126 * 2**19 * (2**20 + 1)] * 4
    left = float(jax.jit(imbalance, static_argnums=(1, 2))(jnp.float32(work), 8, 1))
    assert left == pytest.approx(4 / 3, rel=1e-5)


def test_train_py_says_the_imbalance_that_is_left(tune, capsys):
    assert tune("--max-steps", "2", "--grad-accum-steps", "1", "--output-dir", "out") == 0
    found = runs.metrics("out", "attention_imbalance")
    assert len(found) == 2 and all(1 <= x < 8 for x in found)
    said = f"the busiest devices have {np.mean(found):.2f} times the mean number of pairs"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("more", [{}, {"context_parallel": 2}, {"mesh": "replica=2"}])
def test_batches_have_the_rows_of_the_corpus_in_shares_of_the_reported_imbalance(tune, more):
    known = {"init_from": "small", "data": "chat.jsonl", "seq_len": 32, "devices": 8}
    known |= {"global_batch_size": 32, "grad_accum_steps": 2, "max_steps": 2, "warmup_steps": 1}
    trainer = Trainer(load(Config(**known, **more)))
    devices = 8 // more.get("context_parallel", 1)
    pairs = zip(trainer.batches(), trainer.plan.corpus.batches(None, 0, 1), strict=True)
    for (batch, place, left), (rows, after) in itertools.islice(pairs, 3):
        if isinstance(batch, dict):  # rows of inputs and labels
            batch = [batch[name] for name in ("inputs", "mask", "segments")]
        inputs, _, segments = map(np.asarray, batch[:3])
        order = [rows[0][:, :32].tolist().index(row[:32].tolist()) for row in inputs]
        assert place == after and np.array_equal(segments, rows[2][order])
        assert sorted(map(tuple, inputs[:, :32])) == sorted(map(tuple, rows[0][:, :32]))
        work = work_of(segments, trainer.model.config).reshape(devices, 2, -1).sum(axis=2)
        assert float(left) == pytest.approx(work.max(axis=0).sum() / work.mean(axis=0).sum())
