"""Early end of a run by a signal or a time limit, at the same step in all processes.

Ctrl-C, SIGTERM (a scheduler that takes the machine back), SIGHUP (a terminal that is closed) and
SIGUSR1 (SLURM's warning, with `--signal=USR1@120`) are handled between steps: the run saves and
exits. A second Ctrl-C does not wait. Exit codes: INTERRUPTED after Ctrl-C, otherwise RESUMABLE:
the same command resumes from there.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FAILED = 1  # gradients were not finite too often; a restart would not help
INTERRUPTED = 130  # of a shell's Ctrl-C
RESUMABLE = 75  # EX_TEMPFAIL
NOT_JOINED = 69  # EX_UNAVAILABLE: the processes did not find each other
CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: RESUMABLE,
    signal.SIGHUP: RESUMABLE,
    signal.SIGUSR1: RESUMABLE,
}
# Flags that the printed resume command omits, with their number of values.
_ONCE = {
    **{"--resume-step": 1, "--no-resume": 0, "--resume": 0},
    **{"--coordinator-address": 1, "--num-processes": 1, "--process-id": 1},
}
_PATIENCE = 10.0  # seconds after a second Ctrl-C before a hard exit


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


class Stopped(BaseException):
    """The run was asked to end. Like KeyboardInterrupt it is not an `Exception`.

    `saved` is the step of the newest checkpoint in `folder`; later steps are lost if `at_once`.
    """

    def __init__(self, code: int, folder: Path, saved: int | None, *, at_once: bool = False):
        super().__init__("stopped")
        self.code, self._folder, self._saved, self._at_once = code, folder, saved, at_once

    def said(self, args: Sequence[str]) -> str:
        """Describes how the run ended, with the command that resumes it.

        >>> print(Stopped(130, Path("runs/001"), 37).said(["--max-steps", "90"]))
        stopped after step 37, which is saved in runs/001. To resume:
        python train.py --max-steps 90 --output-dir runs/001
        """
        if self._saved is None:
            return f"stopped; no checkpoint is saved in {self._folder}"
        how = "stopped at once; the newest checkpoint is of" if self._at_once else "stopped after"
        rest = "" if self._at_once else ", which is saved"
        resumed = without(args, _ONCE)
        names = {word.partition("=")[0] for word in resumed}
        if "--config" in names:
            resumed.append("--resume")  # the file may have `resume: false`
        if "--output-dir" not in names:
            resumed += ["--output-dir", str(self._folder)]
        return (
            f"{how} step {self._saved}{rest} in {self._folder}. To resume:\n"
            f"python train.py {shlex.join(resumed)}"
        )


def without(args: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Removes flags and their values from arguments.

    >>> without(["--supervise=2", "--seed", "1", "--no-resume"], {"--supervise": 1, "--seed": 1})
    ['--no-resume']
    """
    left, skip = [], 0
    for word in args:
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in flags:
            skip = 0 if equals else flags[name]
        else:
            left.append(word)
    return left


class Stop(contextlib.ExitStack):
    """Decides once per step, equally in all processes, if the run ends; handles its signals."""

    def __init__(self, mesh: Mesh, hours: float | None = None):
        super().__init__()
        self._code = 0
        self._end = math.inf if hours is None else time.monotonic() + 3600 * hours
        self._votes = _Votes(mesh) if jax.process_count() > 1 else None

    def __enter__(self) -> Stop:
        # The handler only sets a code: an exception raised inside a callback of JAX would be lost.
        self.enter_context(signals_to(self._note))
        self.enter_context(_hard_exit())
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self._code = max(self._code, CODES[signal.Signals(number)])
        if number == signal.SIGINT:
            said = "stopping after this step and a checkpoint; press Ctrl-C again to stop at once\n"
            os.write(2, said.encode())
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> int:
        """Returns the exit code to end with, equal in all processes; 0 to continue."""
        if time.monotonic() > self._end:
            self._code = max(self._code, RESUMABLE)
        return self._code if self._votes is None else self._votes.cast(self._code)


@contextlib.contextmanager
def _hard_exit() -> Iterator[None]:
    """Ends the process some seconds after a second Ctrl-C, if it does not end by itself.

    Python calls signal handlers in the main thread alone, between two instructions. A main thread
    that waits for storage or a device does not get there, and one that does get its exception may
    then wait for a thread that reads data. Python's C handler writes each signal's number to a pipe
    at once, and a thread reads it there. After the block an earlier second Ctrl-C still counts.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def count() -> None:
        interrupts = 0
        while numbers := os.read(read, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                time.sleep(_PATIENCE)
                said = f"exiting {_PATIENCE:.0f} s after the second Ctrl-C without waiting. "
                os.write(2, f"{said}The same command resumes from the newest checkpoint\n".encode())
                os._exit(INTERRUPTED)
        os.close(read)

    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=count, daemon=True, name="Ctrl-C").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)


class _Votes:
    """Maximum over processes of a number from each.

    Each call queues one small program among the training steps. Its result is read one step later,
    so that no process waits for it.
    """

    def __init__(self, mesh: Mesh):
        flat = Mesh(mesh.devices.reshape(-1), ("all",))
        self._split = NamedSharding(flat, PartitionSpec("all"))
        self._local = np.zeros(len(flat.local_devices), np.int32)
        whole = NamedSharding(flat, PartitionSpec())
        self._max = jax.jit(lambda x: x.max(), out_shardings=whole)
        self._outcome: jax.Array | None = None

    def cast(self, number: int) -> int:
        before = self._outcome
        mine = jax.make_array_from_process_local_data(self._split, self._local + number)
        self._outcome = self._max(mine)
        return 0 if before is None else int(before)
