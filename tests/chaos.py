"""Kills and disturbs runs of `train.py` at random moments and resumes them until they are done.

    python tests/chaos.py --kills 50    # prints counts of docs/checkpoint-format.md, 15 minutes

Each run starts in 1, 2 or 4 processes and ends by a random fault. The other processes must end by
themselves and print the reason. A run that finishes must equal one that was not disturbed.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# ruff: noqa: E402

import jax
import jax.numpy as jnp

from training.supervise import WRONG, free_address
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.distributed.watchdog import EXIT_CODE

STEPS, EVERY = 120, 10
# SGD with momentum: its state is not divided by small sums, as Adam's is, so another summation
# order in another number of processes stays below 1e-5; a lost or repeated batch does not.
SETTINGS = f"--max-steps {STEPS} --global-batch-size 8 --seq-len 16 --optimizer sgd --lr 0.03 "
SETTINGS += f"--eval-steps 0 --sample-tokens 0 --save-steps {EVERY} --data text.txt "
SETTINGS += "--heartbeat-timeout-seconds 3"
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40


class Run:
    """A start of a run, and the faults that may happen to it."""

    def __init__(self, folder: Path, out: str, count: int):
        self.folder, self.out, self.log = folder, folder / out, folder / f"{out}.log"
        self.log.touch()
        self.written = len(self.text())
        self.processes = self.start(count)

    def start(self, count: int) -> list[subprocess.Popen]:
        command = [sys.executable, str(ROOT / "train.py"), *SETTINGS.split()]
        command += ["--output-dir", self.out.name, "--devices", str(count)]
        joined = f"--coordinator-address {free_address()} --num-processes {count} --process-id"
        ranks = [[*joined.split(), str(rank)] for rank in range(count)] if count > 1 else [[]]
        # A compilation cache shortens the time before there is something to disturb.
        env = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"), **os.environ}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "a") as log:
            options = {"cwd": self.folder, "env": env, "stdout": log, "stderr": log}
            return [subprocess.Popen([*command, *rank], **options) for rank in ranks]

    def text(self, first: int = 0) -> str:
        return self.log.read_text()[first:]

    def losses(self) -> dict[int, float]:
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def end(self, processes: list[subprocess.Popen]) -> bool:
        """Waits until processes end by themselves; returns whether all succeeded."""
        limit = time.monotonic() + 60
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < limit, f"still running: {self.text()[-9000:]}"
            time.sleep(0.02)
        return not any(process.returncode for process in processes)

    def disturb(self, rng: random.Random, full: bool) -> str:
        """Lets a random fault happen; returns its name and what the run did."""
        step, text = max(self.losses(), default=0), self.text(self.written)
        faults, activity = [self.all_killed], "starting"
        if "Writing to" in text:
            activity = "restoring" if step == 0 else "saving" if step % EVERY < 2 else "training"
            faults.append(self.one_killed)
            if step < STEPS - 2 * EVERY:  # it does not finish before it notices the others
                faults += [self.first_hangs] * (len(self.processes) > 1)
                faults += [self.started_twice] + [self.disk_full] * full
        fault = rng.choice(faults)
        fault(rng)
        return f"{fault.__name__}, {activity}"

    def all_killed(self, _: random.Random | None = None) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def one_killed(self, rng: random.Random) -> None:
        rng.choice(self.processes).kill()
        self.end(self.processes)

    def first_hangs(self, _: random.Random) -> None:
        """The others print its rank and its pid."""
        first, *others = self.processes
        first.send_signal(signal.SIGSTOP)
        self.end(others)
        text = self.text()
        assert f"process 0 (pid {first.pid}" in text, text[-3000:]
        assert {process.returncode for process in others} == {EXIT_CODE}, text[-3000:]
        self.all_killed()

    def started_twice(self, _: random.Random) -> None:
        """The second start is an error while the first one is stopped and has its lock."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)  # until they are stopped
        before, second = len(self.text()), self.start(1)
        self.end(second)
        assert second[0].returncode == WRONG and "another run writes" in self.text(before)
        self.all_killed()

    def disk_full(self, _: random.Random) -> None:
        """The run ends with the reason, at its next checkpoint or line at the latest."""
        before, filler = len(self.text()), self.folder / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True)
        try:
            self.end(self.processes)
        finally:
            filler.unlink()
        text = self.text(before)
        assert "No space left on device" in text or "bytes free" in text, text[-3000:]


def chaos(kills: int, seed: int, folder: Path, counts=(1, 2, 4), full=False):
    """Disturbs runs until there were `kills` faults and the last run has finished.

    Returns counts of faults, and of finished runs, checkpoints and lost steps.
    """
    (folder / "text.txt").write_text(TEXT)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    empty = functools.partial(jax.ShapeDtypeStruct, sharding=device)
    rng, faults, found = random.Random(seed), collections.Counter(), collections.Counter()
    run = Run(folder, "undisturbed", 1)
    run.processes[0].wait(timeout=600)
    want = run.losses()
    assert len(want) == STEPS
    ended = False
    while faults.total() < kills or not ended:
        with contextlib.ExitStack() as stack:
            run = Run(folder, f"run{found['finished']}", rng.choice(counts))
            stack.callback(run.all_killed)
            # Starting takes some seconds, and a step milliseconds.
            wait = rng.uniform(1, 15) if faults.total() < kills else 600
            limit = time.monotonic() + wait
            while time.monotonic() < limit and any(p.poll() is None for p in run.processes):
                time.sleep(0.02)
            ended = any(process.poll() is not None for process in run.processes)
            if ended:
                assert run.end(run.processes), run.text()[-2000:]
                got = run.losses()
                assert got.keys() == want.keys()
                assert max(abs(got[step] / want[step] - 1) for step in want) < 1e-4
            else:
                faults[run.disturb(rng, full)] += 1
            if (run.out / "checkpoints").exists():
                with Checkpoints(run.out / "checkpoints", read_only=True) as checkpoints:
                    for step in checkpoints.steps:  # to the bit
                        arrays = checkpoints.manifest(step).arrays
                        like = {n: empty(x.shape, jnp.dtype(x.dtype)) for n, x in arrays.items()}
                        checkpoints.restore(like, step, say=lambda _: None)
                    found["checkpoints"] += len(checkpoints.steps)
                    lost = max(run.losses(), default=0) - (checkpoints.latest or 0)
                # The last checkpoint may still have been on its way to the disk.
                assert lost <= 3 * EVERY
                found["most steps lost"] = max(lost, found["most steps lost"])
            if ended:
                found["finished"] += 1
                shutil.rmtree(run.out / "checkpoints")
    return faults, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        # Not on the disk that is filled: JAX would keep a truncated entry.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "chaos", folder]
        full = subprocess.run(mount, capture_output=True).returncode == 0  # needs root
        try:
            for counts in chaos(parsed.kills, parsed.seed, Path(folder), full=full):
                print(*(f"| {name} | {n} |" for name, n in sorted(counts.items())), sep="\n")
        finally:
            if full:
                subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    main()
