"""The checkpoints of a run, in the subfolder `checkpoints` of its folder.

A checkpoint also saves the position in the data. A resumed run, in any number of processes, sees
every sample or document of an epoch once.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from training.resuming import RunRecord
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints, on_first_process
from zero_jax.checkpoint.inspection import folders
from zero_jax.checkpoint.manifest import ITEM, Manifest
from zero_jax.checkpoint.retention import set_aside
from zero_jax.offload.nvme import discard, folder_of

PyTree = Any
FOLDER = "checkpoints"


def can_resume(out: str | pathlib.Path | None, resume: bool) -> bool:
    """Returns whether a folder holds a run that can resume there, finished or killed.

    Raises:
        ValueError: It does, and `resume` is False.
    """
    there = out is not None and pathlib.Path(out, FOLDER).is_dir()
    if there and not resume:
        raise ValueError(
            f"--no-resume is given, and {out} has checkpoints: use another "
            "--output-dir, or leave --no-resume out to resume from them"
        )
    return there


def newest_step(out: pathlib.Path) -> int | None:
    """Returns the step of the newest complete checkpoint of a run in this folder."""
    if not pathlib.Path(out, FOLDER).is_dir():
        return None
    with Checkpoints(out / FOLDER, read_only=True) as checkpoints:
        return max(checkpoints.steps, default=None)


@contextlib.contextmanager
def state_files(directory: str | None, out: pathlib.Path) -> Iterator[None]:
    """Initialises optimizer state in files; deletes state files of an earlier start of this run.

    The checkpoint replaces their content. State files of another run stay, and the library raises
    an error there.

    Args:
        directory: Directory of `Offload`; None if no state is in files.
        out: Folder of the run.
    """
    if directory is None:
        yield
        return
    owner = folder_of(directory) / "run.txt"
    if owner.is_file() and owner.read_text() == str(out):
        discard(directory)
    yield
    owner.write_text(str(out))


def _set_aside_later(directory: pathlib.Path, step: int) -> None:
    """Makes a checkpoint the latest, and moves the later ones to a subfolder."""
    try:
        folders(directory, step)
    except ValueError as error:
        raise ValueError(f"--resume-step {step}: {error}") from error
    later = set_aside(directory, step)
    if later is None:
        print(
            f"--resume-step {step} was applied by an earlier start ({directory / f'after-{step}'} "
            "exists): resuming from the latest checkpoint"
        )
    elif later:
        print(
            f"Resuming from step {step}: the later checkpoints ({', '.join(map(str, later))}) are "
            f"moved to {directory / f'after-{step}'}"
        )


def check_resume(out: pathlib.Path, record: RunRecord, from_step: int | None = None) -> None:
    """Raises ValueError if a run can't resume in a folder, before anything is written there.

    One process calls it. `Saver` reports a checkpoint that is damaged, or missing at `from_step`,
    because it names the other checkpoints.
    """
    directory = pathlib.Path(out, FOLDER).resolve()
    with contextlib.suppress(Damaged):
        step = newest_step(out) if from_step is None else from_step
        if step is not None and (directory / str(step)).exists():
            record.compare(Manifest.read(directory / str(step) / ITEM), directory)


class Saver:
    """Saves and restores checkpoints; all processes create one and call it alike.

    Args:
        out: Folder of the run, the same in all processes.
        every: Steps between checkpoints; 0 saves none, and restores none.
        keep: Number of the latest checkpoints to keep.
        keep_every: Checkpoints at multiples of this many steps are kept indefinitely.
        record: Settings and data of the run.
        from_step: Checkpoint to resume from; later ones are set aside. None: the latest.

    Attributes:
        before: Settings of the run that saved the restored checkpoint.
        place: Position in the data from which to train; None for the beginning.

    Raises:
        ValueError: There is no such checkpoint, or the folder can't be written.
    """

    def __init__(
        self,
        out: pathlib.Path,
        every: int,
        keep: int,
        keep_every: int | None,
        record: RunRecord,
        from_step: int | None = None,
    ):
        self._every, self._record = every, record
        self.before: Mapping[str, Any] = {}
        self.place: Any = None
        self._checkpoints = None
        if from_step is not None:
            on_first_process(lambda: _set_aside_later(out / FOLDER, from_step))
        if every:
            self._checkpoints = Checkpoints(out / FOLDER, keep=keep, keep_every=keep_every)
        self._saved = 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint, also one that is still being written; None for none."""
        return self._saved or None

    def resume(
        self, like: Callable[[Mapping[str, Any]], PyTree], say: Callable[[str], Any]
    ) -> tuple[PyTree, int] | None:
        """Returns the tree and the step of the latest checkpoint; None if there is none.

        Args:
            like: Returns a tree like the saved one, from the settings of the run that saved it.
            say: Called with each line to print.

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
            latest, earlier = self._checkpoints.latest, self._checkpoints.steps[:-1]
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
        self._saved = restored.step
        self.place = restored.extra["sample"]
        return restored.tree, restored.step

    def save(self, step: int, tree: PyTree, place: Callable[[], Any], *, now: bool = False) -> None:
        """Saves at multiples of `every` steps, or `now`, unless this step is saved already.

        Args:
            step: Number of finished steps.
            tree: Parameters and optimizer state.
            place: Returns the position in the data after this step; all processes call it.
            now: Saves at any step.
        """
        if self._checkpoints is None or step == self._saved:
            return
        if now or step % self._every == 0:
            record = self._record
            extra = {"sample": place(), "order": record.order, "contents": record.contents}
            self._checkpoints.save(step, tree, config=record.settings, extra=extra)
            self._saved = step
