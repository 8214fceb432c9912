"""The checkpoints of a run, in the subfolder `checkpoints` of its folder.

A checkpoint also saves the position in the data. A resumed run, in any number of processes, sees
every sample or document of an epoch once.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from training.config import Config
from training.multiprocess import say
from training.resuming import RunRecord
from training.run_folder import CHECKPOINTS
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints, on_first_process
from zero_jax.checkpoint.inspection import folders
from zero_jax.checkpoint.manifest import ITEM, Manifest
from zero_jax.checkpoint.retention import set_aside

PyTree = Any


def newest_step(out: pathlib.Path) -> int | None:
    """Returns the step of the newest complete checkpoint of a run in this folder."""
    if not (out / CHECKPOINTS).is_dir():
        return None
    with Checkpoints(out / CHECKPOINTS, read_only=True) as checkpoints:
        return max(checkpoints.steps, default=None)


def check_resume(config: Config, record: RunRecord) -> bool:
    """Returns whether --output-dir holds a run to resume, finished or killed.

    One process calls it, before anything is written there. `Saver` reports a checkpoint that is
    damaged, or missing at --resume-step, because it names the other checkpoints.

    Raises:
        ValueError: The run can't resume there, or must not.
    """
    if config.output_dir is None or not config.save_steps:
        return False
    out = pathlib.Path(config.output_dir)
    directory = (out / CHECKPOINTS).resolve()
    if not directory.is_dir():
        return False
    if not config.resume:
        raise ValueError(
            f"--no-resume is given, and {out} has checkpoints: use another "
            "--output-dir, or leave --no-resume out to resume from them"
        )
    with contextlib.suppress(Damaged):
        step = newest_step(out) if config.resume_step is None else config.resume_step
        if step is not None and (directory / str(step)).exists():
            record.compare(Manifest.read(directory / str(step) / ITEM), directory)
    return True


def _set_aside_later(directory: pathlib.Path, step: int) -> None:
    """Makes a checkpoint the latest, and moves the later ones to a subfolder."""
    try:
        folders(directory, step)
    except ValueError as error:
        raise ValueError(f"--resume-step {step}: {error}") from error
    later, aside = set_aside(directory, step), directory / f"after-{step}"
    if later is None:
        say(
            f"--resume-step {step} was applied by an earlier start ({aside} exists): resuming from "
            "the latest checkpoint"
        )
    elif later:
        steps = ", ".join(map(str, later))
        say(f"Resuming from step {step}: the later checkpoints ({steps}) are moved to {aside}")


class Saver:
    """Saves and restores checkpoints in a folder; all processes create one and call it alike.

    Raises:
        ValueError: There is no checkpoint of --resume-step, or the folder can't be written.
    """

    def __init__(self, config: Config, out: pathlib.Path, record: RunRecord):
        self._every, self._record = config.save_steps, record
        self.before: Mapping[str, Any] = {}  # settings of the run that saved the restored one
        self.place: Any = None  # position in the data from which to train; None: the beginning
        self.saved: int | None = None  # step of the newest one, also if it is still being written
        self._checkpoints = None
        directory, step = out / CHECKPOINTS, config.resume_step
        if step is not None:
            on_first_process(lambda: _set_aside_later(directory, step))
        if config.save_steps:
            kept = {"keep": config.save_total_limit, "keep_every": config.keep_every_steps}
            self._checkpoints = Checkpoints(directory, **kept)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def resume(self, like: Callable[[Mapping[str, Any]], PyTree]) -> tuple[PyTree, int] | None:
        """Returns the tree and the step of the latest checkpoint; None if there is none.

        Args:
            like: Returns a tree like the saved one, from the settings of the run that saved it.

        Raises:
            ValueError: It belongs to another model, optimizer or data.
        """
        if self._checkpoints is None or self._checkpoints.latest is None:
            return None
        manifest = self._checkpoints.manifest()
        warnings = self._record.compare(manifest, self._checkpoints.directory)
        self.before = manifest.config
        try:
            restored = self._checkpoints.restore(like(manifest.config), say=lambda _: None)
        except Damaged as error:
            *earlier, latest = self._checkpoints.steps
            if not earlier:
                raise
            raise Damaged(
                f"{error}. This is step {latest}; earlier steps are "
                f"{', '.join(map(str, earlier))}: use --resume-step {earlier[-1]} to resume from "
                "the last of them"
            ) from error
        say(f"Resuming from {self._checkpoints.directory}, {restored}")
        for line in warnings:
            say(f"warning: {line}")
        self.saved = restored.step
        self.place = restored.extra["sample"]
        return restored.tree, restored.step

    def save(self, step: int, tree: PyTree, place: Callable[[], Any], *, now: bool = False) -> bool:
        """Saves at multiples of `save_steps`, or `now`, unless this step is saved already.

        Args:
            step: Number of finished steps.
            tree: Parameters and optimizer state.
            place: Returns the position in the data after this step; all processes call it.
            now: Saves at any step.

        Returns:
            True if a save has started.
        """
        if self._checkpoints is None or step == (self.saved or 0):
            return False
        if now or step % self._every == 0:
            record = self._record
            extra = {"sample": place(), "order": record.order, "contents": record.contents}
            self._checkpoints.save(step, tree, config=record.settings, extra=extra)
            self.saved = step
        return self.saved == step
