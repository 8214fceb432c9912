"""Training steps in fp8 beside bf16, compiled for H100s that need not be there.

    python benchmarks/fp8.py                                    # 3 models and devices, 3 minutes
    python benchmarks/fp8.py --programs llama-3.1-8b:8 --tables

Each program trains the model at stage 3 with AdamW on 4 rows of 1024 tokens per device, in bf16
with bf16 gradient sums and remat "block": once as it is, once with products of the layers in fp8
with one scale per tensor, and once with one per row. Writes docs/fp8.json. Needs the extra `prove`.
"""

import argparse
import json
import pathlib
import sys
from typing import Any, Literal

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import families

FILE = pathlib.Path(__file__).parent.parent / "docs" / "fp8.json"
PROGRAMS = ("llama-3.1-8b:8", "llama-3.1-8b:64", "llama-3.1-70b:64")
ROWS, TOKENS = 4, 1024
KINDS: dict[str, Literal["fp8", "fp8_rowwise"] | None] = {
    "bf16": None,
    "fp8": "fp8",
    "fp8 by rows": "fp8_rowwise",
}


def facts(model: str, devices: int, kind: Literal["fp8", "fp8_rowwise"] | None) -> dict[str, Any]:
    """Returns memory, communication, products and modelled time of one program."""
    precision = Precision("bf16", reduce_dtype="bf16", matmul_dtype=kind)
    zero = Zero(abstract_mesh(devices), 3, precision=precision, remat="block")
    plan = Case(families.preset(model), zero, "adamw", ROWS * devices, TOKENS).plan(
        3, target="h100"
    )
    assert plan.compiled is not None and plan.time is not None
    gathers = [c for c in plan.compiled.collectives if c.kind == "all-gather"]
    return {
        "total_bytes": plan.total_bytes,
        "predicted_bytes": plan.predicted.total_bytes,
        "sent_bytes": plan.sent_bytes,
        "elements_per_param": plan.elements_per_param,
        "gathered_bytes": sum(c.bytes * (c.runs or 0) for c in gathers),
        "gather_dtypes": sorted({dtype for c in gathers for dtype in c.dtype.split(",")}),
        "products_in_fp8": plan.fp8.count if plan.fp8 else 0,
        "fp8_flops": plan.fp8.flops if plan.fp8 else 0,
        "flops": plan.compiled.flops,
        "step_seconds": plan.time.seconds,
        "kernel_seconds": plan.time.kernel_seconds,
        "exposed_seconds": plan.time.exposed_seconds,
    }


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Formats all programs as Markdown."""
    lines = [
        "| model, H100 | matmuls | step | of bf16 | memory | gathered | products in fp8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kinds in found.items():
        model, devices = name.split(":")
        for kind, own in kinds.items():
            ratio = own["step_seconds"] / kinds["bf16"]["step_seconds"]
            part = f"{own['products_in_fp8']:,}, {own['fp8_flops'] / own['flops']:.1%} of FLOPs"
            cells = (
                *(f"{model}, {devices}", kind, f"{own['step_seconds']:.4f} s", f"{ratio:.3f}"),
                *(f"{own['total_bytes'] / 1e9:.2f} GB", f"{own['gathered_bytes'] / 1e9:.2f} GB"),
                part if own["products_in_fp8"] else "none",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, metavar="MODEL:DEVICES")
    parser.add_argument("--tables", action="store_true", help="print the table of the file alone")
    args = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else {"programs": {}}
    for name in [] if args.tables else args.programs:
        model, devices = name.split(":")
        known["jax"] = jax.__version__
        known["programs"][name] = {k: facts(model, int(devices), v) for k, v in KINDS.items()}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table(known["programs"]))


if __name__ == "__main__":
    main()
