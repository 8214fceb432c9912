"""Data files that a run reads for hours: opened without blocking, and checked for changes.

A read that meets other content than before raises `DataChanged`: the run never trains on it. Files
are read, not mapped, because a mapped file that shrinks ends the process by SIGBUS.
"""

from __future__ import annotations

import copy
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]

# Files of more bytes are fingerprinted by samples: 64 MiB take 0.05 s, 1 TB would take minutes.
EXACT = 1 << 26
SAMPLE = 1 << 16  # bytes


class DataChanged(OSError):
    """A data file, or one of its lines, has other content than when the run began to read it."""

    def __init__(self, path: Path, where: object) -> None:
        try:
            now = path.stat()
            written = datetime.fromtimestamp(now.st_mtime, UTC)
            state = f"now {now.st_size:,} bytes, written {written:%Y-%m-%d %H:%M:%S} UTC"
        except FileNotFoundError:
            state = f"{path} is gone"
        super().__init__(
            f"{where} changed during the run ({state}): restore this file of --data and repeat the "
            "command, or train on the new one with another --output-dir"
        )


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read bytes; raises OSError, and does not wait, for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file: copy its contents to one")
    return os.fdopen(descriptor, "rb")


def reopen(path: Path, where: object) -> BinaryIO:
    """Opens a file that was read before; raises DataChanged, which names `where`, if it is gone."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise DataChanged(path, where) from error


def files_in(path: Path) -> list[Path]:
    """Returns all files of a folder, also behind links, in the order of their paths; or the file.

    Hidden files and folders are left out. A link to a folder that contains it raises ValueError.
    """

    def walk(inside: Path, above: frozenset[Path]) -> Iterator[Path]:
        if not inside.is_dir():
            yield inside
            return
        if (real := inside.resolve()) in above:
            raise ValueError(f"{inside} links to a folder that contains it: remove the link")
        for each in inside.iterdir():
            if not each.name.startswith("."):
                yield from walk(each, above | {real})

    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path of --data")
    return sorted(walk(path, frozenset()), key=lambda file: file.relative_to(path).as_posix())


def checksum(*parts: bytes) -> str:
    """Returns a checksum of parts of bytes, as 12 hexadecimal digits."""
    return hashlib.blake2b(b"".join(parts), digest_size=6).hexdigest()


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Returns a checksum of `size` bytes, or of samples; `read` returns those of start and size."""
    if size <= EXACT:
        return checksum(str(size).encode(), read(0, size))
    places = EXACT // SAMPLE
    samples = (read((size - SAMPLE) * at // (places - 1), SAMPLE) for at in range(places))
    return checksum(str(size).encode(), *samples)


class TokenFile:
    """Token ids of a file as a read-only array of one dimension; a slice reads it and is a copy.

    They begin at byte `offset`; by default they are all that follow. Several threads may read it.
    Bytes that are appended to the file change nothing.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, offset: int = 0, size: int | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._path, self._offset = path, offset
        self._status = self._read(0, 0)[1]
        self._bytes = self._status[0]
        self.fingerprint = self._fingerprint()  # of the full file
        self.size = (self._bytes - offset) // self.dtype.itemsize if size is None else size

    def part(self, start: int, stop: int) -> TokenFile:
        """Returns tokens `start` to `stop` without reading them."""
        view = copy.copy(self)
        view._offset, view.size = self._offset + start * self.dtype.itemsize, stop - start
        return view

    def __getitem__(self, at: slice) -> IntArray:
        """Reads neighbouring tokens; raises DataChanged if the file has other content now."""
        start, stop, _ = at.indices(self.size)
        item = self.dtype.itemsize
        content, status = self._read(self._offset + start * item, max(0, stop - start) * item)
        if status != self._status:
            if status[0] < self._bytes or self._fingerprint() != self.fingerprint:
                raise DataChanged(self._path, self._path)
            self._status = status  # written again, with the same content
        return np.frombuffer(content, self.dtype)

    def _fingerprint(self) -> str:
        return fingerprint(lambda *place: self._read(*place)[0], self._bytes)

    def _read(self, start: int, size: int) -> tuple[bytes, tuple[int, int, int]]:
        """Returns bytes; and size, time and inode of the file after they were read."""
        with reopen(self._path, self._path) as file:
            file.seek(start)
            content, now = file.read(size), os.fstat(file.fileno())
        return content, (now.st_size, now.st_mtime_ns, now.st_ino)
