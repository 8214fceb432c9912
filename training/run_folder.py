"""The folder of a run: `RunLog` writes it during training, `RunFolder` reads it at any time.

`metrics.jsonl` has one JSON object per line, flushed at once so that a killed run keeps all of
them, but perhaps the last. A resumed run repeats the steps after its checkpoint: the last line of a
step counts. JSON has no NaN: a non-finite number is null. Losses are in nats per token, or per byte
without a tokenizer.
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from training.scalars import ScalarWriter, TensorBoard, WeightsAndBiases
from zero_jax.checkpoint.directory import step_folders, summary
from zero_jax.distributed.lock import locked

Line = Mapping[str, Any]
Points = list[tuple[int, float]]
METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "config.json"
CHECKPOINTS, PAGE = "checkpoints", "report.html"


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """Writes the folder of a run, which it creates; nothing if not `enabled`.

    A folder that holds a run is an error, and unchanged, unless `resume` is True. A changed config
    keeps the earlier one as `config.1.json`, and so on. `wandb` is a project of Weights & Biases.
    """

    def __init__(
        self,
        out_dir: str | Path,
        config: Mapping[str, Any],
        enabled: bool = True,
        *,
        resume: bool = False,
        wandb: str | None = None,
    ) -> None:
        self.out_dir, self._open = Path(out_dir), enabled
        if not enabled:
            return
        metrics, known = self.out_dir / METRICS, _plain(config)
        try:
            with contextlib.ExitStack() as files:
                self.out_dir.mkdir(parents=True, exist_ok=True)
                files.callback(os.close, locked(self.out_dir, "metrics"))
                resumed = metrics.exists() and metrics.stat().st_size > 0
                if resumed and not resume:
                    why = "already holds the metrics of a run: use another --output-dir"
                    raise ValueError(f"{self.out_dir} {why}, or resume that run")
                _write_config(self.out_dir, known)
                self._metrics = files.enter_context(_open_lines(metrics))
                self._events = files.enter_context(_open_lines(self.out_dir / EVENTS))
                self._files = files.pop_all()
        except OSError as error:
            way_out = "give --output-dir a folder with write permission, or a new name"
            raise ValueError(f"{self.out_dir} can't be written: {error}; {way_out}") from error
        self._scalars: list[ScalarWriter] = [TensorBoard(self.out_dir / "tensorboard", resumed)]
        if wandb is not None:
            self._scalars.append(WeightsAndBiases(wandb, self.out_dir, known))

    def step(self, step: int, *, skipped: int = 0, **values: float | None) -> None:
        """Writes the metrics of a step, except None; `skipped` is 1 for a skipped update."""
        known = {name: value for name, value in values.items() if value is not None}
        self._write("train", step, known | {"skipped": int(skipped)})

    def evaluation(self, step: int, *, val_loss: float) -> None:
        """Writes the held-out loss after `step` steps."""
        self._write("val", step, {"val_loss": val_loss})

    def event(self, name: str, **facts: Any) -> None:
        """Appends an event with the current time to `events.jsonl`."""
        if self._open:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            _write_line(self._events, {"event": name, "time": now, **facts})

    def close(self, failed: bool = False) -> None:
        """Closes the files and writes `loss.png` and `report.html`; can be called again."""
        if not self._open:
            return
        from training import charts, report_page  # here: they read this folder

        self._open = False
        with self._files:
            for name, write in (("loss.png", charts.draw_losses), (PAGE, report_page.write)):
                try:
                    write(self.out_dir)
                except Exception as error:  # training itself is complete
                    print(f"{name} is not written: {type(error).__name__}: {error}")
            for scalars in self._scalars:
                scalars.close(failed)

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        name, said = (None, "") if kind is None else (kind.__name__, f"{error}".partition("\n")[0])
        # A full disk must not replace the exception that ended the run.
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            try:
                self.event("end", error=name, said=said)
            finally:
                self.close(failed=kind is not None)

    def _write(self, group: str, step: int, given: Mapping[str, float]) -> None:
        if not self._open:
            return
        # float waits for a device array
        values = {name: v if isinstance(v, int) else float(v) for name, v in given.items()}
        _write_line(self._metrics, {"step": int(step), **values})
        finite = {f"{group}/{name}": v for name, v in values.items() if math.isfinite(v)}
        for scalars in self._scalars:
            scalars.add(finite, int(step))


def next_folder(parent: str | Path) -> Path:
    """Creates the next free folder of `001`, `002` and so on, atomically."""
    number = max([0, *(int(p.name) for p in Path(parent).glob("[0-9]*") if p.name.isdecimal())])
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            folder = Path(parent, f"{number:03}")
            folder.mkdir(parents=True)
            return folder


def _plain(value: Any) -> Any:
    """Converts to JSON types; NaN and infinities become None."""
    plain = json.dumps(value, default=lambda x: x.item() if isinstance(x, np.generic) else str(x))
    return json.loads(plain, parse_constant=lambda _: None)


def _configs(folder: Path) -> Iterator[Path]:
    """Yields the paths of settings of earlier starts, and free ones after them."""
    return (folder / f"config.{number}.json" for number in itertools.count(1))


def _write_config(folder: Path, config: Line) -> None:
    text, path = json.dumps(config, indent=2) + "\n", folder / CONFIG
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(next(path for path in _configs(folder) if not path.exists()))
    path.write_text(text, encoding="utf-8")


def _open_lines(path: Path) -> TextIO:
    """Opens a file to append to, without the incomplete last line of a run that was killed."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def _write_line(file: TextIO, line: Line) -> None:
    try:
        file.write(json.dumps(_plain(line)) + "\n")
        file.flush()
    except OSError as error:  # this error has no file name
        raise OSError(error.errno, error.strerror, file.name) from error


class RunFolder:
    """The contents of the folder of a run; raises ValueError if there is none, or it is damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if not any((path / name).is_file() for name in (METRICS, CONFIG)):
            raise ValueError(f"{path} has no {METRICS}: give the folder of a run, such as runs/001")
        self.config = _object(path / CONFIG)  # settings of the latest start
        earlier = itertools.takewhile(Path.exists, _configs(path))
        self.earlier = [_object(path) for path in earlier]  # of starts before, oldest first
        self.steps, self.evaluations = _read_metrics(path / METRICS)  # lines, ascending
        self.events = _read_lines(path / EVENTS)  # starts, checkpoints and ends, oldest first
        self.checkpoints = self._checkpoints()

    @property
    def unit(self) -> str:
        """The unit of losses."""
        known = self.last("start").get("unit")
        return f"nats per {known}" if known else "nats"

    @property
    def levels(self) -> dict[str, float]:
        """Losses to compare with."""
        known = self.last("start").get("levels") or {}
        return {name: y for name, value in known.items() if math.isfinite(y := number(value))}

    def curve(self, name: str) -> Points:
        """Returns a number of each step that has it, or of each evaluation; NaN if not finite."""
        lines = self.evaluations if name == "val_loss" else self.steps
        return [(line["step"], number(line[name])) for line in lines if name in line]

    def named(self, event: str) -> list[Line]:
        """Returns the events of a name, oldest first."""
        return [e for e in self.events if e.get("event") == event]

    def last(self, event: str) -> Line:
        """Returns the latest event of a name; empty if there is none."""
        return [{}, *self.named(event)][-1]

    def _checkpoints(self) -> list[Line]:
        """Returns step, time, bytes and problems of each checkpoint; includes deleted ones."""
        deleted = {"nbytes": None, "problems": ["deleted"]}
        starts = self.named("checkpoint")
        known: dict[int, Line] = {e["step"]: {"time": when(e), **deleted} for e in starts}
        for step, path in step_folders(self.path / CHECKPOINTS).items():
            seen = summary(path)
            done = datetime.fromtimestamp(seen.seconds, UTC) if seen.seconds else None
            time = done or known.get(step, {}).get("time")
            known[step] = {"time": time, "nbytes": seen.nbytes, "problems": seen.problems}
        return [{"step": step, **known[step]} for step in sorted(known)]


def _read_metrics(path: Path) -> tuple[list[Line], list[Line]]:
    """Returns the lines of steps and of evaluations; the last line of a step counts."""
    steps: list[Line] = []
    evaluations: list[Line] = []
    for line in _read_lines(path):
        if not isinstance(line.get("step"), int) or not {"loss", "val_loss"} & set(line):
            raise ValueError(f"{path} has a line without step and loss: {json.dumps(line)[:80]}")
        step, evaluated = line["step"], "val_loss" in line
        while evaluations and evaluations[-1]["step"] >= step + (not evaluated):
            evaluations.pop()
        while not evaluated and steps and steps[-1]["step"] >= step:
            steps.pop()
        (evaluations if evaluated else steps).append(line)
    return steps, evaluations


def _read_lines(path: Path) -> list[Line]:
    """Returns the objects of a file with one per line; none if there is no file."""
    if not path.is_file():
        return []
    # After the last newline a line is incomplete.
    *texts, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    places = ((text, f"{path}, line {number},") for number, text in enumerate(texts, 1))
    return [_json_object(text, where) for text, where in places if text.strip()]


def number(value: Any) -> float:
    """Returns a number of a line as a float; NaN if it is not finite, or not a number.

    >>> number(2), number(None), number(float("inf"))
    (2.0, nan, nan)
    """
    converted = float(value) if isinstance(value, (int, float)) else math.nan
    return converted if math.isfinite(converted) else math.nan


def finite(points: Points) -> Points:
    """Returns the points whose value is finite."""
    return [point for point in points if math.isfinite(point[1])]


def when(event: Line) -> datetime | None:
    """Returns the time of an event; None if it has none."""
    try:
        return datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None


def _object(path: Path) -> Line:
    """Returns the JSON object of a file; empty if there is no file."""
    if not path.is_file():
        return {}
    return _json_object(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _json_object(text: str, where: str) -> Line:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object: {text[:80]}")
    return value
