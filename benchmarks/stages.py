"""Step time and bytes of every stage, beside plain data parallelism and GSPMD, in one run.

    python benchmarks/stages.py                               # 124m on 4 forced CPU devices
    python benchmarks/stages.py --model 1.5b --devices 8 --rows 4 --seq 1024 --compute bf16

All train the same GPT by AdamW on the same mesh; gspmd.py has those without zero_jax:

  data parallel  `jax.jit`, every array whole on every device
  gspmd          arrays split over the devices, and nothing else said
  gspmd held     the same with activations held to the batch dim, as an expert writes it

Rounds alternate between the programs, since machines are noisy: the time is the median over
rounds, the ratio the median of those of each round. Bytes are the compiled program's, of one
device. GPUs are used where there are some. Prints a table and writes docs/stages.json.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gspmd
import jax
import numpy as np

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.models import gpt

FILE = pathlib.Path(__file__).parent.parent / "docs" / "stages.json"
PLAIN = "data parallel"
GSPMD = {PLAIN: {"split": False}, "gspmd": {"held": False}, "gspmd held": {}}
NAMES = (*GSPMD, *(f"stage {s}" for s in range(4)))


class Program:
    """One compiled step, and how its states are made."""

    def __init__(self, name: str, case: Case, rows: jax.Array):
        if name in GSPMD:
            step, args = gspmd.step_of(case, case.zero.config.remat, **GSPMD[name])
            placed = jax.tree.map(lambda x: x.sharding, args)
            make = jax.jit(case.make, out_shardings=placed[0])
            init = jax.jit(case.tx.init, out_shardings=placed[1])
            outs = (*placed[:2], None)
            jitted: Any = jax.jit(step, donate_argnums=(0, 1), out_shardings=outs)
            self.make: Callable[[], Any] = lambda: (params := make(), init(params))
            shapes = args[:2]
        else:
            zero = case.zero.at_stage(int(name.split()[-1]))
            tx = zero.optimizer(case.tx)
            jitted = zero.train_step(case.loss_fn, tx)
            self.make = lambda: (params := zero.init(case.make), tx.init(params))
            shapes = (params := zero.eval_shape(case.make), tx.init(params))
        self.batch = rows
        self.step = jitted.lower(*shapes, rows).compile()
        self.total_bytes = zero_jax.audit(self.step).total_bytes

    def time(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and the loss after the last."""
        states = self.make()
        *states, last = self.step(*states, self.batch)
        jax.block_until_ready(states)
        began = time.perf_counter()
        for _ in range(steps):
            *states, last = self.step(*states, self.batch)
        jax.block_until_ready(states)
        seconds = (time.perf_counter() - began) / steps
        return seconds, float(getattr(last, "loss", last))


def table(rows: list[dict]) -> str:
    lines = ["| program | GB per device | step s | of data parallel |", "|---|---|---|---|"]
    for row in rows:
        cells = f"{row['total_bytes'] / 1e9:.2f} | {row['seconds']:.3f} | {row['ratio']:.2f}"
        lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="124m")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="of one device")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--compute", default="fp32", help="dtype of the computation")
    parser.add_argument("--remat", default="block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed, of each round")
    parser.add_argument("--json", type=pathlib.Path, default=FILE)
    parsed = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", parsed.devices)
    if len(jax.devices()) < parsed.devices:
        parser.error(f"--devices {parsed.devices}, but there are {len(jax.devices())}")
    mesh = zero_jax.make_mesh(devices=jax.devices()[: parsed.devices])
    precision = zero_jax.Precision(parsed.compute, reduce_dtype=parsed.compute)
    zero = zero_jax.Zero(mesh, 3, precision=precision, remat=parsed.remat)
    # Logits of a device at once, as those of the programs without zero_jax are.
    tokens_of_one = parsed.rows * parsed.seq
    config = dataclasses.replace(gpt.preset(parsed.model), seq=parsed.seq, loss_chunk=tokens_of_one)
    case = Case(config, zero, "adamw", parsed.rows * parsed.devices)
    tokens = np.random.default_rng(0).integers(0, config.vocab, case.batch.shape, np.int32)
    batch = zero_jax.global_batch(mesh, tokens)
    programs = {name: Program(name, case, batch) for name in NAMES}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for _ in range(parsed.rounds):
        for name, program in programs.items():
            found[name].append(program.time(parsed.steps))
    losses = [loss for runs in found.values() for _, loss in runs]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5 if parsed.compute == "fp32" else 2e-3)
    rows = []
    for name, runs in found.items():
        seconds = [one for one, _ in runs]
        ratios = [own / plain for own, (plain, _) in zip(seconds, found[PLAIN], strict=True)]
        rows.append(
            {
                "name": name,
                "total_bytes": programs[name].total_bytes,
                "seconds": statistics.median(seconds),
                "ratio": statistics.median(ratios),
            }
        )
    known = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "rows_per_device": parsed.rows,
        **{k: v for k, v in vars(parsed).items() if k not in ("json", "rows")},
        "rows": rows,
    }
    parsed.json.write_text(json.dumps(known, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
