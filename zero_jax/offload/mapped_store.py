"""Arrays in memory-mapped files that survive a process killed at any instant.

A store has two files, the slots. Step t is read from slot t mod 2 and step t + 1 written to the
other; when all of it is on the disk, a small record that names t + 1 takes the place of the old
one in a single rename. Until then the record says t, whose slot nobody has touched. So the store
costs twice what it holds, and nothing else. Each process has its own folder.
"""

import errno
import json
import math
import mmap
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

RECORD = "step.json"
_ALIGN = 4096


class Store:
    """The arrays of one process, by name, in two slots.

    Args:
      folder: of this process.
      shapes: shape and dtype of each array, by name.
      create: makes the files, which must not be there; else they must be, for the same arrays.

    Raises:
      ValueError: the folder can't be written, is full, holds a state already, or another one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shapes: Mapping[str, tuple[Sequence[int], DTypeLike]],
        *,
        create: bool,
    ):
        self.folder = folder
        self._arrays: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            self._arrays[name] = offset, tuple(shape), np.dtype(dtype)
            size = math.prod(shape) * np.dtype(dtype).itemsize
            offset += -(-size // _ALIGN) * _ALIGN
        self.bytes = max(offset, _ALIGN)
        self._layout = {n: [list(s), str(np.dtype(d))] for n, (s, d) in shapes.items()}
        self.step = 0
        if create:
            self._create()
        else:
            self.step = self._open()
        self._maps = [self._map(slot) for slot in (0, 1)]

    def _path(self, slot: int) -> pathlib.Path:
        return self.folder / f"slot{slot}.bin"

    def _create(self) -> None:
        if (self.folder / RECORD).exists():
            raise ValueError(
                f"`offload`: {self.folder} holds the state of step {committed(self.folder)}. "
                "Resume it with tx.resume(params), or use an empty directory"
            )
        made: list[pathlib.Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for slot in (0, 1):
                with open(self._path(slot), "wb") as file:
                    made.append(self._path(slot))
                    os.posix_fallocate(file.fileno(), 0, self.bytes)
        except OSError as error:
            for path in made:
                path.unlink(missing_ok=True)
            raise ValueError(self._trouble(error)) from error

    def _trouble(self, error: OSError) -> str:
        need = f"the optimizer state takes {2 * self.bytes:,} bytes here, in two slots"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self.folder).free
            return (
                f"`offload`: {self.folder} has {free:,} bytes free, but {need}. Use another "
                "directory"
            )
        why = error.strerror or str(error)
        return (
            f"`offload`: {self.folder} cannot be written ({why}): {need}. Use a writable directory"
        )

    def _open(self) -> int:
        if not (self.folder / RECORD).exists():
            raise ValueError(
                f"`offload`: {self.folder} has no state to resume. Start with tx.init(params)"
            )
        record = json.loads((self.folder / RECORD).read_text())
        if record["arrays"] != self._layout:
            raise ValueError(
                f"`offload`: {self.folder} holds the state of another model, optimizer or mesh. "
                "Resume with the same ones, or use an empty directory"
            )
        return int(record["step"])

    def _map(self, slot: int) -> mmap.mmap:
        with open(self._path(slot), "r+b") as file:
            return mmap.mmap(file.fileno(), self.bytes)

    def _view(self, step: int, name: str) -> np.ndarray:
        offset, shape, dtype = self._arrays[name]
        return np.ndarray(shape, dtype, self._maps[step % 2], offset)

    def read(self, step: int, name: str, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """A copy of part of an array as it was at a step."""
        box = tuple(map(slice, starts, stops))
        out = np.array(self._view(step, name)[box])
        self._forget(step)
        return out

    def write(self, step: int, name: str, starts: Sequence[int], piece: np.ndarray) -> None:
        """Writes part of an array, to be part of a step."""
        stops = [s + d for s, d in zip(starts, piece.shape, strict=True)]
        self._view(step, name)[tuple(map(slice, starts, stops))] = piece
        self._forget(step)

    def _forget(self, step: int) -> None:
        # What is mapped counts as this process's memory; written pages stay with the kernel.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[step % 2].madvise(mmap.MADV_DONTNEED)

    def commit(self, step: int) -> None:
        """Makes a step the one that a process resumes from."""
        self._maps[step % 2].flush()
        fresh = self.folder / (RECORD + ".new")
        with open(fresh, "w") as file:
            json.dump({"step": step, "arrays": self._layout}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.folder / RECORD)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.step = step

    def forget(self) -> None:
        """Takes the record away: until the next commit there is nothing to resume from."""
        (self.folder / RECORD).unlink(missing_ok=True)


def committed(folder: pathlib.Path) -> int:
    """The step that a store's record names."""
    return int(json.loads((folder / RECORD).read_text())["step"])
