"""A training step that decides at its first call how it runs: `Zero(mesh, stage="auto")`."""

from collections.abc import Callable
from typing import Any

from zero_jax.engine.step import TrainStep


class AutoStep:
    """A `TrainStep` whose stage, micro-batches and remat are chosen when it first meets arrays.

    By then these have their place, so whether states rest in host memory is not chosen here.

    It has all that a `TrainStep` has. Made by `Zero.train_step`.
    """

    def __init__(self, decide: Callable[..., TrainStep]):
        self._decide = decide
        self._step: TrainStep | None = None

    def _decided(self, args: tuple[Any, ...]) -> TrainStep:
        if self._step is None:
            self._step = self._decide(*args)
        return self._step

    @property
    def settings(self) -> Any:
        """The settings that were chosen.

        Raises:
          AttributeError: nothing was chosen yet.
        """
        if self._step is None:
            raise AttributeError("nothing is chosen before the first step: call it, or lower it")
        return self._step.settings

    def __call__(self, *args: Any) -> Any:
        return self._decided(args)(*args)

    def trace(self, *args: Any) -> Any:
        """As `TrainStep.trace`."""
        return self._decided(args).trace(*args)

    def lower(self, *args: Any) -> Any:
        """As `TrainStep.lower`."""
        return self._decided(args).lower(*args)

    def first_bad_leaf(self, *args: Any) -> str | None:
        """As `TrainStep.first_bad_leaf`."""
        return self._decided(args).first_bad_leaf(*args)
