"""What is in the folder of a run, whether it ended, is going on or was killed.

Nothing is needed of a folder but that something of a run is in it. The last line of a file may be
half written. A run that went on repeats the steps after its checkpoint: what it wrote last counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Points = list[tuple[int, float]]
METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "config.json"
COMPILED, CHECKPOINTS = "compiled.json", "checkpoints"

# Kinds of the entries that are computed with; all others are shown as they are.
_CONFIG_KINDS = {"steps": int, "tokens_per_step": int, "psi": int}
_EVENT_KINDS = {
    **{"step": int, "levels": dict, "devices": dict, "versions": dict, "predicted": dict},
    **{"stages": list, "stage": int, "time": str},
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint of a run.

    Attributes:
        step: Its number.
        time: When it was finished, or begun if it is not there any more; None if unknown.
        nbytes: Of all its files; None if it is not there.
        problem: What is not whole; empty if it is.
    """

    step: int
    time: datetime | None
    nbytes: int | None
    problem: str


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """All that a folder says of its run.

    Attributes:
        path: The folder.
        config: Settings of the latest start.
        earlier: Those of starts with other settings, oldest first.
        steps: A line for each step, ascending.
        evaluations: A line for each look at held-out text.
        events: Starts, checkpoints and ends, in the order in which they came.
        checkpoints: Those that are there, and those that were.
        compiled: What the compiled step holds, if that was looked at.
    """

    path: Path
    config: Line
    earlier: Sequence[Line]
    steps: Sequence[Line]
    evaluations: Sequence[Line]
    events: Sequence[Line]
    checkpoints: Sequence[Saved]
    compiled: Line

    def curve(self, name: str) -> Points:
        """A number of each step that has it, or of each evaluation; NaN where it is not finite."""
        lines = self.evaluations if name == "val_loss" else self.steps
        return [(line["step"], number(line[name])) for line in lines if name in line]

    def last(self, event: str) -> Line:
        """The latest event of a name; empty if there is none."""
        return next((e for e in reversed(self.events) if e.get("event") == event), {})


def read(path: str | Path) -> RunFolder:
    """Reads the folder of a run.

    Raises:
        ValueError: There is nothing of a run in it, or a file is damaged.
    """
    path = Path(path)
    if not any((path / name).is_file() for name in (METRICS, CONFIG)):
        raise ValueError(
            f"{path} has neither {METRICS} nor {CONFIG}: give the folder of a run, as runs/001"
        )
    steps, evaluations = read_metrics(path / METRICS)
    events = read_lines(path / EVENTS)
    for event in events:
        _check_kinds(event, _EVENT_KINDS, path / EVENTS)
    numbered = ((int(p.suffixes[0][1:]), p) for p in path.glob("config.*.json") if _numbered(p))
    return RunFolder(
        path=path,
        config=_check_kinds(_object(path / CONFIG), _CONFIG_KINDS, path / CONFIG),
        earlier=[_object(p) for _, p in sorted(numbered)],
        steps=steps,
        evaluations=evaluations,
        events=events,
        checkpoints=_checkpoints(path / CHECKPOINTS, events),
        compiled=_object(path / COMPILED),
    )


def read_metrics(path: Path) -> tuple[list[Line], list[Line]]:
    """The lines of steps and those of evaluations, each step as it was written last."""
    steps: list[Line] = []
    evaluations: list[Line] = []
    for line in read_lines(path):
        if not isinstance(line.get("step"), int) or not {"loss", "val_loss"} & set(line):
            raise ValueError(f"{path} has a line without step and loss: {json.dumps(line)[:80]}")
        step, evaluated = line["step"], "val_loss" in line
        while evaluations and evaluations[-1]["step"] >= step + (not evaluated):
            evaluations.pop()
        while not evaluated and steps and steps[-1]["step"] >= step:
            steps.pop()
        (evaluations if evaluated else steps).append(line)
    return steps, evaluations


def read_lines(path: Path) -> list[Line]:
    """The objects of a file with one a line; none where there is no file.

    Raises:
        ValueError: A line is no JSON object, and it is not a last one that was cut off.
    """
    if not path.is_file():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for count, text in enumerate(texts, 1):
        try:
            line = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            if count == len(texts):  # no line break follows: it was being written
                break
            raise ValueError(f"{path}, line {count}, is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {count}, is not a JSON object: {text[:80]}")
        if line:
            found.append(line)
    return found


def number(value: Any) -> float:
    """A number of a line as a float; NaN where it is not finite, or no number.

    >>> number(2), number(None), number(float("inf"))
    (2.0, nan, nan)
    """
    given = float(value) if isinstance(value, (int, float)) else math.nan
    return given if math.isfinite(given) else math.nan


def when(event: Line) -> datetime | None:
    """The time of an event; None if it has none."""
    try:
        time = datetime.fromisoformat(str(event.get("time")))
        return time if time.tzinfo else time.replace(tzinfo=UTC)
    except ValueError:
        return None


def _check_kinds(line: Line, kinds: Mapping[str, type], path: Path) -> Line:
    """Returns an object of a file if the settings that the page computes with are of their kinds.

    Raises:
        ValueError: One is not: the file was edited, or is damaged.
    """
    for name, kind in kinds.items():
        value = line.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(
                f"{path}: `{name}` is {json.dumps(value)[:80]}, and must be of type "
                f"{kind.__name__}: correct it, or remove it"
            )
    return line


def _object(path: Path) -> Line:
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(known, dict):
        raise ValueError(f"{path} is not a JSON object: {json.dumps(known)[:80]}")
    return known


def _numbered(path: Path) -> bool:
    return path.name.split(".")[1].isdecimal()


def _checkpoints(folder: Path, events: Sequence[Line]) -> list[Saved]:
    noted = {e["step"]: when(e) for e in events if e.get("event") == "checkpoint" and "step" in e}
    found = {step: Saved(step, time, None, "not there any more") for step, time in noted.items()}
    if folder.is_dir():
        from zero_jax.checkpoint import inspection  # here: it imports jax
        from zero_jax.checkpoint.retention import is_step

        for own in folder.iterdir():
            if is_step(own.name) and own.is_dir():
                seen = inspection.glance(int(own.name), own)
                done = datetime.fromtimestamp(seen.seconds, UTC) if seen.seconds else None
                known = done or noted.get(seen.step)
                found[seen.step] = Saved(seen.step, known, seen.nbytes, "; ".join(seen.problems))
    return [found[step] for step in sorted(found)]
