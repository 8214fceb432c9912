"""The page of a run: `report.html`, one file to open in a browser, made from what is in its folder.

    python -m training.report_page runs/001

makes it anew, also of a run that is going on or was killed. A part is shown where there is
something to show. Nothing is loaded: no script, no font, no picture.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np

from training import page_history, page_memory
from training.charts import Line, Words, curves, shown, text
from training.page_history import moment
from training.page_style import STYLE
from training.page_tables import section, table
from training.report import running_mean
from training.run_folder import Points, RunFolder, number, read, when
from training.show import human_bytes, human_count

FILE = "report.html"
COMPILE = "compile the step once more, for the largest temporaries; needs the run's devices"
NAMED = 60  # stretches of steps of which each is named
KNOWN = {"step", "loss", "grad_norm", "tokens_per_second", "skipped", "step_seconds"}
KNOWN |= {"learning_rate", "memory_bytes"}
SMOOTH = {"tokens_per_second", "learning_rate", "memory_bytes"}  # and not below 0


def main(args: Sequence[str] | None = None) -> int:
    """Writes the page of a run; returns 2 if there is no run."""
    parser = argparse.ArgumentParser("python -m training.report_page", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="of the run, as runs/001")
    parser.add_argument("--compile", action="store_true", help=COMPILE)
    given = parser.parse_args(args)
    try:
        if given.compile:
            from training.compiled_step import compile_step  # here: it begins JAX

            compile_step(read(given.folder))
        print(write(given.folder))
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0


def write(folder: str | Path) -> Path:
    """Writes `report.html` into the folder of a run, and returns its path.

    Raises:
        ValueError: There is no run in it, or a file of it is damaged.
    """
    path = Path(folder, FILE)
    made = page(read(folder))
    beside = path.with_suffix(".tmp")  # a browser that loads it meanwhile sees the whole old one
    beside.write_text(made, encoding="utf-8")
    os.replace(beside, path)
    return path


def page(run: RunFolder) -> str:
    """The page, as a document that is HTML and XML."""
    name = text(run.path.resolve().name)
    parts = [_summary, _losses, _others, _odd_steps, page_memory.memory]
    parts += [page_history.checkpoints, page_history.starts, page_history.settings]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>Run {name}</title><style>{STYLE}</style></head>\n<body><main>"
        f"<h1>Run {name}</h1>{_state(run)}\n" + "\n".join(part(run) for part in parts) + "\n"
        "</main></body></html>\n"
    )


def _state(run: RunFolder) -> str:
    """What became of the run, in a sentence."""
    known = run.config
    what = [f"{name} {known[name]}" for name in ("model", "optimizer") if name in known]
    if known.get("hf") and "model" in known:
        what[0] = f"model of {known['hf']}"
    if "corpus" in known:
        what.append(f"on {known['corpus']}")
    said = f'<p class="muted">{text(", ".join(what))}</p>' if what else ""
    return said + (_end(run) if run.events else "")


def _end(run: RunFolder) -> str:
    """How it ended and when, or that nobody knows."""
    since, end = when(run.last("start")), run.events[-1]
    until = when(end)
    if end.get("event") != "end":
        return "<p>No end is noted: the run is going on, or was killed.</p>"
    took = f", {_duration(until - since)} after its start" if since and until else ""
    if end.get("error") is None:
        return f"<p>Finished {moment(until)}{took}.</p>"
    stopped = end["error"] == "Stopped"
    why = "it was stopped" if stopped else f"{end['error']}: {end.get('said', '')}"
    return f'<p class="warn">Ended early {moment(until)}{took}: {text(why)}</p>'


def _summary(run: RunFolder) -> str:
    rows: list[tuple[str, str, str]] = []
    done, config = (run.steps[-1]["step"] if run.steps else None), run.config
    if done is not None:
        rows.append(("Steps", f"{done:,}", f"of {config['steps']:,}" if "steps" in config else ""))
    for name, title in (("val_loss", "Held-out loss"), ("loss", "Last step's loss")):
        if curve := run.curve(name):
            rows.append((title, shown(curve[-1][1], _loss), _unit(run)))
    if rates := _finite(run.curve("tokens_per_second")):
        rows.append(("Tokens/s", human_count(statistics.median(rates)), "median"))
    if done is not None and isinstance(config.get("tokens_per_step"), int):
        rows.append(("Tokens seen", human_count(done * config["tokens_per_step"]), ""))
    if run.steps:
        rows.append(("Skipped steps", f"{len(_skipped(run)):,}", ""))
    if isinstance(config.get("psi"), int):
        rows.append(("Parameters", human_count(config["psi"]), ""))
    if "stage" in config:
        devices = f"on {config['devices']} devices" if "devices" in config else ""
        rows.append(("ZeRO stage", str(config["stage"]), devices))
    cells = (
        f"<div><dt>{text(a)}</dt><dd>{text(b)} <small>{text(c)}</small></dd></div>"
        for a, b, c in rows
    )
    return f"<dl>{''.join(cells)}</dl>" if rows else ""


def _losses(run: RunFolder) -> str:
    train, held_out = run.curve("loss"), run.curve("val_loss")
    if not train and not held_out:
        return ""
    lines = _two(train, "train, a step", "train, mean") if train else []
    if held_out:
        lines.append(Line("held out", held_out, "b", "dots"))
    said = [f"{line.name} {_ends(line.points, _loss)}" for line in lines[-2:]]
    marks = {"skipped": _skipped(run), "went on": _resumed(run)}
    unit = _unit(run)
    chart = curves(
        *("Training and held-out text", lines, lambda value: f"{value:.4g}"),
        **{"unit": unit, "said": f"Loss in {unit}: {'; '.join(said)}", "levels": _levels(run)},
        **{"marks": marks, "wide": True},
    )
    rows = [(f"{x:,}", shown(y, _loss)) for x, y in _some(held_out)]
    return section("Loss", chart + _table_of("Held-out loss", ("step", unit), rows))


def _others(run: RunFolder) -> str:
    """All else that is measured in a step, each in a chart of its own."""
    charts = [
        ("tokens_per_second", "Throughput", "tokens/s, mean of 20 steps", human_count),
        ("learning_rate", "Learning rate", "of each step", _short),
        ("grad_norm", "Gradient norm", "before clipping, mean", _short),
        ("memory_bytes", "Peak memory of a device", "bytes", human_bytes),
    ]
    more = dict.fromkeys(name for line in run.steps for name in line if name not in KNOWN)
    charts += [(name, name.replace("_", " ").capitalize(), "mean", _short) for name in more]
    made = ""
    for name, title, unit, words in charts:
        points = run.curve(name)
        smooth = name in SMOOTH
        lines = [Line(title, points)] if smooth else _two(points, "a step", "mean")
        said = f"{title}: {_ends(points, words)}"
        made += curves(title, lines, words, unit=unit, said=said, zero=smooth)
    return f'<section aria-label="Other curves" class="grid">{made}</section>' if made else ""


def _odd_steps(run: RunFolder) -> str:
    """Steps that were skipped, or had a loss or a norm that is not finite."""
    rows = []
    for title, steps in (
        ("skipped: no update, as gradients were not finite", _skipped(run)),
        ("loss not finite", _not_finite(run.curve("loss"))),
        ("gradient norm not finite", _not_finite(run.curve("grad_norm"))),
        ("held-out loss not finite", _not_finite(run.curve("val_loss"))),
    ):
        if steps:
            rows.append((title, f"{len(steps):,}", _named(steps)))
    if not rows:
        return ""
    return section("Steps that went wrong", table(("what", "how many", "steps"), rows, left=True))


def _named(steps: Sequence[int]) -> str:
    """Steps in words, those that follow each other as one.

    >>> _named([3, 7, 8, 9])
    '3, 7 to 9'
    """
    stretches: list[list[int]] = []
    for step in steps:
        if stretches and stretches[-1][-1] == step - 1:
            stretches[-1][1:] = [step]
        else:
            stretches.append([step])
    said = [" to ".join(f"{step:,}" for step in own) for own in stretches[:NAMED]]
    return ", ".join(said) + (", and later ones" if len(stretches) > NAMED else "")


def _table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    body = table(columns, rows)
    return f"<details><summary>{text(title)} as a table</summary>{body}</details>"


def _unit(run: RunFolder) -> str:
    known = run.last("start").get("unit")
    return f"nats per {known}" if known else "nats"


def _levels(run: RunFolder) -> dict[str, float]:
    """What counting alone reaches; of a folder without events it stands in the config."""
    known = run.last("start").get("levels")
    if known is None:
        known = {name: value for name, value in run.config.items() if name.endswith(" entropy")}
    return {name: y for name, value in known.items() if math.isfinite(y := number(value))}


def _skipped(run: RunFolder) -> list[int]:
    return [line["step"] for line in run.steps if line.get("skipped")]


def _resumed(run: RunFolder) -> list[int]:
    own = (e.get("step") for e in run.events if e.get("event") in ("states", "back"))
    return [step for step in own if isinstance(step, int) and step > 0]


def _not_finite(points: Points) -> list[int]:
    return [x for x, y in points if not math.isfinite(y)]


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if math.isfinite(y)]


def _two(points: Points, each: str, mean: str) -> list[Line]:
    """Each step faint, and their running mean."""
    return [Line(each, points, "a", "faint"), Line(mean, _mean(points), "a")]


def _mean(points: Points) -> Points:
    known = [p for p in points if math.isfinite(p[1])]
    if not known:
        return []
    mean = running_mean(np.array([y for _, y in known]), reach=max(4, len(known) // 25))
    return [(x, float(y)) for (x, _), y in zip(known, mean, strict=True)]


def _some(points: Points, most: int = 40) -> Iterable[tuple[int, float]]:
    """So many at most, evenly, with the last."""
    every = max(1, -(-len(points) // most))
    return points[::-1][::every][::-1]


def _ends(points: Points, words: Words) -> str:
    if not points:
        return "nothing"
    (first, y), (last, z) = points[0], points[-1]
    return f"{shown(y, words)} at step {first}, {shown(z, words)} at step {last}"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _duration(took: timedelta) -> str:
    whole = round(took.total_seconds())
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
