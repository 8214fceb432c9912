"""The page of a run holds what its folder knows, escaped, in one file that loads nothing."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from test_scalars import wandb
from test_train import HERE, TINY, folder

import training.main
import zero_jax
from training import noted, report_page
from training.config import Config
from training.main import main
from training.plan import by_stage, facts, load
from training.run_folder import RunLog, read
from training.show import human_bytes
from training.trainer import Trainer

__all__ = ["folder", "wandb"]  # fixtures

STEP = {"grad_norm": 0.5, "tokens_per_second": 1e4, "learning_rate": 1e-3}
TERMS = {"parameters": 4e9, "state": 8e9, "copy": 1e9, "gradients": 2e9}
START = {
    "unit": "byte",
    "levels": {"unigram entropy": 3.1, "bigram entropy": 2.4},
    "stage": 2,
    "stages": [TERMS, TERMS, TERMS, {**TERMS, "copy": 3e8}],
    "predicted": {"parameters": 4e9, "optimizer_state": 8e9, "work": 7e8, "host": 6e8},
    "predicted_total": 12.7e9,
    "devices": {"devices": 8, "kind": "NVIDIA H100", "processes": 2},
    "versions": {"jax": "0.10.2"},
}


def made(out):
    """The page's text, and its elements: it is XML too, so every tag is closed."""
    assert report_page.main([str(out)]) == 0
    assert not list(out.glob("*.tmp"))
    source = (out / "report.html").read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    return source, ET.fromstring(source)


def words(element):
    return " ".join(" ".join(element.itertext()).split())


def rows(root):
    """Every table's rows, as texts of their cells."""
    return [[words(cell) for cell in row] for row in root.iter("tr")]


def tiles(root):
    with_names = (d for d in root.iter("div") if d.find("dt") is not None)
    return {words(d.find("dt")): words(d.find("dd")) for d in with_names}


def drawn(root, kind):
    """Numbers of the curve of a class, in the first chart that has one, and how often it begins."""
    box = next(div for div in root.iter("div") if div.get("class") == "box")
    path = next(p.get("d") for p in box.iter("path") if p.get("class") == kind)
    points = re.findall(r"([\d.]+),([\d.]+)", path)
    return [(float(x), float(y)) for x, y in points], path.count("M")


def write(log, steps, loss=2.0, **more):
    for step in steps:
        log.step(step, loss=loss, **STEP, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all that a page shows, and its page as it is left when the log is closed."""
    out = tmp_path_factory.mktemp("whole")
    with RunLog(out, {"steps": 6, "model": "nano", "tokens_per_step": 100}) as log:
        log.event("start", **START)
        log.event("states", step=0, parameters=4_000_000_000, optimizer_state=8_100_000_000)
        write(log, range(1, 5), memory_bytes=14_200_000_000)
        log.evaluation(4, val_loss=2.75)
        log.event("checkpoint", step=4)
        log.step(5, loss=math.nan, grad_norm=math.inf, tokens_per_second=1e4, skipped=1)
        write(log, [6], loss=1.2345)
        log.evaluation(6, val_loss=1.5)
    source = (out / "report.html").read_text(encoding="utf-8")
    return out, source, ET.fromstring(source)


def test_a_page_has_the_losses_curves_and_what_went_wrong(whole):
    _, _, root = whole
    known, said, found = tiles(root), words(root), rows(root)
    assert known["Last step's loss"] == "1.2345 nats per byte"
    assert known["Held-out loss"] == "1.5000 nats per byte"
    assert known["Tokens/s"] == "10K median" and known["Skipped steps"] == "1"
    assert ["4", "2.7500"] in found and "Finished" in said
    titles = {words(h) for h in root.iter("h3")}
    assert titles >= {"Throughput", "Learning rate", "Gradient norm", "Peak memory of a device"}
    assert "unigram entropy 3.1" in said and "bigram entropy 2.4" in said
    assert said.count("step (optimizer updates)") == 5
    labels = [svg.get("aria-label") for svg in root.iter("svg") if svg.get("role") == "img"]
    assert len(labels) == 5 and all(labels)
    assert "nats per byte" in labels[0] and "held out 1.5" in labels[0]
    assert ["loss not finite", "1", "5"] in found
    assert ["gradient norm not finite", "1", "5"] in found
    assert ["skipped: no update, as gradients were not finite", "1", "5"] in found
    hovers = [words(title) for title in root.iter("title")]
    assert any("step 5 train, a step not finite skipped" in hover for hover in hovers)
    points, pieces = drawn(root, "faint a")
    assert [x for x, _ in points] == [0, 20, 40, 60, 100] and pieces == 2, "a gap at step 5"


def test_memory_is_shown_by_stage_and_beside_what_was_measured(whole):
    _, _, root = whole
    found = rows(root)
    bars = "parameters, fp32 4 GB optimizer state 8 GB gathered copy 1 GB gradients 2 GB"
    assert ["stage 0", bars, "15 GB", "4 GB", "8 GB", "1 GB", "2 GB"] in found
    assert ["stage 2, this run", bars, "15 GB", "4 GB", "8 GB", "1 GB", "2 GB"] in found
    (stage,) = [row for row in found if row[0] == "stage 3"]
    assert stage[2:] == ["14.3 GB", "4 GB", "8 GB", "300 MB", "2 GB"]
    assert ["optimizer state", "optimizer_state 8 GB", "8 GB", "8.1 GB"] in found
    assert ["total", "", "12.7 GB", "14.2 GB"] in found
    assert ["in host memory", "", "600 MB", "–"] in found
    bar = next(svg for svg in root.iter("svg") if svg.get("class") == "bar")
    parts = [(float(r.get("x")), float(r.get("width"))) for r in bar.iter("rect")]
    ends = [1000 * size / 15 for size in (0, 4, 12, 13, 15)]  # of a width of 1000
    for (left, width), (begin, end) in zip(parts, itertools.pairwise(ends), strict=True):
        assert left == pytest.approx(begin, abs=0.01) and width == pytest.approx(
            end - begin, abs=0.01
        )


def test_a_page_loads_nothing_and_nests_as_html_with_headings_and_headers(whole):
    _, source, root = whole
    assert not re.search(r"https?://|url\(|@import|<script|<link|<iframe|<img", source)
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not attributes & {"src", "href", "srcset", "data", "action"}
    assert not any(name.startswith("on") for name in attributes)
    nesting = Nesting()
    nesting.feed(source)
    assert nesting.open == []
    levels = [int(e.tag[1]) for e in root.iter() if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    for table in root.iter("table"):
        assert all(th.get("scope") == "col" for th in table.find("thead").iter("th"))
        assert all(row[0].get("scope") == "row" for row in table.find("tbody"))


class Nesting(HTMLParser):
    """Checks that tags close in the order in which they were opened."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        # HTML itself knows no other elements that end at once, but within SVG.
        assert tag == "meta" or "svg" in self.open, tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_strings_of_the_run_are_escaped(tmp_path):
    evil = "<script>alert('&amp;')</script>\x00\x1b\ud800"
    with RunLog(tmp_path / "<i>", {"model": evil, evil: [evil]}) as log:
        given = {"levels": {evil: 1.0}, "unit": evil, "versions": {evil: evil}}
        devices = {"devices": 8, "kind": evil}
        log.event("start", **{**START, **given, "devices": devices, "predicted": {evil: 1.0}})
        write(log, [1], **{evil: 1.0})
        log.event("end", error=evil, said=evil)
    source, root = made(tmp_path / "<i>")
    assert not list(root.iter("script")) and "<script" not in source
    assert words(root).count("<script>alert('&amp;')</script>") > 8
    assert words(root.find("body/main/h1")) == "Run <i>"


def test_checkpoints_are_listed_with_those_that_are_gone(tmp_path):
    with zero_jax.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(4, {"w": jnp.arange(1000.0)})
    size = sum(p.stat().st_size for p in (tmp_path / "checkpoints" / "4").rglob("*") if p.is_file())
    with RunLog(tmp_path, {}) as log:
        write(log, [1])
        log.event("checkpoint", step=2)
        log.event("checkpoint", step=4)
    found = {row[0]: row[1:] for row in rows(made(tmp_path)[1]) if row[0] in ("2", "4")}
    assert found["2"][1:] == ["–", "not there any more"]
    assert found["4"][1:] == [human_bytes(size), "whole"] and found["4"][0].endswith("UTC")
    chunk = next(p for p in (tmp_path / "checkpoints" / "4").rglob("c/*") if p.is_file())
    chunk.unlink()
    assert any("is missing" in row[-1] for row in rows(made(tmp_path)[1]) if row[0] == "4")


def test_a_resumed_run_shows_its_whole_curve_and_its_starts(tmp_path):
    for first, steps, loss, devices in ((0, [1, 2, 3], 5.0, 8), (2, [3, 4], 1.0, 4)):
        with RunLog(tmp_path, {"steps": 4, "devices": devices}, resume=True) as log:
            log.event("start", **{**START, "devices": {"devices": devices, "kind": "X"}})
            log.event("states", step=first, parameters=1, optimizer_state=1)
            write(log, steps, loss=loss)
    _, root = made(tmp_path)
    (high, *others), _ = drawn(root, "faint a")
    assert [y > high[1] for _, y in others] == [False, True, True], "steps 3 and 4 as written last"
    starts = [row for row in rows(root) if row[0].endswith("UTC")]
    assert [row[1:4] for row in starts] == [["0", "2", "8 x X"], ["2", "2", "4 x X"]]
    assert ["devices", "8", "4"] in rows(root), "a setting that changed"
    assert any("step 2" in words(t) and "went on" in words(t) for t in root.iter("title"))
    # Times without a zone are of UTC.
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text().replace("+00:00", "", 1))
    assert [row for row in rows(made(tmp_path)[1]) if row[0].endswith("UTC")] == starts


def test_folders_with_less_have_a_page_with_less(tmp_path):
    def folder(name, config=None, metrics=None):
        (tmp_path / name).mkdir()
        for file, content in (("config.json", config), ("metrics.jsonl", metrics)):
            if content is not None:
                (tmp_path / name / file).write_text(content)
        source, root = made(tmp_path / name)
        return source, root, words(root)

    known = json.dumps({"model": "nano", "hf": "Some-8B", "bigram entropy": 2.25})
    _, root, said = folder("before events", known, '{"step": 1, "loss": 2.5}\n')
    assert tiles(root)["Last step's loss"] == "2.5000 nats"
    assert "model of Some-8B" in said and "bigram entropy 2.25" in said
    assert "No end" not in said and "Memory" not in said and "Checkpoints" not in said
    for metrics in ("", '{"step": 1, "lo', None):
        source, root, _ = folder(f"settings {metrics}", '{"model": "nano", "stage": 3}', metrics)
        assert ["stage", "3"] in rows(root) and "<figure" not in source
    _, root, _ = folder("one step", None, '{"step": 7, "loss": 2.5}\n{"step": 8, "lo')
    assert drawn(root, "line a") == ([(50, 50)], 1)
    nothing = '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n{"step": 3, "loss": null}\n'
    _, root, _ = folder("not finite", None, nothing)
    assert tiles(root)["Last step's loss"] == "not finite nats"
    assert ["loss not finite", "3", "1 to 3"] in rows(root)


def test_a_run_that_was_killed_or_failed_has_a_page_that_says_so(tmp_path):
    with pytest.raises(RuntimeError), RunLog(tmp_path, {}) as log:
        log.event("start", **START)
        write(log, [1])
        assert "No end is noted" in words(made(tmp_path)[1])
        raise RuntimeError("out of <memory>\nand more")
    source = (tmp_path / "report.html").read_text()
    assert "RuntimeError: out of &lt;memory&gt;</p>" in source
    assert (tmp_path / "loss.png").exists()


def test_a_page_or_picture_that_can_not_be_made_ends_no_run(tmp_path, monkeypatch, capsys):
    with RunLog(tmp_path / "a", {}) as log:
        write(log, [1], loss=math.nan)
    assert (tmp_path / "a" / "report.html").exists() and not (tmp_path / "a" / "loss.png").exists()
    monkeypatch.setattr(report_page, "page", lambda run: 1 / 0)
    with RunLog(tmp_path / "b", {}) as log:
        write(log, [1], loss=1e308)
        write(log, [2], loss=-1e308)
    said = capsys.readouterr().out
    assert "no loss.png: " in said and "no report.html: ZeroDivisionError" in said


def test_a_long_run_keeps_its_peaks_and_a_small_page(tmp_path):
    lines = [{"step": n, "loss": 99.0 if n == 5000 else 1.0, **STEP} for n in range(1, 10_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    source, root = made(tmp_path)
    assert len(source) < 200_000
    heights = [y for _, y in drawn(root, "faint a")[0]]
    assert len(heights) <= 802 and max(heights) - min(heights) > 90


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (None, None, "neither metrics.jsonl nor config.json"),
        ("metrics.jsonl", "{}{}\n", "line 1"),
        ("metrics.jsonl", "[1]\n", "line 1"),
        ("metrics.jsonl", '{"loss": 1}\n', "step"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[1]", "not a JSON object"),
        ("config.json", '{"steps": "many"}', "`steps`"),
        ("config.json", '{"psi": [1]}', "`psi`"),
        ("config.json", '{"tokens_per_step": true}', "`tokens_per_step`"),
        ("events.jsonl", '{"event": "checkpoint", "step": [4]}', "`step`"),
        ("events.jsonl", '{"event": "start", "devices": 8}', "`devices`"),
        ("events.jsonl", '{"event": "start", "levels": [1]}', "`levels`"),
        ("events.jsonl", '{"event": "start", "versions": "x"}', "`versions`"),
    ],
)
def test_a_folder_without_a_run_and_a_damaged_file_are_named(tmp_path, capsys, name, content, said):
    if name:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
        (tmp_path / name).write_text(content + "\n" * (name == "events.jsonl"))
    assert report_page.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and (name or str(tmp_path)) in error


# What train.py notes.


def test_the_stages_are_those_of_the_planner(folder):
    """The closed forms of `zero_jax.memory`, and what the first device holds, to the byte."""
    trainer = Trainer(load(Config(data="text.txt", seq=16, batch=8, devices=8, stage=3)))
    step, shapes = trainer.predict(), trainer.shapes()
    stages = by_stage(trainer.zero, shapes, trainer.plain_tx, step.window)
    known = noted.start(step, stages, {}, "byte")
    for stage, terms in enumerate(known["stages"]):
        own = {"shards": 8, "stage": stage, "tx": trainer.plain_tx, "window": step.window}
        assert terms == zero_jax.memory.estimate(shapes, **own).terms
        psi = sum(x.size for x in jax.tree.leaves(shapes))
        assert terms["parameters"] == 4 * psi // (8 if stage else 1)  # 8 divides every leaf
    assert (
        sum(known["predicted"].values()) == known["predicted_total"] == step.predicted.total_bytes
    )
    states = trainer.init()
    held = noted.held(*states)
    for name, tree in zip(("parameters", "optimizer_state"), states, strict=True):
        pieces = [x.addressable_data(0).nbytes for x in jax.tree.leaves(tree)]
        assert held[name] == sum(pieces)
    for name in ("parameters", "optimizer_state"):
        assert held[name] == known["predicted"][name] == step.predicted.terms[name]
    assert known["versions"]["jax"] == jax.__version__
    assert known["devices"]["devices"] == jax.device_count() == 8


def test_two_starts_of_train_py_leave_one_page_and_one_run_at_wandb(folder, capsys, wandb):
    args = [*TINY, *HERE, "--sample-length", "0", "--checkpoint-every", "2", "--out", "out"]
    args += ["--wandb", "zero"]
    assert main(args) == 0
    assert main([*args, "--steps", "6"]) == 0
    said, run = capsys.readouterr().out, read("out")
    starts = [["start", "states", *["checkpoint"] * n, "end"] for n in (2, 1)]
    assert [event["event"] for event in run.events] == [*starts[0], *starts[1]]
    root = ET.fromstring((folder / "out" / "report.html").read_text())
    last = [line["val_loss"] for line in run.evaluations][-1]
    assert tiles(root)["Held-out loss"] == f"{last:.4f} nats per byte"
    assert [saved.step for saved in run.checkpoints] == [2, 4, 6]
    assert all(not saved.problem and saved.nbytes for saved in run.checkpoints)
    stage = next(row for row in rows(root) if row[0] == "stage 3, this run")
    printed = next(x for x in said.splitlines() if x.split()[:1] == ["total"])
    assert stage[2] in printed and "unigram entropy" in words(root)
    first, second = wandb.runs
    assert first["id"] == second["id"] and first["project"] == "zero" and first["dir"] == "out"
    assert (first["config"]["steps"], second["config"]["steps"]) == (4, 6)
    assert (first["resume"], first["axis"]) == ("allow", "step")
    assert first["code"] == second["code"] == 0
    sent = [
        {k.split("/")[-1]: v for k, v in x.items()} for own in wandb.runs for x in own["logged"]
    ]
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert sent == [json.loads(line) for line in lines]


def test_the_compiled_step_is_shown_and_another_is_refused(folder, capsys):
    trainer = Trainer(load(Config(data="text.txt", seq=16, batch=8, devices=8)))
    step = trainer.predict()
    stages = by_stage(trainer.zero, trainer.shapes(), trainer.plain_tx, step.window)
    noted_before = noted.start(step, stages, {}, "byte")
    settings = facts(trainer.plan, trainer.zero, trainer.shapes())
    with RunLog(folder / "run", settings) as log:
        log.event("start", **noted_before)
    assert report_page.main(["run", "--compile"]) == 0
    audit = trainer.predict(compile=True).compiled
    _, root = made(folder / "run")
    assert f"XLA gives it {human_bytes(audit.total_bytes)}, and" in words(root)
    largest = human_bytes(audit.peak.temporaries[0].bytes)
    assert largest in [row[1] for row in rows(root) if len(row) == 3]

    with RunLog(folder / "run", settings, resume=True) as log:
        log.event("start", **noted_before | {"predicted_total": 1})
    assert "XLA gives it" not in words(made(folder / "run")[1]), "of another step"
    assert report_page.main(["run", "--compile"]) == 2
    assert "and the run noted 1: go where its devices" in capsys.readouterr().err


def test_a_step_is_not_compiled_for_other_devices_nor_without_a_plan(folder, capsys, monkeypatch):
    RunLog(folder / "run", {"devices": 4}).close()
    assert report_page.main(["run", "--compile"]) == 2
    assert "does not say what was predicted" in capsys.readouterr().err
    with RunLog(folder / "run", {"devices": 16, "mesh": {"data": 16}}) as log:
        log.event("start", **START)
    # GPUs are as many as there are; a CPU is cut into as many devices as the run had.
    monkeypatch.setattr(training.main, "join", lambda config: None)
    assert report_page.main(["run", "--compile"]) == 2
    assert "ran on 16 devices, and here are 8" in capsys.readouterr().err
