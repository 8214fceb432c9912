"""One array on the disk: zarr 3 by TensorStore, in chunks that each carry a CRC-32C.

What is stored is the logical array. A chunk never crosses the border of two devices' shards, so
every process writes its own chunks and none is written twice; a shard larger than CHUNK_BYTES has
several, so that little has to be read for a small part of it. A chunk that is missing, cut short
or altered is an error when it is read, never zeros.
"""

import contextlib
import itertools
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from zero_jax.checkpoint.checksum import words

CHUNK_BYTES = 64 * 2**20
CRC_BYTES = 4
# Names of dtypes that zarr knows; others are stored as unsigned integers of the same bits.
_KNOWN = {"bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}


class Damaged(ValueError):
    """A file of a checkpoint differs from the one that was written."""


def chunk_shape(shape: Sequence[int], shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of a chunk: a shard, or an even part of it of about CHUNK_BYTES.

    Args:
      shape: of the whole array.
      shard: the largest piece that one device holds.
      itemsize: bytes of an element.

    >>> chunk_shape((36, 4096, 4096), (36, 512, 4096), 4)
    (8, 512, 4096)
    """
    chunk = [max(1, min(a, b)) for a, b in zip(shape, shard, strict=True)]
    cut = [a < b for a, b in zip(chunk, shape, strict=True)]
    for dim in sorted(range(len(chunk)), key=lambda d: cut[d]):
        size = chunk[dim]
        least = min(size, math.ceil(math.prod(chunk) * itemsize / CHUNK_BYTES))
        if not cut[dim]:
            chunk[dim] = -(-size // least)
            continue
        # Here shards begin at multiples of `size`, and so must chunks.
        even = (n for n in range(least, min(size, 8 * least) + 1) if size % n == 0)
        chunk[dim] = size // next(even, 1)
    return tuple(chunk)


def regular_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file; does not wait for a writer where a pipe took its place.

    Raises:
      Damaged: it is a pipe, a device, a socket or a folder.
      OSError: it can't be opened.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise Damaged(f"{path} is not a regular file")
    with open(path, "rb") as file:
        return file.read()


class Array:
    """An array on the disk.

    Args:
      folder: where its chunks are.
      shape: of the whole array.
      dtype: its name.
      chunk: from `chunk_shape`.
    """

    def __init__(self, folder: str, shape: Sequence[int], dtype: str, chunk: Sequence[int]):
        self.shape, self.dtype = tuple(shape), jnp.dtype(dtype)
        self._chunk = tuple(chunk)
        self._folder = os.path.realpath(folder)  # TensorStore takes no ".."
        self._stored = dtype if dtype in _KNOWN else f"uint{8 * self.dtype.itemsize}"
        grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
        self._spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self._folder}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": self._stored,
                "chunk_grid": grid,
                "chunk_key_encoding": {"name": "default"},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
        }

    def create(self) -> None:
        """Writes the description that other readers of zarr need; one process does."""
        with _os_errors(self._folder):
            ts.open(self._spec, create=True, open=False).result()

    def write(self, pieces: Sequence[tuple[tuple[int, ...], np.ndarray]]) -> None:
        """Writes pieces, each with where it starts; all of their chunks at once.

        They are not copied, and must not change until this returns.
        """
        store = self._open()
        known = jnp.dtype(self._stored)
        futures = []
        for starts, piece in pieces:
            value = piece if piece.dtype == known else words(piece)
            place = store[_box(starts, piece.shape)]
            futures.append(place.write(value, can_reference_source_data_indefinitely=True))
        with _os_errors(self._folder):
            for future in futures:
                future.result()

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """Reads a part.

        Raises:
          Damaged: a chunk is not as it was written.
        """
        shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
        if 0 in shape:
            return np.zeros(shape, self.dtype)
        self._check_files(starts, stops)
        try:
            value = self._open()[_box(starts, shape)].read().result()
        except ValueError as error:  # what TensorStore raises for all of this
            raise Damaged(f"{self._folder}: {str(error).partition(' [')[0]}") from error
        return np.asarray(value).view(self.dtype)

    def _check_files(self, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Raises Damaged if a chunk is missing, a pipe, or larger than it can be.

        TensorStore waits for a pipe's writer without end, and reads a file of any size.
        """
        largest = math.prod(self._chunk) * self.dtype.itemsize + CRC_BYTES
        bounds = zip(starts, stops, self._chunk, strict=True)
        for at in itertools.product(*(range(a // n, -(-b // n)) for a, b, n in bounds)):
            path = "/".join([self._folder, "c", *map(str, at)])
            try:
                found = os.stat(path)
            except OSError as error:
                raise Damaged(f"{path} can't be read: {error.strerror}") from error
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(f"{path} is not a regular file")
            if found.st_size > largest:
                raise Damaged(f"{path} has {found.st_size:,} bytes, and its chunk {largest:,}")

    def _open(self) -> Any:
        # Zeros are written as any other number, so that a missing chunk is always an error.
        more = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
        spec = {**self._spec, **more}
        return ts.open(spec, open=True, assume_metadata=True).result()


@contextlib.contextmanager
def _os_errors(folder: str) -> Iterator[None]:
    """What the system says of a write that fails, and of which chunk: TensorStore adds much more.

    Raises:
      OSError: it said something.
    """
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        named = re.search(r'"([^"]+)"', str(error))
        number = int(code[1])
        raise OSError(number, os.strerror(number), named[1] if named else folder) from None


def _box(starts: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))
