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
from zero_jax.models import gpt
from zero_jax.plan.case import Case

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a script as if it had been started: what lies beside it can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def by_name(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return by_name


def run(name, *args):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, args)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"held": False}, {"split": False}, {"chunks": 4}])
def test_gspmd_trains_as_zero_jax_does(load, how):
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3, remat="block")
    config = gpt.GPTConfig(layers=2, width=32, heads=2, vocab=96, seq=16)
    case = Case(config, zero, "adamw", 16)
    tokens = np.random.default_rng(0).integers(0, 96, case.batch.shape, np.int32)
    params = zero.init(case.make)
    tx = zero.optimizer(case.tx)
    train, state = zero.train_step(case.loss_fn, tx), tx.init(params)
    full = jax.tree.map(np.asarray, zero.full(params))
    step, likes = load("gspmd").step_of(case, "block", **how)

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


def test_plain_data_parallelism_is_whole_on_every_device(load):
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3)
    case = Case(gpt.GPTConfig(layers=2, width=32, heads=2, vocab=96, seq=16), zero, "adamw", 16)
    _, (params, state, _) = load("gspmd").step_of(case, "none", split=False)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((params, state)))
    _, (params, state, _) = load("gspmd").step_of(case, "none")
    assert not any(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_stages_are_measured_beside_the_others(tmp_path):
    out = tmp_path / "stages.json"
    given = ("--model", "nano", "--devices", 2, "--seq", 16, "--rounds", 1, "--json", out)
    printed = run("stages", *given)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["data parallel", "gspmd", "gspmd held", *(f"stage {s}" for s in range(4))]
    assert rows["data parallel"]["ratio"] == 1
    assert rows["stage 3"]["total_bytes"] < rows["data parallel"]["total_bytes"]
    assert all(f"| {name} |" in printed for name in rows)


@pytest.mark.slow
def test_a_peer_that_is_absent_is_named_and_the_others_go_on(load, tmp_path, monkeypatch, capsys):
    peers = load("peers")
    (tmp_path / "benchmarks").mkdir()
    for name in ("peer.py", "peer_jax.py"):
        (tmp_path / "benchmarks" / name).symlink_to(FOLDER / name)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(peers, "FILE", tmp_path / "peers.json")
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocab": 96, "seq": 16}
    monkeypatch.setattr(peers, "PROBLEM", sizes)
    peers.main(["--processes", "2", "--rounds", "1", "--steps", "2"])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [f"stage-{s}" for s in range(4)]
    assert all(row["loss_error"] < 1e-5 and row["peak_bytes"] > 1e8 for row in rows)
    said = capsys.readouterr().err
    for library, install in peers.INSTALL.items():
        assert f"{library} is left out: python3 -m venv .venv-{library}" in said
        assert f"pip install {install}" in said


@pytest.mark.slow
def test_every_kind_of_row_is_measured_at_toy_size(load, tmp_path, monkeypatch):
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "python_with_torch", lambda: None)
    kinds = {own["kind"]: own for own in gpu.cases(True)}
    wrong = {"kind": "train", "model": "nano", "rows": 1, "remat": "most"}
    monkeypatch.setattr(gpu, "cases", lambda toy: [*kinds.values(), wrong])
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--json", str(out)])
    rows = {row["case"]["kind"]: row for row in json.loads(out.read_text())["rows"][:-1]}
    assert 0 < rows["train"]["mfu"] < 2 and rows["train"]["tokens_per_second"] > 0
    assert rows["update"]["of_copy"] > 0 and rows["largest"]["layers"] > 4
    assert rows["largest"]["ended_by"] == "device"
    assert rows["torch"] == {"case": kinds["torch"], "missing": gpu.TORCH}
    failed = json.loads(out.read_text())["rows"][-1]
    assert "remat='most'" in failed["error"] and "tokens_per_second" not in failed


def test_a_row_finds_the_memory_of_a_gpu_whatever_the_user_has_set(load, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = load("gpu").environment()
    # Where both of its names are set JAX does not start on the GPU; it warns and takes a CPU.
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    assert int(found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) > 0


def test_without_a_gpu_a_row_says_so_and_measures_nothing(load):
    measured = load("gpu").alone({"kind": "train", "model": "nano", "rows": 2}, 60, "cuda")
    assert "JAX sees no GPU here: pip install -U 'jax[cuda13]'" in measured["error"]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("W0 slow\nzero_jax.selfcheck.WrongHere: offload is wrong\n\n", "zero_jax.selfcheck.Wron"),
        ("ValueError: no\nE1123 01:02 cuda.cc:1] late\n", "ValueError: no"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_the_line_that_says_what_ended_a_row_is_found(load, log, said):
    found = load("gpu").last_error(log)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.slow
def test_the_time_of_a_compilation_is_measured():
    found = json.loads(run("compile", "--one", 1, 2).splitlines()[-1])
    assert min(found.values()) > 0 and 1e8 < found["peak_bytes"] < 4e9
