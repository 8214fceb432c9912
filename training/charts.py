"""Charts for a page that has neither scripts nor a network: SVG for shapes, HTML for words.

A curve is drawn in a box of 1000 by 1000 that is stretched to the room there is. What must not be
stretched stands beside it in HTML, at a percentage: so letters are as large on a phone as on a wide
screen. A step's numbers are in a `<title>`, which shows while the pointer is there. Colours are
classes, to which the page's style gives one for light and one for dark.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Points = Sequence[tuple[int, float]]
Words = Callable[[float], str]

SIDE = 1000.0  # of the box
MOST = 800  # points of a curve: more than the box has pixels on most screens
STRIPS = 100  # places at which the pointer finds numbers
NEVER = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not in XML


def text(value: object) -> str:
    """Any value as text of a page.

    >>> text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return html.escape(NEVER.sub("\ufffd", str(value)))


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: What it is of.
        points: (step, value), ascending; NaN leaves a gap.
        color: Class of its colour: a to d.
        kind: line, faint, or dots on a line.
    """

    name: str
    points: Points
    color: str = "a"
    kind: str = "line"


@dataclasses.dataclass(frozen=True)
class Axis:
    """From which value to which, and where it has ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)


def value_axis(values: Iterable[float], *, zero: bool = False, count: int = 4) -> Axis:
    """An axis around finite values; logarithmic where they spread over more than a factor of 100.

    Args:
        values: At least one.
        zero: Whether it begins at 0, and is linear.
        count: About how many stretches between ticks.

    >>> value_axis([1.2, 4.7]).ticks
    (1.0, 2.0, 3.0, 4.0, 5.0)
    >>> value_axis([0.02, 30.0]).ticks
    (0.01, 0.1, 1.0, 10.0, 100.0)
    """
    known = list(values)
    low, high = min(known), max(known)
    if not zero and low > 0 and high > 100 * low:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = -(-(last - first) // 6)
        ticks = tuple(10.0**n for n in range(first, last + 1, every))
        return Axis(10.0**first, 10.0**last, ticks, log=True)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    step = _step(high - low, count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(n * step for n in range(first, last + 1))
    return Axis(first * step, last * step, ticks)


def step_axis(steps: Iterable[int]) -> Axis:
    """The axis of steps, from the first to the last."""
    known = list(steps)
    low, high = min(known), max(known)
    if low == high:
        return Axis(low - 1, high + 1, (low,))
    step = max(1, int(_step(high - low, 5)))
    return Axis(low, high, tuple(range(-(-low // step) * step, high + 1, step)))


def thinned(points: Points, most: int = MOST) -> Points:
    """At most so many points: of each of many stretches the least and the largest, so peaks stay.

    >>> thinned([(n, 9.0 if n == 37 else 1.0) for n in range(100)], most=10)[1:4]
    [(20, 1.0), (37, 9.0), (40, 1.0)]
    """
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [p for p in part if math.isfinite(p[1])] or part[:1]
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept += sorted(ends, key=lambda p: p[0])
    return kept


def curves(
    title: str,
    lines: Sequence[Line],
    words: Words,
    *,
    unit: str,
    said: str = "",
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, Sequence[int]] | None = None,
    zero: bool = False,
    wide: bool = False,
) -> str:
    """A chart of values over steps; empty where no value is finite.

    Args:
        title: Of the chart.
        lines: Curves; those that are not faint are named.
        words: How a value is written.
        unit: Of the values.
        said: What it shows in a sentence, for those who do not see it.
        levels: Values to compare with, by name.
        marks: Steps at which something happened, by what did; ticks and upright lines in turn.
        zero: Whether the axis begins at 0.
        wide: Whether it has the whole width, with names at the right.
    """
    levels, marks = levels or {}, marks or {}
    finite = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    across = step_axis(x for line in lines for x, _ in line.points)
    up = value_axis([*finite, *levels.values()], zero=zero, count=6 if wide else 4)
    shapes = [_path(f"M0,{_up(up, y)}H1000", "rule") for y in up.ticks]
    dashes, ticks = _in_turn(levels, "level"), _in_turn(marks, "mark")
    shapes += [_path(f"M0,{_up(up, y)}H1000", dashes[name]) for name, y in levels.items()]
    shapes += [_marks(steps, across, ticks[name]) for name, steps in marks.items()]
    shapes += [_curve(line, across, up) for line in lines]
    shapes += _strips(lines, across, up, words, marks)
    scale = ", log" if up.log else ""
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><h3>{text(title)}</h3>'
        f"<span>{text(unit)}{scale}</span></figcaption>"
        + (_key(lines, levels, marks, words) if wide else "")
        + '<div class="plot"><div class="box">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(said or title)}">{"".join(shapes)}</svg>'
        + "".join(_at("y", "top", 1 - up.share(y), words(y)) for y in up.ticks)
        + "".join(_at("x", "left", across.share(x), f"{x:,}") for x in across.ticks)
        + (_names(lines, levels, up, words) if wide else "")
        + '</div></div><div class="axis">step (optimizer updates)</div></figure>'
    )


def bar(parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """A bar of stacked parts: (what it says, size, class of its colour), of a whole."""
    left, shapes = 0.0, []
    for said, size, color in parts:
        width = SIDE * size / whole if whole else 0.0
        if width:
            shapes.append(
                f'<rect class="{color}" x="{left:.2f}" y="0" width="{width:.2f}" height="10">'
                f"<title>{text(said)}</title></rect>"
            )
        left += width
    return (
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1 moved apart, each so far from the next at least, in the same order.

    >>> [round(p, 2) for p in spread([0.5, 0.52, 0.1], gap=0.1)]
    [0.5, 0.6, 0.1]
    """
    order = sorted(range(len(places)), key=lambda n: places[n])
    moved, last = list(places), -gap
    for n in order:
        moved[n] = last = max(moved[n], last + gap)
    limit = 1.0
    for n in reversed(order):
        moved[n] = min(moved[n], limit)
        limit = moved[n] - gap
    return moved


def _step(span: float, count: int) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, for about so many."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)


def _up(axis: Axis, value: float) -> str:
    return f"{SIDE * (1 - axis.share(value)):.1f}"


def _path(how: str, color: str) -> str:
    return f'<path class="{color}" d="{how}" />'


def _curve(line: Line, across: Axis, up: Axis) -> str:
    drawn, pen, dots = [], "M", []
    for x, y in thinned(line.points):
        if not math.isfinite(y):
            pen = "M"
            continue
        at = f"{SIDE * across.share(x):.1f},{_up(up, y)}"
        drawn.append(f"{pen}{at}" + ("h0" if pen == "M" else ""))  # h0: a point alone is seen
        dots.append(f"M{at}h0")
        pen = "L"
    both = _path("".join(drawn), f"{line.kind} {line.color}")
    return both + (_path("".join(dots), f"dot {line.color}") if line.kind == "dots" else "")


def _marks(steps: Sequence[int], across: Axis, color: str) -> str:
    inside = [x for x in steps if across.low <= x <= across.high][:MOST]
    top = 0 if color.endswith("odd") else 960
    how = "".join(f"M{SIDE * across.share(x):.1f},{top}V1000" for x in inside)
    return _path(how, color) if how else ""


def _strips(
    lines: Sequence[Line],
    across: Axis,
    up: Axis,
    words: Words,
    marks: Mapping[str, Sequence[int]],
) -> list[str]:
    """Invisible upright strips, each with the numbers of one step."""
    values = [(line.name, dict(line.points)) for line in lines]
    steps = sorted({x for line in lines for x, _ in line.points})
    special = {x for line in lines if line.kind == "dots" for x, _ in line.points}
    special |= {x for found in marks.values() for x in found} & set(steps)
    every = -(-len(steps) // STRIPS)
    kept = sorted({*steps[::every], steps[-1], *sorted(special)[:STRIPS]})
    edges = [(a + b) / 2 for a, b in itertools.pairwise(kept)]
    found = []
    for x, low, high in zip(kept, [across.low, *edges], [*edges, across.high], strict=True):
        rows = [f"{name} {shown(own[x], words)}" for name, own in values if x in own]
        rows += [name for name, at in marks.items() if x in at]
        left, right = SIDE * across.share(low), SIDE * across.share(high)
        found.append(
            f'<rect class="strip" x="{left:.1f}" y="0" width="{right - left:.1f}" height="1000">'
            f"<title>{text(chr(10).join([f'step {x:,}', *rows]))}</title></rect>"
        )
    return found


def shown(value: float, words: Words) -> str:
    """A value in words; one that is not finite as such."""
    return words(value) if math.isfinite(value) else "not finite"


def _at(kind: str, side: str, share: float, words: str) -> str:
    return f'<span class="{kind}" style="{side}:{100 * share:.2f}%">{text(words)}</span>'


def _key(
    lines: Sequence[Line],
    levels: Mapping[str, float],
    marks: Mapping[str, Sequence[int]],
    words: Words,
) -> str:
    """What is what; the page hides what has its name beside it."""
    rows = [(f"{x.kind} {x.color}", x.name, x.kind != "faint") for x in lines]
    dashes, ticks = _in_turn(levels, "level"), _in_turn(marks, "mark")
    rows += [(dashes[name], f"{name} {words(value)}", True) for name, value in levels.items()]
    rows += [(ticks[name], name, False) for name, steps in marks.items() if steps]
    made = ""
    for color, name, beside in rows:
        hidden = ' class="beside"' if beside else ""
        swatch = f'<svg viewBox="0 0 20 10" aria-hidden="true"><path class="{color}" d="M2,5H18" />'
        made += f"<li{hidden}>{swatch}</svg>{text(name)}</li>"
    return f'<ul class="key">{made}</ul>'


def _in_turn(names: Iterable[str], color: str) -> dict[str, str]:
    """The class of each name, of which every second is drawn in another way."""
    return {name: f"{color} odd" if n % 2 else color for n, name in enumerate(names)}


def _names(lines: Sequence[Line], levels: Mapping[str, float], up: Axis, words: Words) -> str:
    """Names and last values at the right end, beside what they are of."""
    rows = [(f"color-{line.color}", *_end(line)) for line in lines if line.kind != "faint"]
    rows += [("muted", name, value) for name, value in levels.items()]
    rows = [row for row in rows if math.isfinite(row[2])]
    places = spread([1 - up.share(value) for *_, value in rows], gap=0.065)
    return "".join(
        _at(f"name {color}", "top", place, f"{name} {words(value)}")
        for (color, name, value), place in zip(rows, places, strict=True)
    )


def _end(line: Line) -> tuple[str, float]:
    return line.name, next((y for _, y in reversed(line.points) if math.isfinite(y)), math.nan)
