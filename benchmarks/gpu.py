"""Correctness, then training speed beside PyTorch, on the GPU that is here. 15 minutes, no network.

    python benchmarks/gpu.py                    # writes docs/gpu.json and docs/on_gpu.json
    python benchmarks/gpu.py --minutes 9        # a second call does the rows that are left
    python benchmarks/gpu.py --predict          # models the rows for an H200; needs no GPU
    python benchmarks/gpu.py --toy --json FILE  # every kind of row at toy size, on a CPU

Checks of tests/on_gpu.py that no GPU has passed come first, then rows by importance. Each row is a
process of its own, so that a failure ends nothing else and memory peaks are its own. Results are
written as they come. A row stays as it is if the same kind of device measured it with the same
code. Rows for which no time is left are named.

MFU counts the model's FLOPs over the data sheet's dense bf16 peak, recomputation not counted and
attention counted whole. `--predict` compiles each zero_jax row for an absent H200 (extra `prove`)
and models its step by the roofline, a lower bound of the time.

PyTorch trains the same models, its blocks and loss compiled by torch.compile and in fp8 by torchao,
where this Python has them, or that of .venv-torch.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import numpy as np

import zero_jax
from training.memory import host_memory
from zero_jax.commands.case import Case
from zero_jax.fp8.product import SCOPE
from zero_jax.hlo import auditor, roofline, targets
from zero_jax.hlo.fp8_products import fp8_products
from zero_jax.models import gpt
from zero_jax.sharding.mesh import AnyMesh

Row = dict[str, Any]

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent
FILE = ROOT / "docs" / "gpu.json"
MINUTES = 14  # the last row, and starting, take the rest of 15
ROW_SECONDS = 150  # of one row at most
CHECK_MINUTES = 4
COMPILE_SECONDS = 600  # of one row of `--predict` at most
LEAST_SECONDS = 20  # no row is done in fewer
STEPS, WARM = 8, 3
TARGET = "h200"
# By default XLA computes matmuls again where a step takes more than 76 % of the memory: modelled
# steps of 7.5b take 0.719 s, with this 0.618 s.
KEEP = "--xla_gpu_memory_limit_slop_factor=200"
TORCH = "python3 -m venv .venv-torch && .venv-torch/bin/pip install torch torchao numpy"
# Checks that no GPU has passed.
CHECKS = ["remat", "precision", "states", "attention", "packed attention", "fp8", "blocks"]
CHECKS += ["remat on the host", "states on the host", "options"]


def cases(toy: bool) -> list[Row]:
    """Returns the rows, the most important first."""
    small, large, wide = ("nano", "nano", "nano") if toy else ("124m", "1.5b", "7.5b")
    many, few = (2, 2) if toy else (16, 8)
    middle = {"model": large, "rows": many, "remat": "block"}
    largest = {"model": wide, "rows": few, "remat": "block"}
    fp8 = {"matmuls": "fp8"}
    first = {"only": ["skipped"] if toy else CHECKS}
    return [
        {"kind": "checks", **first},
        {"kind": "train", "model": small, "rows": many, "remat": "dots"},
        {"kind": "torch", "model": small, "rows": many, "remat": "none"},
        {"kind": "train", **middle},
        {"kind": "torch", **middle},
        {"kind": "train", **largest},
        {"kind": "torch", **largest},
        {"kind": "train", **middle, **fp8},
        {"kind": "torch", **middle, **fp8},
        {"kind": "train", **largest, **fp8},
        {"kind": "torch", **largest, **fp8},
        {"kind": "train", "model": small, "rows": many, "remat": "none"},
        {"kind": "train", **middle, "remat": "dots"},
        {"kind": "checks", **(first if toy else {})},  # those that passed with other code
    ]


def precision(own: Row) -> zero_jax.Precision:
    if own.get("matmuls") != "fp8":
        return zero_jax.Precision("bf16")
    return zero_jax.Precision("bf16", matmul_dtype="fp8")


def reason_against(own: Row) -> str:
    """Returns why a row cannot be done here; "" if it can."""
    if own["kind"] == "torch" and python_with_torch() is None:
        return f"no PyTorch: {TORCH}"
    return ""


def case_of(own: Row, mesh: AnyMesh) -> Case:
    """Returns one model on one device, at stage 3."""
    zero = zero_jax.Zero(mesh, 3, precision=precision(own), remat=own["remat"])
    return Case(gpt.preset(own["model"]), zero, "adamw", own["rows"])


def train(own: Row) -> Row:
    """Returns the seconds of a training step, and its memory."""
    case = case_of(own, zero_jax.make_mesh(devices=jax.devices()[:1]))
    zero = case.zero
    tokens = np.random.default_rng(0).integers(0, case.config.vocab, case.batch.shape, np.int32)
    batch, tx = zero_jax.global_batch(zero.mesh, tokens), zero.optimizer(case.tx)
    params = zero.init(case.make)
    states: tuple[Any, ...] = (params, tx.init(params))
    del params
    step = zero.train_step(case.loss_fn, tx)
    began = time.perf_counter()
    compiled = step.lower(*states, batch).compile()
    compile_seconds = time.perf_counter() - began

    def once() -> None:
        nonlocal states
        *states, _ = step(*states, batch)
        jax.block_until_ready(states)

    seconds = median_seconds(once)
    device, audit = jax.devices()[0], auditor.audit(compiled, dict(zero.mesh.shape))
    sheet, modelled = targets.of_kind(device.device_kind), None
    if sheet is not None and sheet.platform == "cuda":
        modelled = roofline.step_time(audit.program, audit.collectives, sheet).seconds
    return {
        "seconds": seconds,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "compiled_bytes": audit.total_bytes,
        "forecast_bytes": case.plan(3).predicted.total_bytes,
        "compile_seconds": compile_seconds,
        "roofline_seconds": modelled,
        "fp8_products": fp8_products(audit.program, SCOPE).count,
        "device": device.device_kind,
    }


def predict(own: Row) -> Row:
    """Returns the modelled step of the program that XLA compiles for an absent device."""
    began = time.perf_counter()
    plan = case_of(own, zero_jax.abstract_mesh(1)).plan(3, target=TARGET)
    assert plan.time is not None and plan.compiled is not None
    return {
        "seconds": plan.time.seconds,
        "matmul_seconds": plan.time.compute_seconds,
        "traffic_bytes": plan.time.traffic_bytes,
        "compiled_bytes": plan.total_bytes,
        "forecast_bytes": plan.predicted.total_bytes,
        "compile_seconds": time.perf_counter() - began,
        "device": targets.target(TARGET).description,
    }


def rates(own: Row, row: Row) -> Row:
    """Returns parameters, tokens per second, and MFU on a device with a data sheet."""
    config = gpt.preset(own["model"])
    rate = own["rows"] * config.seq / row["seconds"]
    found: Row = {"params": gpt.num_params(config), "tokens_per_second": rate}
    sheet = targets.of_kind(row.get("device", ""))
    if sheet is not None and sheet.flops > 0:
        found["mfu"] = rate * gpt.flops_per_token(config, config.seq) / sheet.flops
    return found


def median_seconds(once: Callable[[], Any]) -> float:
    for _ in range(WARM):
        once()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def environment() -> dict[str, str]:
    """Returns the environment of a row: all memory of device and host, and full tracebacks."""
    # The older spelling of the first: JAX ends where it is given both.
    env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return env | {
        "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} {KEEP}".strip(),
        "XLA_CLIENT_MEM_FRACTION": "0.95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(int(0.9 * host_memory() / 2**30)),
        "JAX_TRACEBACK_FILTERING": "off",  # leaves the error in the last line
    }


def alone(own: Row, seconds: float, device: str) -> Row:
    """Returns the result of one row, done in a process of its own; on "cuda" or "cpu"."""
    if reason := reason_against(own):
        return {"skipped": reason}
    command, given = [sys.executable, __file__, *(["--toy"] if device == "cpu" else [])], own
    if own["kind"] == "torch":
        config = dataclasses.asdict(gpt.preset(own["model"]))
        given = own | {k: config[k] for k in ("layers", "width", "heads", "vocab", "seq")}
        given["device"] = device
        command = [str(python_with_torch()), str(FOLDER / "gpu_torch.py")]
    env = environment() | ({"JAX_PLATFORMS": "cpu"} if own["kind"] == "predict" else {})
    command += ["--one", json.dumps(given)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {seconds:.0f} s"}
    if done.returncode:
        return {"error": last_error(done.stderr) or f"exit code {done.returncode}"}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row | rates(own, row) if "seconds" in row else row


def checks(own: Row, file: pathlib.Path, seconds: float) -> Row:
    """Runs checks of tests/on_gpu.py that have not passed with this code.

    Returns the names of all checks in the file by outcome, and why others did not run.
    """
    command = [sys.executable, str(ROOT / "tests" / "on_gpu.py"), "--missing", "--json", str(file)]
    command += ["--minutes", str(min(seconds / 60, CHECK_MINUTES))]
    command += ["--only", *own["only"]] if "only" in own else []
    done = subprocess.run(command, capture_output=True, text=True)
    if not file.exists():
        return {"error": last_error(done.stderr) or f"exit code {done.returncode}"}
    rows = json.loads(file.read_text())["checks"]
    passed = {row["check"]: row["passed"] for row in rows}
    return {
        "passed": [name for name, good in passed.items() if good],
        "failed": [name for name, good in passed.items() if not good],
        "not_run": re.findall(r"^[\w ]+: (?:no time|left out).*", done.stdout, re.MULTILINE),
    }


def last_error(log: str) -> str:
    """Returns the line that says what ended a process, "" if it said nothing."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return (errors or lines or [""])[-1][:300]


@functools.cache
def python_with_torch() -> str | None:
    for python in (sys.executable, str(ROOT / ".venv-torch" / "bin" / "python")):
        if pathlib.Path(python).exists():
            tried = subprocess.run([python, "-c", "import torch"], capture_output=True)
            if tried.returncode == 0:
                return python
    return None


@functools.cache
def code_of(kind: str) -> str:
    """Returns a hash of the code that decides a row of this kind."""
    files = [FOLDER / "gpu_torch.py", FOLDER / "peer_torch.py"]
    if kind != "torch":
        files = sorted((ROOT / "zero_jax").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Results:
    """Rows of one kind of device, in a file that is written after each of them.

    Attributes:
      part: "measured" or "predicted", the part of the file.
      rows: Results by their case as JSON. Those of earlier cases stay.
    """

    def __init__(self, file: pathlib.Path, part: str, device: str):
        self.file, self.part = file, part
        self._known = json.loads(file.read_text()) if file.exists() else {}
        old = self._known.get(part, {})
        rows = old.get("rows", []) if old.get("device") == device else []
        self.rows = {json.dumps(row["case"]): row for row in rows}
        self._known[part] = {"device": device, "rows": [], "not_done": []}

    def has(self, own: Row) -> bool:
        """True if the row was done with this code."""
        return self.rows.get(json.dumps(own), {}).get("code") == code_of(own["kind"])

    def add(self, own: Row, row: Row) -> None:
        here = self._known[self.part]
        if "error" in row or "skipped" in row:
            here["not_done"].append({"case": own, **row})
        else:
            known = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
            known["code"] = code_of(own["kind"])
            self.rows[json.dumps(own)] = {"case": own, **row, **known}
        here["rows"] = list(self.rows.values())
        self.file.write_text(json.dumps(self._known, indent=1) + "\n")

    def table(self) -> str:
        """Formats the rows, and the reasons of those that were not done."""
        lines = ["| row | tokens/s | MFU | GB | ms |", "|---|---|---|---|---|"]
        lines += [line(row) for row in self.rows.values() if "tokens_per_second" in row]
        for row in self.rows.values():
            if "passed" in row:
                bad = ", ".join(row["failed"] + row["not_run"])
                lines.append(f"checks passed: {len(row['passed'])}, others: {bad or 'none'}")
        not_done = self._known[self.part]["not_done"]
        return "\n".join(lines + [f"not done: {name(r['case'])}: {reason(r)}" for r in not_done])


def name(own: Row) -> str:
    kind = {"train": "zero_jax", "torch": "PyTorch"}.get(own["kind"], own["kind"])
    return " ".join([kind, *(str(v) for k, v in own.items() if k not in ("kind", "only"))])


def reason(row: Row) -> str:
    return str(row.get("error") or row.get("skipped"))


def line(row: Row) -> str:
    used = row.get("peak_bytes") or row.get("compiled_bytes")
    cells = [name(row["case"]), f"{row['tokens_per_second']:,.0f}"]
    cells.append(f"{row['mfu']:.1%}" if "mfu" in row else "")
    cells += [f"{used / 1e9:.2f}" if used else "", f"{1e3 * row['seconds']:.1f}"]
    return f"| {' | '.join(cells)} |"


def say(own: Row, row: Row) -> None:
    said = line({"case": own, **row}) if "seconds" in row else f"{name(own)}: {json.dumps(row)}"
    print(said, file=sys.stderr, flush=True)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--toy", action="store_true", help="small models, for a CPU")
    parser.add_argument("--predict", action="store_true", help="model an absent H200")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--json", type=pathlib.Path, default=FILE)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parsed = parser.parse_args(args)
    if parsed.one:
        own = json.loads(parsed.one)
        if not parsed.toy and own["kind"] != "predict" and jax.default_backend() != "gpu":
            parser.error("JAX sees no GPU here: pip install -U 'jax[cuda13]', or --toy for a CPU")
        kinds = {"train": train, "predict": predict}
        kinds["device"] = lambda _: {"device": jax.devices()[0].device_kind}
        print(json.dumps(kinds[own["kind"]](own)))
        return
    if parsed.toy and parsed.json == FILE:
        parser.error("--toy needs --json FILE: docs/gpu.json is for figures of a GPU")
    deadline = time.monotonic() + 60 * parsed.minutes
    rows = cases(parsed.toy)
    if parsed.predict:
        results = Results(parsed.json, "predicted", targets.target(TARGET).description)
        for own in rows:
            if own["kind"] == "train" and not results.has(own):
                skip = reason_against(own)
                given = own | {"kind": "predict"}
                row = {"skipped": skip} if skip else alone(given, COMPILE_SECONDS, "cuda")
                results.add(own, row)
                say(own, row)
        print(results.table())
        return
    platform = "cpu" if parsed.toy else "cuda"
    # In a process of its own: one that looks at a device takes its memory.
    found = alone({"kind": "device"}, ROW_SECONDS, platform)
    if "device" not in found:
        parser.error(reason(found))
    results = Results(parsed.json, "measured", found["device"])
    for own in rows:
        left = deadline - time.monotonic()
        if own["kind"] != "checks" and results.has(own):
            continue
        row = {"error": "no time was left"}
        if left > LEAST_SECONDS and own["kind"] == "checks":
            row = checks(own, parsed.json.with_name("on_gpu.json"), left)
        elif left > LEAST_SECONDS:
            row = alone(own, min(left, ROW_SECONDS), platform)
        results.add(own, row)
        say(own, row)
    print(results.table())


if __name__ == "__main__":
    main()
