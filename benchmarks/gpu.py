"""How fast zero_jax is on the GPU that is here. No network, under 10 minutes.

    python benchmarks/gpu.py                    # one GPU; writes docs/gpu.json, prints a table
    python benchmarks/gpu.py --toy --json FILE  # every measurement at toy size, on a CPU too

Rates are tokens per second and MFU: the model's FLOPs, recomputation not counted and attention
counted whole, over the device's dense peak (of a device without a data sheet here, over the rate of
a large matrix product). An optimizer's step is what it must read and write, 28 bytes a parameter,
over the bandwidth of a copy measured in the same process; with its state in host memory the 16
bytes that cross the link, over a copy there and back. Every row is a process of its own, so that
one that does not fit ends nothing else, and memory peaks are its own; rows for which no time is
left are named.

Rows that the file has already, from the same kind of device, stay as they are.

PyTorch, its blocks and loss compiled by torch.compile, trains the same models where this Python has
it, or that of .venv-torch; else the line that brings it is printed.
"""

import argparse
import bisect
import dataclasses
import functools
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
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from training.memory import host_memory
from zero_jax.commands.case import Case
from zero_jax.hlo import auditor, roofline, targets
from zero_jax.models import gpt
from zero_jax.offload.host import parse

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER.parent / "docs" / "gpu.json"
MINUTES = 9  # and what the last row needs to end
ROW_SECONDS = 150  # of one row at most
STEPS = 8
MEASURED_SECONDS = 15  # enough of them, once there are three
LARGEST = 96  # layers at most, of the largest model that fits
HOST_SHARE = 0.7  # of the host memory that is free: states may take so much
PIECE_BYTES = 2**30  # of states in host memory: XLA compiles each piece of the update
TORCH = "python3 -m venv .venv-torch && .venv-torch/bin/pip install torch numpy"


def cases(toy: bool) -> list[dict[str, Any]]:
    """What is measured, in this order: what matters most comes first."""
    small, large, wide = ("nano", "nano", "nano") if toy else ("124m", "1.5b", "7.5b")
    few, many = (2, 2) if toy else (8, 16)
    made: list[dict[str, Any]] = [
        {"kind": "train", "model": large, "rows": many, "remat": "block"},
        {"kind": "update", "model": large},
        {"kind": "train", "model": small, "rows": many, "remat": "none"},
        {"kind": "torch", "model": small, "rows": many, "remat": "none"},
        {"kind": "torch", "model": large, "rows": many, "remat": "block"},
        {"kind": "update", "model": large, "offload": "optimizer"},
        {"kind": "largest", "model": wide, "rows": few},
        {"kind": "largest", "model": wide, "rows": few, "offload": "optimizer,params"},
        # The others have "auto": cuDNN's kernel, where there is one.
        {"kind": "train", "model": small, "rows": many, "remat": "none", "attention": "xla"},
    ]
    made += [
        {"kind": "train", "model": small, "rows": many, "remat": remat}
        for remat in ("dots", "block")
    ]
    made += [
        {"kind": "train", "model": large, "rows": few, "remat": remat}
        for remat in ("none", "dots", "block")
    ]
    return made


def case_of(own: dict[str, Any], layers: int | None = None) -> Case:
    """One model on one device, stage 3, bf16."""
    config = gpt.preset(own["model"], attention=own.get("attention", "auto"))
    if layers is not None:
        config = dataclasses.replace(config, layers=layers)
    zero = zero_jax.Zero(
        zero_jax.make_mesh(devices=jax.devices()[:1]),
        3,
        precision=zero_jax.Precision("bf16"),
        remat=own.get("remat", "block"),
        offload=dataclasses.replace(parse(own.get("offload")), piece_bytes=PIECE_BYTES),
    )
    return Case(config, zero, "adamw", own.get("rows", 1))


def train(own: dict[str, Any], layers: int | None = None) -> dict[str, Any]:
    """Tokens per second of training steps, MFU, and the memory that they took."""
    case = case_of(own, layers)
    zero = case.zero
    tokens = np.random.default_rng(0).integers(0, case.config.vocab, case.batch.shape, np.int32)
    batch, tx = zero_jax.global_batch(zero.mesh, tokens), zero.optimizer(case.tx)
    params = zero.init(case.make)
    states: tuple[Any, ...] = (params, tx.init(params))
    del params
    step = zero.train_step(case.loss_fn, tx)
    began = time.perf_counter()
    compiled = auditor.audit(step.lower(*states, batch).compile(), dict(zero.mesh.shape))
    compile_seconds = time.perf_counter() - began

    def once() -> None:
        nonlocal states
        *states, _ = step(*states, batch)
        jax.block_until_ready(states)

    seconds = median_seconds(once)
    rate = tokens[:, 1:].size / seconds
    peak, source = peak_flops()
    return {
        "params": gpt.num_params(case.config),
        "seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * gpt.flops_per_token(case.config, case.config.seq) / peak,
        "peak_flops": peak,
        "peak_from": source,
        "peak_bytes": held_bytes(),
        "compiled_bytes": compiled.total_bytes,
        "forecast_bytes": case.plan(3).predicted.total_bytes,
        "compile_seconds": compile_seconds,
        "roofline_seconds": at_best(compiled),
    }


def at_best(compiled: auditor.Audit) -> float | None:
    """Seconds of a step by the roofline of this device; of one without a data sheet here None."""
    sheet = data_sheet()
    if sheet is None:
        return None
    return roofline.step_time(compiled.program, compiled.collectives, sheet).seconds


def data_sheet() -> targets.Target | None:
    """What is known here of this kind of device."""
    kind = jax.devices()[0].device_kind
    return next((x for x in targets.TARGETS.values() if x.description == kind), None)


def update(own: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of AdamW's step, beside a copy's; with offload of those in host memory."""
    case = case_of(own)
    zero, tx = case.zero, case.zero.optimizer(case.tx)
    params = zero.init(case.make)
    states: tuple[Any, ...] = (params, tx.init(params))
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3, dtype=jnp.float32), params)
    count = sum(x.size for x in jax.tree.leaves(params))
    del params

    def step(params: Any, state: Any, grads: Any) -> Any:
        # A training step knows whether its gradients are finite.
        updates, state = tx.update(grads, state, params, finite=True)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def once() -> None:
        nonlocal states
        states = jitted(*states, grads)
        jax.block_until_ready(states)

    # Reads gradient, master, both moments; writes master and both moments; all fp32. Both moments
    # come from the host and go back.
    words, copied = (4, link_bandwidth) if own.get("offload") else (7, copy_bandwidth)
    speed, copy = 4 * words * count / median_seconds(once), copied()
    return {"params": count, "bytes_per_second": speed, "copy": copy, "of_copy": speed / copy}


def largest(own: dict[str, Any]) -> dict[str, Any]:
    """The deepest model of this width that fits by the plan, trained; and what ended the search."""
    limits = {"device": 0.9 * memory_limit(), "host": HOST_SHARE * host_memory()}

    def ends(layers: int) -> str:
        """What has too little memory for so many layers, "" if nothing has."""
        predicted = case_of(own, layers).plan(3).predicted
        needed = {"device": predicted.total_bytes, "host": predicted.host}
        return next((name for name in limits if needed[name] > limits[name]), "")

    depths = range(1, LARGEST + 1)
    deepest = bisect.bisect_left(depths, True, key=lambda layers: bool(ends(layers)))
    if not deepest:
        raise ValueError(f"not one layer of {own['model']} fits, for its {ends(1)} memory")
    ended = ends(deepest + 1) if deepest < LARGEST else f"{LARGEST} layers, the most that are tried"
    return {"layers": deepest, "ended_by": ended, "limits": limits, **train(own, deepest)}


def peak_flops() -> tuple[float, str]:
    """FLOP/s of this device, and where that figure is from."""
    sheet = data_sheet()
    if sheet is not None:
        return sheet.flops, "data sheet's peak"
    size = 8192 if jax.default_backend() == "gpu" else 1024
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    seconds = median_seconds(lambda: product(x).block_until_ready())
    return 2 * size**3 / seconds, f"rate of a product of {size}"


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    x, add = large_array(), jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: add(x).block_until_ready())


def link_bandwidth() -> float:
    """Bytes per second to host memory, and back once they are there."""
    x = large_array()
    host, device = (x.sharding.with_memory_kind(kind) for kind in ("pinned_host", "device"))

    def once() -> None:
        jax.device_put(jax.device_put(x, host).block_until_ready(), device).block_until_ready()

    return 2 * x.nbytes / median_seconds(once)


def large_array() -> jax.Array:
    return jnp.zeros(2**29 if jax.default_backend() == "gpu" else 2**24, jnp.float32)


def median_seconds(once: Callable[[], Any]) -> float:
    for _ in range(2):
        once()
    seconds: list[float] = []
    while len(seconds) < STEPS and (len(seconds) < 3 or sum(seconds) < MEASURED_SECONDS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def held_bytes() -> int | None:
    """The most that was held of the device."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def memory_limit() -> int:
    """Bytes that this process may take of the device; of a CPU, enough for a toy."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 10**8)


def environment() -> dict[str, str]:
    """In which a row finds all memory of device and host: what fits is to be seen, not what JAX and
    XLA take by default."""
    # The older spelling of the first: JAX ends where it is given both.
    env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return env | {
        "XLA_CLIENT_MEM_FRACTION": "0.95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(int(0.9 * host_memory() / 2**30)),
        "JAX_TRACEBACK_FILTERING": "off",  # of what went wrong the error, not its frames
    }


def alone(own: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    """One row, in a process of its own; on "cuda" or "cpu"."""
    command = [sys.executable, __file__, *(["--toy"] if device == "cpu" else [])]
    if own["kind"] == "torch":
        python = python_with_torch()
        if python is None:
            return {"missing": TORCH}
        config = dataclasses.asdict(gpt.preset(own["model"]))
        own = {**own, **{k: config[k] for k in ("layers", "width", "heads", "vocab", "seq")}}
        own["device"] = device
        command = [python, str(FOLDER / "gpu_torch.py")]
    try:
        done = subprocess.run(
            [*command, "--one", json.dumps(own)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {seconds:.0f} s"}
    if done.returncode:
        return {"error": last_error(done.stderr) or f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def measured_before(file: pathlib.Path, device: str) -> dict[str, dict[str, Any]]:
    """Rows that a run before this one measured on the same kind of device, by their case."""
    if not file.exists():
        return {}
    known = json.loads(file.read_text())
    # In a process of its own: one that looks at a device takes its memory.
    if known["device"] != alone({"kind": "device"}, ROW_SECONDS, device).get("device"):
        return {}
    good = (row for row in known["rows"] if not {"error", "missing"} & row.keys())
    return {json.dumps(row["case"]): row for row in good}


def last_error(log: str) -> str:
    """The line that says what ended a process, "" if it said nothing."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return (errors or lines or [""])[-1][:300]


@functools.cache
def python_with_torch() -> str | None:
    for python in (sys.executable, str(FOLDER.parent / ".venv-torch" / "bin" / "python")):
        if pathlib.Path(python).exists():
            tried = subprocess.run([python, "-c", "import torch"], capture_output=True)
            if tried.returncode == 0:
                return python
    return None


def table(rows: list[dict]) -> str:
    lines = ["| what | model | settings | result |", "|---|---|---|---|"]
    for row in rows:
        known = {k: v for k, v in row["case"].items() if k not in ("kind", "model")}
        settings = ", ".join(f"{k} {v}" for k, v in known.items())
        lines.append(
            f"| {row['case']['kind']} | {row['case']['model']} | {settings} | {said(row)} |"
        )
    return "\n".join(lines)


def said(row: dict[str, Any]) -> str:
    if "of_copy" in row:
        rates = (row["bytes_per_second"] / 1e9, row["copy"] / 1e9, row["of_copy"])
        return "{:.0f} GB/s, a copy {:.0f}: {:.0%}".format(*rates)
    if "tokens_per_second" in row:
        peak = row.get("peak_bytes")
        held = f", {peak / 1e9:.1f} GB" if peak else ""
        size = f"{row['params'] / 1e9:.2f}B, " if "layers" in row else ""
        mfu = f", MFU {row['mfu']:.1%} of the {row['peak_from']}" if "mfu" in row else ""
        ended = f", ended by {row['ended_by']}" if "ended_by" in row else ""
        return f"{size}{row['tokens_per_second']:,.0f} tokens/s{mfu}{held}{ended}"
    return row.get("error") or f"left out: {row['missing']}"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--toy", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=pathlib.Path, default=FILE)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parsed = parser.parse_args(args)
    if parsed.one:
        own = json.loads(parsed.one)
        if not parsed.toy and jax.default_backend() != "gpu":
            parser.error("JAX sees no GPU here: pip install -U 'jax[cuda13]', or --toy for a CPU")
        kinds = {"train": train, "update": update, "largest": largest, "device": lambda _: {}}
        measured = kinds[own["kind"]](own)
        print(json.dumps(measured | {"device": jax.devices()[0].device_kind}))
        return
    if parsed.toy and parsed.json == FILE:
        parser.error("--toy needs --json FILE: docs/gpu.json is for figures of a GPU")
    deadline = time.monotonic() + 60 * MINUTES
    device = "cpu" if parsed.toy else "cuda"
    before = measured_before(parsed.json, device)
    rows: list[dict[str, Any]] = []
    for own in cases(parsed.toy):
        left = deadline - time.monotonic()
        measured = before.get(json.dumps(own), {"error": "no time was left"})
        if "error" in measured and left > 20:
            measured = alone(own, min(left, ROW_SECONDS), device)
        rows.append({"case": own, **measured})
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        known = {
            "jax": jax.__version__,
            "device": next((row["device"] for row in rows if "device" in row), None),
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        parsed.json.write_text(json.dumps(known, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
