"""The folder of a run, its scalars, which never block it, and its page, which loads nothing."""

import itertools
import json
import math
import re
import resource
import sys
import threading
import time
import types
import unittest.mock
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import tensorboardX.record_writer

from training import report_page, scalars
from training.run_folder import RunFolder, RunLog, finite, next_folder

pytestmark = pytest.mark.usefixtures("no_picture")
STEP = {"grad_norm": 0.5, "tokens_per_second": 1e4}


def write(log, steps, loss=2.0, **more):
    for step in steps:
        log.step(step, loss=loss, **STEP, **more)


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_a_run_leaves_config_metrics_tensorboard_picture_and_page(tmp_path, no_picture):
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
    assert RunFolder(out).config == {"path": "x", "clip": None, "betas": [0.9, 0.5]}
    step = {"loss": 2.0, "grad_norm": 0.5, "skipped": 0}
    assert lines(out) == [
        *({"step": n, **step, "tokens_per_second": 1e4} for n in (1, 2)),
        *({"step": 2, "val_loss": 2.5}, {"step": 3, "loss": None, "grad_norm": None, "skipped": 1}),
        {"step": 4, **step},
    ]
    assert finite(RunFolder(out).curve("loss")) == [(1, 2.0), (2, 2.0), (4, 2.0)]
    assert list((out / "tensorboard").glob("events.*")) and (out / "report.html").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_runs_have_folders_of_their_own_and_other_processes_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "new", tmp_path / "file"):
        with RunLog(out, {}, enabled=False, wandb="project") as log:
            write(log, [1])
            log.evaluation(1, val_loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    RunLog(tmp_path / "run", {"seed": 0}).close()  # it ended before its first step
    with RunLog(tmp_path / "run", {"seed": 1}) as log:
        write(log, [1])
        with pytest.raises(ValueError, match="another run"):
            RunLog(tmp_path / "run", {"seed": 2}, resume=True)
    for out in ("file", "file/below", "run"):
        with pytest.raises(ValueError, match="--output-dir"):
            RunLog(tmp_path / out, {"seed": 2})
    assert RunFolder(tmp_path / "run").config == {"seed": 1} and len(lines(tmp_path / "run")) == 1
    folders = [next_folder(tmp_path / "runs").name for _ in range(3)]
    (tmp_path / "runs" / "1041").mkdir()
    assert [*folders, next_folder(tmp_path / "runs").name] == ["001", "002", "003", "1042"]
    denied = unittest.mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop a root user
    with pytest.raises(ValueError, match=r"Permission denied.*--output-dir"):
        RunLog(tmp_path, {})


def test_resuming_appends_and_steps_repeated_after_a_checkpoint_count_once(tmp_path):
    for steps, processes in (([1, 2], 1), ([3, 4], 4), ([3], 4)):
        with RunLog(tmp_path, {"processes": processes}, resume=True) as log:
            log.evaluation(steps[0] - 1, val_loss=5.0)
            write(log, steps, loss=1.0 if steps == [3] else 5.0)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')  # the run is killed
    run = RunFolder(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 2, 3, 4, 2, 3]
    assert run.config == {"processes": 4} and run.earlier == [{"processes": 1}]
    assert run.curve("loss") == [(1, 5.0), (2, 5.0), (3, 1.0)]
    assert run.curve("val_loss") == [(0, 5.0), (2, 5.0)]
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("events.*"))
    assert events.count(b"train/loss") == 5
    assert events.count(b":\x02\x08\x01") == 2, "SessionLog(status=START), where it resumes"
    # A full disk names the file.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(tmp_path / "full", {}) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow
        try:
            for write_one, name in ((log.step, "metrics.jsonl"), (log.event, "events.jsonl")):
                with pytest.raises(OSError, match=name):
                    write_one(1, loss=2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def wandb(monkeypatch, request):
    """A module like wandb; a call that the parameter names fails or hangs."""
    module, never = unittest.mock.Mock(trouble=getattr(request, "param", "")), threading.Event()
    module.init.return_value = module
    call, _, hangs = module.trouble.partition(" ")
    if call in ("init", "log", "finish"):
        fail = (lambda *_, **__: never.wait()) if hangs else ConnectionResetError("gone")
        getattr(module, call).side_effect = fail
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(scalars, "FINISH_SECONDS", 0.2)
    yield module
    never.set()


TROUBLE = ["init", "log", "log hangs", "finish hangs", "write", "flush", "no folder", "clock"]


@pytest.mark.parametrize("wandb", TROUBLE, indirect=True)
def test_training_continues_when_scalars_fail_or_hang(tmp_path, wandb, capsys, monkeypatch):
    monkeypatch.setattr(scalars, "WAITING", 10 if "hangs" in wandb.trouble else scalars.WAITING)
    log, month = RunLog(tmp_path, {}, wandb="zero"), time.time() - 31 * 24 * 3600
    if wandb.trouble == "no folder":
        (tmp_path / "tensorboard").write_text("a file")
    write(log, [1])
    if wandb.trouble in ("write", "flush"):
        errors = {"write": OSError(28, "No space left on device"), "flush": TypeError("bytes")}
        failing = unittest.mock.Mock(side_effect=errors[wandb.trouble])
        monkeypatch.setattr(tensorboardX.record_writer.RecordWriter, wandb.trouble, failing)
    elif wandb.trouble == "clock":  # set back by a month
        monkeypatch.setattr(time, "time", lambda: month)
    rest = threading.Thread(target=lambda: (write(log, range(2, 40)), log.close()), daemon=True)
    rest.start()
    rest.join(20)
    assert not rest.is_alive(), "training is blocked"
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 40))
    said = capsys.readouterr().out
    assert said.count("Weights & Biases") == (wandb.trouble in TROUBLE[:4])
    assert said.count(f"in {tmp_path / 'tensorboard'}") == (wandb.trouble in TROUBLE[4:7])


def test_a_failed_run_is_one_at_wandb_and_nothing_infinite_is_sent(tmp_path, wandb, monkeypatch):
    for resume in (False, True):
        with pytest.raises(KeyError), RunLog(tmp_path, {}, wandb="zero", resume=resume) as log:
            log.step(1, loss=float("inf"), grad_norm=0.5)
            raise KeyError
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    known = {"project": "zero", "resume": "allow", "dir": str(tmp_path)}
    assert first == second == first | known
    assert wandb.define_metric.call_args == unittest.mock.call("*", step_metric="step")
    assert wandb.finish.call_args == unittest.mock.call(exit_code=1)
    sent = {"train/grad_norm": 0.5, "train/skipped": 0, "step": 1}
    assert wandb.log.call_args_list == [unittest.mock.call(sent)] * 2
    for module in (None, types.ModuleType("wandb")):  # not installed, or another module
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(ValueError, match="--wandb-project zero"):
            scalars.import_wandb("zero")


TERMS = {"parameters": 4e9, "state": 8e9, "copy": 1e9, "gradients": 2e9}
START = {"unit": "byte", "levels": {"unigram entropy": 3.1, "bigram entropy": 2.4}, "stage": 2,
         "stages": [TERMS, TERMS, TERMS, {**TERMS, "copy": 3e8}], "predicted_total": 12.7e9,
         "predicted": {"parameters": 4e9, "optimizer_state": 8e9, "work": 7e8, "host": 6e8},
         "devices": {"devices": 8, "kind": "NVIDIA H100", "processes": 2},
         "versions": {"jax": "0.10.2"}}  # fmt: skip
DAMAGED = [(None, None, "metrics.jsonl"), ("metrics.jsonl", "{}{}\n", "line 1"),
           ("metrics.jsonl", "[1]\n", "line 1"), ("metrics.jsonl", '{"loss": 1}\n', "step"),
           ("config.json", "{", "config.json"), ("config.json", "[1]", "[1]"),
           ("events.jsonl", "{}\n{\n", "line 2")]  # fmt: skip


def made(out):
    """The page's text, and its elements: it is XML too, so every tag is closed."""
    assert report_page.main([str(out)]) == 0
    source = (out / "report.html").read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    return source, ET.fromstring(source)


def words(element):
    return " ".join(" ".join(element.itertext()).split())


def rows(root):
    return [[words(cell) for cell in row] for row in root.iter("tr")]


def drawn(root, kind):
    """Points of the first curve of a class, and how often it begins."""
    path = root.find(f".//div[@class='box']//path[@class='{kind}']").get("d")
    points = re.findall(r"([\d.]+),([\d.]+)", path)
    return [(float(x), float(y)) for x, y in points], path.count("M")


def test_a_page_has_losses_curves_memory_and_what_went_wrong_and_loads_nothing(tmp_path):
    with RunLog(tmp_path, {"max_steps": 6, "model": "nano", "tokens_per_step": 100}) as log:
        log.event("start", **START)
        log.event("states", step=0, parameters=4_000_000_000, optimizer_state=8_100_000_000)
        write(log, range(1, 5), memory_bytes=14_200_000_000, learning_rate=1e-3)
        log.evaluation(4, val_loss=2.75)
        log.step(5, loss=math.nan, grad_norm=math.inf, tokens_per_second=1e4, skipped=1)
        write(log, [6], loss=1.2345)
        log.evaluation(6, val_loss=1.5)
    source, root = made(tmp_path)
    said, found = words(root), rows(root)
    for text in (
        "Last step's loss 1.2345 nats per byte", "Held-out loss 1.5000 nats per byte", "4 2.7500",
        "Tokens/s 10K median", "Skipped steps 1", "Finished", "unigram entropy 3.1",
        "bigram entropy 2.4",
    ):  # fmt: skip
        assert text in said, text
    assert said.count("step (optimizer updates)") == 5
    for name in ("loss not finite", "gradient norm not finite", "skipped"):
        assert any(row[0].startswith(name) and row[1:] == ["1", "5"] for row in found), name
    assert any("step 5 train, per step not finite skipped" in words(t) for t in root.iter("title"))
    points, pieces = drawn(root, "faint a")
    assert [x for x, _ in points] == [0, 20, 40, 60, 100] and pieces == 2, "a gap at step 5"
    bars = "parameters, fp32 4 GB optimizer state 8 GB gathered copy 1 GB gradients 2 GB"
    assert ["stage 2, this run", bars, "15 GB", "4 GB", "8 GB", "1 GB", "2 GB"] in found
    (stage,) = [row[2:] for row in found if row[0] == "stage 3"]
    assert stage == ["14.3 GB", "4 GB", "8 GB", "300 MB", "2 GB"]
    assert ["optimizer state", "optimizer_state 8 GB", "8 GB", "8.1 GB"] in found
    assert ["total", "", "12.7 GB", "14.2 GB"] in found
    assert ["in host memory", "", "600 MB", "–"] in found
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe|<img", source)
    assert not {"src", "href", "srcset", "data"} & {name for x in root.iter() for name in x.attrib}
    levels = [int(e.tag[1]) for e in root.iter() if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1 and all(1 < b <= a + 1 for a, b in itertools.pairwise(levels))
    assert {th.get("scope") for th in root.iterfind(".//thead//th")} == {"col"}
    assert {row[0].get("scope") for row in root.iterfind(".//tbody/tr")} == {"row"}


def test_folders_with_less_have_a_page_with_less_and_long_runs_a_small_one(tmp_path):
    def page(metrics):
        (tmp_path / "metrics.jsonl").write_text(metrics)
        return made(tmp_path)

    _, root = page('{"step": 7, "loss": 2.5}\n{"step": 8, "lo')
    assert drawn(root, "line a") == ([(50, 50)], 1)
    assert "Last step's loss 2.5000 nats" in words(root)
    assert not re.search("No end|Memory|Checkpoints", words(root))
    nothing = '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n{"step": 3, "loss": null}\n'
    _, root = page(nothing)
    assert "Last step's loss not finite nats" in words(root)
    assert ["loss not finite", "3", "1 to 3"] in rows(root)
    # A long run keeps its peaks. The axis is logarithmic, from 0.1 to 100.
    losses = [99.0 if n == 5000 else 0.2 for n in range(10_000)]
    source, root = page("".join(f'{{"step": {n}, "loss": {x}}}\n' for n, x in enumerate(losses)))
    heights = [y for _, y in drawn(root, "faint a")[0]]
    assert len(source) < 200_000 and len(heights) <= 802
    ends = [100 * math.log10(100 / loss) / 3 for loss in (99.0, 0.2)]
    assert [min(heights), max(heights)] == pytest.approx(ends, abs=0.01)


def test_pages_of_failed_runs_and_failed_pages(tmp_path, monkeypatch, capsys, no_picture):
    no_picture.undo()
    evil = "<script>alert('&amp;')</script>\x00\x1b\ud800"
    evils = {"unit": evil, "levels": {evil: 1.0}, "versions": {evil: evil}}
    with pytest.raises(RuntimeError), RunLog(tmp_path / "a", {"model": evil, evil: [evil]}) as log:
        log.event("start", **START | evils)
        write(log, [1], loss=math.nan, **{evil: 1.0})
        assert "No end is recorded" in words(made(tmp_path / "a")[1])
        raise RuntimeError("out of <memory>\nand more")
    source = (tmp_path / "a" / "report.html").read_text()
    assert "RuntimeError: out of &lt;memory&gt;</p>" in source
    assert "<script" not in source and source.count("&lt;script&gt;alert(") > 4
    assert not (tmp_path / "a" / "loss.png").exists(), "no loss is finite"
    monkeypatch.setattr(report_page, "page", lambda run: 1 / 0)
    with RunLog(tmp_path / "b", {}) as log:
        write(log, [1], loss=1e308)
        write(log, [2], loss=-1e308)
    said = capsys.readouterr().out
    assert "loss.png is not" in said and "report.html is not written: ZeroDivisionError" in said
    with RunLog(tmp_path / "c", {}) as log:
        log.evaluation(1, val_loss=2.0)
    assert (tmp_path / "c" / "loss.png").exists()


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED)
def test_a_folder_without_a_run_and_a_damaged_file_are_named(tmp_path, capsys, name, content, said):
    if name:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
        (tmp_path / name).write_text(content)
    assert report_page.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and (name or str(tmp_path)) in error
