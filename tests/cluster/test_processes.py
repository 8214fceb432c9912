"""What several processes compute together is what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import zero_jax
from training.supervise import free_address
from zero_jax.cluster import processes, roll

GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "3"}
SCRIPT = Path(__file__).parents[1] / "process_gradients.py"


def run(out, *groups):
    # XLA's settings are those of users: how the program is scheduled matters here.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    commands = [[sys.executable, str(SCRIPT), str(out), *map(str, group)] for group in groups]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [p.wait(timeout=300) for p in processes] == [0] * len(groups)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, None),
        (GPUS, None),
        (GPUS | STEP, [3]),
        (STEP | {"CUDA_VISIBLE_DEVICES": "GPU-8f"}, [0]),
        (GPUS | STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, [0, 1, 2, 3]),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, None),
        (GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, [2]),
        (
            GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            [0, 1, 2, 3],
        ),
        (GPUS | STEP | {"JAX_LOCAL_DEVICE_IDS": "1,2"}, None),
    ],
)
def test_each_process_takes_its_own_gpus(monkeypatch, given, own):
    """What JAX is told: by itself it takes number LOCALID, also where that is not there."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = []

    def initialize(*, local_device_ids, **_):
        told.append(local_device_ids)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(roll, "call", lambda *_: None)
    monkeypatch.setattr(processes, "_links", [])
    zero_jax.initialize("127.0.0.1:1", 2, 0)
    assert told == [own]


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["none", "int4"])
def test_gradients_of_two_processes_are_those_of_one(tmp_path, scatter):
    """To rounding, each time: sums that go wrong now and then do so for a few numbers."""
    run(tmp_path / "one", (scatter,))
    address = free_address()
    run(tmp_path / "two", (scatter, address, 2, 0), (scatter, address, 2, 1))
    want = np.load(tmp_path / "one-0.npz")
    for number in range(3):
        got = np.load(tmp_path / f"two-{number}.npz")
        assert want.keys() == got.keys()
        for name in want:
            largest = np.abs(want[name]).max()
            off = np.abs(got[name] - want[name])
            same = off <= 1e-5 * largest + 1e-9
            # Where a number is half-way between two steps, an ulp decides which one it becomes.
            assert np.mean(~same) <= (0 if scatter == "none" else 1e-3), name
            assert np.all(off <= largest / 2), name
