"""What benchmarks compare is comparable: the other programs train the same model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import zero_jax
from models import gpt
from zero_jax.plan import Case

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gspmd_trains_as_zero_jax_does():
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3, remat="block")
    config = gpt.GPTConfig(layers=2, width=32, heads=2, vocab=96, seq=16)
    case = Case(config, zero, "adamw", 16)
    tokens = np.random.default_rng(0).integers(0, 96, case.batch.shape, np.int32)
    params = zero.init(case.make)
    tx = zero.optimizer(case.tx)
    train, state = zero.train_step(case.loss_fn, tx), tx.init(params)
    full = jax.tree.map(np.asarray, zero.full(params))
    step, likes = load("gspmd").step_of(case, "block")

    def placed(tree, like):
        leaves, treedef = jax.tree.flatten(like)
        pairs = zip(jax.tree.leaves(tree), leaves, strict=True)
        return jax.tree.unflatten(treedef, [jax.device_put(x, s.sharding) for x, s in pairs])

    theirs = placed(full, likes[0]), placed(case.tx.init(full), likes[1])
    rows, jitted = placed(tokens, likes[2]), jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state, metrics = train(params, state, zero_jax.global_batch(zero.mesh, tokens))
        *theirs, loss = jitted(*theirs, rows)
        np.testing.assert_allclose(loss, metrics.loss, rtol=2e-6)


@pytest.mark.heavy
def test_the_time_of_a_compilation_is_measured():
    command = [sys.executable, str(FOLDER / "compile.py"), "--one", "1", "2"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found.values()) > 0 and 1e8 < found["peak_bytes"] < 4e9
