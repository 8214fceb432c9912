"""Memory and overlap of stage 3 on H100s that need not be there, beside GSPMD's program.

    python benchmarks/schedule.py                # 9 pairs of programs, 5 minutes on two cores
    python benchmarks/schedule.py --models 7.5b --devices 64
    python benchmarks/schedule.py --tables       # prints the table of what is there

Both programs of a pair train the same GPT by AdamW on 4 rows of 1024 tokens a device, in bf16 with
bf16 reduction, each layer rematerialised; gspmd.py has the other one. Where one does not fit, XLA
hides nothing: both are compiled for the same GPU with more memory then. Writes docs/schedule.json.
Needs the extra `prove`.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gspmd
import jax

from models import gpt
from zero_jax import Precision, Zero, abstract_mesh, hlo, prove, roofline, targets
from zero_jax.plan import Case

FILE = pathlib.Path(__file__).parent.parent / "docs" / "schedule.json"
MODELS, DEVICES, ROWS, REMAT = ("1.5b", "7.5b", "128b"), (8, 64, 256), 4, "block"


def programs(model: str, devices: int) -> dict:
    """Both compiled programs as plain data, and whether both fit."""
    precision = Precision("bf16", reduce="bf16")
    zero = Zero(abstract_mesh(devices), 3, precision=precision, remat=REMAT)
    case = Case(gpt.preset(model), zero, "adamw", ROWS * devices)
    target = targets.target("h100")
    found = pair(case, target)
    most = max(own["total_bytes"] for own in found.values())
    if most > target.memory_bytes:
        found = pair(case, dataclasses.replace(target, memory_bytes=int(1.25 * most)))
    return {"fits": most <= target.memory_bytes} | found


def pair(case: Case, target: targets.Target) -> dict[str, dict]:
    plan = case.plan(3, target=target)
    assert plan.compiled is not None and plan.time is not None
    step, args = gspmd.step_of(case, REMAT)
    audit = prove.compile_for(target, step, args, case.zero.mesh)
    times = roofline.step_time(audit.program, audit.collectives, target, case.model_flops)
    return {
        "zero_jax": facts(plan.compiled, plan.time, plan.num_params),
        "gspmd": facts(audit, times, plan.num_params),
    }


def facts(audit: hlo.Audit, times: roofline.StepTime, num_params: int) -> dict:
    """What one program holds, sends and hides."""
    step, layers = audit.hidden(), audit.hidden(layers_only=True)
    return {
        "total_bytes": audit.total_bytes,
        "temp_bytes": audit.temp_bytes,
        "words_per_param": audit.words_per_param(num_params),
        "hidden_in_layers": layers.fraction,
        "hidden": step.fraction,
        "exposed_bytes": step.exposed,
        "wire_seconds": times.wire_seconds,
        "covered": times.hidden_seconds / times.wire_seconds,
        "step_seconds": times.seconds,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| model, N | program | GB | words / Ψ | hidden in layers | hidden | covered | step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name in ("zero_jax", "gspmd"):
            own = row[name]
            case = f"{row['model']}, {row['devices']}" + ("" if row["fits"] else " (does not fit)")
            lines.append(
                f"| {case} | {name} | {own['total_bytes'] / 1e9:.2f} | "
                f"{own['words_per_param']:.4f} | {own['hidden_in_layers']:.1%} | "
                f"{own['hidden']:.1%} | {own['covered']:.0%} | {own['step_seconds']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    parsed = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    if not parsed.tables:
        jax.config.update("jax_platforms", "cpu")
        for model in parsed.models:
            for devices in parsed.devices:
                own = {"model": model, "devices": devices}
                made = own | programs(model, devices)
                rows = [r for r in known["rows"] if any(r[k] != own[k] for k in own)]
                known = {
                    "jax": jax.__version__,
                    "target": "h100",
                    "date": time.strftime("%Y-%m-%d"),
                    "rows": sorted([*rows, made], key=_order),
                }
                FILE.write_text(json.dumps(known, indent=1) + "\n")
                print(table([made]), flush=True)
    print(table(known["rows"]))


def _order(row: dict) -> tuple:
    model = row["model"]
    return MODELS.index(model) if model in MODELS else len(MODELS), row["devices"]


if __name__ == "__main__":
    main()
