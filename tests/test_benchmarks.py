"""Programs that benchmarks compare train the same model; the checks of a GPU run on the CPU."""

import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import on_gpu
import pytest

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.models import gpt

FOLDER = Path(__file__).parent.parent / "benchmarks"
SIZES = {"layers": 2, "width": 32, "heads": 2, "vocab": 96, "seq": 16}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"held": False}, {"split": False}, {"chunks": 4}])
def test_gspmd_trains_as_zero_jax_does(load, how):
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3, remat="block")
    case = Case(gpt.GPTConfig(**SIZES), zero, "adamw", 16)
    tokens = np.random.default_rng(0).integers(0, 96, case.batch.shape, np.int32)
    params, tx = zero.init(case.make), zero.optimizer(case.tx)
    train, state = zero.train_step(case.loss_fn, tx), tx.init(params)
    full = jax.tree.map(np.asarray, zero.unshard(params))
    step, likes = load("gspmd").step_of(case, "block", **how)
    leaves, treedef = jax.tree.flatten(likes)
    values = jax.tree.leaves((full, case.tx.init(full), tokens))
    placed = [jax.device_put(x, s.sharding) for x, s in zip(values, leaves, strict=True)]
    *theirs, rows = jax.tree.unflatten(treedef, placed)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state, metrics = train(params, state, zero_jax.global_batch(zero.mesh, tokens))
        *theirs, loss = jitted(*theirs, rows)
        np.testing.assert_allclose(loss, metrics.loss, rtol=2e-6)


def test_plain_data_parallelism_replicates_and_gspmd_shards(load):
    case = Case(gpt.GPTConfig(**SIZES), zero_jax.Zero(zero_jax.make_mesh(), 3), "adamw", 16)
    for split in (False, True):
        _, (params, state, _) = load("gspmd").step_of(case, "none", split=split)
        leaves = jax.tree.leaves(params if split else (params, state))
        assert {x.sharding.is_fully_replicated for x in leaves} == {not split}


@pytest.mark.slow
def test_stages_and_compilation_are_measured(tmp_path):
    run = functools.partial(subprocess.check_output, text=True, cwd=FOLDER)
    out, command = tmp_path / "stages.json", [sys.executable, "stages.py", "--model", "nano"]
    printed = run([*command, "--devices", "2", "--seq", "16", "--rounds", "1", "--json", out])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["data parallel", "gspmd", "gspmd held", *(f"stage {s}" for s in range(4))]
    assert rows["data parallel"]["ratio"] == 1 and all(f"| {name} |" in printed for name in rows)
    assert rows["stage 3"]["total_bytes"] < rows["data parallel"]["total_bytes"]
    compiled = json.loads(run([sys.executable, "compile.py", "--one", "1", "2"]).splitlines()[-1])
    assert min(compiled.values()) > 0 and 1e8 < compiled["peak_bytes"] < 4e9


@pytest.mark.slow
def test_a_missing_peer_is_named_and_the_others_are_measured(load, tmp_path, monkeypatch, capsys):
    peers = load("peers")
    for name in ("peer.py", "peer_jax.py"):
        (tmp_path / name).symlink_to(FOLDER / name)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "FILE", tmp_path / "peers.json")
    monkeypatch.setattr(peers, "PROBLEM", SIZES)
    peers.main(["--processes", "2", "--rounds", "1", "--steps", "2"])
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [f"stage-{s}" for s in range(4)]
    assert all(row["loss_error"] < 1e-5 and row["peak_bytes"] > 1e8 for row in rows)
    printed = capsys.readouterr().err
    assert all(f"pip install {install}" in printed for install in peers.INSTALL.values())


@pytest.mark.slow
def test_every_kind_of_row_is_done_at_toy_size(load, tmp_path, monkeypatch):
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "python_with_torch", lambda: None)
    kinds = {own["kind"]: own for own in reversed(gpu.cases(True))}
    wrong = {"kind": "train", "model": "nano", "rows": 1, "remat": "most"}
    monkeypatch.setattr(gpu, "cases", lambda toy: [*kinds.values(), wrong])
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--json", str(out)])
    measured = json.loads(out.read_text())["measured"]
    rows = {row["case"]["kind"]: row for row in measured["rows"]}
    assert rows["checks"]["passed"] == ["skipped"] and not rows["checks"]["failed"]
    row, config = rows["train"], gpt.preset("nano")
    assert row["params"] == gpt.num_params(config) and row["compiled_bytes"] > 0
    assert row["tokens_per_second"] == pytest.approx(2 * config.seq / row["seconds"])
    assert [row["case"] for row in measured["not_done"]] == [kinds["torch"], wrong]
    skipped, failed = measured["not_done"]
    assert skipped["skipped"] == f"no PyTorch: {gpu.TORCH}" and "most" in failed["error"]
    without = gpu.alone({"kind": "train", "model": "nano", "rows": 2}, 60, "cuda")
    assert "pip install" in without["error"]


@pytest.fixture
def gpu(load, monkeypatch):
    """gpu.py with two rows of which none runs: `alone` returns what `gpu.row` is."""
    gpu = load("gpu")
    rows = [{"kind": "train", "model": name, "rows": 2, "remat": "none"} for name in "ab"]
    monkeypatch.setattr(gpu, "cases", lambda toy: rows)
    monkeypatch.setattr(gpu, "row", {"tokens_per_second": 1.0, "seconds": 2.0}, raising=False)

    def alone(own, seconds, device):
        return {"device": "cpu"} if own["kind"] == "device" else gpu.row

    monkeypatch.setattr(gpu, "alone", alone)
    return gpu


def test_a_second_run_does_the_rows_that_are_left(gpu, tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.json"
    first, second = gpu.cases(True)

    def run(*args):
        gpu.main(["--toy", "--json", str(out), *args])
        return json.loads(out.read_text())["measured"]

    monkeypatch.setattr(gpu, "cases", lambda toy: [first])
    assert [row["case"] for row in run()["rows"]] == [first]
    monkeypatch.setattr(gpu, "cases", lambda toy: [first, second])
    late = run("--minutes", "0")
    assert [row["case"] for row in late["rows"]] == [first]
    assert late["not_done"] == [{"case": second, "error": "no time was left"}]
    assert "not done: zero_jax b 2 none: no time was left" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "row", {"tokens_per_second": 3.0, "seconds": 4.0})
    both = run()
    assert [row["seconds"] for row in both["rows"]] == [2.0, 4.0] and not both["not_done"]
    # Other code measures again; a failure leaves the older result.
    monkeypatch.setattr(gpu, "code_of", lambda kind: "other")
    monkeypatch.setattr(gpu, "row", {"error": "killed"})
    failed = run()
    assert [row["seconds"] for row in failed["rows"]] == [2.0, 4.0]
    assert [row["error"] for row in failed["not_done"]] == ["killed"] * 2


def test_predicted_rows_are_kept_apart(gpu, tmp_path):
    out = tmp_path / "gpu.json"
    gpu.main(["--toy", "--json", str(out)])
    measured = json.loads(out.read_text())["measured"]
    gpu.main(["--predict", "--json", str(out)])
    found = json.loads(out.read_text())
    assert found["measured"] == measured and len(found["predicted"]["rows"]) == 2
    assert found["predicted"]["device"] == "NVIDIA H200"


def test_rates_are_those_of_the_data_sheet(load):
    gpu = load("gpu")
    own = {"kind": "torch", "model": "124m", "rows": 16, "remat": "none"}
    found = gpu.rates(own, {"seconds": 0.036428, "device": "NVIDIA H200"})
    # 12 layers of width 768, 50304 tokens in the vocabulary: PaLM's count, over 989.4 TFLOP/s.
    flops = 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert found["tokens_per_second"] == pytest.approx(449_764, rel=1e-5)
    assert found["mfu"] == pytest.approx(449_764 * flops / 989.4e12, rel=1e-5)
    assert "mfu" not in gpu.rates(own, {"seconds": 1.0, "device": "cpu"})


def test_a_row_sets_the_memory_of_a_gpu_and_names_the_error_that_ended_it(load, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    gpu = load("gpu")
    found = gpu.environment()
    # With both of its names set, JAX does not start on the GPU, warns and uses the CPU.
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    assert int(found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) > 0
    assert gpu.last_error("W0 slow\nzero_jax.Wrong: no\n\n") == "zero_jax.Wrong: no"
    assert gpu.last_error("ValueError: no\nE1123 01:02 cuda.cc:1] late\n") == "ValueError: no"
    assert gpu.last_error("Killed\n") == "Killed" and not gpu.last_error("")


@pytest.mark.slow
def test_one_check_leaves_the_others_in_the_file(tmp_path, capsys):
    file = tmp_path / "found.json"
    found = [{"what": "", "apart": 2, "limit": 1, "passed": False}]
    row = {"check": "blocks", "found": found, "passed": False}
    other = {"check": "checkpoints", "error": "x", "passed": False}
    device = jax.devices()[0].device_kind
    file.write_text(json.dumps({"device": device, "checks": [row, other]}))
    assert on_gpu.main(["--json", str(file), "--only", "checkpoints", "options"]) == 1
    known = {row["check"]: row for row in json.loads(file.read_text())["checks"]}
    assert known.keys() == {"blocks", "checkpoints", "options"} and known["blocks"] == row
    assert [f["passed"] for f in known["checkpoints"]["found"]] == [True]
    # Those that passed with this code stay as they are.
    capsys.readouterr()
    late = ["--json", str(file), "--missing", "--minutes", "0", "--only", "checkpoints", "blocks"]
    assert on_gpu.main(late) == 1
    assert capsys.readouterr().out.splitlines()[0] == "blocks: no time was left"
    assert on_gpu.main(["--json", str(file), "--only", "blocks"]) == 0
    differences = (1.0, 1.5, float("nan"))
    assert [on_gpu.verdict("", x, 1.0)["passed"] for x in differences] == [True, False, False]


def test_every_check_of_the_benchmark_exists_and_those_without_time_are_named(load, tmp_path):
    gpu, file = load("gpu"), tmp_path / "on_gpu.json"
    assert set(gpu.CHECKS) <= on_gpu.CHECKS.keys()
    file.write_text(json.dumps({"device": jax.devices()[0].device_kind, "checks": []}))
    found = gpu.checks({"kind": "checks", "only": ["skipped", "blocks"]}, file, 0)
    late = sorted(f"{name}: no time was left" for name in ("skipped", "blocks"))
    assert sorted(found.pop("not_run")) == late and found == {"passed": [], "failed": []}
