"""Removal of old checkpoints: renamed first, then deleted in the background.

A process that is killed while it deletes a checkpoint would leave an incomplete one. So Orbax moves
old checkpoints to `.discarded`, and `sweep` deletes them there.
"""

import pathlib
import shutil
import sys
import threading
import uuid
from collections.abc import Callable

FOLDER = ".discarded"
AFTER = "after-"
_INTERVAL = 1.0  # seconds


def step_folders(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the folders of checkpoints by step, ascending; their names are ASCII digits."""
    paths = directory.iterdir() if directory.is_dir() else iter(())
    return dict(sorted((int(p.name), p) for p in paths if _is_step(p.name) and p.is_dir()))


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
    closed = threading.Event()
    # A daemon: after an end without `close` the next run deletes the rest.
    thread = threading.Thread(target=_sweep, args=(directory / FOLDER, closed), daemon=True)
    thread.start()

    def close() -> None:
        closed.set()
        thread.join()

    return close


def _sweep(folder: pathlib.Path, closed: threading.Event) -> None:
    is_last, reported = False, set[str]()
    while not is_last:
        is_last = closed.wait(_INTERVAL)
        try:
            discarded = list(folder.glob("*"))
        except OSError:  # the storage does not answer: retried in the next sweep
            continue
        for path in discarded:
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
