"""A run's folder holds all it said, and nothing of another run; the screen shows what matters."""

import io
import json
import math
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from training import show
from training.report import RunLog, next_folder, read_losses
from training.show import Speed, human_bytes, human_count, print_table, progress

PNG = b"\x89PNG"


def write(log, steps, loss=2.0):
    for step in steps:
        log.step(step, loss=loss, grad_norm=0.5, tokens_per_second=1e4)


def lines(folder):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_run_leaves_config_metrics_tensorboard_and_picture(tmp_path):
    out = tmp_path / "runs" / "a"
    with RunLog(out, {"stage": 3, "path": Path("x")}, levels={"bigram": 2.4}) as log:
        write(log, [1, 2])
        log.evaluation(2, val_loss=2.5)
    assert json.loads((out / "config.json").read_text()) == {"stage": 3, "path": "x"}
    step = {"loss": 2.0, "grad_norm": 0.5, "tokens_per_second": 1e4, "skipped": 0}
    assert lines(out) == [{"step": 1, **step}, {"step": 2, **step}, {"step": 2, "val_loss": 2.5}]
    assert list((out / "tensorboard").glob("events.*"))
    assert (out / "loss.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("trouble", ["a failed write", "no folder", "a clock set back by a month"])
def test_training_goes_on_with_all_metrics_when_tensorboard_can_write_no_more(
    tmp_path, capsys, monkeypatch, trouble
):
    """Said once. Its writer is no thread behind a queue that fills up."""
    log = RunLog(tmp_path, {})
    if trouble == "no folder":
        (tmp_path / "tensorboard").write_text("a file")
    write(log, [1])
    if trouble == "a failed write":

        def fail(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(log._writer._file, "write", fail)
    elif trouble == "a clock set back by a month":
        month = time.time() - 31 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: month)
    done = threading.Thread(target=write, args=(log, range(2, 40)), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive(), "training is blocked"
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 40))
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


def test_each_line_is_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path, {})
    for count in (1, 2, 3):
        write(log, [count])
        assert len(lines(tmp_path)) == count
    log.close()


def test_numbers_that_are_not_finite_are_null_in_valid_json(tmp_path):
    with RunLog(tmp_path, {"clip": math.inf, "betas": (0.9, np.float32(0.5))}) as log:
        log.step(1, loss=math.nan, grad_norm=math.inf, tokens_per_second=1.0, skipped=True)
        write(log, [2])
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["grad_norm"]) == (None, None)
    assert lines(tmp_path)[0]["skipped"] == 1
    assert json.loads((tmp_path / "config.json").read_text()) == {"clip": None, "betas": [0.9, 0.5]}
    assert read_losses(tmp_path / "metrics.jsonl") == ([(2, 2.0)], [])


def test_array_scalars_are_taken_as_numbers(tmp_path):
    with RunLog(tmp_path, {}) as log:
        log.step(
            np.int32(1),
            loss=np.float32(2),
            grad_norm=np.array(0.5, np.float32),
            tokens_per_second=1,
            skipped=np.bool_(True),
        )
    assert lines(tmp_path)[0]["loss"] == 2.0
    assert lines(tmp_path)[0]["skipped"] == 1


def test_other_processes_write_nothing_even_where_they_could_not(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "new", tmp_path / "file"):
        with RunLog(out, {}, enabled=False) as log:
            write(log, [1])
            log.evaluation(1, val_loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_out_that_is_a_file_is_refused_at_construction(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write a run to .*--out needs a folder"):
        RunLog(tmp_path / out, {})


def test_unwritable_out_is_refused_at_construction(tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop a root user
    with pytest.raises(ValueError, match=r"Permission denied.*where you may write"):
        RunLog(tmp_path, {})


def test_a_folder_of_another_run_is_not_mixed_and_not_touched(tmp_path):
    with RunLog(tmp_path, {"seed": 1}) as log:
        write(log, [1])
    with pytest.raises(ValueError, match=r"already holds.*another --out, or resume"):
        RunLog(tmp_path, {"seed": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}
    assert len(lines(tmp_path)) == 1


def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(tmp_path):
    RunLog(tmp_path, {}).close()
    assert not (tmp_path / "loss.png").exists()
    with RunLog(tmp_path, {}) as log:
        write(log, [1])
    assert len(lines(tmp_path)) == 1


def test_resuming_appends_and_keeps_the_earlier_config(tmp_path):
    for steps, processes in (([1, 2], 1), ([3, 4], 4), ([5], 4)):
        with RunLog(tmp_path, {"processes": processes}, resume=True) as log:
            write(log, steps)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "config.json").read_text()) == {"processes": 4}
    assert json.loads((tmp_path / "config.1.json").read_text()) == {"processes": 1}
    assert not (tmp_path / "config.2.json").exists()


def test_resuming_after_a_kill_drops_the_half_written_line(tmp_path):
    with RunLog(tmp_path, {}) as log:
        write(log, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with RunLog(tmp_path, {}, resume=True) as log:
        write(log, [2])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_steps_repeated_after_a_checkpoint_count_once_as_written_last(tmp_path):
    with RunLog(tmp_path, {}) as log:
        write(log, [1, 2], loss=5.0)
        log.evaluation(2, val_loss=5.0)
        write(log, [3, 4], loss=5.0)
        log.evaluation(4, val_loss=5.0)
    with RunLog(tmp_path, {}, resume=True) as log:  # from a checkpoint after step 2
        write(log, [3], loss=1.0)
    train, val = read_losses(tmp_path / "metrics.jsonl")
    assert train == [(1, 5.0), (2, 5.0), (3, 1.0)]
    assert val == [(2, 5.0)]


def test_evaluation_before_the_first_step_is_kept(tmp_path):
    with RunLog(tmp_path, {}) as log:
        log.evaluation(0, val_loss=5.5)
        write(log, [0, 1])
    assert read_losses(tmp_path / "metrics.jsonl")[1] == [(0, 5.5)]


def test_a_run_that_fails_still_gets_its_picture(tmp_path):
    def fail():
        with RunLog(tmp_path, {}) as log:
            write(log, [1])
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert (tmp_path / "loss.png").exists()


def test_every_run_gets_a_numbered_folder_of_its_own(tmp_path):
    folders = [next_folder(tmp_path / "runs") for _ in range(3)]
    assert [folder.name for folder in folders] == ["001", "002", "003"]
    (tmp_path / "runs" / "1041").mkdir()
    assert next_folder(tmp_path / "runs").name == "1042"


def test_matplotlib_is_imported_only_for_the_picture():
    code = "import sys, training.report; assert not {'matplotlib', 'tensorboardX'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_progress_in_a_file_is_a_plain_line_every_tenth(capsys):
    with progress(200) as show:
        for step in range(1, 201):
            show(step, loss=2.5, tokens_per_second=12345)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 10
    assert out[0].startswith("step 20/200  loss 2.5000  12.3K tokens/s")
    assert out[-1].endswith("0:00:00 left")
    assert all(line.isprintable() for line in out)


def test_progress_of_a_resumed_run_goes_on_where_it_was(capsys):
    with progress(100, start=50) as show:
        for step in range(51, 101):
            show(step, loss=1.0, tokens_per_second=1.0)
    assert capsys.readouterr().out.splitlines()[0].startswith("step 60/100")


def test_progress_shows_a_bar_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress(4) as show:
        show(4, loss=2.5, tokens_per_second=5e6)
    assert "step 4/4" in screen.getvalue()
    assert "loss 2.5000  5M tokens/s" in screen.getvalue()
    assert "\x1b[" in screen.getvalue()


def test_progress_of_other_processes_is_silent(capsys):
    with progress(2, enabled=False) as show:
        show(2, loss=1.0, tokens_per_second=1.0)
    assert capsys.readouterr().out == ""


def test_speed_is_that_of_the_last_steps_without_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    speed = Speed(tokens_per_step=100, window=2)

    def after(seconds):
        now[0] += seconds
        return speed.tick()

    assert [after(10), after(10), after(1), after(1)] == [10, 10, 200 / 11, 100]
    now[0] += 1000
    speed.restart()
    assert after(2) == 50


def test_table_is_not_cut_off_or_read_as_markup_in_a_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "['params']['blocks'][0]['attention']['query']['kernel']"
    print_table("memory [GB]", ["leaf", "bytes"], [[path, "1.5 GB"], ["[red]x", 2]])
    out = capsys.readouterr().out
    assert "memory [GB]" in out
    assert "[red]x" in out
    assert any(path in line and "1.5 GB" in line for line in out.splitlines())


def test_bytes_are_decimal_as_in_the_paper():
    # 7.5e9 parameters at 16 bytes: 120 GB without partitioning, Figure 1 of the paper
    assert human_bytes(7.5e9 * 16) == "120 GB"
    assert human_bytes(7.5e9 * 16 / 64) == "1.88 GB"  # the paper rounds to 1.9
    assert [human_bytes(n) for n in (0, 512, 1000)] == ["0 B", "512 B", "1 kB"]


def test_human_numbers_round_into_the_next_unit():
    assert human_count(999_499) == "999K"
    assert human_count(999_600) == "1M"
    assert human_bytes(999.9) == "1 kB"
    assert human_count(-1500) == "-1.5K"
    assert human_count(1e18) == "1000000T"
    assert [human_count(n) for n in (0, 0.25, math.nan, math.inf)] == ["0", "0.25", "nan", "inf"]
