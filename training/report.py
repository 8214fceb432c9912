"""What a run leaves behind, and what it shows while it works.

A run's folder holds `config.json`; `metrics.jsonl`, one JSON object per line, written through at
once so that a killed run keeps all it knew; `events.jsonl`, when it started, saved and ended;
TensorBoard files; and `loss.png` and `report.html`, made at the end from these files, so that a
resumed run shows its whole curve. JSON has no NaN: a number that is not finite is written as null,
and left out of TensorBoard and of the picture.

Losses are in nats per token, or per byte of text that is read byte by byte.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from training.run_folder import EVENTS, Points, number, read_metrics
from training.scalars import Scalars


class RunLog:
    """Writes down a run, step by step; use it in a `with`, or call `close`.

    Args:
        out_dir: Folder of the run; made if missing.
        config: What the run was started with; any nesting of dicts, lists and plain values.
            Anything else is written as its `str`.
        enabled: False writes nothing: for all processes but the first.
        resume: Go on in a folder that already holds a run. If the config has changed, the earlier
            one stays as `config.1.json`, and so on.
        levels: Losses to compare with, drawn as lines in the picture.
        unit: What a loss is of: "token", or "byte" of text that is read byte by byte.

    Raises:
        ValueError: `out_dir` is a file or cannot be written, another run writes there, or it holds
            a run and `resume` is False. Nothing in it has been touched then.
    """

    def __init__(
        self,
        out_dir: str | Path,
        config: Mapping[str, Any],
        enabled: bool = True,
        *,
        resume: bool = False,
        levels: Mapping[str, float] | None = None,
        unit: str = "token",
    ) -> None:
        self.out_dir = Path(out_dir)
        self._unit = unit
        self._levels = dict(levels or {})
        self._open = enabled
        self._resumed = False
        self._writer: Scalars | None = None
        if not enabled:
            return
        self._lock: int | None = None
        from zero_jax.cluster.lock import locked  # here: it imports jax

        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.out_dir, "metrics")
            metrics = self.out_dir / "metrics.jsonl"
            self._resumed = metrics.exists() and metrics.stat().st_size > 0
            if self._resumed and not resume:
                raise ValueError(
                    f"{self.out_dir} already holds the metrics of a run, and two would mix; "
                    "give another --out, or resume that run"
                )
            _write_config(self.out_dir, config)
            for path in (metrics, self.out_dir / EVENTS):
                if path.exists():
                    _drop_torn_line(path)
            self._file = metrics.open("a", encoding="utf-8")
        except ValueError:
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            raise ValueError(
                f"cannot write a run to {self.out_dir}: {error}; --out needs a folder, or a name "
                "for a new one, where you may write"
            ) from error

    def step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        tokens_per_second: float,
        skipped: int = 0,
        **more: float | None,
    ) -> None:
        """Writes one training step; `skipped` is 1 where the update was not applied.

        Args:
            step: Its number.
            loss: Of its batch.
            grad_norm: Before clipping.
            tokens_per_second: Of the last steps.
            skipped: See above.
            **more: Other numbers by name; None where there is none.
        """
        values = {"loss": loss, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second}
        known = {name: value for name, value in more.items() if value is not None}
        self._write("train", step, {**values, "skipped": int(skipped), **known})

    def evaluation(self, step: int, *, val_loss: float) -> None:
        """Writes the held-out loss after `step` steps, in nats per token."""
        self._write("val", step, {"val_loss": val_loss})

    def event(self, name: str, **facts: Any) -> None:
        """Notes that something happened now, in `events.jsonl`; facts are as in a config."""
        if not self._open:
            return
        line = {"event": name, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
        path = self.out_dir / EVENTS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        except OSError as error:  # which does not say of which file
            raise OSError(error.errno, error.strerror, str(path)) from error

    def close(self) -> None:
        """Closes the files and makes `loss.png` and `report.html`; more calls do nothing."""
        if not self._open:
            return
        self._open = False
        try:
            self._file.close()
            if self._writer is not None:
                self._writer.close()
            _made("loss.png", self._draw)
            _made("report.html", self._write_page)
        finally:
            self._unlock()

    def _draw(self) -> None:
        train, val = read_losses(self.out_dir / "metrics.jsonl")
        if train or val:
            draw_losses(self.out_dir / "loss.png", train, val, self._levels, self._unit)

    def _write_page(self) -> None:
        from training import report_page  # here: it reads what this file writes

        report_page.write(self.out_dir)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        said = "" if error is None else str(error).partition("\n")[0]
        # What can't be written at the end does not hide the error that ends the run.
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            try:
                self.event("end", error=None if error is None else type(error).__name__, said=said)
            finally:
                self.close()

    def _write(self, group: str, step: int, given: Mapping[str, float]) -> None:
        if not self._open:
            return
        # float waits for a device array
        values = {name: v if isinstance(v, int) else float(v) for name, v in given.items()}
        line = json.dumps(_plain({"step": int(step), **values}), allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:  # which does not say of which file
            raise OSError(error.errno, error.strerror, self._file.name) from error
        if self._writer is None:
            # A resumed run repeats the steps after its checkpoint: TensorBoard drops the old ones.
            purge = int(step) if self._resumed else None
            self._writer = Scalars(self.out_dir / "tensorboard", purge)
        finite = {f"{group}/{name}": v for name, v in values.items() if math.isfinite(v)}
        self._writer.add(finite, int(step))


def next_folder(parent: str | Path) -> Path:
    """Makes the first free one of `001`, `002` and so on, so that no two runs get the same."""
    taken = [int(p.name) for p in Path(parent).glob("[0-9]*") if p.name.isdecimal()]
    number = max(taken, default=0) + 1
    while True:
        folder = Path(parent, f"{number:03}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def read_losses(metrics: Path) -> tuple[Points, Points]:
    """The finite `(step, loss)` of training and of evaluation, from a `metrics.jsonl`.

    A resumed run repeats the steps after its checkpoint; what it wrote last counts.
    """
    steps, evaluations = read_metrics(metrics)
    train = [(line["step"], number(line["loss"])) for line in steps]
    val = [(line["step"], number(line["val_loss"])) for line in evaluations]
    return [p for p in train if math.isfinite(p[1])], [p for p in val if math.isfinite(p[1])]


def draw_losses(
    path: Path,
    train: Points,
    val: Points,
    levels: Mapping[str, float] | None = None,
    unit: str = "token",
) -> None:
    """Draws a loss curve: each step faint, their running mean, held-out points, named levels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: neither a display nor a global state is needed
    axes = figure.add_subplot()
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="#4477aa", alpha=0.25, linewidth=0.8, label="train, a step")
        mean = running_mean(losses, reach=max(4, len(losses) // 25))
        axes.plot(steps, mean, color="#4477aa", linewidth=1.8, label="train, running mean")
    if val:
        steps, losses = np.array(val).T
        axes.plot(steps, losses, "o-", color="#cc3311", linewidth=0.8, ms=5, label="held out")
    for (name, level), dashes in zip((levels or {}).items(), itertools.cycle(("--", ":"))):
        axes.axhline(level, color="#555555", linestyle=dashes, linewidth=1)
        axes.text(
            0.995,
            level,
            f"{name} {level:.2f}",
            transform=axes.get_yaxis_transform(),
            color="#555555",
            ha="right",
            va="bottom",
        )
    axes.set_xlabel("step (optimizer updates)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean of each value and up to `reach` before it: what comes later does not raise it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - reach, 0), at + 1
    return np.asarray((sums[high] - sums[low]) / (high - low))


def _made(name: str, make: Callable[[], None]) -> None:
    try:
        make()
    except Exception as error:  # the run is done; whatever it is, it can be made later
        print(f"no {name}: {type(error).__name__}: {error}")


def _plain(value: Any) -> Any:
    """The same value in types that JSON has; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    text = json.dumps(_plain(config), indent=2, allow_nan=False) + "\n"
    path = folder / "config.json"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        number = 1
        while (folder / f"config.{number}.json").exists():
            number += 1
        path.rename(folder / f"config.{number}.json")
    path.write_text(text, encoding="utf-8")


def _drop_torn_line(metrics: Path) -> None:
    """Cuts off the half-written line of a run that was killed, so that every line is JSON."""
    with metrics.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
