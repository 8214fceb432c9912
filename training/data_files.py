"""Data files that a run reads for hours: opened without blocking, and checked for changes.

A run remembers the size, the modification time and the inode of a file, and checksums of its
content. A read that meets other content raises `DataChanged`: the run never trains on it. Files
are read, not mapped, because a mapped file that shrinks ends the process by SIGBUS.
"""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
        how: The difference, from `Stamp.difference`.
    """

    def __init__(self, where: str, how: str) -> None:
        super().__init__(
            f"{where} changed during the run ({how}): restore this file of --data and repeat the "
            "command, or train on the new one with another --output-dir"
        )


class Stamp(NamedTuple):
    """State of a file: its size in bytes, its modification time and its inode."""

    size: int
    time_ns: int
    inode: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: Stamp) -> str:
        """Describes the differences of a later stamp, for an error message.

        >>> Stamp(9, 0, 1).difference(Stamp(4, 10**18, 2))
        'size 9 bytes, now 4; written 2001-09-09 01:46:40 UTC; inode 1, now 2'
        """
        found = []
        if now.size != self.size:
            found.append(f"size {self.size:,} bytes, now {now.size:,}")
        if now.time_ns != self.time_ns:
            written = datetime.fromtimestamp(now.time_ns // 10**9, UTC)
            found.append(f"written {written:%Y-%m-%d %H:%M:%S} UTC")
        if now.inode != self.inode:
            found.append(f"inode {self.inode}, now {now.inode}")
        return "; ".join(found) or "same size, time and inode, other content"


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes; does not wait for a writer where a pipe took its place.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file: copy its contents to one")
    return os.fdopen(descriptor, "rb")


def fingerprint(read: Callable[[int, int], bytes], size: int) -> str:
    """Returns a checksum of content, as hexadecimal digits.

    Content of more than `EXACT` bytes is read at `EXACT / SAMPLE` evenly spaced places.

    Args:
        read: Returns the bytes of a range, given its start and its length.
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

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, offset: int = 0, size: int | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._file = _Watched(path)
        self._offset = offset
        self.size = (self._file.size - offset) // self.dtype.itemsize if size is None else size

    @property
    def fingerprint(self) -> str:
        """Checksum of the whole file, as hexadecimal digits."""
        return self._file.fingerprint

    def part(self, start: int, stop: int) -> TokenFile:
        """Tokens `start` to `stop` of the same open file; nothing is read."""
        view = object.__new__(TokenFile)
        view.dtype, view._file, view.size = self.dtype, self._file, stop - start
        view._offset = self._offset + start * self.dtype.itemsize
        return view

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: slice) -> IntArray:
        """Reads a slice.

        Raises:
            DataChanged: The file has other content than before.
        """
        start, stop, step = at.indices(self.size)
        if step != 1:
            raise ValueError(f"step={step}: a token file supports slices with step 1 only")
        item = self.dtype.itemsize
        found = self._file.read(self._offset + start * item, max(0, stop - start) * item)
        return np.frombuffer(found, self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> IntArray:
        return np.asarray(self[:], dtype)


class _Watched:
    """An open file, and its state when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path)
        weakref.finalize(self, self._file.close)
        self._stamp = Stamp.from_stat(os.fstat(self._file.fileno()))
        self.size = self._stamp.size
        self.fingerprint = fingerprint(self._read, self.size)

    def read(self, start: int, size: int) -> bytes:
        now = Stamp.from_stat(os.fstat(self._file.fileno()))
        if now != self._stamp:
            same = now.size >= self.size
            if not same or fingerprint(self._read, self.size) != self.fingerprint:
                raise DataChanged(str(self._path), self._stamp.difference(now))
            self._stamp = now  # written, with the same content
        return self._read(start, size)

    def _read(self, start: int, size: int) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            part = os.pread(self._file.fileno(), left, start + size - left)
            if not part:
                now = Stamp.from_stat(os.fstat(self._file.fileno()))
                raise DataChanged(str(self._path), self._stamp.difference(now))
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
