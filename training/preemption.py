"""Early end of a run by a signal or a time limit, at the same step in all processes.

Ctrl-C, SIGTERM, SIGHUP (a terminal that is closed) and SIGUSR1 (SLURM's warning) are handled
between steps: the run saves and exits. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.supervise import CODES, INTERRUPTED, RESUMABLE, signals_to

PATIENCE = 10.0  # seconds after a second Ctrl-C


class Stopped(BaseException):
    """The run was asked to end. Like KeyboardInterrupt it is not an `Exception`."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Stop(contextlib.ExitStack):
    """Decides once per step, equally in all processes, if the run ends; handles its signals.

    Python calls signal handlers in the main thread alone, which may wait for storage or a device.
    Its C handler writes each signal's number to a pipe at once. There a thread reads it, confirms
    the first Ctrl-C, and ends the process at the second. `saved` describes what is saved then.
    """

    def __init__(
        self, mesh: Mesh, hours: float | None = None, saved: Callable[[], str] = lambda: "stopped"
    ):
        super().__init__()
        self._code, self._saved = 0, saved
        self._end = math.inf if hours is None else time.monotonic() + 3600 * hours
        self._votes = _Votes(mesh) if jax.process_count() > 1 else None

    def __enter__(self) -> Stop:
        read, write = os.pipe()
        os.set_blocking(write, False)
        thread = threading.Thread(target=self._listen, args=[read], daemon=True, name="Ctrl-C")
        thread.start()
        self.callback(thread.join, 1.0)  # it may wait for a reader of stderr
        self.callback(os.close, write)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.callback(signal.set_wakeup_fd, before)
        # The handler only sets a code: an exception raised inside a callback of JAX would be lost.
        self.enter_context(signals_to(self._note))
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self._code = max(self._code, CODES[signal.Signals(number)])

    def _listen(self, pipe: int) -> None:
        again = "stopping after this step and a checkpoint; press Ctrl-C again to stop at once\n"
        texts = [again, "second Ctrl-C: "]
        with open(pipe, "rb", buffering=0) as numbers:
            while texts and (number := numbers.read(1)):
                if number[0] == signal.SIGINT:
                    with contextlib.suppress(OSError):
                        os.write(2, texts.pop(0).encode())
        if not texts:
            # Storage may hang when its checkpoints are listed.
            threading.Timer(PATIENCE, os._exit, [INTERRUPTED]).start()
            with contextlib.suppress(OSError, ValueError):
                os.write(2, f"{self._saved()}\n".encode())
            os._exit(INTERRUPTED)

    def __call__(self) -> int:
        """Returns the exit code to end with, equal in all processes; 0 to continue."""
        if time.monotonic() > self._end:
            self._code = max(self._code, RESUMABLE)
        return self._code if self._votes is None else self._votes.cast(self._code)


class _Votes:
    """Maximum over processes of a number from each, read a step later so that no process waits."""

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
