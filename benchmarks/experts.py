"""Mixtral 8x7B on 64 H100 that need not be there: experts gathered, and experts that stay.

    python benchmarks/experts.py               # prints a row for each program, about 12 minutes
    python benchmarks/experts.py --seq 4096    # longer rows, of which only remat "block" fits

Stage 3, 4 rows a device, AdamW, bf16 with gradients summed in bf16. Of 8 groups rows go to the
experts by all-to-all; of 2 at capacity 1.25 tokens are gathered. Prints bytes, words over Ψ, how
much of the wire products cover and the roofline's step, beside what was foretold. With latencies
XLA's scheduler is told how long instructions take. Needs the extra `prove`.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import families

MODEL, DEVICES, ROWS = "mixtral-8x7b", 64, 4
# Groups of devices with experts of their own, capacity, remat, latencies.
PROGRAMS = (
    (1, 1.25, "block", False),
    (1, 1.0, "block", False),
    (2, 1.25, "block", False),
    (8, 1.25, "block", False),
    (8, 1.25, "dots", True),
    (8, 1.0, "block", False),
    (8, 1.0, "block", True),
    (8, 1.0, "dots", False),
    (8, 1.0, "dots", True),
    (8, 1.0, "none", False),
)


def compiled(
    experts: int, capacity: float, remat: str, latencies: bool, seq: int
) -> dict[str, Any]:
    """What one program holds, sends and takes."""
    config = families.with_capacity(families.preset(MODEL), capacity)
    zero = Zero(
        abstract_mesh(DEVICES // experts, experts=experts),
        3,
        precision=Precision("bf16", reduce_dtype="bf16"),
        remat=remat,
    )
    case = Case(config, zero, "adamw", ROWS * DEVICES, seq)
    with tempfile.TemporaryDirectory() as folder:
        told = {"latencies": f"{folder}/step.pbtxt"} if latencies else {}
        plan = case.plan(3, target="h100", **told)
    assert plan.time is not None
    return {
        "experts": experts,
        "capacity": capacity,
        "remat": remat,
        "latencies": latencies,
        "seq": seq,
        "total_bytes": plan.total_bytes,
        "error": round(plan.error, 4),
        "elements_per_param": round(plan.elements_per_param, 4),
        "overlapped": round(plan.time.overlapped, 3),
        "exposed_seconds": round(plan.time.exposed_seconds, 4),
        "seconds": round(plan.time.seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row")
    seq = parser.parse_args().seq
    short = seq <= 1024
    for program in (p for p in PROGRAMS if short or "block" in p):
        print(json.dumps(compiled(*program, seq)), flush=True)


if __name__ == "__main__":
    main()
