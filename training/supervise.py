"""Process supervisor for one machine, and the signals and exit codes of runs.

When a process of a run dies, the others end by themselves (`zero_jax.Watchdog`), and the run
resumes from its last checkpoint in the remaining processes. A run that ended on purpose is not
restarted. The processes end with the supervisor, even if it is killed. Imports nothing of JAX,
which takes seconds.
"""

import collections
import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

# Exit codes.
FAILED = 1  # gradients were not finite too often; a restart would not help
WRONG = 2  # an invalid setting
NOT_JOINED = 69  # EX_UNAVAILABLE: the processes did not find each other
RESUMABLE = 75  # EX_TEMPFAIL: the same command resumes
INTERRUPTED = 130  # of a shell's Ctrl-C
# Those of runs that ended on purpose, the most important first.
ON_PURPOSE = (WRONG, FAILED, INTERRUPTED, RESUMABLE)
# Signals that a run and its supervisor handle. SLURM warns by `--signal=USR1@120`.
CODES = {signal.SIGINT: INTERRUPTED}
CODES |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), RESUMABLE)
VARIABLE = "ZERO_JAX_SUPERVISOR"  # process id of the supervisor, in the environment of its children
_LONGEST_WAIT = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def handled() -> list[signal.Signals]:
    """Returns the signals that a run handles; not SIGHUP where nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in CODES if not (ignored and number == signal.SIGHUP)]


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Calls `handler` for the signals that a run handles, within the block."""
    with contextlib.ExitStack() as restored:
        for number in handled():
            restored.callback(signal.signal, number, signal.signal(number, handler))
        yield


def supervise(
    command: Sequence[str],
    count: int,
    *,
    restarts: int,
    grace: float,
    divides: int,
    backoff: float = 1.0,
) -> int:
    """Starts `count` processes of a command until the run ends; returns its exit code.

    Restarts those that are left, at most `restarts` times, in a number that divides that of devices
    (`divides`). After a failure the others have `grace` seconds to end by themselves. A restart
    waits for `backoff` seconds, doubled for each further one.
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
    """Returns an address at which processes of this machine can find each other."""
    for _ in range(1000):
        port = random.randrange(20000, 32000)  # not of those that outgoing connections take
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("", port))
            return f"127.0.0.1:{port}"
    raise OSError("no port from 20000 to 32000 is free")


def _run(command: Sequence[str], count: int, grace: float) -> tuple[list[int], int, int]:
    """Starts the processes and waits; kills those still running `grace` s after a failure.

    Returns the exit codes, the number of processes lost to a signal from elsewhere, and the exit
    code for the signals that were forwarded; 0 for none.
    """
    names = ("--coordinator-address", free_address(), "--num-processes", str(count), "--process-id")
    flags = [(*names, str(rank)) for rank in range(count)] if count > 1 else [()]
    environment = {**os.environ, VARIABLE: str(os.getpid())}
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []  # signals
    forwarded, end = 0, math.inf
    with signals_to(lambda number, _: received.append(number)):
        try:
            # A new session: a Ctrl-C in the terminal reaches each process once, from here.
            for args in ([*command, *own] for own in flags):
                processes.append(subprocess.Popen(args, env=environment, start_new_session=True))
            while any(p.poll() is None for p in processes) and time.monotonic() <= end:
                for number in received[forwarded:]:
                    for process in processes:
                        process.send_signal(number)
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


def end_with_supervisor() -> None:
    """Makes the kernel kill this process when its supervisor dies; no effect without one.

    Otherwise the children of a killed supervisor would train on, and hold the lock of the run's
    folder against the next start. On systems other than Linux they still do.
    """
    supervisor = os.environ.get(VARIABLE)
    if supervisor is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(supervisor):  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
