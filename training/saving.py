"""The checkpoints of a run, in `checkpoints` of its folder: when they are made, and going on.

Beside the parameters and the optimizer's state a checkpoint has the place in the data, so that a
run that goes on, in however many processes, sees every sample or document of an epoch once.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from training.resuming import check_release, check_settings
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints, on_first_process
from zero_jax.checkpoint.inspection import folders
from zero_jax.checkpoint.manifest import ITEM, Manifest
from zero_jax.checkpoint.retention import set_aside
from zero_jax.distributed.agreement import gather_texts
from zero_jax.offload.nvme import discard, folder_of

PyTree = Any
FOLDER = "checkpoints"


def goes_on(out: str | pathlib.Path | None, resume: bool) -> bool:
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


def newest(out: pathlib.Path) -> int | None:
    """The step of the newest checkpoint that is whole on the disk, of a run in this folder."""
    if not pathlib.Path(out, FOLDER).is_dir():
        return None
    with Checkpoints(out / FOLDER, read_only=True) as checkpoints:
        return max(checkpoints.steps, default=None)


def same_everywhere(path: pathlib.Path) -> pathlib.Path:
    """The first process's path, as an absolute one: checkpoints are on storage that all share."""
    return pathlib.Path(gather_texts(str(path.resolve()))[0])


@contextlib.contextmanager
def state_files(directory: str | None, out: pathlib.Path) -> Iterator[None]:
    """While a state begins in files: those that a run in `out` began before are given up.

    A checkpoint takes their place, or the beginning if there is none yet. Those of another run
    stay, and the library refuses to begin there.

    Args:
        directory: That of `Offload`; None if no state is in files.
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


def _begin_from(directory: pathlib.Path, step: int) -> None:
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


# Flags of what decides on the order; all else follows from --data.
_FLAGS = ("seq_len", "global_batch_size", "seed", "loss_on", "long_documents")


def _check_order(order: Mapping[str, Any], before: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if the order of samples differs from that of the saved run."""
    for name, value in order.items():
        if before.get(name) == value:
            continue
        if name in _FLAGS:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value} is given, and {where}, was trained with {flag} "
                f"{before.get(name)}: the order of samples would change. Give {flag} "
                f"{before.get(name)}, or another --output-dir"
            )
        known = name.replace("_", " ")
        raise ValueError(
            f"--data has {known} {value}, and {where}, was trained with {known} "
            f"{before.get(name)}: the order of samples would change. Restore the former data, "
            "or give another --output-dir"
        )


def _changed_contents(
    contents: Mapping[str, str], before: Mapping[str, str], where: str
) -> list[str]:
    """Returns warnings about data with as many samples as before, and other content.

    Raises:
        ValueError: The tokenizer has another vocabulary, or the frozen model other weights.
    """
    said = []
    for name, now in contents.items():
        former = before.get(name, now)  # a release before checksums saved none
        if former == now:
            continue
        sums = f"(checksum {now}, before {former})"
        if name == "tokenizer":
            raise ValueError(
                f"--tokenizer (or that of --init-from) has another vocabulary than in {where} "
                f"{sums}. Give the former tokenizer, or another --output-dir"
            )
        if name == "base":
            raise ValueError(
                f"--init-from holds other weights than in {where} {sums}, and the saved adapters "
                "belong to the former weights. Give the former folder, or another --output-dir "
                "(with --lora-init-from to start from the saved adapters)"
            )
        flag = {
            "data": "--data",
            "chat template": "The chat template of --tokenizer (or --init-from)",
        }[name]
        said.append(
            f"{flag} changed since {where} {sums}. The run resumes at the same position in the "
            "changed data. Restore the former files to repeat the former run, or give another "
            "--output-dir for a new one"
        )
    return said


def _compare(
    manifest: Manifest,
    settings: Mapping[str, Any],
    order: Mapping[str, Any],
    contents: Mapping[str, str],
    directory: pathlib.Path,
) -> list[str]:
    """Compares a run with the checkpoint it resumes from; returns the warnings.

    Raises:
        ValueError: The run can't resume from it, or `train.py` did not write it.
    """
    extra, before = manifest.extra, manifest.config
    where = f"{directory}, step {manifest.step}"
    is_ours = isinstance(before, Mapping) and isinstance(extra, Mapping) and "sample" in extra
    if not is_ours or not isinstance(extra.get("order"), Mapping):
        raise ValueError(
            f"--output-dir: train.py did not write the checkpoint in {where}, which has no "
            "settings or no data position. Give another --output-dir, or restore it with "
            "zero_jax.Checkpoints"
        )
    check_release(before, where)
    sums = extra.get("contents", {})
    if not isinstance(sums, Mapping):
        raise Damaged(f"{where}: its checksums of the data are {sums!r:.80}, not an object")
    _check_order(order, extra["order"], where)
    warnings = check_settings(settings, before, where)
    return warnings + _changed_contents(contents, sums, where)


def check_resume(
    out: pathlib.Path,
    settings: Mapping[str, Any],
    order: Mapping[str, Any],
    contents: Mapping[str, str],
    from_step: int | None = None,
) -> None:
    """Raises ValueError if a run can't resume in a folder, before anything is written there.

    One process calls it. A checkpoint that is damaged, or missing at `from_step`, is left to
    `Saver`, which names the others.
    """
    directory = pathlib.Path(out, FOLDER).resolve()
    try:
        step = newest(out) if from_step is None else from_step
        if step is not None and (directory / str(step)).exists():
            manifest = Manifest.read(directory / str(step) / ITEM)
            _compare(manifest, settings, order, contents, directory)
    except Damaged:
        pass


class Saver:
    """Saves every so many steps; all processes make one and call it alike.

    Args:
        out: Folder of the run, the same in all processes.
        every: Steps between checkpoints; 0 makes none, and resumes from none.
        keep: How many of the latest stay.
        keep_every: Steps whose multiples are kept indefinitely.
        known: Settings of the run, from `plan.facts`.
        order: Settings that determine the order of samples.
        contents: Checksums of the data and of what makes tokens of it, by name.
        from_step: Resumes from this checkpoint; later ones are set aside. None: from the latest.

    Raises:
        ValueError: There is no such checkpoint, or nothing can be written there.
    """

    def __init__(
        self,
        out: pathlib.Path,
        every: int,
        keep: int,
        keep_every: int | None,
        known: Mapping[str, Any],
        order: Mapping[str, Any],
        contents: Mapping[str, str],
        from_step: int | None = None,
    ):
        self._every, self._known, self._order = every, dict(known), dict(order)
        self._contents = dict(contents)
        self.before: Mapping[str, Any] = {}  # settings of the run that saved what was restored
        self.place: Any = None  # in the data, from which the run goes on; None: the beginning
        self._checkpoints = None
        if from_step is not None:
            on_first_process(lambda: _begin_from(out / FOLDER, from_step))
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
        """The step of the newest checkpoint, on the disk or on its way; None if there is none."""
        return self._saved or None

    def resume(
        self, like: Callable[[Mapping[str, Any]], PyTree], say: Callable[[str], Any]
    ) -> tuple[PyTree, int] | None:
        """The tree and the step of the latest checkpoint; None if there is none.

        Args:
            like: Makes a tree like the one that was saved, given what that run was started with.
            say: Is told what was restored.

        Raises:
            ValueError: It belongs to another model, optimizer or data.
        """
        if self._checkpoints is None or self._checkpoints.latest is None:
            return None
        manifest = self._checkpoints.manifest()
        compared = self._known, self._order, self._contents, self._checkpoints.directory
        changed = _compare(manifest, *compared)
        self.before = manifest.config
        try:
            found = self._checkpoints.restore(like(manifest.config), say=lambda _: None)
        except Damaged as error:
            latest, earlier = self._checkpoints.latest, self._checkpoints.steps[:-1]
            if not earlier:
                raise
            raise Damaged(
                f"{error}. This is step {latest}; earlier steps are "
                f"{', '.join(map(str, earlier))}: use --resume-step {earlier[-1]} to resume from "
                "the last of them"
            ) from error
        say(f"Resuming from {self._checkpoints.directory}, {found}")
        for line in changed:
            say(f"warning: {line}")
        self._saved = found.step
        self.place = found.extra["sample"]
        return found.tree, found.step

    def go_back(
        self,
        like: Callable[[Mapping[str, Any]], PyTree],
        say: Callable[[str], Any],
        place: Any,
    ) -> tuple[PyTree, int] | None:
        """As `resume`, but goes on from this place in the data, after the batch that failed."""
        found = self.resume(like, say)
        self.place = place
        return found

    def save(self, step: int, tree: PyTree, place: Callable[[], Any], *, now: bool = False) -> None:
        """Saves if it is time to, or `now`, unless this step is saved already.

        Args:
            step: Steps that are done.
            tree: Parameters and the optimizer's state.
            place: Tells the place in the data after them; all processes call it.
            now: Whether to save in any case.
        """
        if self._checkpoints is None or step == self._saved:
            return
        if now or step % self._every == 0:
            extra = {"sample": place(), "order": self._order, "contents": self._contents}
            self._checkpoints.save(step, tree, config=self._known, extra=extra)
            self._saved = step
