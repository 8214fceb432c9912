"""Errors, interrupts and the end of a run in several processes."""

from __future__ import annotations

import contextlib
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

import zero_jax
from training.preemption import INTERRUPTED, Stopped
from training.saving import newest_step
from zero_jax.distributed.agreement import gather_texts

T = TypeVar("T")


@contextlib.contextmanager
def interrupted(folder: pathlib.Path) -> Iterator[None]:
    """Raises `Stopped` with the newest checkpoint when a second Ctrl-C interrupts the block."""
    try:
        yield
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends already
        saved = None
        with contextlib.suppress(OSError, ValueError):
            saved = newest_step(folder)
        raise Stopped(INTERRUPTED, folder, saved, at_once=True) from error


@contextlib.contextmanager
def shutdown_distributed() -> Iterator[None]:
    """Shuts down `jax.distributed`, which waits for all processes, under the watchdog."""
    try:
        yield
    except Stopped:
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


def together(settings: Mapping[str, Any], name: str, function: Callable[[], T]) -> T:
    """Returns the result of `function`; if it fails in one process, all processes raise."""
    failure: Exception | None = None
    try:
        result = function()
    except (ValueError, OSError) as error:
        failure = error
    if jax.distributed.is_initialized():
        zero_jax.check_agreement({**settings, name: failure or "fine"})
    if failure is not None:
        raise failure
    return result


def path_of_first_process(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path of process 0, because checkpoints are on shared storage."""
    return pathlib.Path(gather_texts(str(path.resolve()))[0])
