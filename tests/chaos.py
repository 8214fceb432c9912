"""Disturbs runs of `train.py` at random moments and lets them go on, until they are done.

    python tests/chaos.py --kills 50        # prints the table of docs/checkpoints.md, 15 minutes

A run is started in one, two or four processes. After a random time (in steps, in saves, in
restores, while compiling) something happens to it: one process or all are killed, the first one
hangs, somebody starts the same run again, the disk is full. What is left has to end by itself, with
its reason (those that still wait for each other at the start are killed). Then every checkpoint is
read and checked, and the run is started again, often in another number of processes. A run that
gets through is compared with one that nobody disturbed, and the next is begun.
"""

import argparse
import collections
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from training.supervise import WRONG, free_address  # noqa: E402
from zero_jax.cluster.roll import ENDED  # noqa: E402

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
    """What happened, by what it was and what the run was doing."""

    kills: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finished: int = 0
    checked: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    worst: float = 0.0

    def __str__(self) -> str:
        rows = [f"| {what} | {n} |" for what, n in sorted(self.kills.items())]
        return "\n".join(
            [
                *("| what happened, while | times |", "|---|---|", *rows),
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
    # What a start says is in its log at once, or nobody could tell what it does.
    environment = {**cache, **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
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
                f"with {[p.returncode for p in processes]}; {log.read_text()[-9000:]}"
            ) from None


@dataclasses.dataclass
class Run:
    """One start of a run, and what may happen to it."""

    folder: Path
    out: str
    processes: list[subprocess.Popen]
    rng: random.Random

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def log(self) -> Path:
        return self.folder / f"{self.out}.log"

    def kill(self, processes: list[subprocess.Popen]) -> None:
        for process in processes:
            process.kill()
        end(self.processes, 60, self.log)

    def all_killed(self) -> None:
        self.kill(self.processes)

    def one_killed(self) -> None:
        self.kill([self.rng.choice(self.processes)])

    def first_hangs(self) -> None:
        """The others name it, by its rank alone where it has given no sign of life yet."""
        first, *others = self.processes
        first.send_signal(signal.SIGSTOP)
        end(others, 60, self.log)
        if self._through() and not any(process.returncode for process in others):
            return self._got_through()
        told = self.log.read_text()
        known = f"process 0 (pid {first.pid}" in told
        assert known or "process 0 was not seen" in told, told[-3000:]
        assert all(process.returncode == ENDED for process in others), told[-3000:]
        self.all_killed()

    def started_twice(self) -> None:
        """The second start is refused; the first one meanwhile stands still, and keeps its lock."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)  # they stand still soon after
        before, watched = len(self.log.read_text()), self._watched()
        through = self._through()  # before the second start, which would write its own last loss
        (second,) = start(self.folder, self.out, 1)
        end([second], 60, self.log)
        told = self.log.read_text()[before:]
        if through and second.returncode == 0:
            return self._got_through()
        assert second.returncode == WRONG and "another run writes" in told, told
        # Perhaps no sign of life yet, which the first one comes to only after its "Writing to".
        assert watched and self._watched() == watched, "what the first start watches was changed"
        self.all_killed()

    def _got_through(self) -> None:
        """It was done when it was made to stand still, and its lock given back: it only leaves."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        end(self.processes, 60, self.log)
        assert not any(p.returncode for p in self.processes), self.log.read_text()[-3000:]

    def _through(self) -> bool:
        """Whether its last loss is written, which it is before its lock is given back."""
        there = (self.folder / self.out / "metrics.jsonl").exists()
        return there and STEPS in curve(self.folder, self.out, "val_loss")

    def _watched(self) -> dict[Path, int]:
        """The folder of signs of life and all in it, and when each was written, in nanoseconds."""
        return {
            path: path.stat().st_mtime_ns for path in (self.folder / self.out / "alive").rglob("*")
        }

    def disk_full(self) -> None:
        """It ends with the reason, at its next checkpoint or line at the latest."""
        before = len(self.log.read_text())
        filler = self.folder / "filler"
        with open(filler, "wb", buffering=0) as file:  # closing has nothing left to write
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                pass
        try:
            end(self.processes, 60, self.log)
        finally:
            filler.unlink()
        told = self.log.read_text()[before:]
        through = all(process.returncode == 0 for process in self.processes)
        assert through or "No space left on device" in told or "bytes free" in told, told[-3000:]


def small_disk(folder: Path) -> bool:
    """Puts a small file system on a folder; only root can."""
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "chaos", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def curve(folder: Path, out: str, key: str = "loss") -> dict[int, float]:
    import json

    found = {}
    for line in (folder / out / "metrics.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n") and key in json.loads(line):
            found[json.loads(line)["step"]] = json.loads(line)[key]
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
    if "over all" in log:  # its last loss, said when everything is written
        return "leaving"
    if "Going on from" not in log and step == 0:
        return "beginning or restoring"
    return "saving" if step % EVERY <= 1 else "training"


def chaos(
    kills: int,
    seed: int,
    folder: Path,
    counts: tuple[int, ...] = (1, 2, 4),
    full: bool = False,
    only: str | None = None,
) -> Outcome:
    """Runs until so much has happened, and the run that it happened to is through.

    Args:
      kills: how many times something happens.
      seed: of all that is random.
      folder: to run in.
      counts: numbers of processes.
      full: whether the folder is a small file system, which may be filled.
      only: what happens; anything unless given. Before a run has begun all of it is killed.
    """
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
        with Run(folder, out, start(folder, out, rng.choice(counts)), rng) as run:
            # Starting takes some seconds, and a step milliseconds.
            wait = rng.uniform(1, 15) if sum(outcome.kills.values()) < kills else 600
            limit = time.monotonic() + wait
            while time.monotonic() < limit and any(p.poll() is None for p in run.processes):
                time.sleep(0.02)
            if any(p.poll() == 0 for p in run.processes):
                end(run.processes, 60, log)  # the run is through: they leave one after another
                assert not any(p.returncode for p in run.processes), log.read_text()[-2000:]
                got = curve(folder, out)
                assert got.keys() == want.keys()
                gap = max(abs(got[s] / want[s] - 1) for s in want)
                assert gap < 1e-4, gap
                outcome.worst, outcome.finished = max(outcome.worst, gap), outcome.finished + 1
                outcome.checked += check_all(folder, out)[0]
                shutil.rmtree(folder / out / "checkpoints")
                if sum(outcome.kills.values()) >= kills:
                    return outcome
                number += 1
                continue
            assert not any(p.returncode for p in run.processes), log.read_text()[-2000:]
            metrics = folder / out / "metrics.jsonl"
            step = max(curve(folder, out), default=0) if metrics.exists() else 0
            what = doing(log.read_bytes()[written:].decode(), step)
            kinds = {"all killed": run.all_killed}
            if what != "starting":
                kinds["one killed"] = run.one_killed
            # Who leaves waits for nobody, and has given its lock back.
            if what not in ("starting", "leaving"):
                if len(run.processes) > 1:
                    kinds["first hangs"] = run.first_hangs
                kinds["started twice"] = run.started_twice
                if full:
                    kinds["disk full"] = run.disk_full
            kind = only if only in kinds else rng.choice(list(kinds))
            kinds[kind]()
            outcome.kills[f"{kind}, {what}"] += 1
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
    parser.add_argument("--only", help="what happens, as 'disk full'; anything unless given")
    parsed = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        # Not on the disk that is filled: JAX keeps an entry that was cut short, and compiles anew.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        began = time.monotonic()
        small = small_disk(Path(folder))
        if not small:
            print("no small file system to fill (mount needs root): no disk will be full")
        try:
            print(chaos(parsed.kills, parsed.seed, Path(folder), full=small, only=parsed.only))
        finally:
            if small:
                subprocess.run(["umount", "-l", folder], check=True)
        print(f"\nin {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
