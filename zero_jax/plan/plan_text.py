"""Plans as text: terms by stage, the proof beside them, and a picture of both."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.hlo import auditor, prove, roofline
from zero_jax.plan import pictures
from zero_jax.plan.tables import gigabytes, table

# That of `planning.py`, which prints itself by this and so can't be imported here.
Plan = Any
_MUCH = 0.25  # of a step
# Steps this near to each other are taken for equal, modelled and estimated: kernels differ more.
TIE = 0.01


def format_plan(plan: Plan) -> str:
    """One plan: its bytes by term, its layers, and where it was compiled the proof."""
    parts = [format_stages([plan]), format_layers(plan)]
    if plan.compiled is not None:
        parts += ["", format_proof(plan, 0)]
    return "\n".join(parts)


def format_stages(plans: Sequence[Plan], memory_bytes: int = 0) -> str:
    """Predicted bytes of one device, a row a term, a column a stage.

    Args:
      plans: a column each.
      memory_bytes: that may be used, and whether each fits there; 0 says nothing of it.
    """
    columns = ["", *(f"stage {plan.stage}" for plan in plans)]
    names = [name for name in _names(plans) if any(_term(p, name) for p in plans)]
    rows = [[name, *(gigabytes(_term(p, name)) for p in plans)] for name in names]
    rows.append(["total", *(gigabytes(p.predicted.total_bytes) for p in plans)])
    compiled = [p for p in plans if p.compiled]
    if compiled:
        rows.append(["compiled", *(gigabytes(p.total_bytes) if p.compiled else "" for p in plans)])
        rows.append(["error", *(f"{p.error:+.1%}" if p.compiled else "" for p in plans)])
    if memory_bytes:
        fits = ("fits" if p.total_bytes <= memory_bytes else "does not fit" for p in plans)
        rows.append([f"in {gigabytes(memory_bytes)}", *fits])
    rows.append(["elements sent / Ψ", *(_words(p, 3) for p in plans)])
    rows.append(["sent per step", *(_bytes_sent(p) for p in plans)])
    return table([columns, *rows])


def format_advice(plans: Sequence[Plan], memory_bytes: int, seconds: Sequence[float]) -> str:
    """Says which stage to take, and how long a step takes at least.

    Args:
      plans: a stage each.
      memory_bytes: that may be used; 0 if that is not known.
      seconds: of each by `step_estimate.least_seconds`; nan if that is not known.
    """
    fitting = [p for p in range(len(plans)) if plans[p].total_bytes <= memory_bytes]
    if memory_bytes and not fitting:
        return (
            "none fits: take more devices, --micro-batches, --remat, --offload or --model-parallel "
            "(--auto tries all but the first and last)\n"
        )
    if not memory_bytes:
        return ""
    if any(math.isnan(seconds[p]) for p in fitting):
        stages = ", ".join(f"--stage {plans[p].stage}" for p in fitting)
        return f"fits: {stages}; the target has no figures to estimate the step by\n"
    least = min(seconds[p] for p in fitting)
    short = [p for p in fitting if seconds[p] <= least * (1 + TIE)]
    best = min(short, key=lambda p: plans[p].total_bytes)
    others = [f"{seconds[p]:.3g} s at stage {plans[p].stage}" for p in fitting if p != best]
    reason = "the shortest step of those that fit" if others else "no other fits"
    return (
        f"take --stage {plans[best].stage}: {reason}. Estimated from products and communication: "
        f"{', '.join([f'{seconds[best]:.3g} s', *others])}; --compile models the compiled step, "
        "1.1 to 3.4 times as long\n"
    )


def format_layers(plan: Plan) -> str:
    """The layers that were found in the loss, and what their backward passes keep."""
    if not plan.layers:
        return "layers: none found; activations are kept whatever remat says"
    found = [
        f"{x.count} {'scanned' if x.scanned else 'unrolled'} of {x.words:,} parameters, remat "
        f"{x.policy}"
        for x in plan.layers
    ]
    return "layers: " + "; ".join(found)


def format_proof(plan: Plan, memory_bytes: int) -> str:
    """What the compiled program says, and what it cannot say."""
    audit = plan.compiled
    assert audit is not None
    name = plan.target.name if plan.target else "these devices"
    fits = ""
    if memory_bytes:
        word = "fits" if audit.total_bytes <= memory_bytes else "does NOT fit"
        fits = f": {word} in {gigabytes(memory_bytes)}"
    flops = "unknown" if audit.flops is None else f"{audit.flops / 1e12:,.1f} TFLOP"
    rows = [
        ["total", gigabytes(audit.total_bytes) + fits],
        ["  arguments", f"{audit.argument_bytes:,} (predicted {plan.predicted.argument_bytes:,})"],
        ["  aliased", f"{audit.alias_bytes:,} (predicted {plan.predicted.alias_bytes:,})"],
        [
            "  temporaries",
            f"{gigabytes(audit.temp_bytes)}, fragmentation {audit.fragmentation:.3f}",
        ],
        ["  outputs not aliased", gigabytes(audit.output_bytes - audit.alias_bytes)],
        ["  host", gigabytes(audit.host_bytes)],
        ["predicted", f"{gigabytes(plan.predicted.total_bytes)} ({plan.error:+.1%})"],
        ["elements sent / Ψ", _words(plan, 4)],
        ["sent per step", _bytes_sent(plan)],
        ["  by overlap", _sent(plan, layers_only=False)],
        ["  in layers' loops", _sent(plan, layers_only=True)],
        *([] if plan.time is None else [["  covered", _covered(plan.time)]]),
        ["matrix products", flops],
    ]
    if audit.uncounted:
        rows.append(["  not counted", ", ".join(audit.uncounted)])
    parts = [f"Stage {plan.stage} compiled for {name}", table(rows, "<"), "", "Largest temporaries"]
    parts += [
        f"  {gigabytes(t.bytes):>10}  {t.shape.split('{')[0][:40]:40}  {t.source}"
        for t in audit.peak.temporaries[:8]
    ]
    parts += ["", "Collectives", auditor.format_table(audit)]
    if plan.time is not None:
        parts += ["", "Step time", roofline.format_step_time(plan.time)]
        parts += [f"- {line}" for line in plan.time.assumptions]
        if audit.host_bytes:
            crossing = f"up to {gigabytes(2 * audit.host_bytes)} cross it per step"
            if plan.host_seconds:
                crossing += f", {plan.host_seconds:.4f} s if nothing overlaps"
            parts += [f"- The link to host memory is not part of the step time; {crossing}."]
    if plan.target is not None:
        parts += [
            "",
            "What such a compile does not show",
            *(f"- {line}" for line in prove.not_shown(plan.target)),
        ]
    return "\n".join(parts)


def _words(plan: Plan, digits: int) -> str:
    return f"{plan.words_per_param:.{digits}f}" if plan.countable else "?"


def _bytes_sent(plan: Plan) -> str:
    return gigabytes(plan.sent_bytes) if plan.countable else "?"


def _sent(plan: Plan, *, layers_only: bool) -> str:
    assert plan.compiled is not None
    if not plan.countable:
        return "unknown: a loop around a collective depends on data"
    sent = plan.compiled.hidden(layers_only=layers_only)
    return f"{gigabytes(sent.hidden)} hidden, {gigabytes(sent.exposed)} exposed"


def _covered(time: roofline.StepTime) -> str:
    """What products are long enough for; hidden is what goes on beside any."""
    waits = time.exposed_seconds / time.seconds if time.seconds else 0.0
    said = f"{time.covered:.0%} of the wire's {time.wire_seconds:.4f} s"
    if waits < _MUCH:
        return said
    return f"{said}; the device waits {waits:.0%} of its step: compare `plan meshes`"


def plot(
    plans: Sequence[Plan],
    curves: Mapping[int, Sequence[tuple[int, float]]],
    path: str | pathlib.Path,
    title: str,
    limit: int = 0,
) -> None:
    """Draws bytes per device by stage, stacked by term, and model states against N.

    Args:
      plans: one for each stage.
      curves: for each stage, (N, bytes of model states).
      path: where to write the picture.
      title: its title.
      limit: bytes of the device, drawn as a line; 0 draws none.

    Raises:
      ValueError: matplotlib is not installed.
    """
    drawn = pictures.figure(10, 4.5)
    bars, lines = drawn.subplots(1, 2, width_ratios=[3, 2])
    _draw_bars(bars, plans, limit)
    for stage, points in curves.items():
        lines.plot(
            *zip(*((n, size / 1e9) for n, size in points), strict=True),
            "o-",
            label=f"stage {stage}",
        )
    _draw_limit(lines, limit)
    lines.set(xscale="log", yscale="log", xlabel="devices N", ylabel="GB per device")
    lines.set_title("model states, without activations", fontsize=10)
    lines.legend(fontsize=8)
    drawn.suptitle(title, fontsize=11)
    drawn.savefig(path)


def _draw_bars(axes: Any, plans: Sequence[Plan], limit: int) -> None:
    bottom = [0.0] * len(plans)
    labels = [f"stage {plan.stage}" for plan in plans]
    for term in (n for n in _names(plans) if n != "host"):
        heights = [_term(plan, term) / 1e9 for plan in plans]
        if max(heights) < 0.002 * max(plan.predicted.total_bytes for plan in plans) / 1e9:
            continue  # would not be seen
        axes.bar(labels, heights, bottom=bottom, label=term.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for at, plan in enumerate(plans):
        mark = "" if plan.compiled is None else f"\ncompiled {plan.total_bytes / 1e9:.3g}"
        text = f"{plan.predicted.total_bytes / 1e9:.3g} GB{mark}"
        axes.annotate(text, (at, bottom[at]), ha="center", va="bottom", fontsize=8)
    _draw_limit(axes, limit)
    axes.set(ylabel="GB per device", ylim=(0, 1.15 * max(bottom)))
    axes.set_title("predicted, at the worst instant of a step", fontsize=10)
    axes.legend(fontsize=8)


def _draw_limit(axes: Any, limit: int) -> None:
    if limit:
        name = f"memory of a device, {limit / 1e9:.3g} GB"
        axes.axhline(limit / 1e9, color="black", linestyle=":", linewidth=1, label=name)


def _names(plans: Sequence[Plan]) -> list[str]:
    """Of the terms of any."""
    return list(dict.fromkeys(name for plan in plans for name in plan.predicted.terms))


def _term(plan: Plan, name: str) -> int:
    return plan.predicted.terms.get(name, 0)
