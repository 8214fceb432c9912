"""Figures of plans; requires matplotlib."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zero_jax.engine.config import Stage
from zero_jax.plan.plans import Plan, term_names


def plot(
    plans: Sequence[Plan],
    curves: Mapping[Stage, Sequence[tuple[int, float]]],
    path: str | pathlib.Path,
    title: str,
    limit: int = 0,
) -> None:
    """Draws bytes per device by stage, stacked by term, and model states against N.

    `plans` has one for each stage, `curves` pairs of N and bytes. A limit is drawn as a line.
    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot no display is needed
    except ImportError as error:
        raise ValueError("a plot requires matplotlib: pip install 'zero_jax[train]'") from error
    drawn = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    bars, lines = drawn.subplots(1, 2, width_ratios=[3, 2])
    _draw_bars(bars, plans, limit)
    for stage, points in curves.items():
        devices, sizes = np.array(points).T
        lines.plot(devices, sizes / 1e9, "o-", label=f"stage {stage}")
    _draw_limit(lines, limit)
    lines.set(xscale="log", yscale="log", xlabel="devices N", ylabel="GB per device")
    lines.set_title("model states, without activations", fontsize=10)
    lines.legend(fontsize=8)
    drawn.suptitle(title, fontsize=11)
    drawn.savefig(path)


def _draw_bars(axes: Any, plans: Sequence[Plan], limit: int) -> None:
    bottom, labels = np.zeros(len(plans)), [f"stage {plan.stage}" for plan in plans]
    totals = [plan.predicted.total_bytes / 1e9 for plan in plans]
    for term in (n for n in term_names(plans) if n != "host"):
        heights = np.array([plan.predicted.terms.get(term, 0) / 1e9 for plan in plans])
        if max(heights) >= 0.002 * max(totals):  # others would not be seen
            axes.bar(labels, heights, bottom=bottom, label=term.replace("_", " "))
            bottom += heights
    for at, (plan, total) in enumerate(zip(plans, totals, strict=True)):
        mark = "" if plan.compiled is None else f"\ncompiled {plan.total_bytes / 1e9:.3g}"
        text = f"{total:.3g} GB{mark}"
        axes.annotate(text, (at, bottom[at]), ha="center", va="bottom", fontsize=8)
    _draw_limit(axes, limit)
    axes.set(ylabel="GB per device", ylim=(0, 1.15 * max(bottom)))
    axes.set_title("predicted, at the peak of a step", fontsize=10)
    axes.legend(fontsize=8)


def _draw_limit(axes: Any, limit: int) -> None:
    if limit:
        name = f"device memory, {limit / 1e9:.3g} GB"
        axes.axhline(limit / 1e9, color="black", linestyle=":", linewidth=1, label=name)
