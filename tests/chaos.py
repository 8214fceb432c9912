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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from training.supervise import WRONG, free_address  # noqa: E402
from zero_jax.checkpoint.checkpoints import Checkpoints  # noqa: E402
from zero_jax.cluster.roll import ENDED  # noqa: E402

STEPS, EVERY = 120, 10
# SGD with momentum: its state is not divided by small sums, as Adam's is, so another summation
# order in another number of processes stays below 1e-5; a lost or repeated batch does not.
SETTINGS = f"--steps {STEPS} --batch 8 --seq 16 --optimizer sgd --lr 0.03 --eval-every 0 "
SETTINGS += f"--sample-length 0 --checkpoint-every {EVERY} --data text.txt --dead-after 3"
TEXT = "Partition what each device holds, and gather what it needs.\n" * 40


@dataclasses.dataclass
class Outcome:
    """Counts of faults by kind and by the activity of the run, and their consequences."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    finished: int = 0
    checked: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    worst: float = 0.0

    def __str__(self) -> str:
        rows = [f"| {kind} | {n} |" for kind, n in sorted(self.kills.items())]
        rows = ["| fault, while | times |", "|---|---|", *rows, f"| all | {self.kills.total()} |"]
        return "\n".join(rows) + (
            f"\n\n{self.finished} runs finished; {self.checked} checkpoints were read and intact; "
            f"at most {max(self.lost, default=0)} steps were lost; losses differ from those of "
            f"the undisturbed run by at most {self.worst:.1e}"
        )


def start(folder: Path, out: str, count: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, str(ROOT / "train.py"), *SETTINGS.split(), "--out", out]
    command += ["--devices", str(count)]
    joined = ["--coordinator", free_address(), "--num-processes", str(count), "--process-id"]
    ranks = [[*joined, str(rank)] for rank in range(count)] if count > 1 else [[]]
    # A compilation cache shortens the time before there is something to disturb.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env = {**cache, **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with open(folder / f"{out}.log", "a") as log:
        popen = {"cwd": folder, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
        return [subprocess.Popen([*command, *rank], **popen) for rank in ranks]


class Run:
    """A start of a run, and the faults that may happen to it."""

    def __init__(self, folder: Path, out: str, count: int, rng: random.Random):
        self.folder, self.out, self.rng = folder, out, rng
        self.log = folder / f"{out}.log"
        self.written = len(self.text()) if self.log.exists() else 0
        self.processes = start(folder, out, count)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, first: int = 0) -> str:
        return self.log.read_text()[first:]

    def curve(self, key: str = "loss") -> dict[int, float]:
        """Returns values by step, of complete lines."""
        file = self.folder / self.out / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row[key] for row in rows if key in row}

    def end(self, processes: Sequence[subprocess.Popen[bytes]] | None = None) -> bool:
        """Waits until processes end by themselves; returns whether all succeeded."""
        processes, limit = processes or self.processes, time.monotonic() + 60
        for process in processes:
            try:
                process.wait(timeout=max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                codes = [p.returncode for p in processes]
                raise AssertionError(f"still running: {codes}; {self.text()[-9000:]}") from None
        return not any(process.returncode for process in processes)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def finished(self) -> bool:
        """Returns whether the last loss is written, which precedes the release of the lock."""
        return STEPS in self.curve("val_loss")

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

    def continue_to_the_end(self) -> None:
        self.signal(signal.SIGCONT)
        assert self.end(), self.text()[-3000:]

    # Faults.

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
            return self.continue_to_the_end()
        text = self.text()
        known = f"process 0 (pid {first.pid}" in text or "process 0 was not seen" in text
        assert known and {p.returncode for p in others} == {ENDED}, text[-3000:]
        self.all_killed()

    def started_twice(self) -> None:
        """The second start is an error while the first one is stopped and has its lock."""
        self.signal(signal.SIGSTOP)
        time.sleep(0.1)  # until they are stopped
        alive = self.folder / self.out / "alive"
        watched = {path: path.stat().st_mtime_ns for path in alive.rglob("*")}
        before, finished = len(self.text()), self.finished()
        second = start(self.folder, self.out, 1)
        if self.end(second) and finished:
            return self.continue_to_the_end()
        text = self.text(before)
        assert second[0].returncode == WRONG and "another run writes" in text, text
        assert watched == {path: path.stat().st_mtime_ns for path in alive.rglob("*")} != {}
        self.all_killed()

    def disk_full(self) -> None:
        """The run ends with the reason, at its next checkpoint or line at the latest."""
        before, filler = len(self.text()), self.folder / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                pass
        try:
            succeeded = self.end()
        finally:
            filler.unlink()
        text = self.text(before)
        assert succeeded or "No space left on device" in text or "bytes free" in text, text[-3000:]


def check_all(folder: Path, out: str) -> tuple[int, int]:
    """Reads every checkpoint to the bit; returns their number and the last one's step."""
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    with Checkpoints(folder / out / "checkpoints", read_only=True) as checkpoints:
        for step in checkpoints.steps:
            like = {
                name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=device)
                for name, x in checkpoints.manifest(step).arrays.items()
            }
            checkpoints.restore(like, step, say=lambda _: None)
        return len(checkpoints.steps), checkpoints.latest or 0


def disturb(run: Run, full: bool, only: str | None) -> str:
    """Lets one fault happen, and returns it and the activity of the run."""
    activity, faults = run.activity(), {"all killed": run.all_killed}
    if activity != "starting":
        faults["one killed"] = run.one_killed
    # A process that is leaving waits for no other, and has released its lock.
    if activity not in ("starting", "leaving"):
        if len(run.processes) > 1:
            faults["first hangs"] = run.first_hangs
        faults["started twice"] = run.started_twice
        if full:
            faults["disk full"] = run.disk_full
    fault = only if only in faults else run.rng.choice(list(faults))
    faults[fault]()
    return f"{fault}, {activity}"


def chaos(
    kills: int,
    seed: int,
    folder: Path,
    counts: tuple[int, ...] = (1, 2, 4),
    full: bool = False,
    only: str | None = None,
) -> Outcome:
    """Disturbs runs until there were `kills` faults and the disturbed run has finished.

    Args:
      kills: number of faults.
      seed: of all random choices.
      folder: to run in.
      counts: numbers of processes.
      full: whether the folder is a small file system, which may be filled.
      only: the fault; any by default. Before a run has begun all of it is killed.
    """
    (folder / "text.txt").write_text(TEXT)
    rng, outcome, number = random.Random(seed), Outcome(), 0
    with Run(folder, "undisturbed", 1, rng) as run:
        run.processes[0].wait(timeout=600)
        want = run.curve()
    assert len(want) == STEPS
    while True:
        out = f"run{number}"
        with Run(folder, out, rng.choice(counts), rng) as run:
            # Starting takes some seconds, and a step milliseconds.
            limit = rng.uniform(1, 15) if outcome.kills.total() < kills else 600
            limit += time.monotonic()
            while time.monotonic() < limit and run.running():
                time.sleep(0.02)
            if any(process.poll() == 0 for process in run.processes):
                assert run.end(), run.text()[-2000:]
                got = run.curve()
                assert got.keys() == want.keys()
                worst = max(abs(got[step] / want[step] - 1) for step in want)
                assert worst < 1e-4, worst
                outcome.worst, outcome.finished = max(outcome.worst, worst), outcome.finished + 1
                outcome.checked += check_all(folder, out)[0]
                if outcome.kills.total() >= kills:
                    return outcome
                shutil.rmtree(folder / out / "checkpoints")
                number += 1
                continue
            assert not any(process.returncode for process in run.processes), run.text()[-2000:]
            outcome.kills[disturb(run, full, only)] += 1
            if (folder / out / "checkpoints").exists():
                count, latest = check_all(folder, out)
                outcome.checked += count
                outcome.lost.append(max(run.curve(), default=0) - latest)
                # The last checkpoint may still have been on its way to the disk.
                assert outcome.lost[-1] <= 3 * EVERY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the fault, as 'disk full'; any by default")
    parsed = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        # Not on the disk that is filled: JAX would keep a truncated entry.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "chaos", folder]
        small = subprocess.run(mount, capture_output=True).returncode == 0
        if not small:
            print("no small file system to fill (mount needs root): no disk will be full")
        try:
            print(chaos(parsed.kills, parsed.seed, Path(folder), full=small, only=parsed.only))
        finally:
            if small:
                subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    main()
