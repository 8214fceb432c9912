"""Arrays on disk: zarr 3 by TensorStore, in chunks that each carry a CRC-32C.

The stored array has its full, unpadded shape. No chunk crosses a border between the shards of two
devices, so every process writes its own chunks. A shard above CHUNK_BYTES has several, so that a
small part is read alone. A missing, truncated or altered chunk is an error, never zeros.
"""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from zero_jax.checkpoint.checksum import as_unsigned

CHUNK_BYTES = 64 * 2**20
CRC_BYTES = 4
MAX_BYTES = 2**60  # of one array; 1 EiB
KEY = "key<"  # begins the dtype of a random key
# Dtypes of zarr; others are stored as unsigned integers of the same bits.
_ZARR_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
Index = tuple[int, ...]
Piece = tuple[Index, np.ndarray]  # with the index of its first element in the full array


class Damaged(ValueError):
    """A file of a checkpoint differs from the one that was written."""


class Chunk(NamedTuple):
    """The bounds of a chunk in the array, or of its part in a box."""

    starts: Index
    stops: Index


def chunk_shape(shape: Sequence[int], shard: Sequence[int], itemsize: int) -> Index:
    """Returns the shape of a chunk: a shard, or an even part of it of about CHUNK_BYTES.

    >>> chunk_shape((36, 4096, 4096), (36, 512, 4096), 4)
    (8, 512, 4096)
    """
    chunk = [max(1, min(a, b)) for a, b in zip(shape, shard, strict=True)]
    sharded = [a < b for a, b in zip(chunk, shape, strict=True)]
    for dim in sorted(range(len(chunk)), key=lambda d: sharded[d]):
        size = chunk[dim]
        least = min(size, math.ceil(math.prod(chunk) * itemsize / CHUNK_BYTES))
        if not sharded[dim]:
            chunk[dim] = -(-size // least)
            continue
        # Shards begin at multiples of `size` here, and so must chunks.
        even = (n for n in range(least, min(size, 8 * least) + 1) if size % n == 0)
        chunk[dim] = size // next(even, 1)
    return tuple(chunk)


def regular_bytes(path: Path) -> bytes:
    """Returns the bytes of a file; raises Damaged for a pipe, whose writer it would wait for."""
    if path.exists() and not path.is_file():
        raise Damaged(f"{path} is not a regular file")
    return path.read_bytes()


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint; methods take the folder of its manifest.

    Raises ValueError for fields that no save writes.

    Attributes:
      folder: Folder of its chunks, within that of the manifest.
      shape: Full shape, without padding.
      dtype: Dtype in the tree; for a random key, "key<threefry2x32>", for example.
      stored: Dtype on disk.
      chunk: Shape of a chunk, from `chunk_shape`.
      checksum: See checksum.py.
    """

    folder: str
    shape: Index
    dtype: str
    stored: str
    chunk: Index
    checksum: int = 0

    def __post_init__(self) -> None:
        for name in ("shape", "chunk"):  # lists in JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        is_grid = len(self.chunk) == len(self.shape)
        limits = zip(self.chunk, self.shape, strict=True)
        valid = {
            "shape": all(type(n) is int and n >= 0 for n in self.shape)
            and math.prod(self.shape) * jnp.dtype(self.stored).itemsize <= MAX_BYTES,
            "chunk": is_grid and all(type(c) is int and 1 <= c <= max(1, n) for c, n in limits),
            "stored": self.stored == ("uint32" if str(self.dtype)[:4] == KEY else self.dtype),
            "checksum": type(self.checksum) is int and self.checksum >= 0,
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"{self.folder} has the invalid `{name}` {getattr(self, name)!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * jnp.dtype(self.stored).itemsize

    def write(self, root: Path, pieces: Sequence[Piece], *, create: bool = False) -> None:
        """Writes pieces, all chunks at once, without copying them; raises OSError if it fails.

        One process also creates zarr.json, for other readers of zarr.
        """
        try:
            store, futures = self._open(root, create), []
            for starts, piece in pieces:
                value = piece if self.stored in _ZARR_DTYPES else as_unsigned(piece)
                target = store[tuple(map(slice, starts, map(operator.add, starts, piece.shape)))]
                futures.append(target.write(value, can_reference_source_data_indefinitely=True))
            for future in futures:
                future.result()
        except ValueError as error:  # TensorStore has no other type for a full disk
            raise OSError(_message(error)) from error

    def read(self, root: Path, starts: Index, stops: Index) -> np.ndarray:
        """Reads the part between two indices; raises Damaged if a chunk is not as written."""
        dtype, shape = jnp.dtype(self.stored), tuple(map(operator.sub, stops, starts))
        if 0 in shape:
            return np.zeros(shape, dtype)
        for chunk in self.chunks(starts, stops):
            self.check_file(root, chunk)
        store = self._open(root)
        try:
            value = store[tuple(map(slice, starts, stops))].read().result()
        except ValueError as error:  # TensorStore has no other type for a wrong CRC
            raise Damaged(f"{root / self.folder}: {_message(error)}") from error
        return np.asarray(value).view(dtype)

    def chunks(self, starts: Index = (), stops: Index = ()) -> Iterator[Chunk]:
        """Yields the chunks that overlap a box, by default all, with their bounds within it.

        Lists nothing in advance: a forged manifest may describe 2^50 chunks.
        """
        starts, stops = starts or (0,) * len(self.shape), stops or self.shape
        grid = [range(a - a % c, b, c) for a, b, c in zip(starts, stops, self.chunk, strict=True)]
        counts = tuple(map(len, grid))
        for number in range(math.prod(counts)):
            corner = [*map(operator.getitem, grid, np.unravel_index(number, counts))]
            ends = map(operator.add, corner, self.chunk)
            yield Chunk(tuple(map(max, starts, corner)), tuple(map(min, stops, ends)))

    def check_file(self, root: Path, chunk: Chunk) -> None:
        """Raises Damaged if a chunk's file is missing, a pipe or of another size than a chunk.

        TensorStore would wait for the writer of a pipe, and read a file of any size.
        """
        path = self._path(root, chunk.starts)
        nbytes = math.prod(self.chunk) * jnp.dtype(self.stored).itemsize + CRC_BYTES
        size = path.stat().st_size if path.is_file() else None
        if size != nbytes:
            problem = "is no regular file" if size is None else f"has {size:,} bytes"
            count = math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))
            raise Damaged(f"{path} {problem}; the array has {count:,} chunks of {nbytes:,} bytes")

    def _path(self, root: Path, index: Index) -> Path:
        """Returns the file of the chunk with the element at an index."""
        position = map(operator.floordiv, index, self.chunk)
        return root.joinpath(self.folder, "c", *map(str, position))

    def _open(self, root: Path, create: bool = False) -> ts.TensorStore:
        bits = 8 * jnp.dtype(self.stored).itemsize
        folder = (root / self.folder).resolve()  # TensorStore takes no ".."
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": {
                "shape": self.shape,
                "data_type": self.stored if self.stored in _ZARR_DTYPES else f"uint{bits}",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk}},
                "chunk_key_encoding": {"name": "default"},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
            # Zeros are stored as any other number, so that a missing chunk is always an error.
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        known = not create
        return ts.open(spec, create=create, open=known, assume_metadata=known).result()


def _message(error: ValueError) -> str:
    """Returns a message of TensorStore without its specification of the array."""
    return str(error).partition(" [")[0]
