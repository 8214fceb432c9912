"""Optimizer state in files: the same numbers, bounded host memory, nothing lost when killed.

Tolerance: 4 ulps of a leaf's largest element, as for the host tier.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from nvme_run import ADAMW, small_problem
from problems import train_zero, ulps

import zero_jax
from zero_jax.cluster.addresses import free_port
from zero_jax.offload.mapped_store import Store
from zero_jax.offload.tiers import parse

ULPS, ROOT = 4, pathlib.Path(__file__).parents[2]
MASTERS = "optimizer,params"


def on(folder, words="optimizer", **options):
    small = {"piece_bytes": 4096, **options}
    return dataclasses.replace(parse(f"{words}:nvme={folder}"), **small)


def zero_on(n, offload):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), stage=3, offload=offload)


def test_a_state_in_files_changes_no_value_and_is_resumed(tmp_path, monkeypatch):
    made, zero = small_problem(), zero_on(3, on(tmp_path, MASTERS))
    want = [train_zero(made, ADAMW, steps, 3)[:2] for steps in (2, 4)]
    tx = zero.optimizer(ADAMW)
    params = zero.shard(made.start)
    state, step = tx.init(params), zero.train_step(made.loss, tx)
    files = state.inner.files
    losses = []
    for _ in range(2):
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
    assert ulps(zero.full(params), want[0][1]) <= ULPS

    def moments(number):
        held = [f"state{j}" for j, held in enumerate(files.held) if held]
        return [np.asarray(files.fetch_whole(number, name, jnp.zeros(()))) for name in held]

    # A step that is not finite is skipped.
    before = jax.tree.map(np.asarray, params), moments(2)
    params, state, metrics = step(params, state, made.batch.at[0].set(jnp.nan))
    assert int(metrics.skipped) == 1 and files.store.step == 3
    after = jax.tree.map(np.asarray, params), moments(3)
    jax.tree.map(np.testing.assert_array_equal, before, after)

    # The files alone are enough: parameters of another run are replaced.
    resumed = zero.optimizer(ADAMW)
    params, state = resumed.resume(zero.shard(jax.tree.map(np.zeros_like, made.start)))
    assert int(state.guard.consecutive) == 1
    step = zero.train_step(made.loss, resumed)
    for _ in range(2):
        earlier = zero.full(params), [np.asarray(x) for x in state.inner.resident]
        params, state, metrics = step(params, state, made.batch)
        losses.append(float(metrics.loss))
    assert ulps(jnp.array(losses), jnp.array(want[1][0])) <= ULPS
    assert ulps(zero.full(params), want[1][1]) <= ULPS
    assert losses[-1] < losses[0], "a run that does not learn compares little"

    # Another process has not finished the last step: both resume from the one before.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.stack([x, x - 1]))
    params, state = zero.optimizer(ADAMW).resume(params)
    monkeypatch.undo()
    assert state.inner.files.store.step == 4
    jax.tree.map(np.testing.assert_array_equal, earlier, (zero.full(params), state.inner.resident))


@pytest.mark.parametrize("words", ["optimizer", MASTERS])
def test_a_state_four_times_the_host_budget_trains(words, tmp_path):
    shape, budget = (128, 256), 1 << 16
    assert 8 * shape[0] * shape[1] == 4 * budget  # of this process, over its two devices
    zero = zero_on(2, on(tmp_path, words, host_bytes=budget, piece_bytes=1 << 26))
    params, tx = zero.init(lambda: {"w": jnp.ones(shape)}), zero.optimizer(ADAMW)
    step = zero.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2), tx)
    params, state, metrics = step(params, tx.init(params), jnp.ones((4, shape[0])))
    files = state.inner.files
    assert budget / 2 < files.peak_bytes <= budget and files.live_bytes == 0
    assert np.isfinite(metrics.loss)


# Killed, and resumed.


def run(folder, out, processes, kill_in=0):
    """The exit code of the last of some processes, which train for five steps."""
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(ROOT / "tests" / "nvme_run.py"), str(folder), str(out), "5"]
    group, started = [f"127.0.0.1:{free_port()}", str(processes)], []
    for rank in range(processes):
        kill = str(kill_in if rank == processes - 1 else 0)
        args = [*command, kill, *[*group, str(rank)] * (processes > 1)]
        started.append(subprocess.Popen(args, env=env | {"JAX_PLATFORMS": "cpu"}))
    code = started.pop().wait(timeout=300)
    for process in started:
        if code != 0:
            process.kill()  # it waits for the one that died
        process.wait(timeout=300)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_step_it_resumes_with_nothing_lost(tmp_path, processes):
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    assert run(tmp_path / "a", whole, processes) == 0
    assert run(tmp_path / "b", broken, processes, kill_in=3) == -signal.SIGKILL
    assert not broken.exists()
    assert run(tmp_path / "b", broken, processes) == 0
    whole, broken = dict(np.load(whole)), dict(np.load(broken))
    assert (whole.pop("begin"), broken.pop("begin")) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, whole, broken)


def test_a_step_is_whole_or_does_not_exist(tmp_path):
    shapes = {"a": ((3, 2), np.float32), "b": ((5,), np.int8)}
    store = Store(tmp_path / "s", shapes, create=True)
    store.write(0, "a", (0, 0), np.ones((3, 2), np.float32))
    store.write(0, "b", (0,), np.arange(5, dtype=np.int8))
    store.commit(0)
    store.write(1, "a", (1, 0), np.full((2, 2), 7, np.float32))  # and dies
    again = Store(tmp_path / "s", shapes, create=False)
    assert again.step == 0
    np.testing.assert_array_equal(again.read(0, "a", (0, 0), (3, 2)), np.ones((3, 2)))
    np.testing.assert_array_equal(again.read(0, "b", (1,), (5,)), [1, 2, 3, 4])
    store.commit(1)
    assert Store(tmp_path / "s", shapes, create=False).step == 1
    np.testing.assert_array_equal(store.read(1, "a", (2, 0), (3, 2)), [[7, 7]])
