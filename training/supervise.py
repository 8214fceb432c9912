"""Process supervisor for one machine: starts the processes of a run and restarts them on failure.

    python train.py --supervise 4 --output-dir runs/long ...

runs `python train.py --num-processes 4 ...` in four processes. When one dies, the others end by
themselves (`zero_jax.Watchdog`), and the run resumes from its last checkpoint in the remaining
processes. A run that ended on purpose is not restarted: an invalid setting, non-finite gradients, a
signal or `--max-hours`. The processes end with the supervisor, even if it is killed. On a cluster
the scheduler does this.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from training import orphans
from training.preemption import CODES, FAILED, INTERRUPTED, RESUMABLE, handled

WRONG = 2  # an invalid setting
# Exit codes of runs that ended on purpose, the most important first.
ON_PURPOSE = (WRONG, FAILED, INTERRUPTED, RESUMABLE)
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
    """Starts and restarts the processes until the run ends; returns its exit code.

    Args:
        command: The command of each process, without the flags of its rank.
        count: Number of processes.
        restarts: Maximum number of restarts.
        grace: Seconds in which the others must end by themselves after one has failed.
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
        # JAX aborts healthy processes when another one has died.
        lost = sum(code < 0 and code != -signal.SIGABRT for code in group.exited)
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
    """Combines the exit codes of processes, some of which are not 0.

    Args:
        codes: Exit codes of the processes; negative after a signal.
        asked: Exit code for the signal that the supervisor forwarded; 0 for none.

    >>> outcome([76, 75]), outcome([-9, -15], asked=75), outcome([76, -9]), outcome([-9])
    (75, 75, 76, 137)
    """
    for code in ON_PURPOSE:
        if code in codes:
            return code
    worst = max(codes, key=abs)
    return asked or (worst if worst >= 0 else 128 - worst)


def free_address() -> str:
    """Returns an address at which processes of this machine can find each other.

    The system would choose a port from the range that it uses for outgoing connections, so another
    connection could take the port first.
    """
    for _ in range(1000):
        port = random.randrange(20000, 32000)
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))
            return f"127.0.0.1:{port}"
    raise OSError("no port from 20000 to 32000 is free")


class _Group:
    """The processes of one start."""

    def __init__(self, command: Sequence[str], count: int):
        self.asked = 0  # exit code for the forwarded signal
        self._signal = 0  # its number
        self._signalled: set[int] = set()  # ids of processes that received it
        self.exited: list[int] = []  # exit codes of processes that were not killed here
        self._processes: list[subprocess.Popen[bytes]] = []
        address = free_address()
        names = ("--coordinator-address", address, "--num-processes", str(count), "--process-id")
        group = [(*names, str(rank)) for rank in range(count)] if count > 1 else [()]
        self._commands = [[*command, *flags] for flags in group]

    def run(self, grace: float) -> list[int]:
        """Starts the processes and waits; kills those still running `grace` s after a failure."""
        before = {number: signal.signal(number, self._forward) for number in handled()}
        try:
            environment = {**os.environ, orphans.VARIABLE: str(os.getpid())}
            for command in self._commands:
                # A new session: a Ctrl-C in the terminal reaches each process once, from here.
                process = subprocess.Popen(command, env=environment, start_new_session=True)
                self._processes.append(process)
            if self._signal:  # the signal arrived during the starts
                self._send([p for p in self._processes if p.pid not in self._signalled])
            end = None
            while any(p.poll() is None for p in self._processes):
                failed = any(p.poll() not in (None, 0) for p in self._processes)
                if failed and end is None:
                    end = time.monotonic() + grace
                if end is not None and time.monotonic() > end:
                    break
                time.sleep(0.1)
            self.exited = [p.returncode for p in self._processes if p.poll() is not None]
        finally:
            for process in self._processes:
                process.kill()  # a stopped process too
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return [p.returncode for p in self._processes]

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.asked = max(self.asked, CODES[signal.Signals(number)])
        self._signal = number
        self._send(self._processes)

    def _send(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(self._signal)
                self._signalled.add(process.pid)
