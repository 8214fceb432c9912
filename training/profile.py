"""Profiler traces of a few steps, for TensorBoard, XProf or Perfetto."""

from __future__ import annotations

import pathlib
from typing import Any

import jax

# Steps of a start to trace; earlier ones compile and warm up.
FIRST, LAST = 10, 12


class Profile:
    """Traces steps FIRST to LAST of this start; use it in a `with`.

    Args:
        folder: Destination of the trace; None traces nothing.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder, self._on, self._traced = folder, False, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        if self._folder is not None and not self._traced:
            print(f"--profile: nothing is traced, this start had fewer than {FIRST} steps left")

    def before(self, step: int, results: Any) -> None:
        """Starts or stops the trace; called before each step.

        Args:
            step: The step, counted from 1 in this start.
            results: Arrays of the step before.
        """
        if self._folder is None or step not in (FIRST, LAST + 1):
            return
        jax.block_until_ready(results)  # earlier steps are not in the trace
        self._stop()
        if step == FIRST:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else 100,000 Python calls
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._on = self._traced = True

    def _stop(self) -> None:
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
