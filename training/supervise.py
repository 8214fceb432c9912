"""Process supervisor for one machine: starts the processes of a run and restarts them on failure.

    python train.py --supervise 4 --output-dir runs/long ...

runs `python train.py --num-processes 4 ...` in four processes. When one dies, the others end by
themselves (`zero_jax.Watchdog`), and the run resumes from its last checkpoint in the remaining
processes. A run that ended on purpose is not restarted: an invalid setting, non-finite gradients, a
signal or `--max-hours`. The processes end with the supervisor, even if it is killed. On a cluster
the scheduler does this.
"""

import collections
import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from training import orphans
from training.preemption import CODES, FAILED, INTERRUPTED, RESUMABLE, signals_to

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
        count: Number of processes at the start; it always divides the number of devices `divides`.
        restarts: Maximum number of restarts.
        grace: Seconds in which the others must end by themselves after one has failed.
        backoff: Seconds before the first restart; doubled for each further one.
    """
    for attempt in range(restarts + 1):
        codes, lost, asked = _run(command, count, grace)
        if set(codes) == {0}:
            return 0
        if asked or set(codes) & set(ON_PURPOSE) or attempt == restarts:
            break
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
    return outcome(codes, asked)


def outcome(codes: Sequence[int], asked: int = 0) -> int:
    """Combines the exit codes of processes, some of which are not 0.

    `asked` is the exit code for the signal that the supervisor forwarded; 0 for none.

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


def _run(command: Sequence[str], count: int, grace: float) -> tuple[list[int], int, int]:
    """Starts the processes and waits; kills those still running `grace` s after a failure.

    Returns:
        The exit codes, the number of processes lost to a signal from elsewhere, and the exit code
        for the signals that were forwarded; 0 for none.
    """
    names = ("--coordinator-address", free_address(), "--num-processes", str(count), "--process-id")
    flags = [(*names, str(rank)) for rank in range(count)] if count > 1 else [()]
    environment = {**os.environ, orphans.VARIABLE: str(os.getpid())}
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []  # signals
    forwarded, end = 0, math.inf
    with signals_to(lambda number, _: received.append(number)):
        try:
            for own in flags:
                # A new session: a Ctrl-C in the terminal reaches each process once, from here.
                process = subprocess.Popen(
                    [*command, *own], env=environment, start_new_session=True
                )
                processes.append(process)
            while any(p.poll() is None for p in processes) and time.monotonic() <= end:
                while forwarded < len(received):
                    for process in processes:
                        process.send_signal(received[forwarded])
                    forwarded += 1
                if end == math.inf and any(p.poll() not in (None, 0) for p in processes):
                    end = time.monotonic() + grace
                time.sleep(0.1)
            # JAX aborts healthy processes when another one has died; the rest is killed below.
            lost = sum((p.poll() or 0) < 0 and p.returncode != -signal.SIGABRT for p in processes)
        finally:
            for process in processes:
                process.kill()  # a stopped process too
                process.wait()
    asked = max((CODES[signal.Signals(number)] for number in received), default=0)
    return [p.returncode for p in processes], lost, asked
