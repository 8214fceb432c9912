"""Charts of the report page, and `loss.png`.

The template draws a chart as SVG in a box of 100 by 100, stretched to the available width. Labels
are HTML at percentages, so that they keep their size.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.run_folder import Points, RunFolder, finite

MAX_POINTS = 800  # of a curve: about the pixels of a wide screen
STRIPS = 100  # steps with a tooltip


class Line(NamedTuple):
    """A curve of ascending (step, value), where NaN leaves a gap."""

    name: str
    points: Points
    color: str = "a"  # or b
    kind: str = "line"  # or faint (without a name), or dots


class Axis(NamedTuple):
    """The range of an axis, and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    scale: Callable[[float], float] = float  # or math.log

    def place(self, value: float) -> float:
        """Returns the position of a value, from 0 to 100."""
        low, high, at = map(self.scale, (self.low, self.high, value))
        return 100 * (at - low) / (high - low)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of values over steps."""

    title: str
    unit: str
    lines: Sequence[Line]
    show: Callable[[float], str]  # formats a value
    levels: Mapping[str, float] = dataclasses.field(default_factory=dict)  # horizontal lines
    marks: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)  # vertical lines
    zero: bool = False  # the axis of values begins at 0
    wide: bool = False  # over the full width, with a key and names at the right

    @property
    def values(self) -> list[float]:
        """The finite values of all lines."""
        return [y for line in self.lines for _, y in finite(line.points)]

    @functools.cached_property
    def up(self) -> Axis:
        """The axis of values."""
        values, count = [*self.values, *self.levels.values()], 6 if self.wide else 4
        return value_axis(values, zero=self.zero, count=count)

    @functools.cached_property
    def across(self) -> Axis:
        """The axis of steps."""
        steps = {x for line in self.lines for x, _ in line.points}
        low, high = min(steps), max(steps)
        if low == high:
            return Axis(low - 1, high + 1, (low,))
        ticks = [int(tick) for tick in _ticks(low, high, 5, integer=True)]
        return Axis(low, high, [tick for tick in ticks if low <= tick <= high])

    def x(self, step: float) -> str:
        """Returns the position of a step from the left, in percent."""
        return f"{self.across.place(step):.2f}"

    def y(self, value: float) -> str:
        """Returns the position of a value from the top, in percent."""
        return f"{100 - self.up.place(value):.2f}"

    def curve(self, line: Line, pen: str = "L") -> str:
        """Returns the path of a line; with the pen "M" a dot at each point."""
        path, move = "", "M"
        for x, y in thinned(line.points):
            if math.isfinite(y):
                path += f"{move}{self.x(x)},{self.y(y)}" + "h0" * (move == "M")  # h0 draws a point
            move = pen if math.isfinite(y) else "M"
        return path

    def ticks(self, steps: Sequence[int], top: int) -> str:
        """Returns the path of vertical lines at marked steps."""
        return "".join(f"M{self.x(step)},{top}V100" for step in steps[:MAX_POINTS])

    def names(self) -> list[tuple[str, str, float, str]]:
        """Returns class, text, last value and position from the top of the labels at the right."""
        known = [(x, finite(x.points)) for x in self.lines if x.kind != "faint"]
        rows = [(f"color-{x.color}", x.name, points[-1][1]) for x, points in known if points]
        rows += [("muted", name, value) for name, value in self.levels.items()]
        places = spread([100 - self.up.place(value) for *_, value in rows], gap=6.5)
        return [(*row, f"{place:.2f}") for row, place in zip(rows, places, strict=True)]

    def strips(self) -> list[tuple[str, str, str]]:
        """Returns left, width and text of the strips with tooltips."""
        values = [(line.name, dict(line.points)) for line in self.lines]
        steps = sorted({x for _, points in values for x in points})
        special = {x for line in self.lines if line.kind == "dots" for x, _ in line.points}
        special |= {x for marked in self.marks.values() for x in marked}
        some = {*steps[:: -(-len(steps) // STRIPS)], steps[-1], *sorted(special)[:STRIPS]}
        middles = ((a + b) / 2 for a, b in itertools.pairwise(sorted(some)))
        edges = [self.across.low, *middles, self.across.high]
        strips = []
        for step, (left, right) in zip(sorted(some), itertools.pairwise(edges), strict=True):
            lines = [f"step {step:,}"]
            lines += [f"{name} {shown(x[step], self.show)}" for name, x in values if step in x]
            lines += [name for name, marked in self.marks.items() if step in marked]
            width = self.across.place(right) - self.across.place(left)
            strips.append((self.x(left), f"{width:.2f}", "\n".join(lines)))
        return strips


def shown(value: float, show: Callable[[float], str]) -> str:
    """Formats a value that may be NaN or infinite."""
    return show(value) if math.isfinite(value) else "not finite"


def value_axis(values: Sequence[float], *, zero: bool = False, count: int = 4) -> Axis:
    """Returns an axis around finite values, logarithmic if their ratio exceeds 100.

    >>> value_axis([1.2, 4.7]).ticks
    [1.0, 2.0, 3.0, 4.0, 5.0]
    >>> value_axis([0.02, 30.0]).ticks
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """
    low, high = min(values), max(values)
    if not zero and low > 0 and high > 100 * low:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [10.0**n for n in range(first, last + 1, -(-(last - first) // 6))]
        return Axis(10.0**first, 10.0**last, ticks, math.log)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    ticks = _ticks(low, high, count)
    return Axis(ticks[0], ticks[-1], ticks)


def _ticks(low: float, high: float, count: int, *, integer: bool = False) -> list[float]:
    """Returns about `count` ticks around a range: multiples of 1, 2 or 5 times a power of ten."""
    locator = MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer)
    return [float(tick) for tick in locator.tick_values(low, high)]


def thinned(points: Points) -> Points:
    """Returns at most `MAX_POINTS` points: minimum and maximum of each interval."""
    size, kept = max(1, -(-2 * len(points) // MAX_POINTS)), []
    for start in range(0, len(points), size):
        known = finite(points[start : start + size]) or [points[start]]
        kept += sorted({min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])})
    return kept if len(points) > MAX_POINTS else points


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Moves label positions from 0 to 100 at least `gap` apart; keeps their order.

    >>> spread([50.0, 52.0, 10.0], gap=10.0)
    [50.0, 60.0, 10.0]
    """
    order = sorted(range(len(places)), key=lambda n: places[n])
    moved, last, limit = list(places), -gap, 100.0
    for n in order:
        moved[n] = last = max(moved[n], last + gap)
    for n in reversed(order):
        moved[n] = min(moved[n], limit)
        limit = moved[n] - gap
    return moved


def running_mean(points: Points) -> Points:
    """Returns the running mean over a twenty-fifth of the finite points."""
    known = finite(points)
    sums, at = np.cumsum([0.0, *(y for _, y in known)]), np.arange(len(known))
    low = np.maximum(at - max(4, len(known) // 25), 0)
    means = (sums[at + 1] - sums[low]) / (at + 1 - low)
    return [(x, float(y)) for (x, _), y in zip(known, means, strict=True)]


def each_and_mean(name: str, points: Points) -> list[Line]:
    """Returns the lines of a noisy curve: each step, and the running mean."""
    mean = Line(f"{name}mean", running_mean(points))
    return [Line(f"{name}per step", points, kind="faint"), mean]


def losses(run: RunFolder) -> Chart:
    """Returns the chart of training and held-out losses."""
    train = run.curve("loss")
    begun = {event.get("step") for event in run.events if event.get("event") in ("states", "back")}
    skipped = [line["step"] for line in run.steps if line.get("skipped")]
    marks = {"skipped": skipped, "resumed": sorted(begun & {x for x, _ in train})}
    held_out = Line("held out", run.curve("val_loss"), "b", "dots")
    lines = [*each_and_mean("train, ", train), held_out]
    text = "Training and held-out text"
    return Chart(text, run.unit, lines, "{:.4g}".format, run.levels, marks, wide=True)


def draw_losses(folder: Path) -> None:
    """Draws `loss.png` in the folder of a run: losses of training and of held-out text."""
    chart = losses(RunFolder(folder))
    if not chart.values:
        return
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which needs global state
    axes, colors, gray = figure.add_subplot(), {"a": "#4477aa", "b": "#cc3311"}, "#555555"
    looks = {"faint": {"alpha": 0.25, "lw": 0.8}, "line": {"lw": 1.8}}
    for line in chart.lines:
        if points := finite(line.points):
            look = looks.get(line.kind, {"marker": "o", "lw": 0.8, "ms": 5})
            axes.plot(*np.transpose(points), color=colors[line.color], label=line.name, **look)
    for (name, level), dashes in zip(chart.levels.items(), itertools.cycle(("--", ":"))):
        axes.axhline(level, color=gray, linestyle=dashes, lw=1)
        right = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        axes.text(0.995, level, f"{name} {level:.2f}", color=gray, **right)
    axes.set(xlabel="step (optimizer updates)", ylabel=f"loss ({chart.unit})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png")
