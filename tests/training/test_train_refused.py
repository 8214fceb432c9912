"""What train.py refuses, and how it ends."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import HERE, TINY, folder

import zero_jax
from training import main as program
from training.config import Config
from training.plan import check_batch

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "nowhere.txt"], ["nowhere.txt", "check the path"]),
        (["--data", "empty.txt"], ["empty.txt is empty"]),
        (["--seq", "500"], ["2160 to train on and 240 held out", "501", "--seq"]),
        (["--vocab", "100"], ["outside [0, 100)", "--vocab 120"]),
        (["--data", "ids.npy"], ["token 256", "outside [0, 256)", "--vocab 300"]),
        (["--steps", "4", "--profile"], ["steps 10 to 12", "--steps 4"]),
        (["--batch", "12"], ["--batch 12", "8 devices x 1", "8 or 16"]),
        (["--batch", "8", "--micro-batches", "3"], ["8 devices x 3", "= 24", "take 24"]),
        (["--model", "nanno"], ["'nanno'", "'nano'"]),
        (["--model", "350m"], ["'350m'", "nearest is '124m'"]),
        (["--optimizer", "adam"], ["'adam'", "'adamw'", "lion"]),
        (["--remat", "blok"], ["'blok'", "'block'"]),
        (["--compute", "bf61"], ["'bf61'", "'bf16'"]),
        (["--reduce", "fp16"], ["'fp16'", "bf16"]),
        (["--stage", "4"], ["stage=4", "0 (nothing partitioned)"]),
        (["--stage", "auto"], ["does not say how much memory", "memory_limit="]),
        pytest.param(
            *(["--stage", "auto", "--memory-limit", "1e-6"], ["nothing fits in", "smallest is"]),
            marks=pytest.mark.slow,
        ),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--steps", "99999999999999999999"], ["--steps 99999999999999999999", "at most 2.1"]),
        (["--seed", "9223372036854775808"], ["--seed 9223372036854775808", "at most 9.2"]),
        (["--vocab", "2147483648"], ["--vocab 2147483648", "at most 2.1"]),
        (["--lr", "1e38"], ["--lr 1e+38", "at most 10000"]),
        (["--out", ""], ["--out is empty"]),
        (["--memory-limit", "1e9"], ["--memory-limit 1e+09", "--stage auto"]),
        (["--from-step", "3", "--out", "new"], ["--from-step 3", "does not hold a checkpoint"]),
        (["--lr", "nan"], ["--lr nan", "at least 0"]),
        (["--warmup", "4"], ["--warmup 4", "--steps 4"]),
        (["--mesh", "data=²"], ["--mesh data=²", "'data=²'", "data=4,model=2"]),
        (["--mesh", "data=" + "9" * 5000], ["--mesh data=999", "data=4,model=2"]),
        (["--mesh", "data=999999999"], ["data=999999999", "but there are 8 devices"]),
        (["--devices", "2147483647"], ["--devices 2147483647", "at most"]),
        (["--sample-length", "2147483647"], ["--sample-length 2147483647", "at most 1e+06"]),
        (["--join-seconds", "inf"], ["--join-seconds inf", "at most 1e+06"]),
        (["--max-hours", "nan"], ["--max-hours nan", "at least 0"]),
        (["--memory-limit", "-1"], ["--memory-limit -1", "at least 0"]),
        (["--mesh", "data=2,modle=4"], ["'modle=4'", "data=4,model=2"]),
        (["--mesh", "data=2,model=2"], ["= 4, but there are 8 devices"]),
        (["--sequence-parallel"], ["this mesh has none"]),
        (["--config", "c6"], ["'c6'", "c1, c2, c3"]),
        (["--config", "c1", "--remat", "dots"], ["--config c1 decides --stage and --remat"]),
        (["--config", "c1", "--stage", "3"], ["--config c1 decides --stage and --remat"]),
        (["--config", "c4"], ["--config c4", "--mesh model=2"]),
        (["--offload", "activations", "--remat", "none"], ["remat='none'", '"block"']),
        (["--process-id", "0"], ["process_id=0", "give all three"]),
        (["--out", "text.txt"], ["text.txt", "--out needs a folder"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_input_of_no_use_is_refused_in_one_line_that_tells_what_is(folder, capsys, args, words):
    (folder / "empty.txt").write_text("")
    np.save("ids.npy", np.tile(np.arange(300, dtype=np.uint16), 10))
    assert program.main([*TINY, *HERE, *args]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert all(word in error for word in words), error
    assert not Path("runs").exists()


def test_devices_are_shared_out_evenly_to_the_processes(folder, capsys):
    group = ["--num-processes", "3", "--process-id", "0", "--coordinator", "127.0.0.1:1"]
    assert program.main([*TINY, *group, "--devices", "8"]) == 2
    assert (
        "8 devices must be a multiple of 3 processes: take --devices 9" in capsys.readouterr().err
    )


@pytest.mark.parametrize("mesh", ["replica=4", "model=8"])
def test_a_mesh_leaves_the_other_devices_to_data(monkeypatch, mesh):
    monkeypatch.setattr(zero_jax, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(program, "launched_processes", lambda: 32)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    program.join(Config(mesh=mesh))
    with pytest.raises(ValueError, match="must be a multiple of 32 processes"):
        program.join(Config(mesh=f"data=3,{mesh}"))


@pytest.mark.parametrize(("processes", "ended"), [(1, "returned 2"), (4, "left with 2")])
def test_too_little_memory_is_no_reason_to_start_again(monkeypatch, capsys, processes, ended):
    def run(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GB\nmore")

    def leave(code):
        raise SystemExit(f"left with {code}")

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(os, "_exit", leave)
    try:
        found = f"returned {program.main(HERE)}"
    except SystemExit as left:
        found = left.code
    assert found == ended
    error = capsys.readouterr().err
    assert error.startswith("error: RESOURCE_EXHAUSTED: Out of memory: 9 GB. Less on each device: ")
    assert "more\n" not in error


def test_debug_shows_where_an_error_came_from(folder):
    with pytest.raises(FileNotFoundError):
        program.main([*TINY, *HERE, "--data", "nowhere.txt", "--debug"])


def test_a_batch_that_divides_is_accepted():
    check_batch(24, devices=4, micro_batches=3)
    with pytest.raises(ValueError, match="4 devices x 3 micro-batches = 12: take 12 or 24"):
        check_batch(18, devices=4, micro_batches=3)
