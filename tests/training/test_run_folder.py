"""The folder of a run holds all its numbers and none of another run; scalars never block it."""

import json
import math
import resource
import struct
import subprocess
import sys
import threading
import time
import types
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import tensorboardX.record_writer
from tensorboardX.proto import event_pb2

from training import scalars
from training.run_folder import RunLog, finite, next_folder, read

pytestmark = pytest.mark.usefixtures("no_picture")


def write(log, steps, loss=2.0):
    for step in steps:
        log.step(step, loss=loss, grad_norm=0.5, tokens_per_second=1e4)


def lines(folder):
    """The complete lines of the metrics, which are JSON without NaN."""
    text = (folder / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def steps_of(folder):
    return [line["step"] for line in lines(folder)]


def test_a_run_leaves_config_metrics_tensorboard_picture_and_page(tmp_path, no_picture):
    """Infinities and NaN are null; array scalars are numbers."""
    no_picture.undo()
    out = tmp_path / "runs" / "a"
    config = {"path": Path("x"), "clip": math.inf, "betas": (0.9, np.float32(0.5))}
    with RunLog(out, config) as log:
        for count in (1, 2):
            write(log, [count])
            assert len(lines(out)) == count, "flushed at once"
        log.evaluation(2, val_loss=2.5)
        log.step(3, loss=math.nan, grad_norm=math.inf, skipped=np.bool_(True), balance=None)
        log.step(np.int32(4), loss=np.float32(2), grad_norm=np.array(0.5, np.float32))
    known = json.loads((out / "config.json").read_text())
    assert known == {"path": "x", "clip": None, "betas": [0.9, 0.5]}
    step = {"loss": 2.0, "grad_norm": 0.5, "tokens_per_second": 1e4, "skipped": 0}
    assert lines(out) == [
        {"step": 1, **step},
        {"step": 2, **step},
        {"step": 2, "val_loss": 2.5},
        {"step": 3, "loss": None, "grad_norm": None, "skipped": 1},
        {"step": 4, "loss": 2.0, "grad_norm": 0.5, "skipped": 0},
    ]
    assert finite(read(out).curve("loss")) == [(1, 2.0), (2, 2.0), (4, 2.0)]
    assert list((out / "tensorboard").glob("events.*")) and (out / "report.html").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_other_processes_write_nothing_and_a_folder_must_be_writable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "new", tmp_path / "file"):
        with RunLog(out, {}, enabled=False, wandb="project") as log:
            write(log, [1])
            log.evaluation(1, val_loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for out in ("file", "file/below"):
        with pytest.raises(ValueError, match="--out"):
            RunLog(tmp_path / out, {})
    denied = unittest.mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop a root user
    with pytest.raises(ValueError, match=r"Permission denied.*--out"):
        RunLog(tmp_path, {})


def test_a_folder_of_another_run_is_not_mixed_and_not_changed(tmp_path):
    RunLog(tmp_path, {"seed": 0}).close()  # it ended before its first step
    with RunLog(tmp_path, {"seed": 1}) as log:
        write(log, [1])
        with pytest.raises(ValueError, match="another run"):
            RunLog(tmp_path, {"seed": 2}, resume=True)
    with pytest.raises(ValueError, match="--out"):
        RunLog(tmp_path, {"seed": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}
    assert steps_of(tmp_path) == [1]


def test_resuming_appends_and_steps_repeated_after_a_checkpoint_count_once(tmp_path):
    for steps, processes in (([1, 2], 1), ([3, 4], 4), ([3], 4)):
        with RunLog(tmp_path, {"processes": processes}, resume=True) as log:
            log.evaluation(steps[0] - 1, val_loss=5.0)
            write(log, steps, loss=1.0 if steps == [3] else 5.0)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')  # the run is killed
    run = read(tmp_path)
    assert steps_of(tmp_path) == [0, 1, 2, 2, 3, 4, 2, 3]
    assert run.config == {"processes": 4} and run.earlier == [{"processes": 1}]
    assert run.curve("loss") == [(1, 5.0), (2, 5.0), (3, 1.0)]
    assert run.curve("val_loss") == [(0, 5.0), (2, 5.0)]


def test_runs_get_numbered_folders_and_a_full_disk_names_the_file(tmp_path):
    folders = [next_folder(tmp_path / "runs").name for _ in range(3)]
    (tmp_path / "runs" / "1041").mkdir()
    assert [*folders, next_folder(tmp_path / "runs").name] == ["001", "002", "003", "1042"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunLog(tmp_path, {})
    for name, fail in (
        ("metrics.jsonl", lambda: write(log, [1])),
        ("events.jsonl", lambda: log.event("back", step=0)),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow
        try:
            with pytest.raises(OSError, match=name):
                fail()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.close()


def test_packages_are_imported_when_they_are_needed():
    modules = "training.text, training.entropy, training.data, training.run_folder, training.charts"
    late = {"jax", "matplotlib", "tensorboardX", "wandb"}
    code = f"import sys, {modules}, training.show; assert not {late} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# Scalars: TensorBoard's files.


def not_blocked(log, steps, seconds=20):
    """Writes steps and closes the log, in limited time."""
    thread = threading.Thread(target=lambda: (write(log, steps), log.close()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "training is blocked"


@pytest.mark.parametrize("trouble", ["a failed write", "no folder", "a clock set back by a month"])
def test_training_continues_when_tensorboard_fails(tmp_path, capsys, monkeypatch, trouble):
    log = RunLog(tmp_path, {})
    if trouble == "no folder":
        (tmp_path / "tensorboard").write_text("a file")
    write(log, [1])
    if trouble == "a failed write":
        failing = unittest.mock.Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr(tensorboardX.record_writer.RecordWriter, "write", failing)
    elif trouble == "a clock set back by a month":
        month = time.time() - 31 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: month)
    not_blocked(log, range(2, 40))
    assert steps_of(tmp_path) == list(range(1, 40))
    said = capsys.readouterr().out.count(f"in {tmp_path / 'tensorboard'}")
    assert said == (trouble != "a clock set back by a month")


def records(path):
    """Reads the records of a TFRecord file: length, its checksum, data, their checksum."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 16 + length


def test_tensorboard_has_every_scalar_and_where_a_resumed_run_begins(tmp_path):
    for resume, steps in ((False, [1, 2, 3]), (True, [3, 4])):
        with RunLog(tmp_path, {}, resume=resume) as log:
            write(log, steps)
    paths = sorted((tmp_path / "tensorboard").glob("events.*"))
    events = [event_pb2.Event.FromString(record) for path in paths for record in records(path)]
    losses = [e.step for e in events for v in e.summary.value if v.tag == "train/loss"]
    assert sorted(losses) == [1, 2, 3, 3, 4]
    starts = [e.step for e in events if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [3]


# Weights & Biases.


class Wandb(types.ModuleType):
    """A module like wandb, which keeps what it is given; a call named `trouble` fails or hangs."""

    def __init__(self, trouble=""):
        super().__init__("wandb")
        self.trouble, self.runs, self.never = trouble, [], threading.Event()

    def check(self, call):
        if self.trouble == call:
            raise ConnectionResetError("the service is gone")
        if self.trouble == f"{call} hangs":
            self.never.wait()

    def Settings(self, **given):
        return given

    def init(self, **given):
        self.check("init")
        self.runs.append({**given, "logged": [], "code": None})
        return self

    def define_metric(self, name, step_metric):
        self.runs[-1]["axis"] = step_metric

    def log(self, values):
        self.check("log")
        self.runs[-1]["logged"].append(values)

    def finish(self, exit_code):
        self.check("finish")
        self.runs[-1]["code"] = exit_code


@pytest.fixture
def wandb(monkeypatch, request):
    module = Wandb(getattr(request, "param", ""))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(scalars, "FINISH_SECONDS", 0.2)
    yield module
    module.never.set()


@pytest.mark.parametrize("wandb", ["init", "log", "log hangs", "finish hangs"], indirect=True)
def test_training_continues_when_wandb_fails_or_hangs(tmp_path, wandb, capsys, monkeypatch):
    monkeypatch.setattr(scalars, "WAITING", 10)
    log = RunLog(tmp_path, {}, wandb="zero")
    not_blocked(log, range(1, 40))
    assert steps_of(tmp_path) == list(range(1, 40))
    assert capsys.readouterr().out.count("Weights & Biases") == 1


def test_a_failed_run_is_one_at_wandb_and_nothing_infinite_is_sent(tmp_path, wandb):
    for resume in (False, True):
        with pytest.raises(KeyError), RunLog(tmp_path, {}, wandb="zero", resume=resume) as log:
            log.step(1, loss=float("inf"), grad_norm=0.5)
            raise KeyError
    first, second = wandb.runs
    assert first["code"] == 1
    assert first["logged"] == [{"train/grad_norm": 0.5, "train/skipped": 0, "step": 1}]
    assert first["id"] == second["id"] and first["project"] == "zero"
    assert (first["resume"], first["axis"], first["dir"]) == ("allow", "step", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        for module in (None, types.ModuleType("wandb")):  # not installed, or another module
            patch.setitem(sys.modules, "wandb", module)
            with pytest.raises(ValueError, match="--wandb zero"):
                scalars.import_wandb("zero")
