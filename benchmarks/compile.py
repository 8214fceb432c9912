"""How long a training step takes to trace and to compile, against layers and devices.

    python benchmarks/compile.py            # 7 steps, 3 times each, 3 minutes

Stage 3 of a GPT of width 1600 in bf16, on forced CPU devices. Prints the medians and writes
docs/compile.json. Peak is the host memory of the process that compiles, jax included.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax

from zero_jax import Precision, Zero, make_mesh
from zero_jax.commands.case import Case
from zero_jax.models import gpt

FILE = pathlib.Path(__file__).parent.parent / "docs" / "compile.json"
CASES = ((12, 64), (48, 64), (96, 64), (48, 1), (48, 8), (48, 256), (48, 1024))  # layers, devices
ROUNDS = 3
NAMES = ("trace_seconds", "compile_seconds", "peak_bytes")


def measure(layers: int, devices: int) -> dict[str, float]:
    """One case, in this process."""
    jax.config.update("jax_num_cpu_devices", devices)
    zero = Zero(make_mesh(), 3, precision=Precision("bf16", reduce_dtype="bf16"), remat="block")
    config = dataclasses.replace(gpt.preset("1.5b"), layers=layers)
    case = Case(config, zero, "adamw", 4 * devices)
    params = zero.eval_shape(case.make)
    tx = zero.optimizer(case.tx)
    step, args = zero.train_step(case.loss_fn, tx), (params, tx.init(params), case.batch)
    began = time.perf_counter()
    lowered = step.lower(*args)
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    peak = peak_bytes()
    return dict(zip(NAMES, (traced - began, done - traced, peak), strict=True))


def peak_bytes() -> int:
    """The most memory that this program has held (Linux). Not `ru_maxrss`, which begins with what
    the process held that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def alone(layers: int, devices: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", str(layers), str(devices)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def table(rows: list[dict]) -> str:
    lines = ["| layers | devices | trace s | compile s | peak GB |", "|---|---|---|---|---|"]
    for row in rows:
        trace, compiled, peak = (row[name] for name in NAMES)
        cells = (row["layers"], row["devices"], f"{trace:.1f}", f"{compiled:.1f}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{peak / 1e9:.2f}"))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        print(json.dumps(measure(*parsed.one)))
        return
    found: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):  # side by side, because machines are noisy
        for case in CASES:
            found[case].append(alone(*case))
    rows = [
        {"layers": layers, "devices": devices}
        | {name: statistics.median(one[name] for one in runs) for name in NAMES}
        for (layers, devices), runs in found.items()
    ]
    known = {
        "jax": jax.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": ROUNDS,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
