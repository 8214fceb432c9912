"""Memory on a run's page: what was predicted by stage and by term, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from training.charts import bar, text
from training.page_tables import Made, nbytes, section, table
from training.run_folder import RunFolder
from training.show import human_bytes

COLORS = {"parameters": "a", "state": "c", "copy": "d", "gradients": "b"}
NAMES = {
    "parameters": "parameters, fp32",
    "state": "optimizer state",
    "copy": "gathered copy",
    "gradients": "gradients",
}
# What terms are that do not say so themselves: docs/plan.md has them all.
TERMS = {
    "copy": "copy: gathered parameters",
    "saved": "saved from forward to backward",
    "loss": "loss: logits and their gradients",
    "buffers": "buffers: gradients on their way",
    "work": "work: one layer, forward and backward",
    "fetched": "fetched from host memory",
    "pieces": "pieces of what streams",
    "turned": "turned: transposed matrices",
}


def memory(run: RunFolder) -> str:
    """The section; empty where the run noted nothing."""
    start = run.last("start")
    if not start.get("stages") and not start.get("predicted"):
        return ""
    return section(
        "Memory of a device", _stages(start) + _terms(run, start) + _compiled(run, start)
    )


def _stages(start: Mapping[str, Any]) -> str:
    stages: list[dict[str, float]] = start.get("stages") or []
    if not stages:
        return ""
    totals = [sum(terms.values()) for terms in stages]
    most, rows = max(totals), []
    for stage, (terms, total) in enumerate(zip(stages, totals, strict=True)):
        parts = [
            (f"{NAMES.get(name, name)} {human_bytes(size)}", size, COLORS.get(name, "a"))
            for name, size in terms.items()
        ]
        own = ", this run" if stage == start.get("stage") else ""
        sizes = map(human_bytes, terms.values())
        rows.append((f"stage {stage}{own}", Made(bar(parts, most)), human_bytes(total), *sizes))
    columns = ["", "", "total", *(NAMES.get(name, name) for name in stages[0])]
    key = "".join(
        f'<li><svg viewBox="0 0 20 10" aria-hidden="true"><rect class="{COLORS.get(name, "a")}" '
        f'width="20" height="10" /></svg>{text(NAMES.get(name, name))}</li>'
        for name in stages[0]
    )
    said = "Model states predicted at the four stages, all else as in this run; no activations"
    return f"<h3>By stage</h3><p class='muted'>{said}.</p><ul class='key'>{key}</ul>" + table(
        columns, rows, own=start.get("stage")
    )


def _terms(run: RunFolder, start: Mapping[str, Any]) -> str:
    terms: dict[str, float] = start.get("predicted") or {}
    if not terms:
        return ""
    on_device = {name: size for name, size in terms.items() if name != "host"}
    held, most = run.last("states"), max(on_device.values())
    rows = [
        (
            TERMS.get(name, name.replace("_", " ")),
            Made(bar([(f"{name} {human_bytes(size)}", size, "a")], most)),
            human_bytes(size),
            nbytes(held.get(name)),
        )
        for name, size in on_device.items()
    ]
    peaks = [y for _, y in run.curve("memory_bytes") if math.isfinite(y)]
    total = start.get("predicted_total")
    rows.append(("total", "", nbytes(total), nbytes(max(peaks, default=None))))
    if "host" in terms:
        rows.append(("in host memory", "", human_bytes(terms["host"]), "–"))
    said = "What rests is counted in the arrays of the run. "
    said += (
        "The total is the most that a device has held."
        if peaks
        else "Devices of this kind do not say how much they have held at most."
    )
    columns = ("at the worst instant of a step", "", "predicted", "measured")
    made = table(columns, rows, own=len(on_device))
    return f"<h3 class='next'>This run, predicted and measured</h3>{made}<p class='note'>{said}</p>"


def _compiled(run: RunFolder, start: Mapping[str, Any]) -> str:
    """What the compiled step holds, unless the run went on with another step since."""
    known, predicted = run.compiled, start.get("predicted_total")
    if not known or known.get("predicted_total") != predicted:
        return ""
    off = predicted / known["total_bytes"] - 1
    said = (
        f"XLA gives it {human_bytes(known['total_bytes'])}, and {human_bytes(predicted)} were "
        f"predicted ({off:+.1%}). What of its temporaries lives at once, largest first:"
    )
    rows = [
        (t["source"] or t["op_name"] or t["name"], nbytes(t["bytes"]), t["shape"].partition("{")[0])
        for t in known["largest_temporaries"]
    ]
    made = table(("made at", "size", "shape"), rows)
    return f"<h3 class='next'>The compiled step</h3><p>{text(said)}</p>{made}"
