"""`train.py` from the outside: what it writes, and that processes agree."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zero_jax
from training.config import Config
from training.main import main
from training.plan import load
from training.supervise import free_address
from training.trainer import Trainer
from zero_jax.models import gpt

SCRIPT = Path(__file__).parents[2] / "train.py"
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40  # 2400 bytes
TINY = ["--data", "text.txt", "--steps", "4", "--batch", "8", "--seq", "16", "--eval-every", "2"]
TINY += ["--eval-batches", "1", "--sample-length", "8", "--optimizer", "sgd"]
HERE = ["--devices", "8"]  # what conftest.py made of this process


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run in, with a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*args, cwd=None, script=(str(SCRIPT),), environment=None, stderr=subprocess.PIPE):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
    return subprocess.Popen(
        [sys.executable, *script, *args],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        cwd=cwd,
    )


def finish(processes, seconds=300):
    """(exit code, stdout, stderr) of each; all are killed when the time is over."""
    end, late = time.monotonic() + seconds, False
    results = []
    for process in processes:
        try:
            output = process.communicate(timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, late = process.communicate(), True
        results.append((process.returncode, *output))
    assert not late, results
    return results


def start_many(count, common, own=None, folders=None, **how):
    """Processes of one run; `own` holds further arguments by rank, `folders` where they run."""
    own, folders = own or {}, folders or {}
    address = free_address()
    group = ["--coordinator", address, "--num-processes", str(count), *common]
    return [
        start(*group, "--process-id", str(rank), *own.get(rank, []), cwd=folders.get(rank), **how)
        for rank in range(count)
    ]


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [line.get("loss", line.get("val_loss")) for line in metrics(out)]


# A run.


def test_a_run_with_experts_says_what_routers_did(folder):
    args = [*TINY, *HERE, "--model", "nano-experts", "--capacity", "0.5", "--out", "run"]
    assert main(args) == 0
    steps = [line for line in metrics("run") if "loss" in line]
    choices = 8 * 16 * 2 * 4  # rows, tokens, of each two, layers
    assert all(choices / 2 <= line["dropped"] < choices for line in steps)
    assert all(line["balance"] >= 0.9 and line["router_z"] > 0 for line in steps)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A run from the command line, on the four devices it makes by default."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (result,) = finish([start(*TINY)])
    return folder, result


@pytest.mark.slow
def test_a_run_says_first_what_it_will_do_and_last_what_came_out(one_process):
    _, (code, out, err) = one_process
    assert code == 0, err
    order = ["data 4", "micro_batches", "Bytes per device on 4", "activations are not included"]
    order += ["stage 0", "stage 1", "stage 2", "stage 3, this run", "at rest", "in flight"]
    order += [
        "This run, predicted",
        "saved",
        "4 steps train on text",
        "step 4/4",
        "nats per byte",
        "unigram",
        "bigram",
    ]
    order += ["sample:", TEXT[-240:][:16]]
    places = [out.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.slow
def test_a_run_writes_settings_metrics_tensorboard_and_picture(one_process):
    folder, _ = one_process
    out = folder / "runs" / "001"
    config = json.loads((out / "config.json").read_text())
    for name, value in {"stage": 3, "devices": 4, "vocab": 256, "seq": 16, "lr": 0.3}.items():
        assert config[name] == value
    assert config["psi"] == gpt.num_params(gpt.preset("nano", seq=16))
    assert {"mesh", "processes", "jax", "bigram entropy", "train_tokens"} <= config.keys()
    lines = metrics(out)
    step = {"step", "loss", "grad_norm", "tokens_per_second", "skipped"}
    step |= {"step_seconds", "learning_rate"}  # on CPUs nobody knows how much memory was taken
    val = {"step", "val_loss"}
    assert [set(line) for line in lines] == [step, step, val, step, step, val]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    assert list((out / "tensorboard").glob("events.*"))
    assert all((out / name).stat().st_size > 0 for name in ("loss.png", "report.html"))


@pytest.mark.slow
def test_auto_says_what_it_chose_and_records_it(folder, capsys):
    quiet = [*TINY, *HERE, "--sample-length", "0", "--stage", "auto", "--memory-limit", "1"]
    assert main(quiet) == 0
    said = capsys.readouterr().out
    assert "chose stage 2, 1 micro-batches, remat none" in said and "stage 2, this run" in said
    assert json.loads(Path("runs/001/config.json").read_text())["stage"] == 2


@pytest.mark.slow
def test_auto_lets_experts_stay_where_that_sends_less(folder):
    quiet = [*TINY, *HERE, "--sample-length", "0", "--stage", "auto", "--memory-limit", "1"]
    quiet += ["--model", "nano-experts"]
    assert main(quiet) == 0
    assert main([*quiet, "--mesh", "data=8"]) == 0
    stay, gathered = (json.loads(Path(f"runs/00{n}/config.json").read_text()) for n in (1, 2))
    assert stay["mesh"] == {"experts": 8, "data": 1} and gathered["mesh"] == {"data": 8}
    np.testing.assert_allclose(losses("runs/001"), losses("runs/002"), rtol=1e-4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_in_the_next_folder(folder):
    quiet = [*TINY, *HERE, "--sample-length", "0", "--steps", "3"]
    for _ in range(2):
        assert main(quiet) == 0
    assert losses("runs/001") == losses("runs/002")
    assert main([*quiet, "--seed", "1", "--out", "other"]) == 0
    assert losses("other") != losses("runs/001")


@pytest.mark.slow
def test_token_files_are_measured_per_token_and_sampled_as_ids(folder, capsys):
    np.save("ids.npy", np.tile(np.arange(300, dtype=np.uint16), 10))
    chosen = ["--data", "ids.npy", "--vocab", "300", "--stage", "2", "--micro-batches", "2"]
    chosen += ["--batch", "16", "--optimizer", "muon", "--compute", "bf16", "--reduce", "bf16"]
    assert main([*TINY, *HERE, *chosen, "--remat", "dots", "--clip", "0"]) == 0
    out = capsys.readouterr().out
    assert "nats per token" in out
    sample = json.loads(out[out.index("sample:") + len("sample:") :])
    assert len(sample) == 16 + 8
    assert sample[:16] == list(range(16))  # the last tenth begins at a multiple of 300


def test_validation_loss_is_the_mean_over_every_held_out_token(folder):
    plan = load(Config(data="text.txt", seq=16, batch=8, devices=8))
    trainer = Trainer(plan)
    params, _ = trainer.init()
    model = nnx.merge(trainer.model.graphdef, trainer.zero.full(params))
    total, count, held_out = 0.0, 0, plan.corpus.rest
    assert (held_out.size - 1) % 16 != 0  # the last window is a part of one
    for first in range(0, held_out.size - 1, 16):
        row = jnp.asarray(held_out[first : first + 17], jnp.int32)[None]
        loss, weight = gpt.loss(model, row)
        total, count = total + float(loss), count + int(weight)
    assert count == held_out.size - 1
    # Sums of the same fp32 losses in another order.
    assert trainer.evaluate(params) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_one_line_and_all_its_files(folder, capsys):
    wild = ["--lr", "1e4", "--clip", "0", "--steps", "60", "--eval-every", "0"]
    assert main([*TINY, *HERE, *wild, "--out", "out"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: 20 steps in a row")
    assert "\n" not in error
    assert sum(line["skipped"] for line in metrics("out")) >= 18  # the last are not looked at
    assert Path("out/loss.png").exists() and Path("out/report.html").exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_all_its_files(folder):
    (run,) = running = [start(*TINY, "--steps", "100000", "--out", "out")]
    end = time.monotonic() + 120
    while not (Path("out/metrics.jsonl").exists() and metrics("out")):
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    ((code, _, error),) = finish(running, seconds=60)
    assert code == 130 and error.startswith("stopping after this step"), error
    assert "\nstopped after step" in error and "The command that goes on" in error, error
    assert Path("out/loss.png").exists() and Path("out/report.html").exists()


# Several processes.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, []),
        (4, []),
        (2, ["--mesh", "data=2,model=2"]),
        # Each process has one device, and two of them share their rows.
        (4, ["--mesh", "data=2,model=2", "--sequence-parallel"]),
        (4, ["--mesh", "replica=2,data=1,model=2", "--config", "c5"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_processes_train_as_one_process_does(folder, one_process, count, more):
    results = finish(start_many(count, [*TINY, "--out", "out", *more]))
    assert [code for code, _, _ in results] == [0] * count, results
    assert ["validation loss" in out for _, out, _ in results] == [True] + [False] * (count - 1)
    alone = losses(one_process[0] / "runs" / "001")
    # Sums over devices in another order; Adam would divide small numbers by small numbers.
    np.testing.assert_allclose(losses("out"), alone, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "elsewhere", "words"),
    [
        ({1: ["--stage", "1"]}, {}, ["disagree on stage", "'3'", "'1'"]),
        ({0: ["--out", "text.txt"]}, {}, ["cannot write a run to text.txt"]),
        ({}, {1: "empty"}, ["no file or folder at text.txt"]),
        ({}, {1: "edited"}, ["disagree on checksum of the data"]),
    ],
    ids=["other settings", "trouble of the first alone", "trouble of another alone", "other data"],
)
def test_all_processes_end_and_tell_why_when_one_can_not_go_on(folder, own, elsewhere, words):
    (folder / "empty").mkdir()
    (folder / "edited").mkdir()
    (folder / "edited" / "text.txt").write_text(TEXT.lower())
    folders = {rank: folder / name for rank, name in elsewhere.items()}
    for code, _, error in finish(start_many(2, TINY, own, folders), seconds=120):
        assert code == 2, error
        assert all(word in error for word in words), error


@pytest.mark.slow
def test_a_profile_of_three_steps_is_written(folder, monkeypatch):
    traced, started = [], jax.profiler.start_trace
    monkeypatch.setattr(
        *(jax.profiler, "start_trace"),
        lambda path, **how: (traced.append(path), started(path, **how)),
    )
    step = zero_jax.TrainStep.__call__

    def counted(*args):
        traced.append(len(traced))
        return step(*args)

    monkeypatch.setattr(zero_jax.TrainStep, "__call__", counted)
    args = ["--steps", "14", "--checkpoint-every", "0", "--sample-length", "0"]
    assert main([*TINY, *HERE, *args, "--out", "out", "--profile"]) == 0
    assert traced.index(Path.cwd() / "out" / "profile") == 9, "before step 10"
    (trace,) = Path("out/profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("gather" in name for name in names), "what a viewer shows"
    assert not any(name.startswith("$") for name in names), "the host's own code is left out"
    assert list(Path("out/profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_runs_is_named(folder, stage):
    trainer = Trainer(load(Config(stage=stage, data="text.txt", devices=8, seq=16)))
    text = trainer.step.lower(*trainer.like(), next(trainer.batches())[0]).compile().as_text()
    for name in ("embed", "attention", "mlp", "loss", "zero_update"):
        assert f"/{name}" in text or f"({name})" in text, name
    for kind, name in (("all-gather", "zero_gather"), ("reduce-scatter", "zero_reduce_scatter")):
        lines = [
            line for line in text.splitlines() if f" {kind}(" in line or f"{kind}-start(" in line
        ]
        assert lines and all(name in line for line in lines), lines
