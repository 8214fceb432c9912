"""Signs of life: files of one folder that all processes of a run share.

Every process writes its own, `00003.json`, again and again; a verdict, of why the run ends, is for
all. Each start has a folder of its own, so what an earlier one left says nothing about this one.
"""

import contextlib
import json
import os
import pathlib
import shutil
from typing import Any

from zero_jax.cluster.lock import locked

_OWN = "start-"
_VERDICT = "verdict.json"
LEFT = 0  # the counter of a process that is done


class Signs:
    """The files of one start.

    Args:
      folder: in which each start has one.
      start: a number that no other start has.
      rank: of this process.
    """

    def __init__(self, folder: pathlib.Path, start: int, rank: int):
        self.folder, self._rank = folder.absolute() / f"{_OWN}{start}", rank
        self._lock: int | None = None  # of the first process: while it lives, the folder stays

    def open(self) -> None:
        """Makes the folder; the first process removes those of starts that are gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            self._lock = _lock(self.folder)
            for old in self.folder.parent.glob(f"{_OWN}*"):
                _remove(old)

    def close(self) -> None:
        """Lets a later start remove the folder."""
        if self._lock is not None:
            os.close(self._lock)

    def path_of(self, rank: int) -> pathlib.Path:
        """Where a process tells how it is."""
        return self.folder / f"{rank:05d}.json"

    def tell(self, known: dict[str, Any]) -> None:
        """Tells how this process is: its `counter`, and the rest of what `Other` knows."""
        path = self.path_of(self._rank)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(known))
        beside.rename(path)

    def of(self, rank: int) -> dict[str, Any] | None:
        """What a process has told; None if nothing."""
        return _read(self.path_of(rank))

    def condemn(self, why: str) -> None:
        """Tells all why the run ends, if that can be written."""
        with contextlib.suppress(OSError):
            beside = self.folder / f"{self._rank:05d}.{_VERDICT}"
            beside.write_text(json.dumps({"why": why}))
            beside.rename(self.folder / _VERDICT)

    @property
    def verdict(self) -> str | None:
        """Why the run ends, if somebody has told."""
        told = _read(self.folder / _VERDICT)
        return None if told is None else str(told["why"])


class Other:
    """What is known of another process, and since when it has not changed."""

    UNSEEN = -1

    def __init__(self, now: float):
        self.since, self.counter = now, self.UNSEEN
        self.step: int | None = None
        self.name = ""
        self.failed = False

    def look(self, told: dict[str, Any] | None, now: float) -> None:
        """Takes in what it tells now."""
        if told is not None and told["counter"] != self.counter:
            self.since, self.counter = now, told["counter"]
            self.step, self.name, self.failed = told["step"], told["process"], told["failed"]


def _lock(folder: pathlib.Path) -> int | None:
    """The lock of a start's folder; None if a process that lives has it, or there are no locks."""
    with contextlib.suppress(ValueError):
        return locked(folder, "heartbeats")
    return None


def _remove(folder: pathlib.Path) -> None:
    """Deletes what an earlier start left, if its first process is gone."""
    lock = _lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None
