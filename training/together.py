"""How the processes of a run fail, are interrupted, and leave: all of them when one does."""

from __future__ import annotations

import contextlib
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

import zero_jax
from training.saving import newest
from training.stop import INTERRUPTED, Stopped
from zero_jax.cluster.processes import leave

T = TypeVar("T")


@contextlib.contextmanager
def interrupted(folder: pathlib.Path) -> Iterator[None]:
    """After a Ctrl-C that does not wait says what is on the disk."""
    try:
        yield
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends already
        saved = None
        with contextlib.suppress(OSError, ValueError):
            saved = newest(folder)
        raise Stopped(INTERRUPTED, folder, saved, at_once=True) from error


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """Leaves the group while the watchdog looks on: who leaves waits for all others."""
    try:
        yield
    except Stopped:
        leave()
        raise
    leave()


def together(settings: Mapping[str, Any], what: str, attempt: Callable[[], T]) -> T:
    """Does what may fail in one process alone, so that all of them end when it does."""
    trouble: Exception | None = None
    try:
        result = attempt()
    except (ValueError, OSError) as error:
        trouble = error
    if jax.distributed.is_initialized():
        zero_jax.check_agreement({**settings, what: trouble or "fine"})
    if trouble is not None:
        raise trouble
    return result
