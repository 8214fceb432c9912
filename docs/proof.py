"""Compiles the presets for H100 at every stage and remat policy, and writes `proof.json`, which
the tables of plan-accuracy.md and performance-tables.md are made from.

    python docs/proof.py --jobs 2        # 36 programs, 10 to 20 minutes on two cores
    python docs/proof.py --more          # other batches, fp32 reduction, micro-batches: 24 more
    python docs/proof.py --stages 1 2 --models 7.5b    # these again, the others stay
    python docs/proof.py --tables        # prints the tables of what is there

Needs the extra `prove`.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import gpt

CASES = (("1.5b", 64), ("7.5b", 64), ("128b", 256))
POLICIES = ("block", "dots", "none")
ROWS = 4
# Stage, remat, rows of a device, reduce dtype, micro-batches.
MORE = (
    *((s, "block", 1, "bf16", 1) for s in (1, 2, 3)),
    *((s, "block", 4, "fp32", 1) for s in (1, 2, 3)),
    *((s, "block", 8, "bf16", 2) for s in (1, 2, 3)),
    (3, "none", 1, "bf16", 1),
    (3, "block", 2, "fp32", 1),
    (3, "block", 16, "bf16", 1),
)
_KEPT = (
    "stage",
    "remat",
    "elements_per_param",
    "error",
    "concurrent_fraction",
    "overlapped_fraction",
)
_SHOWN = ("model", "devices", "stage", "remat", "rows", "reduce", "grad_accum_steps")
FILE = pathlib.Path(__file__).parent / "proof.json"


def prove(
    model: str,
    devices: int,
    stage: int,
    remat: str,
    rows: int = ROWS,
    reduce: str = "bf16",
    grad_accum_steps: int = 1,
) -> dict:
    """One compiled program as plain data."""
    zero = Zero(
        abstract_mesh(devices),
        stage,
        precision=Precision("bf16", reduce_dtype=reduce),
        remat=remat,
        grad_accum_steps=grad_accum_steps,
    )
    case = Case(gpt.preset(model), zero, "adamw", rows * devices)
    started = time.monotonic()
    plan = case.plan(stage, target="h100")
    known = plan.as_dict()
    row = {k: known[k] for k in _KEPT}
    total, loops = plan.compiled.overlap(), plan.compiled.overlap(layers_only=True)
    return row | {
        "model": model,
        "devices": devices,
        "rows": rows,
        "reduce": reduce,
        "grad_accum_steps": grad_accum_steps,
        "predicted": known["predicted"],
        "compiled": {k: v for k, v in known["compiled"].items() if k != "largest_temporaries"},
        "overlap_bytes": dataclasses.asdict(total),
        "overlap_bytes_loops": dataclasses.asdict(loops),
        "step_seconds": known["step_time"]["seconds"],
        "seconds": round(time.monotonic() - started, 1),
    }


def tables(rows: list[dict]) -> str:
    """Markdown: totals by stage and policy, then elements and concurrent bytes."""
    lines = [
        "| model, N | remat | " + " | ".join(f"stage {s}" for s in range(4)) + " |",
        "|---|---|" + "---|" * 4,
    ]
    for model, devices in CASES:
        for remat in POLICIES:
            mine = [r for r in rows if (r["model"], r["remat"]) == (model, remat)]
            cells = {r["stage"]: r for r in mine}
            text = [
                f"{cells[s]['predicted']['total_bytes'] / 1e9:.2f} / "
                f"{cells[s]['compiled']['total_bytes'] / 1e9:.2f} ({cells[s]['error']:+.1%})"
                for s in range(4)
            ]
            lines.append(f"| {model}, {devices} | {remat} | " + " | ".join(text) + " |")
    lines += [
        "",
        "| model, N | stage | elements / Ψ | concurrent GB | exposed GB | concurrent in loops | "
        "overlapped "
        "| step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: (CASES.index((r["model"], r["devices"])), r["stage"])):
        if r["remat"] == "block":
            both, loops = r["overlap_bytes"], r["overlap_bytes_loops"]
            inside = loops["concurrent"] + loops["exposed"]
            # Programs that were compiled before it was read do not have it.
            overlapped = f"{r['overlapped_fraction']:z.0%}" if "overlapped_fraction" in r else "–"
            share = (
                f"{loops['concurrent'] / inside:.0%} of {inside / 1e9:.1f}" if inside > 1e6 else "–"
            )
            lines.append(
                f"| {r['model']}, {r['devices']} | {r['stage']} | {r['elements_per_param']:.4f} | "
                f"{both['concurrent'] / 1e9:.1f} | {both['exposed'] / 1e9:.1f} | {share} | "
                f"{overlapped} | {r['step_seconds']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    parser.add_argument("--stages", nargs="+", type=int, default=range(4), help="only these")
    parser.add_argument("--models", nargs="+", default=[m for m, _ in CASES], help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="how many are compiled at once")
    parser.add_argument("--more", action="store_true", help="compile the variations instead")
    parsed = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not parsed.tables:
        jax.config.update("jax_platforms", "cpu")
        cases = [c for c in CASES if c[0] in parsed.models]
        grid = [(*c, s, r) for r in POLICIES for c in cases for s in parsed.stages]
        more = [(*c, *v) for c in CASES[:2] for v in MORE]
        kept = [] if parsed.more else known.get("rows", [])
        rows = [
            row
            for row in kept
            if row["model"] not in parsed.models or row["stage"] not in parsed.stages
        ]
        # A program is traced here and compiled by a child, on one core: threads are enough.
        with concurrent.futures.ThreadPoolExecutor(parsed.jobs) as pool:
            for row in pool.map(lambda case: prove(*case), more if parsed.more else grid):
                rows.append(row)
                print(*(row[k] for k in _SHOWN), f"{row['error']:+.1%}", flush=True)
        known |= {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
        known["more" if parsed.more else "rows"] = rows
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(tables(known["rows"]))


if __name__ == "__main__":
    main()
