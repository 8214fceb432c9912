"""Muon beside AdamW on H100s that need not be there: memory, words, and who computes how much.

    python benchmarks/muon.py                # 4 programs, 4 minutes on two cores
    python benchmarks/muon.py --loss         # both optimizers in the default run of train.py

Stage 3, 4 rows of 1024 tokens a device, bf16 with bf16 reduction, each layer rematerialised; the
optimizers are those of train.py. `busiest` is what Newton and Schulz's products cost the busiest
owner over the mean of all. Needs the extra `prove`; --loss needs `train` instead, and draws
docs/muon.png.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import matplotlib.pyplot as plt
import numpy as np

from training.run_folder import Points, RunFolder, finite
from zero_jax import Precision, Zero, abstract_mesh
from zero_jax.commands.case import Case
from zero_jax.models import families
from zero_jax.plan import planning

ROOT = pathlib.Path(__file__).parent.parent
CASES = (("1.5b", 8), ("7.5b", 64))
ROWS, TOKENS = 4, 1024


def compiled(model: str, devices: int, optimizer: str) -> dict:
    """What one program holds and sends."""
    zero = Zero(abstract_mesh(devices), 3, precision=Precision("bf16", "bf16"), remat="block")
    case = Case(families.preset(model), zero, optimizer, ROWS * devices, TOKENS)
    plan = case.plan(3, target="h100")
    found = {"model": model, "devices": devices, "optimizer": optimizer}
    found["gb"] = round(plan.total_bytes / 1e9, 2)
    found["elements_per_param"] = round(plan.elements_per_param, 3)
    found["limit_of_elements"] = round(3 + 3 / devices, 3)
    found["forecast_error"] = round(plan.error, 4)
    found["step_seconds"] = round(plan.time.seconds, 4)
    full = jax.eval_shape(case.make)
    for one in planning.assigned(zero.config, case.tx, full).exchanges:
        loads = zip(*(kind.counts for kind in one.kinds), strict=True)
        work = [sum(n * f for n, f in zip(load, one.flops, strict=True)) for load in loads]
        found["busiest"] = round(max(work) * devices / sum(work), 3)
    return found


def trained(optimizer: str) -> tuple[Points, Points]:
    """Losses of the default run, of training and held out."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "train.py", "--optimizer", optimizer]
        subprocess.run([*command, "--output-dir", f"{out}/run"], cwd=ROOT, check=True)
        run = RunFolder(pathlib.Path(out, "run"))
        return finite(run.curve("loss")), finite(run.curve("val_loss"))


def draw(runs: dict[str, tuple[Points, Points]]) -> None:
    """Draws both runs: the running mean of 25 steps, and what is held out."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for (name, (train, held_out)), color in zip(runs.items(), ("#4477aa", "#cc3311"), strict=True):
        steps, losses = np.array(train).T
        means = [losses[max(0, at - 24) : at + 1].mean() for at in range(len(losses))]
        axes.plot(steps, means, color=color, label=f"{name}, training")
        axes.plot(*np.array(held_out).T, "o", color=color, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs" / "muon.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", action="store_true")
    if not parser.parse_args().loss:
        for model, devices in CASES:
            for optimizer in ("muon", "adamw"):
                print(json.dumps(compiled(model, devices, optimizer)), flush=True)
        return
    runs = {name: trained(name) for name in ("adamw", "muon")}
    draw(runs)
    print({name: held_out for name, (_, held_out) in runs.items()})


if __name__ == "__main__":
    main()
