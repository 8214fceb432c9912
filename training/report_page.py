"""Writes `report.html`, the report page of a run, into its folder.

    python -m training.report_page runs/001

Works for finished, running and killed runs. The page is one file, without external resources.
Sections without data are left out.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import jinja2

from training.charts import Chart, Line, each_and_mean, losses, shown
from training.run_folder import PAGE, RunFolder, finite, when
from training.show import human_bytes, human_count

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_NAMED = 60  # intervals of steps in a list

# Title, unit and format of charts, and if they begin at 0 and have no mean, by metric.
SHORT = "{:.3g}".format
CHARTS = {
    "tokens_per_second": ("Throughput", "tokens/s, mean of 20 steps", human_count, True),
    "learning_rate": ("Learning rate", "per step", SHORT, True),
    "grad_norm": ("Gradient norm", "before clipping, mean", SHORT, False),
    "memory_bytes": ("Peak memory per device", "bytes", human_bytes, True),
}
NOT_CHARTED = {"step", "loss", "skipped", "step_seconds"}


def main(args: Sequence[str] | None = None) -> int:
    """Writes the page of a run; returns 2 if there is no run."""
    parser = argparse.ArgumentParser("python -m training.report_page", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="Folder of the run, such as runs/001.")
    try:
        print(write(parser.parse_args(args).folder))
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0


def write(folder: str | Path) -> Path:
    """Writes `report.html` into the folder of a run, and returns its path."""
    path, text = Path(folder, PAGE), page(RunFolder(folder))
    beside = path.with_suffix(".tmp")  # a browser that loads it meanwhile gets the whole old one
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
    return path


def page(run: RunFolder) -> str:
    """Returns the page, valid as HTML and as XML."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    templates = jinja2.Environment(loader=folder, **options)
    templates.filters |= {
        "bytes": lambda size: "–" if size is None else human_bytes(size),
        "count": human_count,
        "loss": lambda value: shown(value, "{:.4f}".format),
        "median": statistics.median,
        "moment": _moment,
        "number": "{:,}".format,
    }
    start = run.last("start")
    stages, predicted = start.get("stages") or [], start.get("predicted") or {}
    facts = {
        "most": max((sum(terms.values()) for terms in stages), default=0),
        "predicted": {name: size for name, size in predicted.items() if name != "host"},
        "run": run,
        "end": _end(run),
        "chart": losses(run),
        "others": _other_charts(run),
        "wrong": _wrong(run),
        "starts": _starts(run),
        **_settings(run),
        "rates": [y for _, y in finite(run.curve("tokens_per_second"))],
        "peak": max((y for _, y in finite(run.curve("memory_bytes"))), default=None),
    }
    text = templates.get_template("report_page.html").render(facts)
    return NOT_XML.sub("\ufffd", text)


def _end(run: RunFolder) -> str:
    """Describes how and when a run ended."""
    end = run.events[-1] if run.events else {}
    if end.get("event") != "end":
        return "No end is recorded: the run is still active, or was killed." if end else ""
    since, until, error = when(run.last("start")), when(end), end.get("error")
    at = _moment(until)
    if since and until:
        at += f", {timedelta(seconds=round((until - since).total_seconds()))} after its start"
    if error is None:
        return f"Finished {at}."
    why = "it was stopped" if error == "Stopped" else f"{error}: {end.get('said', '')}"
    return f"Ended early {at}: {why}"


def _other_charts(run: RunFolder) -> list[Chart]:
    """Returns the charts of all metrics but the losses."""
    charts = []
    names = dict.fromkeys([*CHARTS, *(name for line in run.steps for name in line)])
    for name in [name for name in names if name not in NOT_CHARTED]:
        also = name.replace("_", " ").capitalize(), "mean", SHORT, False
        title, unit, show, plain = CHARTS.get(name, also)
        points = run.curve(name)
        lines = [Line(title, points)] if plain else each_and_mean("", points)
        charts.append(Chart(title, unit, lines, show, zero=plain))
    return [chart for chart in charts if chart.values]


def _wrong(run: RunFolder) -> list[tuple[str, str, str]]:
    """Returns kind, number and list of skipped and non-finite steps."""
    skipped = [line["step"] for line in run.steps if line.get("skipped")]
    wrong = {"skipped, because gradients were not finite": skipped}
    names = {"loss": "loss", "gradient norm": "grad_norm", "held-out loss": "val_loss"}
    for name, metric in names.items():
        wrong[f"{name} not finite"] = [x for x, y in run.curve(metric) if not math.isfinite(y)]
    return [(name, f"{len(steps):,}", _named(steps)) for name, steps in wrong.items() if steps]


def _starts(run: RunFolder) -> list[tuple[object, ...]]:
    """Returns time, step, stage, devices and processes of each start of a run."""
    starts = []
    for at, event in enumerate(run.events):
        if event.get("event") == "start":
            later = (e for e in run.events[at + 1 :] if e.get("event") in ("start", "states"))
            where, step = event.get("devices", {}), next(later, {}).get("step", "–")
            devices = f"{where.get('devices', '?')} x {where.get('kind', '?')}"
            about = event.get("stage", "–"), devices, where.get("processes", "?")
            starts.append((_moment(when(event)), step, *about))
    return starts


def _settings(run: RunFolder) -> dict[str, Any]:
    """Returns the settings of a run, and those that changed between its starts."""
    every = [*run.earlier, run.config]
    names = dict.fromkeys(name for config in every for name in config)
    values = {name: [_setting(config.get(name)) for config in every] for name in names}
    changes = [(name, *row) for name, row in values.items() if len(set(row)) > 1]
    configs = ["setting that changed", *(f"config {n}" for n in range(1, len(every))), "now"]
    settings = [(name, values[name][-1]) for name in run.config]
    return {"configs": configs, "changes": changes, "settings": settings}


def _named(steps: Sequence[int]) -> str:
    """Lists steps as intervals.

    >>> _named([3, 7, 8, 9])
    '3, 7 to 9'
    """
    texts = []
    for _, group in itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        first, *_, last = [step for _, step in group] * 2
        texts.append(f"{first:,}" + f" to {last:,}" * (last > first))
    return ", ".join(texts[:MAX_NAMED]) + ", and more" * (len(texts) > MAX_NAMED)


def _moment(time: datetime | None) -> str:
    return "–" if time is None else f"{time:%Y-%m-%d %H:%M:%S %Z}"


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
