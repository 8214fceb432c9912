"""Small runs of `train.py`: in this process with trainers that are compiled once, or in others."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.supervise import free_address
from training.trainer import Trainer

SCRIPT = Path(__file__).parents[2] / "train.py"
TEXT = "Partition what each device holds, and gather what it needs.\n" * 80  # 4800 bytes
HERE = ["--devices", "8"]  # those of conftest.py
TINY = "--data text.txt --max-steps 4 --global-batch-size 8 --seq-len 16 --eval-steps 2 "
TINY = (TINY + "--max-eval-batches 1 --sample-tokens 8 --optimizer sgd").split()
# Adam has a state; the rate is small, so that sums in another order stay near.
RUN = [*TINY, "--optimizer", "adamw", "--sample-tokens", "0", "--eval-steps", "0", "--lr", "1e-3"]
FIRST = "--seq-len 32 --devices 8 --warmup-steps 2 --eval-steps 2 --save-steps 2"
FIRST = [*RUN, *FIRST.split()]
# Settings of which a compiled step does not depend.
FREE = "output_dir export_dir save_steps save_total_limit resume_step resume sample_tokens "
FREE = (FREE + "eval_steps max_eval_batches max_hours max_rollbacks wandb_project").split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run in, with a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Shared(Trainer):
    """A trainer whose step is predicted once."""

    predict = functools.cache(Trainer.predict)


_trainers = {}


def shared_trainer(plan):
    """Returns one trainer for all plans that differ in `FREE` settings alone."""
    known = repr(dataclasses.replace(plan.config, **dict.fromkeys(FREE)))
    trainer = _trainers[known] = _trainers.get(known) or Shared(plan)
    trainer.plan, trainer.out = plan, Path()
    return trainer


def start(*args, cwd=None, script=(str(SCRIPT),), environment=None, stderr=subprocess.PIPE):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen([sys.executable, *script, *args], env=environment, cwd=cwd, **pipes)


def finish(processes, seconds=300):
    """(exit code, stdout, stderr) of each; all are killed when the time is over."""
    end, late, results = time.monotonic() + seconds, False, []
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
    group = ["--coordinator-address", free_address(), "--num-processes", str(count), *common]
    return [
        start(*group, "--process-id", str(rank), *own.get(rank, []), cwd=folders.get(rank), **how)
        for rank in range(count)
    ]


def wait_for(condition, run, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)


def metrics(out, *names):
    """The lines of a run's metrics, or values of those with one of these names."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in names if name in line] if names else lines


def trained_until(step):
    path = Path("out/metrics.jsonl")
    return path.exists() and any(line["step"] >= step for line in metrics("out"))


def curve(out):
    """The loss of each step, as written last."""
    found = {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}
    return [found[step] for step in sorted(found)]


def last_loss(out):
    return metrics(out, "val_loss")[-1]


def saved_steps(out):
    names = (path.name for path in Path(out, "checkpoints").glob("[0-9]*"))
    return sorted(int(name) for name in names if name.isdigit())  # others are being written
