"""Errors, interrupts and the end of a run, in all of its processes together."""

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

T = TypeVar("T")


@contextlib.contextmanager
def interrupted(folder: pathlib.Path) -> Iterator[None]:
    """Raises `Stopped` with the newest checkpoint when a second Ctrl-C interrupts the block."""
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
    """Leaves JAX's process group, which waits for all processes, while the watchdog still runs."""
    try:
        yield
    except Stopped:
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


def together(settings: Mapping[str, Any], what: str, attempt: Callable[[], T]) -> T:
    """Returns the result of `attempt`; if it fails in one process, all processes raise."""
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
