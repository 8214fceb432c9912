"""Data files that a run reads for hours: opened without blocking, and checked for changes.

A read that meets other content than before raises `DataChanged`: the run never trains on it. Files
are read, not mapped, because a mapped file that shrinks ends the process by SIGBUS.
"""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
Arrays = tuple[np.ndarray, ...]
T = TypeVar("T")

AHEAD = 2  # batches that are made while the devices work
# Files of more bytes are fingerprinted by samples: 64 MiB take 0.05 s, 1 TB would take minutes.
EXACT = 1 << 26
SAMPLE = 1 << 16  # bytes
_NOT_REGULAR = "{} is not a regular file: copy its contents to one"


class DataChanged(OSError):
    """A data file, or one of its lines, has other content than when the run began to read it."""

    def __init__(self, where: str, change: str) -> None:
        super().__init__(
            f"{where} changed during the run ({change or 'same size, time and inode'}): restore "
            "this file of --data and repeat the command, or train on the new one with another "
            "--output-dir"
        )


def check_regular(path: Path) -> None:
    """Raises ValueError for a pipe or a device: opening one may wait, reading one may not end."""
    if not path.is_file():
        raise ValueError(_NOT_REGULAR.format(path))


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read bytes; raises OSError, and does not wait, if a pipe took its place."""
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
    """Describes how the status of a file differs from an earlier one; "" if it is the same."""
    parts = []
    if now.st_size != before.st_size:
        parts.append(f"size {before.st_size:,} bytes, now {now.st_size:,}")
    if now.st_mtime_ns != before.st_mtime_ns:
        written = datetime.fromtimestamp(now.st_mtime_ns // 10**9, UTC)
        parts.append(f"written {written:%Y-%m-%d %H:%M:%S} UTC")
    if now.st_ino != before.st_ino:
        parts.append(f"inode {before.st_ino}, now {now.st_ino}")
    return "; ".join(parts)


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


def checksum(*parts: bytes) -> str:
    """Returns a checksum of parts of bytes, as 12 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Returns a checksum of `size` bytes, of samples if they are more than `EXACT`.

    Args:
        read: Returns the bytes of a range, from its start and its length.
        size: Number of bytes.
    """
    if size <= EXACT:
        return checksum(str(size).encode(), read(0, size))
    places = EXACT // SAMPLE
    samples = (read((size - SAMPLE) * at // (places - 1), SAMPLE) for at in range(places))
    return checksum(str(size).encode(), *samples)


class TokenFile:
    """Token ids of a file as a read-only array of one dimension; a slice reads it and is a copy.

    Several threads may read it. Bytes that are appended to the file change nothing.

    Args:
        path: A regular file.
        dtype: An integer type.
        offset: Bytes before the first token.
        size: Number of tokens; by default all that follow.

    Attributes:
        fingerprint: Checksum of the full file.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, offset: int = 0, size: int | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._path, self._offset, self._status = path, offset, path.stat()
        self._bytes = self._status.st_size
        self.fingerprint = self._fingerprint()
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
        content, now = self._read(self._offset + start * item, max(0, stop - start) * item)
        if change := difference(self._status, now):
            if now.st_size < self._bytes or self._fingerprint() != self.fingerprint:
                raise DataChanged(str(self._path), change)
            self._status = now  # written again, with the same content
        return np.frombuffer(content, self.dtype)

    def _fingerprint(self) -> str:
        return fingerprint(lambda *place: self._read(*place)[0], self._bytes)

    def _read(self, start: int, size: int) -> tuple[bytes, os.stat_result]:
        with reopen(self._path, str(self._path)) as file:
            file.seek(start)
            return file.read(size), os.fstat(file.fileno())


def read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yields batches that a thread makes while the devices work, in their order."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # From one generator: after an error the batches that are queued behind it end at once.
        ahead = [thread.submit(next, batches) for _ in range(AHEAD)]
        while True:
            ahead.append(thread.submit(next, batches))
            yield ahead.pop(0).result()


def stacked(rows: Sequence[Arrays]) -> Arrays:
    """Returns arrays of rows as one array for each of their parts."""
    return tuple(np.stack(part) for part in zip(*rows, strict=True))
