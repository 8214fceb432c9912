"""Starts the processes of a run on this machine, and starts them again when some of them fail.

    python train.py --supervise 4 --output-dir runs/long ...

is `python train.py --num-processes 4 ...` in four processes that find each other. When one dies
the others end by themselves (zero_jax.Watchdog), and the run resumes from its last checkpoint in
as many processes as are left. A run that ended on purpose is not started again: a wrong setting,
gradients that are not finite, a signal or `--max-hours`. The processes end when the supervisor
does, however it ends. On a cluster the scheduler does this.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from training import orphans
from training.stop import CODES, FAILED, GO_ON_LATER, INTERRUPTED, handled
from zero_jax.cluster.addresses import free_port

WRONG = 2  # a setting that can't be
# Exit codes of runs that ended on purpose, the most important first.
ON_PURPOSE = (WRONG, FAILED, INTERRUPTED, GO_ON_LATER)
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
        command: The command of each process, without the flags that tell it from the others.
        count: Number of processes.
        restarts: How often at most they are started again.
        grace: Seconds that the others have to end by themselves when one has failed.
        divides: A number that the count of processes must divide: the devices of the run.
        backoff: Seconds before the first restart; doubled for each further one.
    """
    for attempt in range(restarts + 1):
        group = _Group(command, count)
        codes = group.run(grace)
        if set(codes) == {0}:
            return 0
        if group.asked or set(codes) & set(ON_PURPOSE) or attempt == restarts:
            return outcome(codes, group.asked)
        # JAX aborts processes that live, on machines that are there, when another one is gone.
        lost = sum(code < 0 and code != -signal.SIGABRT for code in group.own)
        count = max(n for n in range(1, max(1, count - lost) + 1) if divides % n == 0)
        wait = min(_LONGEST_WAIT, backoff * 2**attempt)
        said = ", ".join(f"{n} x {code}" for code, n in collections.Counter(codes).items())
        print(
            f"supervise: the processes exited with {said}; restarting {count} in {wait:.0f} s, "
            f"{restarts - attempt - 1} restarts left",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(wait)
    raise AssertionError("unreachable")


def outcome(codes: Sequence[int], asked: int = 0) -> int:
    """Returns the exit code of a run from those of its processes, not all of which are 0.

    Args:
        codes: Of the processes; negative after a signal.
        asked: The code for the signal that the supervisor passed on; 0 for none.

    >>> outcome([76, 75]), outcome([-9, -15], asked=75), outcome([76, -9]), outcome([-9])
    (75, 75, 76, 137)
    """
    for code in ON_PURPOSE:
        if code in codes:
            return code
    worst = max(codes, key=abs)
    return asked or (worst if worst >= 0 else 128 - worst)


def free_address() -> str:
    """Returns an address at which processes of this machine can find each other."""
    return f"127.0.0.1:{free_port()}"


class _Group:
    """The processes of one start."""

    def __init__(self, command: Sequence[str], count: int):
        self.asked = 0  # the exit code for the signal that was passed on
        self._signal = 0  # its number
        self._told: set[int] = set()  # ids of processes that it was passed on to
        self.own: list[int] = []  # exit codes of those that ended by themselves
        self._processes: list[subprocess.Popen[bytes]] = []
        address = free_address()
        names = ("--coordinator-address", address, "--num-processes", str(count), "--process-id")
        group = [(*names, str(rank)) for rank in range(count)] if count > 1 else [()]
        self._commands = [[*command, *flags] for flags in group]

    def run(self, grace: float) -> list[int]:
        """Starts all of them and waits; ends those that do not end when another has failed."""
        before = {number: signal.signal(number, self._pass_on) for number in handled()}
        try:
            environment = {**os.environ, orphans.VARIABLE: str(os.getpid())}
            for command in self._commands:
                # In sessions of their own: a Ctrl-C in the terminal reaches them once, from here.
                process = subprocess.Popen(command, env=environment, start_new_session=True)
                self._processes.append(process)
            if self._signal:  # it came while they were started
                self._send([p for p in self._processes if p.pid not in self._told])
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
        self.asked = max(self.asked, CODES[signal.Signals(number)])
        self._signal = number
        self._send(self._processes)

    def _send(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(self._signal)
                self._told.add(process.pid)
