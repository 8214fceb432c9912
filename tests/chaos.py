"""Kills and disturbs runs of `train.py` at random moments and resumes them until they are done.

    python tests/chaos.py --kills 50        # prints the table of docs/checkpoints.md, 15 minutes

A run starts in one, two or four processes. After a random time (in steps, in saves, in restores,
while compiling) one process or all are killed, the first one hangs, the same run is started a
second time, or the disk is full. The others must end by themselves and print the reason. Then every
checkpoint is read, and the run is started again, often with another number of processes. A run that
finishes is compared with one that was not disturbed.
"""

import argparse
import collections
import dataclasses
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# ruff: noqa: E402

import jax
import jax.numpy as jnp

from training.supervise import WRONG, free_address
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.cluster.roll import ENDED

STEPS, EVERY = 120, 10
# SGD with momentum: its state is not divided by small sums, as Adam's is, so another summation
# order in another number of processes stays below 1e-5; a lost or repeated batch does not.
SETTINGS = f"--steps {STEPS} --batch 8 --seq 16 --optimizer sgd --lr 0.03 --eval-every 0 "
SETTINGS += f"--sample-length 0 --checkpoint-every {EVERY} --data text.txt --dead-after 3"
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40


@dataclasses.dataclass
class Outcome:
    """Counts of faults by kind and by the activity of the run, and their consequences."""

    kills: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finished: int = 0
    checked: int = 0  # checkpoints
    lost: int = 0  # the most steps
    worst: float = 0.0  # relative difference of a loss from the undisturbed run


class Run:
    """A start of a run, and the faults that may happen to it."""

    def __init__(self, folder: Path, out: str, count: int, rng: random.Random):
        self.rng, self.folder, self.out = rng, folder, folder / out
        self.log = folder / f"{out}.log"
        self.written = len(self.text()) if self.log.exists() else 0
        self.processes = self.start(count)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, count: int) -> list[subprocess.Popen]:
        command = [sys.executable, str(ROOT / "train.py"), *SETTINGS.split()]
        command += ["--out", self.out.name, "--devices", str(count)]
        joined = ["--coordinator", free_address(), "--num-processes", str(count), "--process-id"]
        ranks = [[*joined, str(rank)] for rank in range(count)] if count > 1 else [[]]
        # A compilation cache shortens the time before there is something to disturb.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}
        cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env = {**cache, **os.environ, "PYTHONUNBUFFERED": "1"}
        with open(self.log, "a") as log:
            options = {"cwd": self.folder, "env": env, "stdout": log, "stderr": log}
            return [subprocess.Popen([*command, *rank], **options) for rank in ranks]

    def text(self, first: int = 0) -> str:
        return self.log.read_text()[first:]

    def curve(self, key: str = "loss") -> dict[int, float]:
        """Returns values by step, of complete lines."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row[key] for row in rows if key in row}

    def end(self, processes: list[subprocess.Popen] | None = None) -> bool:
        """Waits until processes end by themselves; returns whether all succeeded."""
        processes, limit = processes or self.processes, time.monotonic() + 60
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < limit, f"still running: {self.text()[-9000:]}"
            time.sleep(0.02)
        return not any(process.returncode for process in processes)

    def activity(self) -> str:
        text, step = self.text(self.written), max(self.curve(), default=0)
        if "Writing to" not in text:
            return "starting"
        if "over all" in text:  # the last loss, printed when everything is written
            return "leaving"
        if "Going on from" not in text and step == 0:
            return "beginning or restoring"
        return "saving" if step % EVERY <= 1 else "training"

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def finished(self) -> bool:
        """Returns whether the last loss is written, which precedes the release of the lock."""
        return STEPS in self.curve("val_loss")

    def check_all(self) -> tuple[int, int]:
        """Reads every checkpoint to the bit; returns their number and the last one's step."""
        if not (self.out / "checkpoints").exists():
            return 0, 0
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with Checkpoints(self.out / "checkpoints", read_only=True) as checkpoints:
            for step in checkpoints.steps:
                like = {
                    name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=device)
                    for name, x in checkpoints.manifest(step).arrays.items()
                }
                checkpoints.restore(like, step, say=lambda _: None)
            return len(checkpoints.steps), checkpoints.latest or 0

    # Faults. A run that had finished already must end well.

    def all_killed(self) -> None:
        self.signal(signal.SIGKILL)
        self.end()

    def one_killed(self) -> None:
        self.rng.choice(self.processes).kill()
        self.end()

    def first_hangs(self) -> None:
        """The others print its rank, and its pid if it has given a sign of life."""
        first, *others = self.processes
        first.send_signal(signal.SIGSTOP)
        if self.end(others) and self.finished():
            self.signal(signal.SIGCONT)
            assert self.end(), self.text()[-3000:]
            return
        text = self.text()
        named = f"process 0 (pid {first.pid}" in text or "process 0 was not seen" in text
        assert named and {process.returncode for process in others} == {ENDED}, text[-3000:]
        self.all_killed()

    def started_twice(self) -> None:
        """The second start is an error while the first one is stopped and has its lock."""
        self.signal(signal.SIGSTOP)
        time.sleep(0.1)  # until they are stopped
        times = lambda: {p: p.stat().st_mtime_ns for p in (self.out / "alive").rglob("*")}  # noqa: E731
        before, alive, finished = len(self.text()), times(), self.finished()
        second = self.start(1)
        if self.end(second) and finished:
            self.signal(signal.SIGCONT)
            assert self.end(), self.text()[-3000:]
            return
        text = self.text(before)
        assert second[0].returncode == WRONG and "another run writes" in text, text
        assert alive and times() == alive
        self.all_killed()

    def disk_full(self) -> None:
        """The run ends with the reason, at its next checkpoint or line at the latest."""
        before, filler = len(self.text()), self.folder / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True)
        try:
            succeeded = self.end()
        finally:
            filler.unlink()
        text = self.text(before)
        assert succeeded or "No space left on device" in text or "bytes free" in text, text[-3000:]

    def disturb(self, full: bool) -> str:
        """Chooses a fault that this run must notice; returns its name and the activity."""
        activity, faults = self.activity(), [self.all_killed]
        # A process that is leaving waits for no other, and has released its lock.
        faults += [self.one_killed] * (activity != "starting")
        if activity not in ("starting", "leaving"):
            faults += [self.first_hangs] * (len(self.processes) > 1)
            faults += [self.started_twice] + [self.disk_full] * full
        fault = self.rng.choice(faults)
        fault()
        return f"{fault.__name__}, {activity}"


def chaos(kills: int, seed: int, folder: Path, counts=(1, 2, 4), full=False) -> Outcome:
    """Disturbs runs until there were `kills` faults and the disturbed run has finished.

    Args:
      kills: number of faults.
      seed: of all random choices.
      folder: to run in.
      counts: numbers of processes.
      full: whether the folder is a small file system, which may be filled.
    """
    (folder / "text.txt").write_text(TEXT)
    rng, outcome = random.Random(seed), Outcome()
    with Run(folder, "undisturbed", 1, rng) as run:
        run.processes[0].wait(timeout=600)
        want = run.curve()
    assert len(want) == STEPS
    while True:
        with Run(folder, f"run{outcome.finished}", rng.choice(counts), rng) as run:
            # Starting takes some seconds, and a step milliseconds.
            wait = rng.uniform(1, 15) if outcome.kills.total() < kills else 600
            limit = time.monotonic() + wait
            while time.monotonic() < limit and any(p.poll() is None for p in run.processes):
                time.sleep(0.02)
            assert not any(process.returncode for process in run.processes), run.text()[-2000:]
            ended = any(process.poll() == 0 for process in run.processes)
            if ended:
                assert run.end(), run.text()[-2000:]
            else:
                outcome.kills[run.disturb(full)] += 1
            count, latest = run.check_all()
            outcome.checked += count
            if ended:
                got = run.curve()
                assert got.keys() == want.keys()
                outcome.worst = max(outcome.worst, *(abs(got[s] / want[s] - 1) for s in want))
                assert outcome.worst < 1e-4
                outcome.finished += 1
                if outcome.kills.total() >= kills:
                    return outcome
                shutil.rmtree(run.out / "checkpoints")
            elif (run.out / "checkpoints").exists():
                # The last checkpoint may still have been on its way to the disk.
                outcome.lost = max(outcome.lost, max(run.curve(), default=0) - latest)
                assert outcome.lost <= 3 * EVERY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        # Not on the disk that is filled: JAX would keep a truncated entry.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "chaos", folder]
        full = subprocess.run(mount, capture_output=True).returncode == 0
        if not full:
            print("no small file system to fill (mount needs root): no disk will be full")
        try:
            print(chaos(parsed.kills, parsed.seed, Path(folder), full=full))
        finally:
            if full:
                subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    main()
