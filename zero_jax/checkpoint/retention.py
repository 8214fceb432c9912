"""What retention takes away: set aside by a rename, then deleted beside training.

A folder that is deleted file by file is half there when its process is killed, and still has the
name of a checkpoint. Once it is set aside it has none.
"""

import pathlib
import shutil
import sys
import threading
import uuid

FOLDER = ".discarded"
AFTER = "after-"
_INTERVAL = 1.0


def is_step(name: str) -> bool:
    """Whether a folder is called as a checkpoint is; "²" is a digit too."""
    return name.isascii() and name.isdigit()


def set_aside(directory: pathlib.Path, after: int) -> list[int] | None:
    """Takes later checkpoints out of the way of a run that goes on from an earlier one.

    They are kept, in `after-STEP` beside the others. Where that is there, nothing is done: a run
    that is started again by the same command is not to lose what it has done since.

    Args:
      directory: of the checkpoints; nobody writes there.
      after: the step that is to be the latest.

    Returns:
      Their steps; None if it was done before.
    """
    folder = directory / f"{AFTER}{after}"
    if folder.exists():
        return None
    later = [p for p in directory.iterdir() if is_step(p.name) and int(p.name) > after]
    for path in later:
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    return sorted(int(p.name) for p in later)


class Sweeper:
    """Deletes what is set aside in the directory of a run, and what a killed run left there."""

    def __init__(self, directory: pathlib.Path):
        self._folder = directory / FOLDER
        self._over = threading.Event()
        self._told: set[str] = set()
        # A daemon: what a process leaves that ends without `close`, the next run deletes.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deletes what is still there."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            self._sweep()
            over = self._over.wait(_INTERVAL)
        self._sweep()

    def _sweep(self) -> None:
        try:
            found = list(self._folder.iterdir())
        except OSError:  # nothing was ever set aside, or the storage does not answer now
            return
        for path in found:
            beside = _renamed(path)
            shutil.rmtree(beside, ignore_errors=True)  # goes on with the rest
            step = path.name.partition(".")[0]
            if beside.exists() and step not in self._told:
                self._told.add(step)
                print(f"{beside} is discarded, and can't be deleted: delete it", file=sys.stderr)


def _renamed(path: pathlib.Path) -> pathlib.Path:
    """Under a name of its own: the same step may be set aside again before this one is gone."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        return path.rename(beside) if is_step(path.name) else path
    except OSError:
        return path
