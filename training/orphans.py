"""Termination of a supervised process when its supervisor dies.

Imports nothing of JAX: `train.py` calls it before its imports, which take seconds.
"""

import ctypes
import os
import signal
import sys

VARIABLE = "ZERO_JAX_SUPERVISOR"  # process id of the supervisor, in the environment of its children
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_supervisor() -> None:
    """Makes the kernel kill this process when its supervisor dies; no effect without one.

    A supervisor that is killed (kill -9, out of memory) cannot end its children itself. They would
    train on, and hold the lock of the run's folder against the next start. On systems other than
    Linux they still do.
    """
    supervisor = os.environ.pop(VARIABLE, None)  # children of this process do not inherit it
    if supervisor is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(supervisor):  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
