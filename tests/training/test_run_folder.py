"""The folder of a run holds all its numbers, and none of another run."""

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.run_folder import RunLog, finite, next_folder, read


def write(log, steps, loss=2.0):
    for step in steps:
        log.step(step, loss=loss, grad_norm=0.5, tokens_per_second=1e4)


def lines(folder):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_run_leaves_config_metrics_tensorboard_picture_and_page(tmp_path):
    out = tmp_path / "runs" / "a"
    with RunLog(out, {"stage": 3, "path": Path("x")}) as log:
        for count in (1, 2):
            write(log, [count])
            assert len(lines(out)) == count, "flushed at once"
        log.evaluation(2, val_loss=2.5)
    assert json.loads((out / "config.json").read_text()) == {"stage": 3, "path": "x"}
    step = {"loss": 2.0, "grad_norm": 0.5, "tokens_per_second": 1e4, "skipped": 0}
    assert lines(out) == [{"step": 1, **step}, {"step": 2, **step}, {"step": 2, "val_loss": 2.5}]
    assert list((out / "tensorboard").glob("events.*")) and (out / "report.html").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_are_valid_json(tmp_path):
    """Infinities and NaN are null; array scalars are numbers."""
    with RunLog(tmp_path, {"clip": math.inf, "betas": (0.9, np.float32(0.5))}) as log:
        log.step(1, loss=math.nan, grad_norm=math.inf, skipped=np.bool_(True), balance=None)
        log.step(np.int32(2), loss=np.float32(2), grad_norm=np.array(0.5, np.float32))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"clip": None, "betas": [0.9, 0.5]}
    assert lines(tmp_path)[0] == {"step": 1, "loss": None, "grad_norm": None, "skipped": 1}
    assert lines(tmp_path)[1] == {"step": 2, "loss": 2.0, "grad_norm": 0.5, "skipped": 0}
    assert finite(read(tmp_path).curve("loss")) == [(2, 2.0)]


def test_other_processes_write_nothing_even_where_they_could_not(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "new", tmp_path / "file"):
        with RunLog(out, {}, enabled=False, wandb="project") as log:
            write(log, [1])
            log.evaluation(1, val_loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_can_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        with pytest.raises(ValueError, match="--out"):
            RunLog(tmp_path / out, {})

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop a root user
    with pytest.raises(ValueError, match=r"Permission denied.*--out"):
        RunLog(tmp_path, {})


def test_a_folder_of_another_run_is_not_mixed_and_not_changed(tmp_path):
    RunLog(tmp_path, {"seed": 0}).close()  # it ended before its first step
    with RunLog(tmp_path, {"seed": 1}) as log:
        write(log, [1])
        with pytest.raises(ValueError, match="another run writes"):
            RunLog(tmp_path, {"seed": 2}, resume=True)
    with pytest.raises(ValueError, match="--out"):
        RunLog(tmp_path, {"seed": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}
    assert len(lines(tmp_path)) == 1


def test_resuming_appends_and_keeps_the_earlier_config(tmp_path):
    for steps, processes in (([1, 2], 1), ([3, 4], 4), ([5], 4)):
        with RunLog(tmp_path, {"processes": processes}, resume=True) as log:
            write(log, steps)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')  # the run is killed
    assert [line["step"] for line in lines_but_last(tmp_path)] == [1, 2, 3, 4, 5]
    assert read(tmp_path).config == {"processes": 4}
    assert read(tmp_path).earlier == [{"processes": 1}]


def lines_but_last(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_steps_repeated_after_a_checkpoint_count_once_as_written_last(tmp_path):
    with RunLog(tmp_path, {}) as log:
        log.evaluation(0, val_loss=5.5)
        write(log, [0, 1, 2], loss=5.0)
        log.evaluation(2, val_loss=5.0)
        write(log, [3, 4], loss=5.0)
        log.evaluation(4, val_loss=5.0)
    with RunLog(tmp_path, {}, resume=True) as log:  # from a checkpoint after step 2
        write(log, [3], loss=1.0)
    run = read(tmp_path)
    assert run.curve("loss") == [(0, 5.0), (1, 5.0), (2, 5.0), (3, 1.0)]
    assert run.curve("val_loss") == [(0, 5.5), (2, 5.0)]


def test_every_run_gets_a_numbered_folder_of_its_own(tmp_path):
    folders = [next_folder(tmp_path / "runs") for _ in range(3)]
    assert [folder.name for folder in folders] == ["001", "002", "003"]
    (tmp_path / "runs" / "1041").mkdir()
    assert next_folder(tmp_path / "runs").name == "1042"


def test_a_disk_that_is_full_ends_the_run_with_the_name_of_the_file(tmp_path):
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


def test_packages_for_pictures_and_scalars_are_imported_when_they_are_needed():
    code = "import sys, training.run_folder, training.charts; "
    code += "assert not {'matplotlib', 'tensorboardX', 'wandb'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
