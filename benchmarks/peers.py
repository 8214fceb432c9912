"""The same training in PyTorch DDP, FSDP2, DeepSpeed ZeRO and zero_jax, in real processes.

    python benchmarks/peers.py                  # two and four processes over loopback
    python benchmarks/peers.py --processes 2 --rounds 1

All start from the same weights of a GPT of 51M parameters and train on the same tokens by AdamW in
fp32, so that their losses must agree (else this raises). PyTorch runs eagerly, with the fused
AdamW; DeepSpeed's and FSDP2's settings are those that give back a layer's weights after it, as
zero_jax's stage 3 does. Rounds alternate between them, since machines are noisy: time is the median
over rounds of the slowest process's median step, bytes that of the most that the largest process
held while it trained. Each process has its own share of the cores and as many threads; where there
are fewer cores than processes, they take turns. Writes docs/peers.json (unless `--only` leaves some
out) and prints a table.

Peers live in environments of their own; one that is absent is left out with the line that brings
it.
"""

import argparse
import contextlib
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

from training.supervise import free_address
from zero_jax.models import gpt
from zero_jax.sharding.paths import named_leaves

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER.parent / "docs" / "peers.json"
PEERS = {
    "zero_jax": ("jax", [f"stage-{s}" for s in range(4)]),
    "torch": ("torch", ["ddp", "fsdp2"]),
    "deepspeed": ("torch", [f"deepspeed-{s}" for s in (1, 2, 3)]),
}
INSTALL = {"torch": "torch==2.13.0 numpy", "deepspeed": "torch==2.13.0 numpy deepspeed==0.19.8"}
SECONDS = 900  # of one run
AGREE = 1e-5  # relative; gradients that one of them clips differ by 2e-4
# For all: what a step allocates comes in large pages. XLA asks for its temporaries anew each step.
PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
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
    env = os.environ | {"OMP_NUM_THREADS": str(share), "GLOO_SOCKET_IFNAME": "lo", **PAGES}

    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                first = rank * share % len(cores)
                os.sched_setaffinity(0, cores[first : first + share])  # the child takes it over
                own = [*command, f"--rank={rank}"]
                process = subprocess.Popen(own, env=env, stdout=log, stderr=subprocess.STDOUT)
                processes.append(process)
            limit = time.monotonic() + SECONDS
            while any(p.poll() is None for p in processes) and time.monotonic() < limit:
                if any(p.poll() for p in processes):
                    break
                time.sleep(0.1)
        finally:
            os.sched_setaffinity(0, cores)
            for process in processes:
                process.kill()
        outs = [(log.seek(0), log.read())[1] for log in logs]
        for process, out in zip(processes, outs, strict=True):
            if process.wait() > 0:
                raise RuntimeError(f"{name}: {out[-3000:]}")
        return [json.loads(_last(out)) for out in outs]


def _last(out: str) -> str:
    """What was measured; libraries print too."""
    found = [line for line in out.splitlines() if line.startswith('{"losses"')]
    if not found:
        raise RuntimeError(f"ended by its time of {SECONDS} s, or killed: {out[-3000:]}")
    return found[-1]


def compare(world: int, parsed: argparse.Namespace, weights: str) -> list[dict]:
    """Rows of the table for so many processes."""
    sizes = PROBLEM | {"rows": parsed.rows_per_process, "steps": parsed.steps, "weights": weights}
    pythons = {library: environment(library) for library in PEERS}
    known = [(lib, name) for lib, (_, names) in PEERS.items() if pythons[lib] for name in names]
    cases = [(library, name) for library, name in known if name in parsed.only]
    if not cases:
        return []
    found: dict[str, list[list[dict]]] = {name: [] for _, name in cases}
    for _ in range(parsed.rounds):
        for library, name in list(cases):
            try:
                runs = train(pythons[library], library, name, world, sizes)
            except RuntimeError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                cases.remove((library, name))
                continue
            found[name].append(runs)
            print(world, name, [f"{p['seconds']:.3f}" for p in runs], file=sys.stderr)
    if not cases:
        return []
    losses = np.array(found[cases[0][1]][0][0]["losses"])
    rows = []
    for library, name in cases:
        runs = found[name]
        own = np.array([p["losses"] for run in runs for p in run])
        np.testing.assert_allclose(own, np.broadcast_to(losses, own.shape), AGREE, err_msg=name)
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
    names = [name for _, names in PEERS.values() for name in names]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rows-per-process", type=int, default=2)
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
        "model": PROBLEM,
        "environment": PAGES,
        **{name: getattr(parsed, name) for name in ("rows_per_process", "steps", "rounds")},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    if parsed.only == names:
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
