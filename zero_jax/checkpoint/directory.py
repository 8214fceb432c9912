"""A directory of checkpoints: its steps, their contents and damage, and removal of old ones.

A process that is killed while it deletes a checkpoint would leave an incomplete one. So Orbax moves
old checkpoints to `.discarded`, and `sweep` deletes them there.
"""

import contextlib
import json
import pathlib
import shutil
import sys
import threading
import uuid
from collections.abc import Callable
from typing import NamedTuple

from zero_jax.checkpoint.arrays import Damaged, check_regular
from zero_jax.checkpoint.manifest import ITEM, SEAL, Manifest, check_seal

DISCARDED, AFTER = ".discarded", "after-"
_ORBAX_METADATA = "_CHECKPOINT_METADATA"
_INTERVAL = 1.0  # seconds


class Summary(NamedTuple):
    """The summary of a checkpoint."""

    nbytes: int  # of all files
    seconds: float | None  # time of completion since 1970; None if it can't be read
    manifest: Manifest | None  # None if it can't be read
    sealed: bool
    problems: list[str]  # the first of each array: files missing, of another size, or damaged


def step_folders(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the folders of checkpoints by step, ascending; their names are ASCII digits."""
    paths = directory.iterdir() if directory.is_dir() else iter(())
    return dict(sorted((int(p.name), p) for p in paths if _is_step(p.name) and p.is_dir()))


def folders(directory: pathlib.Path, step: int | None = None) -> dict[int, pathlib.Path]:
    """Returns the folder of each step, or of one; raises ValueError if there is none.

    Includes folders whose manifest is missing.
    """
    every = step_folders(directory)
    if not every:
        raise ValueError(f"{directory} does not hold a checkpoint")
    if step is not None and step not in every:
        steps = ", ".join(map(str, every))
        raise ValueError(f"{directory} does not hold step {step}: it holds steps {steps}")
    return every if step is None else {step: every[step]}


def unfinished(directory: pathlib.Path) -> list[str]:
    """Returns the names of folders left by an interrupted save; the next run removes them."""
    paths = {p for p in directory.iterdir() if p.is_dir() and not p.name.startswith(AFTER)}
    paths -= {*step_folders(directory).values()}
    return sorted(p.name for p in paths if p.name != DISCARDED or any(p.iterdir()))


def summary(folder: pathlib.Path, *, read: bool = False) -> Summary:
    """Returns a summary from the names and sizes of files; if `read`, compares all checksums."""
    manifest, seconds, problems, root = None, None, [], folder / ITEM
    try:
        check_seal(folder)
        manifest = Manifest.read(root)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    for name, array in manifest.arrays.items() if manifest else ():
        try:
            for starts, _ in array.chunks():
                array.check_file(root, starts)
            for _ in array.read_checked(root) if read else ():
                pass
        except (Damaged, OSError) as error:
            problems.append(f"{name}: {error}")
    nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        check_regular(folder / _ORBAX_METADATA)
        metadata = json.loads((folder / _ORBAX_METADATA).read_bytes())
        seconds = float(metadata["commit_timestamp_nsecs"]) / 1e9
    return Summary(nbytes, seconds, manifest, (folder / SEAL).exists(), problems)


def set_aside(directory: pathlib.Path, after: int) -> list[int] | None:
    """Moves the checkpoints after a step to `after-STEP`, to resume from that step.

    Returns the steps that were moved. Returns None and moves nothing if that folder exists: a run
    that is started again by the same command keeps its progress.
    """
    folder = directory / f"{AFTER}{after}"
    if folder.exists():
        return None
    later = {step: path for step, path in step_folders(directory).items() if step > after}
    for path in later.values():
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    return list(later)


def sweep(directory: pathlib.Path) -> Callable[[], None]:
    """Deletes discarded checkpoints in the background; returns a function that deletes the rest."""
    closed, reported = threading.Event(), set[str]()

    def run() -> None:
        is_last = False
        while not is_last:
            is_last = closed.wait(_INTERVAL)
            with contextlib.suppress(OSError):  # the storage does not answer: retried
                for path in [*(directory / DISCARDED).glob("*")]:
                    _delete(path, reported)

    def close() -> None:
        closed.set()
        thread.join()

    # A daemon: after an end without `close` the next run deletes the rest.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return close


def _delete(path: pathlib.Path, reported: set[str]) -> None:
    """Deletes a discarded checkpoint; prints an error once for each step."""
    step = path.name.partition(".")[0]
    try:
        if _is_step(path.name):  # frees the name: the same step may be discarded again
            path = path.rename(path.with_name(f"{step}.{uuid.uuid4().hex}"))
        shutil.rmtree(path, ignore_errors=True)  # deletes every file that it can
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        if step not in reported:
            reported.add(step)
            print(f"delete {path}, which is discarded: {error}", file=sys.stderr)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()
