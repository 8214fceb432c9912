"""Early end of a run, by a signal or a time limit, in all processes at the same step.

Ctrl-C, SIGTERM (a scheduler that takes the machine back), SIGHUP (a terminal that is closed) and
SIGUSR1 (SLURM's warning, with `--signal=USR1@120`) are handled between steps: the run saves and
exits. A second Ctrl-C does not wait. Exit codes: INTERRUPTED after Ctrl-C, otherwise GO_ON_LATER:
the same command resumes from there.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FAILED = 1  # gradients were not finite too often: to go on would not help
INTERRUPTED = 130  # of a shell's Ctrl-C
GO_ON_LATER = 75  # EX_TEMPFAIL
# Flags that the command which goes on does not take over, with how many values each has.
_ONCE = {
    **{"--resume-step": 1, "--no-resume": 0, "--resume": 0},
    **{"--coordinator-address": 1, "--num-processes": 1, "--process-id": 1},
}
NOT_JOINED = 69  # EX_UNAVAILABLE: the processes did not find each other
CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: GO_ON_LATER,
    signal.SIGHUP: GO_ON_LATER,
    signal.SIGUSR1: GO_ON_LATER,
}
_PATIENCE = 10.0  # seconds after a second Ctrl-C in which a run ends by itself


def handled() -> list[signal.Signals]:
    """Returns the signals that a run handles; not SIGHUP where nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in CODES if not (ignored and number == signal.SIGHUP)]


class Stopped(BaseException):
    """The run was asked to end, or ends at once; as a KeyboardInterrupt, no error.

    Args:
        code: For `sys.exit`.
        folder: Of the run.
        saved: The step of its newest checkpoint; None if there is none.
        at_once: Whether what came after that is lost.
    """

    def __init__(self, code: int, folder: Path, saved: int | None, *, at_once: bool = False):
        super().__init__("stopped")
        self.code, self._folder, self._saved, self._at_once = code, folder, saved, at_once

    def said(self, given: Sequence[str]) -> str:
        """Describes how the run ended, with the command that resumes it.

        Args:
            given: The arguments it was started with.

        >>> print(Stopped(130, Path("runs/001"), 37).said(["--max-steps", "90"]))
        stopped after step 37, which is saved in runs/001. To resume:
        python train.py --max-steps 90 --output-dir runs/001
        """
        if self._saved is None:
            return f"stopped; no checkpoint is saved in {self._folder}"
        how = "stopped at once; the newest checkpoint is of" if self._at_once else "stopped after"
        rest = "" if self._at_once else ", which is saved"
        own = without(given, _ONCE)
        names = {word.partition("=")[0] for word in own}
        if "--config" in names:
            own.append("--resume")  # the file may have `resume: false`
        if "--output-dir" not in names:
            own += ["--output-dir", str(self._folder)]
        return (
            f"{how} step {self._saved}{rest} in {self._folder}. To resume:\n"
            f"python train.py {shlex.join(own)}"
        )


def without(given: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Removes flags and their values from arguments.

    >>> without(["--supervise=2", "--seed", "1", "--no-resume"], {"--supervise": 1, "--seed": 1})
    ['--no-resume']
    """
    left, skip = [], 0
    for word in given:
        name, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in flags:
            skip = 0 if equals else flags[name]
        else:
            left.append(word)
    return left


class Stop:
    """Decides, once a step in every process, if the run ends; use it in a `with`.

    Args:
        mesh: The devices of the run.
        hours: Ends the run after so long; None for never.
    """

    def __init__(self, mesh: Mesh, hours: float | None = None):
        self._code = 0
        self._end = None if hours is None else time.monotonic() + 3600 * hours
        self._before: dict[int, Any] = {}
        self._votes = _Votes(mesh) if jax.process_count() > 1 else None
        self._hard_exit = _HardExit()

    def __enter__(self) -> Stop:
        # Noted only: an exception raised wherever the program happens to be can fall into a
        # callback of JAX's and be lost.
        self._before = {number: signal.signal(number, self._note) for number in handled()}
        self._hard_exit.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._hard_exit.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._code = max(self._code, CODES[signal.Signals(number)])
        if number == signal.SIGINT:
            os.write(
                2,
                b"stopping after this step and a checkpoint; press Ctrl-C again to stop at once\n",
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> int:
        """The exit code to end with, the same in every process; 0 to go on."""
        if self._end is not None and time.monotonic() > self._end:
            self._code = max(self._code, GO_ON_LATER)
        return self._code if self._votes is None else self._votes.cast(self._code)


class _HardExit:
    """Ends the process some seconds after a second Ctrl-C, if it does not end by itself.

    Python calls signal handlers in the main thread alone, between two instructions. A main thread
    that waits for storage or a device does not get there, and one that does get its exception may
    then wait for a thread that reads data. Python's C handler writes each signal's number to a pipe
    at once, and a thread reads it there.
    """

    def __init__(self) -> None:
        self._before, self._pipe = -1, -1

    def start(self) -> None:
        """Begins to count."""
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._count, args=(read,), daemon=True, name="Ctrl-C").start()

    def stop(self) -> None:
        """Counts no more; a second Ctrl-C that came before still ends the process."""
        signal.set_wakeup_fd(self._before)
        os.close(self._pipe)

    @staticmethod
    def _count(read: int) -> None:
        count = 0
        while numbers := os.read(read, 64):
            count += numbers.count(signal.SIGINT)
            if count > 1:
                time.sleep(_PATIENCE)
                said = f"exiting {_PATIENCE:.0f} s after the second Ctrl-C without waiting. "
                os.write(2, f"{said}The same command resumes from the newest checkpoint\n".encode())
                os._exit(INTERRUPTED)
        os.close(read)


class _Votes:
    """The largest number that any process cast in the round before.

    A round is one small program among those of the training steps. Its outcome is read a step
    later, when it is long there, so that nobody waits.
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
