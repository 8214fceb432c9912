"""Scalars in TensorBoard's files and at Weights & Biases: complete, and never in the way."""

import json
import struct
import sys
import threading
import time
import types

import pytest
import tensorboardX.record_writer
from tensorboardX.proto import event_pb2
from test_train import HERE, folder

from training import scalars
from training.main import main
from training.run_folder import RunLog

__all__ = ["folder"]  # a fixture


def write(log, steps):
    for step in steps:
        log.step(step, loss=2.0, grad_norm=0.5, tokens_per_second=1e4)


def steps_written(folder):
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def not_blocked(log, steps, seconds=20):
    """Writes steps and closes the log, in limited time."""

    def all_of_it():
        write(log, steps)
        log.close()

    thread = threading.Thread(target=all_of_it, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "training is blocked"


# TensorBoard.


@pytest.mark.parametrize("trouble", ["a failed write", "no folder", "a clock set back by a month"])
def test_training_continues_when_tensorboard_can_write_no_more(
    tmp_path, capsys, monkeypatch, trouble
):
    log = RunLog(tmp_path, {})
    if trouble == "no folder":
        (tmp_path / "tensorboard").write_text("a file")
    write(log, [1])
    if trouble == "a failed write":

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tensorboardX.record_writer.RecordWriter, "write", fail)
    elif trouble == "a clock set back by a month":
        month = time.time() - 31 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: month)
    not_blocked(log, range(2, 40))
    assert steps_written(tmp_path) == list(range(1, 40))
    said = capsys.readouterr().out.count("no more TensorBoard files in")
    assert said == (trouble != "a clock set back by a month")


def test_tensorboard_has_every_scalar_and_where_a_resumed_run_begins(tmp_path):
    for resume, steps in ((False, [1, 2, 3]), (True, [3, 4])):
        with RunLog(tmp_path, {}, resume=resume) as log:
            write(log, steps)
    events = [
        event_pb2.Event.FromString(record)
        for path in sorted((tmp_path / "tensorboard").glob("events.*"))
        for record in records(path)
    ]
    losses = [e.step for e in events for v in e.summary.value if v.tag == "train/loss"]
    assert sorted(losses) == [1, 2, 3, 3, 4]
    starts = [e.step for e in events if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [3]


def records(path):
    """Reads the records of a TFRecord file: length, its checksum, data, their checksum."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 16 + length


# Weights & Biases.


class Wandb(types.ModuleType):
    """A module like wandb, which keeps what it is given."""

    def __init__(self, trouble=None):
        super().__init__("wandb")
        self.trouble, self.runs = trouble, []
        self.never = threading.Event()

    def Settings(self, **given):
        return given

    def init(self, **given):
        if self.trouble == "init":
            raise RuntimeError("no API key")
        self.runs.append({**given, "logged": [], "code": None})
        return self

    def define_metric(self, name, step_metric):
        self.runs[-1]["axis"] = step_metric

    def log(self, values):
        if self.trouble == "log":
            raise ConnectionResetError("the service is gone")
        if self.trouble == "hangs":
            self.never.wait()
        self.runs[-1]["logged"].append(values)

    def finish(self, exit_code):
        if self.trouble == "finish":
            self.never.wait()
        self.runs[-1]["code"] = exit_code


@pytest.fixture
def wandb(monkeypatch, request):
    module = Wandb(getattr(request, "param", None))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(scalars, "FINISH_SECONDS", 0.2)
    yield module
    module.never.set()


@pytest.mark.parametrize("wandb", ["init", "log", "hangs", "finish"], indirect=True)
def test_training_continues_when_wandb_fails_or_hangs(tmp_path, wandb, capsys, monkeypatch):
    monkeypatch.setattr(scalars, "WAITING", 10)
    log = RunLog(tmp_path, {}, wandb="zero")
    not_blocked(log, range(1, 40))
    assert steps_written(tmp_path) == list(range(1, 40))
    assert capsys.readouterr().out.count("no more Weights & Biases from") == 1


def test_an_error_of_the_run_is_one_at_wandb_and_nothing_infinite_is_sent(tmp_path, wandb):
    with pytest.raises(KeyError), RunLog(tmp_path, {}, wandb="zero") as log:
        log.step(1, loss=float("inf"), grad_norm=0.5)
        raise KeyError
    (run,) = wandb.runs
    assert run["code"] == 1
    assert run["logged"] == [{"train/grad_norm": 0.5, "train/skipped": 0, "step": 1}]


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")])  # None: not installed
def test_wandb_is_missed_before_anything_is_read(folder, capsys, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert main([*HERE, "--data", "nowhere.txt", "--wandb", "zero", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert "--wandb zero" in said and "pip install wandb" in said
    assert not (folder / "out").exists()
