"""Data files that a run reads for hours: opened without blocking, and checked for changes.

A run remembers the size, modification time and inode of a file, and checksums of its content. A
read that meets other content raises `DataChanged`: the run never trains on it. Files are read, not
mapped, because a mapped file that shrinks ends the process by SIGBUS.
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
DIGEST = 6  # bytes of a fingerprint


class DataChanged(OSError):
    """A data file has other content than when the run began to read it.

    Args:
        where: The file, and the line where there is one.
        change: The difference, from `difference`.
    """

    def __init__(self, where: str, change: str) -> None:
        super().__init__(
            f"{where} changed during the run ({change}): restore this file of --data and repeat "
            "the command, or train on the new one with another --output-dir"
        )


_NOT_REGULAR = "{} is not a regular file: copy its contents to one"


def check_regular(path: Path) -> None:
    """Raises ValueError for a pipe or a device: opening one may wait, reading one may not end."""
    if not path.is_file():
        raise ValueError(_NOT_REGULAR.format(path))


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes; does not wait for a writer where a pipe took its place.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(_NOT_REGULAR.format(path))
    return os.fdopen(descriptor, "rb")


def reopen(path: Path, where: str) -> BinaryIO:
    """Opens a file that was read before; raises DataChanged if it is gone."""
    try:
        return open_regular(path)
    except FileNotFoundError as error:
        raise DataChanged(where, f"{path} is gone") from error


def difference(before: os.stat_result, now: os.stat_result) -> str:
    """Describes how the status of a file differs from an earlier one, for an error message."""
    parts = []
    if now.st_size != before.st_size:
        parts.append(f"size {before.st_size:,} bytes, now {now.st_size:,}")
    if now.st_mtime_ns != before.st_mtime_ns:
        written = datetime.fromtimestamp(now.st_mtime_ns // 10**9, UTC)
        parts.append(f"written {written:%Y-%m-%d %H:%M:%S} UTC")
    if now.st_ino != before.st_ino:
        parts.append(f"inode {before.st_ino}, now {now.st_ino}")
    return "; ".join(parts) or "same size, time and inode, other content"


def files_in(folder: Path) -> list[Path]:
    """Returns all files of a folder, also behind links, in the order of their paths.

    Raises:
        ValueError: A link leads to a folder that contains it.
    """

    def walk(inside: Path, above: frozenset[Path]) -> Iterator[Path]:
        if (real := inside.resolve()) in above:
            raise ValueError(f"{inside} links to a folder that contains it: remove the link")
        for path in inside.iterdir():
            if path.is_dir():
                yield from walk(path, above | {real})
            else:
                yield path

    return sorted(walk(folder, frozenset()), key=lambda path: path.relative_to(folder).as_posix())


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Returns a checksum of content, as hexadecimal digits.

    Content of more than `EXACT` bytes is read at `EXACT / SAMPLE` evenly spaced places.

    Args:
        read: Returns the bytes of a range by its start and its length.
        size: Bytes of the content.
    """
    digest = hashlib.blake2b(str(size).encode(), digest_size=DIGEST)
    if size <= EXACT:
        digest.update(read(0, size))
    else:
        places = EXACT // SAMPLE
        for place in range(places):
            digest.update(read((size - SAMPLE) * place // (places - 1), SAMPLE))
    return digest.hexdigest()


class TokenFile:
    """Token ids of a file as a read-only array of one dimension; a slice reads it and is a copy.

    Several threads may read it. Bytes that are appended to the file change nothing.

    Args:
        path: A regular file.
        dtype: An integer type.
        offset: Bytes before the first token.
        size: Number of tokens; by default all that follow.

    Attributes:
        fingerprint: Checksum of the full file, as hexadecimal digits.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, offset: int = 0, size: int | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._path, self._offset = path, offset
        self._status = path.stat()
        self._bytes = self._status.st_size
        self.fingerprint = self._fingerprint()
        self.size = (self._bytes - offset) // self.dtype.itemsize if size is None else size

    def part(self, start: int, stop: int) -> TokenFile:
        """Returns tokens `start` to `stop` without reading them."""
        view = copy.copy(self)
        view._offset, view.size = self._offset + start * self.dtype.itemsize, stop - start
        return view

    def __getitem__(self, at: slice) -> IntArray:
        """Reads a slice of neighbouring tokens.

        Raises:
            DataChanged: The file has other content than before.
        """
        start, stop, _ = at.indices(self.size)
        item = self.dtype.itemsize
        content, now = self._read(self._offset + start * item, max(0, stop - start) * item)
        if _version(now) != _version(self._status):
            if now.st_size < self._bytes or self._fingerprint() != self.fingerprint:
                raise DataChanged(str(self._path), difference(self._status, now))
            self._status = now  # written again, with the same content
        return np.frombuffer(content, self.dtype)

    def _fingerprint(self) -> str:
        return fingerprint(lambda *place: self._read(*place)[0], self._bytes)

    def _read(self, start: int, size: int) -> tuple[bytes, os.stat_result]:
        with reopen(self._path, str(self._path)) as file:
            file.seek(start)
            return file.read(size), os.fstat(file.fileno())


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
