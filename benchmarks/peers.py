"""The same training in PyTorch DDP, FSDP2, DeepSpeed ZeRO and zero_jax, in real processes.

    python benchmarks/peers.py                  # two and four processes over loopback
    python benchmarks/peers.py --processes 2 --rounds 1

All start from the same weights of a GPT of 51M parameters and train on the same tokens by AdamW in
fp32, so that their losses must agree. Rounds alternate between them, since machines are noisy: time
is the median over rounds of each one's median step. Bytes are the most that a process held while it
trained, the slowest process's time and the largest's bytes count. Each process has its own share of
the cores and as many threads. Writes docs/peers.json and prints a table.

Peers live in environments of their own; one that is absent is left out with the line that brings
it.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import numpy as np
from flax import nnx

from models import gpt
from training.supervise import free_address
from zero_jax.paths import named_leaves

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER.parent / "docs" / "peers.json"
PEERS = {
    "zero_jax": ("jax", [f"stage-{s}" for s in range(4)]),
    "torch": ("torch", ["ddp", "fsdp2"]),
    "deepspeed": ("torch", [f"deepspeed-{s}" for s in (1, 2, 3)]),
}
INSTALL = {"torch": "torch==2.13.0 numpy", "deepspeed": "torch==2.13.0 numpy deepspeed==0.19.8"}
PROBLEM = {"layers": 8, "width": 512, "heads": 8, "vocab": 50304, "seq": 256}


def environment(library: str) -> str | None:
    """The Python of a library's environment; None, and how to make it, where there is none."""
    if library == "zero_jax":
        return sys.executable
    folder = FOLDER.parent / f".venv-{library}"
    if (folder / "bin" / "python").exists():
        return str(folder / "bin" / "python")
    make = f"python3 -m venv {folder.name} && {folder.name}/bin/pip install {INSTALL[library]}"
    print(f"{library} is left out: {make}", file=sys.stderr)
    return None


def train(python: str, library: str, name: str, world: int, sizes: dict[str, int]) -> list[dict]:
    """One run in so many processes; what each of them measured."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world)
    given = [f"--{key}={value}" for key, value in sizes.items()]
    given += [f"--world={world}", f"--address={free_address()}", f"--threads={share}"]
    command = [python, str(FOLDER / f"peer_{PEERS[library][0]}.py"), name, *given]
    env = os.environ | {"OMP_NUM_THREADS": str(share), "GLOO_SOCKET_IFNAME": "lo"}

    def start(rank: int) -> subprocess.Popen:
        first = rank * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])  # children take it over
        try:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen([*command, f"--rank={rank}"], env=env, **pipes)
        finally:
            os.sched_setaffinity(0, cores)

    processes = [start(rank) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{name}: {outputs[0][1][-3000:]}")
    return [json.loads(_last(out)) for out, _ in outputs]


def _last(out: str) -> str:
    """DeepSpeed prints too."""
    return [line for line in out.splitlines() if line.startswith('{"losses"')][-1]


def compare(world: int, parsed: argparse.Namespace, weights: str) -> list[dict]:
    """Rows of the table for so many processes."""
    sizes = PROBLEM | {"rows": parsed.rows, "steps": parsed.steps, "weights": weights}
    pythons = {library: environment(library) for library in PEERS}
    cases = [(lib, name) for lib, (_, names) in PEERS.items() if pythons[lib] for name in names]
    found: dict[str, list[list[dict]]] = {name: [] for _, name in cases}
    for _ in range(parsed.rounds):
        for library, name in cases:
            found[name].append(train(pythons[library], library, name, world, sizes))
            print(world, name, [f"{p['seconds']:.3f}" for p in found[name][-1]], file=sys.stderr)
    losses = found["stage-3"][0][0]["losses"]
    rows = []
    for library, name in cases:
        runs = found[name]
        own = np.array([p["losses"] for run in runs for p in run])
        rows.append(
            {
                "processes": world,
                "library": library,
                "name": name,
                "seconds": statistics.median(max(p["seconds"] for p in run) for run in runs),
                "peak_bytes": statistics.median(max(p["peak_bytes"] for p in r) for r in runs),
                "imported_bytes": statistics.median(
                    max(p["imported_bytes"] for p in r) for r in runs
                ),
                "loss": float(own[0, -1]),
                "loss_error": float(np.max(np.abs(own - losses) / losses)),
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        "| processes | program | step s | MB a process | MB imported | last loss | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [f"{row[key] / 1e6:.0f}" for key in ("peak_bytes", "imported_bytes")]
        cells = (f"{row['seconds']:.3f}", *sizes, f"{row['loss']:.4f}", f"{row['loss_error']:.0e}")
        label = row["name"] if row["library"] != "zero_jax" else f"zero_jax {row['name']}"
        lines.append("| " + " | ".join((str(row["processes"]), label, *cells)) + " |")
    return "\n".join(lines)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--rows", type=int, default=2, help="of one process")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args(args)
    jax.config.update("jax_platforms", "cpu")
    config = gpt.GPTConfig(**PROBLEM)
    params = jax.jit(lambda: nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param))()
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights.npz")
        np.savez(weights, **{name: np.asarray(x) for name, x in named_leaves(params)})
        del params
        rows = [row for world in parsed.processes for row in compare(world, parsed, weights)]
    known = {
        "jax": jax.__version__,
        "peers": INSTALL,
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
