"""Arrays on disk: zarr 3 by TensorStore, in chunks that each carry a CRC-32C, and their checksums.

The stored array has its full, unpadded shape. No chunk crosses a border between the shards of two
devices, so every process writes its own chunks. A shard above CHUNK_BYTES has several, so that a
small part is read alone. A missing, truncated or altered chunk is an error, never zeros.

The checksum of an array does not depend on partitioning, padding or placement. It is a sum over
elements modulo 2^64. A term is the bits of an element as an unsigned integer, times an odd factor
for each of its indices. Checksums of disjoint pieces add up to that of the full array, so every
process sums the pieces it stores. One changed element always changes the sum, because odd factors
are invertible; another change is missed with a probability of 2^-64.
"""

import dataclasses
import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

CHUNK_BYTES = 64 * 2**20
CRC_BYTES = 4
MAX_BYTES = 2**60  # of one array; 1 EiB
KEY = "key<"  # begins the dtype of a random key
MODULUS = 1 << 64
_SLAB = 1 << 20  # elements widened to 64 bits at a time
# Dtypes of zarr; others are stored as unsigned integers of the same bits.
_ZARR_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
Index = tuple[int, ...]
Piece = tuple[Index, np.ndarray]  # with the index of its first element in the full array


class Damaged(ValueError):
    """A file of a checkpoint differs from the one that was written."""


def check_regular(path: Path) -> None:
    """Raises Damaged if there is no regular file: opening a pipe would wait for its other end."""
    if not path.is_file():
        target = os.path.realpath(path)  # unlike `resolve`, also of a link to itself
        raise Damaged(f"{path} is missing or no regular file ({target}): copy all files")


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
      checksum: Checksum of all elements.
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
        is_valid = (
            all(type(n) is int and n >= 0 for n in (*self.shape, *self.chunk, self.checksum))
            and len(self.chunk) == len(self.shape)
            and all(1 <= c <= max(1, n) for c, n in zip(self.chunk, self.shape, strict=True))
            and self.stored == ("uint32" if str(self.dtype)[:4] == KEY else self.dtype)
            and self.nbytes <= MAX_BYTES
        )
        if not is_valid:
            raise ValueError(f"no save writes {self}")

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
        for first, _ in self.chunks(starts, stops):
            self.check_file(root, first)
        try:
            value = self._open(root)[tuple(map(slice, starts, stops))].read().result()
        except ValueError as error:  # TensorStore has no other type for a wrong CRC
            raise Damaged(f"{root / self.folder}: {_message(error)}") from error
        return np.asarray(value).view(dtype)

    def read_checked(self, root: Path) -> Iterator[Piece]:
        """Yields the array in chunks; raises Damaged if one, or in the end the sum, differs."""
        total = 0
        for starts, stops in self.chunks():
            part = self.read(root, starts, stops)
            total += checksum(part, starts)
            yield starts, part
            del part  # holds one chunk, not two, while the next is read
        if total % MODULUS != self.checksum:
            raise Damaged(f"its checksum does not match ({root / self.folder})")

    def chunks(self, starts: Index = (), stops: Index = ()) -> Iterator[tuple[Index, Index]]:
        """Yields starts and stops of the parts of chunks in a box, by default of all.

        Lists nothing in advance: a forged manifest may describe 2^50 chunks.
        """
        starts, stops = starts or (0,) * len(self.shape), stops or self.shape
        grid = [range(a - a % c, b, c) for a, b, c in zip(starts, stops, self.chunk, strict=True)]
        counts = tuple(map(len, grid))
        for number in range(math.prod(counts)):
            corner = [*map(operator.getitem, grid, np.unravel_index(number, counts))]
            ends = map(operator.add, corner, self.chunk)
            yield tuple(map(max, starts, corner)), tuple(map(min, stops, ends))

    def check_file(self, root: Path, index: Index) -> None:
        """Raises Damaged if the file of the chunk at an index is missing or of another size.

        TensorStore would wait for the writer of a pipe, and read a file of any size.
        """
        path = root.joinpath(self.folder, "c", *map(str, map(operator.floordiv, index, self.chunk)))
        nbytes = math.prod(self.chunk) * jnp.dtype(self.stored).itemsize + CRC_BYTES
        size = path.stat().st_size if path.is_file() else None
        if size != nbytes:
            problem = "is no regular file" if size is None else f"has {size:,} bytes"
            count = math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))
            raise Damaged(f"{path} {problem}; the array has {count:,} chunks of {nbytes:,} bytes")

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
        return ts.open(spec, create=create, open=not create, assume_metadata=not create).result()


def _message(error: ValueError) -> str:
    """Returns a message of TensorStore without its specification of the array."""
    return str(error).partition(" [")[0]


def as_unsigned(piece: np.ndarray) -> np.ndarray:
    """Returns the same bits as unsigned integers.

    >>> as_unsigned(np.array([1.0, -0.0], np.float32)).tolist()
    [1065353216, 2147483648]
    """
    # `ascontiguousarray` gives a number one dim.
    return np.ascontiguousarray(piece).reshape(piece.shape).view(f"u{piece.dtype.itemsize}")


def checksum(piece: np.ndarray, starts: Index) -> int:
    """Returns the checksum of a piece that begins at an index of the full array.

    >>> full = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> parts = checksum(full[:2], (0, 0)) + checksum(full[2:], (2, 0))
    >>> parts % 2**64 == checksum(full, (0, 0))
    True
    """
    if piece.size > _SLAB:
        dim = next(d for d, n in enumerate(piece.shape) if n > 1)
        half = piece.shape[dim] // 2
        first, second = np.split(piece, [half], dim)
        middle = (*starts[:dim], starts[dim] + half, *starts[dim + 1 :])
        return (checksum(first, starts) + checksum(second, middle)) % MODULUS
    total = as_unsigned(piece).astype(np.uint64)
    for dim in reversed(range(piece.ndim)):
        total = total @ factors(dim, starts[dim], piece.shape[dim])
    return int(total)


def factors(dim: int, start: int, count: int) -> np.ndarray:
    """Returns pseudo-random odd factors, one for each index (the finaliser of SplitMix64)."""
    x = np.arange(start, start + count, dtype=np.uint64)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(dim << 56)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def total(pieces: Iterable[Piece]) -> int:
    """Returns the checksum of pieces, each with its start."""
    return sum(checksum(piece, starts) for starts, piece in pieces) % MODULUS
