"""Data files that a run reads for hours: opened without blocking, and checked for changes.

A run remembers the size, modification time and inode of a file, and checksums of its content. A
read that meets other content raises `DataChanged`: the run never trains on it. Files are read, not
mapped, because a mapped file that shrinks ends the process by SIGBUS.
"""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Callable
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


def files_in(folder: Path, on_error: Callable[[OSError], Any] | None = None) -> list[Path]:
    """Returns all files of a folder, also behind links, in the order of their paths.

    Args:
        folder: Folder to search.
        on_error: Called with the error of a folder that can't be read.

    Raises:
        ValueError: A link leads to a folder that contains it.
    """
    files: list[Path] = []
    above = {str(folder): frozenset([folder.resolve()])}  # the folders that contain each, resolved
    for root, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        for name in folders:
            inside = Path(root, name).resolve()
            if inside in above[root]:
                raise ValueError(
                    f"{Path(root, name)} links to a folder that contains it: remove the link"
                )
            above[os.path.join(root, name)] = above[root] | {inside}
        files += [Path(root, name) for name in names]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


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

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """

    def __init__(
        self, path: Path, dtype: npt.DTypeLike, offset: int = 0, size: int | None = None
    ) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._file = _CheckedFile(path)
        self._offset = offset
        self.size = (self._file.size - offset) // self.dtype.itemsize if size is None else size

    @property
    def fingerprint(self) -> str:
        """Checksum of the full file, as hexadecimal digits."""
        return self._file.fingerprint

    def part(self, start: int, stop: int) -> TokenFile:
        """Returns tokens `start` to `stop` of the same open file, without reading it."""
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
        content = self._file.read(self._offset + start * item, max(0, stop - start) * item)
        return np.frombuffer(content, self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> IntArray:
        return np.asarray(self[:], dtype)


class _CheckedFile:
    """An open file with its status and fingerprint of when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path)
        weakref.finalize(self, self._file.close)
        self._status = self._now()
        self.size = self._status.st_size
        self.fingerprint = fingerprint(self._read, self.size)

    def read(self, start: int, size: int) -> bytes:
        now = self._now()
        before = self._status
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            if now.st_size < self.size or fingerprint(self._read, self.size) != self.fingerprint:
                raise DataChanged(str(self._path), difference(before, now))
            self._status = now  # written, with the same content
        return self._read(start, size)

    def _now(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def _read(self, start: int, size: int) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            part = os.pread(self._file.fileno(), left, start + size - left)
            if not part:
                raise DataChanged(str(self._path), difference(self._status, self._now()))
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
