"""Memory and overlap of stage 3 on H100s that need not be there, beside GSPMD's program.

    python benchmarks/schedule.py                # 9 times 4 programs, 12 minutes on two cores
    python benchmarks/schedule.py --models llama-3.1-8b --devices 8 64
    python benchmarks/schedule.py --models llama-3.1-8b --devices 8 64 --latencies
    python benchmarks/schedule.py --tables       # prints the table of what is there

All programs train the same model by AdamW on 4 rows of 1024 tokens a device, in bf16 with bf16
reduction, each layer rematerialised; gspmd.py has the others: as it is, with the options for XLA
that zero_jax's step has, and with its loss in chunks. With `--latencies` each is compiled again, by
what XLA's scheduler is then told of how long its instructions take (hlo/latencies.py). Where one
does not fit, XLA hides nothing: all are compiled for the same GPU with more memory then. Writes
docs/schedule.json. Needs the extra `prove`.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gspmd
import jax

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.context_parallel import cudnn
from zero_jax.hlo import aot, auditor, roofline, targets
from zero_jax.models import families

FILE = pathlib.Path(__file__).parent.parent / "docs" / "schedule.json"
MODELS, DEVICES, REMAT = ("1.5b", "7.5b", "128b"), (8, 64, 256), "block"
ROWS, TOKENS = 4, 1024  # of a device, of a row
CHUNKS = 4  # of GSPMD's loss, each of as many tokens as zero_jax's
PROGRAMS = ("zero_jax", "gspmd", "gspmd, options", "gspmd, chunks")


def programs(model: str, devices: int, told: bool) -> dict:
    """All compiled programs as plain data, and whether all fit."""
    precision = Precision("bf16", reduce_dtype="bf16")
    zero = Zero(abstract_mesh(devices), 3, precision=precision, remat=REMAT)
    case = Case(families.preset(model), zero, "adamw", ROWS * devices, TOKENS)
    target = targets.target("h100")
    found = compiled(case, target, told)
    most = max(own["total_bytes"] for own in found.values())
    if most > target.memory_bytes:
        found = compiled(case, dataclasses.replace(target, memory_bytes=int(1.25 * most)), told)
    return {"fits": most <= target.memory_bytes} | found


def compiled(case: Case, target: targets.Target, told: bool) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "step.pbtxt"
        plan = case.plan(3, target=target, latencies=file if told else None)
        assert plan.compiled is not None and plan.time is not None
        params, tx = case.zero.eval_shape(case.make), case.zero.optimizer(case.tx)
        ours = case.zero.train_step(case.loss_fn, tx)
        options = ours.compiler_options(params, tx.init(params), case.batch)
        predicted = {"predicted_bytes": plan.predicted.total_bytes}
        found = {PROGRAMS[0]: facts(plan.compiled, plan.time, plan.num_params) | predicted}
        for name, chunks, own in zip(PROGRAMS[1:], (1, 1, CHUNKS), ({}, options, {}), strict=True):
            step, args = gspmd.step_of(case, REMAT, chunks=chunks)
            told_to = file if told else None
            with cudnn.compiling_for(target.platform, target.compute_capability):
                audit = aot.compile_for(
                    target, step, args, case.zero.mesh, options=own, latencies=told_to
                )
            times = roofline.step_time(audit.program, audit.collectives, target, case.model_flops)
            found[name] = facts(audit, times, plan.num_params)
    return found


def facts(audit: auditor.Audit, times: roofline.StepTime, num_params: int) -> dict:
    """What one program holds, sends and hides."""
    step, layers = audit.overlap(), audit.overlap(layers_only=True)
    return {
        "total_bytes": audit.total_bytes,
        "temp_bytes": audit.temp_bytes,
        "elements_per_param": audit.elements_per_param(num_params),
        "concurrent_in_layers": layers.fraction,
        "concurrent": step.fraction,
        "exposed_bytes": step.exposed,
        "communication_seconds": times.communication_seconds,
        "overlapped": times.overlapped,
        "step_seconds": times.seconds,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| model, N | program | GB | elements / Ψ | concurrent in layers | concurrent | overlapped "
        "| step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name in PROGRAMS:
            own = row[name]
            case = f"{row['model']}, {row['devices']}" + ("" if row["fits"] else " (does not fit)")
            case += ", latencies told" if row.get("latencies") else ""
            lines.append(
                f"| {case} | {name} | {own['total_bytes'] / 1e9:.2f} | "
                f"{own['elements_per_param']:.4f} | {own['concurrent_in_layers']:.1%} | "
                f"{own['concurrent']:.1%} | {own['overlapped']:.0%} | {own['step_seconds']:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--latencies", action="store_true", help="tell XLA's scheduler of each")
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    parsed = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    if not parsed.tables:
        jax.config.update("jax_platforms", "cpu")
        for model in parsed.models:
            for devices in parsed.devices:
                own = {"model": model, "devices": devices, "latencies": parsed.latencies}
                when = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
                made = own | when | programs(model, devices, parsed.latencies)
                rows = [r for r in known["rows"] if any(r.get(k, False) != own[k] for k in own)]
                known = {
                    "target": "h100",
                    "rows_per_device": ROWS,
                    "remat": REMAT,
                    "precision": "bf16, reduced in bf16",
                    "rows": sorted([*rows, made], key=_order),
                }
                FILE.write_text(json.dumps(known, indent=1) + "\n")
                print(table([made]), flush=True)
    print(table(known["rows"]))


def _order(row: dict) -> tuple:
    model = row["model"]
    known = MODELS.index(model) if model in MODELS else len(MODELS)
    return known, model, row["devices"], row.get("latencies", False)


if __name__ == "__main__":
    main()
