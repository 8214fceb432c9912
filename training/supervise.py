"""Starts the processes of a run on this machine, and starts them again when some of them fail.

    python train.py --supervise 4 --out runs/long ...

is `python train.py --num-processes 4 ...` in four processes that find each other. When one dies
the others end by themselves (zero_jax.watchdog), and the run goes on from its last checkpoint in
as many processes as are left. What was asked to end, and what was asked for wrongly, is not started
again. On a cluster the scheduler does this.
"""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from training.stop import CODES
from zero_jax.cluster.addresses import free_port

WRONG = 2  # a setting that can't be
_LONGEST_WAIT = 60.0


def supervise(
    command: Sequence[str],
    count: int,
    *,
    restarts: int,
    grace: float,
    divides: int,
    backoff: float = 1.0,
) -> int:
    """Runs until the run is done; returns its exit code.

    Args:
        command: What each process runs, without what tells it from the others.
        count: How many processes.
        restarts: How often at most they are started again.
        grace: Seconds that the others have to end by themselves when one has failed.
        divides: A number that the count of processes must divide: the devices of the run.
        backoff: Seconds before the first new start; doubled for each further one.
    """
    for attempt in range(restarts + 1):
        group = _Group(command, count)
        codes = group.run(grace)
        if set(codes) == {0}:
            return 0
        if group.asked or WRONG in codes or attempt == restarts:
            return max(codes, key=abs) if WRONG not in codes else WRONG
        # JAX aborts processes that live, on machines that are there, when another one is gone.
        lost = sum(code < 0 and code != -signal.SIGABRT for code in group.own)
        count = max(n for n in range(1, max(1, count - lost) + 1) if divides % n == 0)
        wait = min(_LONGEST_WAIT, backoff * 2**attempt)
        said = ", ".join(f"{n} x {code}" for code, n in collections.Counter(codes).items())
        print(
            f"supervise: the processes ended with {said}; starting {count} again in {wait:.0f} s, "
            f"{restarts - attempt - 1} more times at most",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(wait)
    raise AssertionError("unreachable")


def free_address() -> str:
    """Where processes of one machine can find each other."""
    return f"127.0.0.1:{free_port()}"


class _Group:
    """The processes of one start."""

    def __init__(self, command: Sequence[str], count: int):
        self.asked = False
        self.own: list[int] = []  # exit codes of those that ended by themselves
        address = free_address()
        names = ("--coordinator", address, "--num-processes", str(count), "--process-id")
        group = [(*names, str(rank)) for rank in range(count)] if count > 1 else [()]
        # In sessions of their own: a Ctrl-C in the terminal reaches them once, from here.
        self._processes = [
            subprocess.Popen([*command, *own], start_new_session=True) for own in group
        ]

    def run(self, grace: float) -> list[int]:
        """Waits for all of them; ends those that do not end when another has failed."""
        before = {number: signal.signal(number, self._pass_on) for number in CODES}
        try:
            end = None
            while any(p.poll() is None for p in self._processes):
                failed = any(p.poll() not in (None, 0) for p in self._processes)
                if failed and end is None:
                    end = time.monotonic() + grace
                if end is not None and time.monotonic() > end:
                    break
                time.sleep(0.1)
            self.own = [p.returncode for p in self._processes if p.poll() is not None]
        finally:
            for process in self._processes:
                process.kill()  # a stopped process too
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return [p.returncode for p in self._processes]

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)
