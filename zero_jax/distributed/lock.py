"""A lock on a directory, released by the kernel when the process that holds it ends."""

import fcntl
import os
import pathlib
import socket

NAME = ".lock"


def locked(directory: pathlib.Path, what: str = "checkpoints") -> int:
    """Takes the lock of a directory, created if missing; returns a file descriptor to close.

    Raises ValueError, with a message about writing `what` there, if another process holds the lock,
    or the directory can't be written or locked.
    """
    lock = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        problem = f"can't write or lock {directory} for {what}: {error.strerror} (Lustre: -o flock)"
        if lock is not None:
            if isinstance(error, (BlockingIOError, PermissionError)):
                holder = os.read(lock, 200).decode("utf-8", "replace").strip()
                problem = f"another run writes {what} to {directory} ({holder}): end it"
            os.close(lock)
        raise ValueError(f"{problem}. Otherwise use another directory") from error
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
