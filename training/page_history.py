"""On a run's page what happened when: checkpoints, starts, and the settings of each."""

from __future__ import annotations

import json
from datetime import datetime

from training.charts import text
from training.page_tables import nbytes, section, table
from training.run_folder import RunFolder, when


def checkpoints(run: RunFolder) -> str:
    """Each checkpoint, also those that are gone."""
    rows = [
        (f"{saved.step:,}", moment(saved.time), nbytes(saved.nbytes), saved.problem or "whole")
        for saved in run.checkpoints
    ]
    if not rows:
        return ""
    return section("Checkpoints", table(("step", "when", "size", "on the disk"), rows, left=True))


def starts(run: RunFolder) -> str:
    """Each start: when, from which step, on what."""
    rows, latest = [], run.last("start")
    for at, event in enumerate(run.events):
        if event.get("event") != "start":
            continue
        after = run.events[at + 1 :]
        states = next((e for e in after if e.get("event") in ("start", "states")), {})
        where = event.get("devices", {})
        kind = f"{where.get('devices', '?')} x {where.get('kind', '?')}"
        processes = where.get("processes", "?")
        begin = states.get("step", "–")
        rows.append((moment(when(event)), begin, event.get("stage", "–"), kind, processes))
    if not rows:
        return ""
    columns = ("started", "after step", "stage", "devices", "processes")
    made = table(columns, rows, left=True) + _changes(run)
    versions = ", ".join(f"{name} {given}" for name, given in latest.get("versions", {}).items())
    made += f'<p class="note">{text(versions)}</p>'
    return section("Versions and devices", made)


def _changes(run: RunFolder) -> str:
    """Settings that were changed between starts."""
    every = [*run.earlier, run.config]
    names = dict.fromkeys(name for config in every for name in config)
    rows = [
        (name, *(_setting(config.get(name)) for config in every))
        for name in names
        if any(config.get(name) != run.config.get(name) for config in run.earlier)
    ]
    columns = ("setting that changed", *(f"config {n}" for n in range(1, len(every))), "now")
    return table(columns, rows, left=True) if rows else ""


def settings(run: RunFolder) -> str:
    """All settings of the latest start, folded."""
    rows = [(name, _setting(value)) for name, value in run.config.items()]
    if not rows:
        return ""
    body = table(("setting", "value"), rows, left=True)
    summary = f"<summary>All {len(rows)} settings of config.json</summary>"
    return section("Configuration", f"<details>{summary}{body}</details>")


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def moment(time: datetime | None) -> str:
    """A time in words; a dash if nobody knows."""
    return "–" if time is None else f"{time:%Y-%m-%d %H:%M:%S %Z}"
