"""Profiler traces of a few steps, for TensorBoard, XProf or Perfetto."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

# Steps of a start to trace; earlier ones compile and warm up.
FIRST, LAST = 10, 12


@contextlib.contextmanager
def traced(folder: pathlib.Path | None) -> Iterator[Callable[[int, Any], None]]:
    """Traces steps FIRST to LAST of this start; None as the destination traces nothing.

    Yields:
        `before(step, results)`, to call before each step with its number, counted from 1 in this
        start, and with arrays of the step before.
    """
    trace, last = contextlib.ExitStack(), 0

    def before(step: int, results: Any) -> None:
        nonlocal last
        last = step
        if folder is None or step not in (FIRST, LAST + 1):
            return
        jax.block_until_ready(results)  # earlier steps are not in the trace
        trace.close()
        if step == FIRST:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else 100,000 Python calls
            jax.profiler.start_trace(folder, profiler_options=options)
            trace.callback(jax.profiler.stop_trace)

    try:
        with trace:
            yield before
    finally:
        if folder is not None and last < FIRST:
            print(f"--profile: nothing is traced, this start had fewer than {FIRST} steps left")
