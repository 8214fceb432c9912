"""Kills runs of `train.py` at random moments and lets them go on, until they are done.

    python tests/chaos.py --kills 50        # prints the table of docs/checkpoints.md, 10 minutes

A run is started in one, two or four processes; after a random time one of them, or all, get
SIGKILL: in steps, in saves, in restores, while compiling. The others have to end by themselves
(those that still wait for each other at the start get it too). Then every checkpoint is read and
checked, and the run is started again, often in another number of processes.
A run that gets through is compared with one that nobody disturbed, and the next is begun.
"""

import argparse
import collections
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from training.supervise import free_address  # noqa: E402

STEPS, EVERY = 120, 10
# Momentum is a state; Adam would also divide small sums by small sums, whose order of summation is
# another one in another number of processes, and at a large learning rate any rounding grows to a
# curve of its own. So it stays below 1e-5, and a batch left out or taken twice does not.
SETTINGS = ["--steps", str(STEPS), "--batch", "8", "--seq", "16", "--optimizer", "sgd"]
SETTINGS += ["--eval-every", "0", "--sample-length", "0", "--checkpoint-every", str(EVERY)]
SETTINGS += ["--data", "text.txt", "--dead-after", "3", "--lr", "0.03"]
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40


@dataclasses.dataclass
class Outcome:
    """What happened, by what the run was doing when it was killed."""

    kills: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finished: int = 0
    checked: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    worst: float = 0.0

    def __str__(self) -> str:
        rows = [f"| {what} | {n} |" for what, n in sorted(self.kills.items())]
        return "\n".join(
            [
                *("| killed while | times |", "|---|---|", *rows),
                f"| in all | {sum(self.kills.values())} |",
                "",
                f"{self.finished} runs got through; {self.checked} checkpoints were read back, all",
                f"whole; at most {max(self.lost, default=0)} steps were lost; losses differ",
                f"from those of the undisturbed run by {self.worst:.1e} at most",
            ]
        )


def start(folder: Path, out: str, count: int) -> list[subprocess.Popen]:
    address = free_address()
    command = [sys.executable, str(ROOT / "train.py"), *SETTINGS, "--out", out]
    command += ["--devices", str(count)]
    own = [["--coordinator", address, "--num-processes", str(count), "--process-id", str(rank)]
           for rank in range(count)] if count > 1 else [[]]  # fmt: skip
    # Compiled once for all starts, so that less time passes before there is something to disturb.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **cache}
    with open(folder / f"{out}.log", "a") as log:
        said = {"stdout": log, "stderr": subprocess.STDOUT}
        return [
            subprocess.Popen([*command, *more], cwd=folder, env=environment, **said) for more in own
        ]


def end(processes: list[subprocess.Popen], seconds: float, log: Path) -> None:
    """Waits for all; what has not ended then did not notice, which is an error."""
    limit = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise AssertionError(
                f"process {processes.index(process)} of {len(processes)} has not ended, the others "
                f"with {[p.returncode for p in processes]}; {log.read_text()[-3000:]}"
            ) from None


def curve(folder: Path, out: str) -> dict[int, float]:
    import json

    found = {}
    for line in (folder / out / "metrics.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n") and "loss" in json.loads(line):
            found[json.loads(line)["step"]] = json.loads(line)["loss"]
    return found


def check_all(folder: Path, out: str) -> tuple[int, int]:
    """Reads every checkpoint to the bit; how many there are, and the last one's step."""
    import jax
    import jax.numpy as jnp

    from zero_jax.checkpoint.checkpoints import Checkpoints

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(folder / out / "checkpoints", read_only=True) as checkpoints:
        for step in checkpoints.steps:
            known = checkpoints.manifest(step).arrays
            like = {
                name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=place)
                for name, x in known.items()
            }
            checkpoints.restore(like, step, say=lambda _: None)
        return len(checkpoints.steps), checkpoints.latest or 0


def doing(log: str, step: int) -> str:
    """What a start does, from what it has written by now and its last step."""
    if "Writing to" not in log:
        return "starting"
    if "Going on from" not in log and step == 0:
        return "beginning or restoring"
    return "saving" if step % EVERY <= 1 else "training"


def chaos(kills: int, seed: int, folder: Path, counts: tuple[int, ...] = (1, 2, 4)) -> Outcome:
    """Runs until so many kills are done, and the run they disturbed is through."""
    (folder / "text.txt").write_text(TEXT)
    rng, outcome = random.Random(seed), Outcome()
    end(start(folder, "whole", 1), 600, folder / "whole.log")
    want = curve(folder, "whole")
    assert len(want) == STEPS
    number = 0
    while True:
        out = f"run{number}"
        log = folder / f"{out}.log"
        written = log.stat().st_size if log.exists() else 0
        processes = start(folder, out, rng.choice(counts))
        # Starting takes some seconds, and a step milliseconds.
        wait = rng.uniform(1, 15) if sum(outcome.kills.values()) < kills else 600
        limit = time.monotonic() + wait
        while time.monotonic() < limit and any(p.poll() is None for p in processes):
            time.sleep(0.02)
        if any(p.poll() == 0 for p in processes):
            end(processes, 60, log)  # the run is through: they leave one after another
        if all(p.poll() == 0 for p in processes):
            got = curve(folder, out)
            assert got.keys() == want.keys()
            gap = max(abs(got[s] / want[s] - 1) for s in want)
            assert gap < 1e-4, gap
            outcome.worst, outcome.finished = max(outcome.worst, gap), outcome.finished + 1
            outcome.checked += check_all(folder, out)[0]
            if sum(outcome.kills.values()) >= kills:
                return outcome
            number += 1
            continue
        assert all(p.poll() is None for p in processes), log.read_text()[-2000:]
        metrics = folder / out / "metrics.jsonl"
        step = max(curve(folder, out), default=0) if metrics.exists() else 0
        what = doing(log.read_bytes()[written:].decode(), step)
        outcome.kills[what] += 1
        alone = what != "starting" and rng.random() < 0.5
        for process in [rng.choice(processes)] if alone else processes:
            process.kill()
        end(processes, 60, log)
        if (folder / out / "checkpoints").exists():
            count, latest = check_all(folder, out)
            outcome.checked += count
            reached = max(curve(folder, out), default=0) if metrics.exists() else 0
            # The last checkpoint may still have been on its way to the disk.
            assert reached - latest <= 3 * EVERY, (reached, latest)
            outcome.lost.append(reached - latest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        print(chaos(parsed.kills, parsed.seed, Path(folder)))
        print(f"\nin {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
