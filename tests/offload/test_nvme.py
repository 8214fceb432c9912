"""The optimizer's state in files: the same numbers, bounded host memory, nothing lost when killed.

Tolerance: 4 ulps of a leaf's largest element, as for the host tier.
"""

import dataclasses
import errno
import math
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import train_zero, ulps, zoo_problem

import zero_jax
from training.supervise import free_address
from zero_jax.offload.mapped_store import Store
from zero_jax.offload.tiers import Offload, parse

STEPS, ULPS = 4, 4
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SCRIPT = pathlib.Path(__file__).parents[1] / "nvme_run.py"


def on(folder, words="optimizer", **options):
    small = {"piece_bytes": 4096, **options}
    return dataclasses.replace(parse(f"{words}:nvme={folder}"), **small)


def zero_on(n, offload):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), stage=3, offload=offload)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "stage", "words"),
    [(1, 3, "optimizer"), (3, 2, "optimizer,params"), (4, 3, "optimizer"), (4, 0, "optimizer")],
)
def test_a_state_in_files_changes_no_value(n, stage, words, tmp_path):
    want = train_zero(zoo_problem(), ADAMW, STEPS, n, stage=stage)
    got = train_zero(zoo_problem(), ADAMW, STEPS, n, stage=stage, offload=on(tmp_path, words))
    assert ulps(jnp.array(got[0]), jnp.array(want[0])) <= ULPS
    assert ulps(got[1], want[1]) <= ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(1e-2, momentum=0.9),
        lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 4), eps=1e-4),
        lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2, eps=1e-4)),
    ],
    ids=["momentum", "schedule", "noise"],
)
def test_other_optimizers_too(make, tmp_path):
    want = train_zero(zoo_problem(), make(), STEPS, 3)[1]
    assert ulps(train_zero(zoo_problem(), make(), STEPS, 3, offload=on(tmp_path))[1], want) <= ULPS


# Host memory.


@pytest.mark.parametrize("words", ["optimizer", "optimizer,params"])
def test_a_state_four_times_the_host_budget_trains(words, tmp_path):
    shape, budget = (128, 256), 1 << 16
    whole = 8 * math.prod(shape)  # in this one process, over its two devices
    assert whole == 4 * budget
    zero = zero_on(2, on(tmp_path, words, host_bytes=budget, piece_bytes=1 << 26))
    params = zero.init(lambda: {"w": jnp.ones(shape)})
    tx = zero.optimizer(ADAMW)

    def loss(params, x):
        return jnp.mean((x @ params["w"] - 1.0) ** 2)

    state, step = tx.init(params), zero.train_step(loss, tx)
    for _ in range(2):
        params, state, metrics = step(params, state, jnp.ones((4, shape[0])))
    files = state.inner.files
    assert budget / 2 < files.peak_bytes <= budget and files.live_bytes == 0
    assert np.isfinite(metrics.loss)


# Killed, and going on.


def run(folder, out, steps, kill_at=0, processes=1):
    address = free_address()
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    started = []
    for index in range(processes):
        more = [address, str(processes), str(index)] if processes > 1 else []
        kill = kill_at if index == processes - 1 else 0  # the last one
        args = [str(folder), str(out), str(steps), str(kill), *more]
        started.append(subprocess.Popen([sys.executable, str(SCRIPT), *args], env=env))
    codes = []
    for process in started[::-1]:
        if codes and codes[0] != 0:
            process.kill()  # it waits for the one that died
        codes.append(process.wait(timeout=300))
    return codes[0]


def assert_same(a, b):
    a, b = np.load(a), np.load(b)
    for name in a.files:
        if name != "begin":
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_step_it_resumes_with_nothing_lost(tmp_path, processes):
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    assert run(tmp_path / "a", whole, 5, processes=processes) == 0
    writes = 130 if processes == 1 else 110
    assert run(tmp_path / "b", broken, 5, writes, processes) == -signal.SIGKILL
    assert not broken.exists()
    assert run(tmp_path / "b", broken, 5, 0, processes) == 0
    assert 0 < int(np.load(broken)["begin"]) < 4, "it died after the first step"
    assert int(np.load(whole)["begin"]) == 0
    assert_same(whole, broken)


def test_a_step_is_whole_or_not_there(tmp_path):
    shapes = {"a": ((3, 2), np.float32)}
    store = Store(tmp_path / "s", shapes, create=True)
    store.write(0, "a", (0, 0), np.ones((3, 2), np.float32))
    store.commit(0)
    store.write(1, "a", (1, 0), np.full((2, 2), 7, np.float32))  # and dies
    again = Store(tmp_path / "s", shapes, create=False)
    assert again.step == 0
    np.testing.assert_array_equal(again.read(0, "a", (0, 0), (3, 2)), np.ones((3, 2)))
    store.commit(1)
    assert Store(tmp_path / "s", shapes, create=False).step == 1
    np.testing.assert_array_equal(store.read(1, "a", (2, 0), (3, 2)), [[7, 7]])


def test_a_skipped_step_changes_no_state(tmp_path):
    zero, made = zero_on(2, on(tmp_path)), zoo_problem()
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    state, step = tx.init(params), zero.train_step(made.loss, tx)
    params, state, _ = step(params, state, made.batch)
    before = jax.tree.map(np.asarray, params)
    files = state.inner.files
    moments = [np.asarray(files.fetch_whole(1, n, None or jnp.zeros(()))) for n in _moments(files)]
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), made.batch)
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1 and files.store.step == 2
    jax.tree.map(np.testing.assert_array_equal, before, params)
    after = [np.asarray(files.fetch_whole(2, n, jnp.zeros(()))) for n in _moments(files)]
    jax.tree.map(np.testing.assert_array_equal, moments, after)


def _moments(files):
    return [f"state{j}" for j, held in enumerate(files.held) if held]


# Directories.


def test_a_directory_that_can_not_be_written_raises_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    zero = zero_on(2, on(tmp_path / "file"))
    with pytest.raises(ValueError, match="can't be written.*two slots"):
        zero.optimizer(ADAMW).init(zero.shard(zoo_problem().start))


def test_a_full_directory_raises_and_is_left_empty(tmp_path, monkeypatch):
    calls = []

    def full(fd, offset, size):
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    zero = zero_on(2, on(tmp_path))
    with pytest.raises(ValueError, match=r"is full: .* takes [\d,]+ bytes here.* are free"):
        zero.optimizer(ADAMW).init(zero.shard(zoo_problem().start))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_state_that_is_there_is_not_overwritten_and_another_one_not_taken(tmp_path):
    zero, made = zero_on(2, on(tmp_path)), zoo_problem()
    params = zero.shard(made.start)
    zero.optimizer(ADAMW).init(params)
    with pytest.raises(ValueError, match=r"holds the state of step 0: go on from it with tx\.res"):
        zero.optimizer(ADAMW).init(params)
    with pytest.raises(ValueError, match="another model, optimizer or mesh"):
        zero.optimizer(optax.sgd(1e-2, momentum=0.9)).resume(params)
    empty = zero_on(2, on(tmp_path / "empty"))
    with pytest.raises(ValueError, match="holds no state to go on from"):
        empty.optimizer(ADAMW).resume(params)
    with pytest.raises(ValueError, match="only a state in files"):
        zero_on(2, None).optimizer(ADAMW).resume(params)


def test_what_the_tier_can_not_do_says_so(tmp_path):
    zero, made = zero_on(2, on(tmp_path)), zoo_problem()
    params, tx = zero.shard(made.start), zero.optimizer(ADAMW)
    with pytest.raises(ValueError, match=r"not inside jit: use zero\.train_step"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="plan it with"):
        zero.plan(made.loss, ADAMW, zero.abstract(made.make), made.batch)
    with pytest.raises(ValueError, match="scale_by_trust_ratio can't be updated in pieces"):
        zero_on(2, on(tmp_path / "x")).optimizer(optax.lamb(1e-2)).init(params)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="at least 16384 bytes"):
        Offload(optimizer=True, tier="nvme", directory="x", host_bytes=100)
