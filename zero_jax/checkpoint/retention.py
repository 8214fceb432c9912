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
_INTERVAL = 1.0


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
                print(f"{beside} is discarded, but can't be deleted", file=sys.stderr)


def _renamed(path: pathlib.Path) -> pathlib.Path:
    """Under a name of its own: the same step may be set aside again before this one is gone."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        return path.rename(beside) if path.name.isdigit() else path
    except OSError:
        return path
