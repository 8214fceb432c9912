"""The manifest of a checkpoint: versions, settings, and every array with its checksum.

It is one JSON file whose last line is the SHA-256 of the rest. It does not depend on the mesh
that wrote it, and reading it executes nothing.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zero_jax.checkpoint.arrays import Array, Damaged, regular_bytes

FORMAT = 1
NAME = "manifest.json"
MOST_BYTES = 2**60  # of one array; 1 EiB


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array.

    Attributes:
      folder: Folder of its chunks, within the checkpoint.
      shape: Full shape, without padding.
      dtype: Dtype in the tree; for a random key, "key<threefry2x32>", for example.
      stored: Dtype on disk.
      chunk: Shape of a chunk.
      checksum: See checksum.py.
    """

    folder: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    chunk: tuple[int, ...]
    checksum: int = 0

    def array(self, folder: pathlib.Path) -> Array:
        """The array on the disk."""
        return Array(str(folder / self.folder), self.shape, self.stored, self.chunk)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
      step: Number of the training step.
      arrays: Array entries by path.
      versions: Versions of the packages that wrote the checkpoint.
      config: Settings of the run, as given by the caller.
      extra: Other state needed to resume, as given by the caller.
    """

    step: int
    arrays: Mapping[str, Entry]
    versions: Mapping[str, str]
    config: Any = None
    extra: Any = None

    def write(self, folder: pathlib.Path) -> None:
        """Writes the file; the caller makes the folder permanent."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        (folder / NAME).write_text(f"{text}\n{_digest(text)}\n")

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Manifest":
        """Reads the file.

        Raises:
          Damaged: The file was changed after it was written.
          ValueError: There is no file, or a later version of zero_jax wrote it.
        """
        path = folder / NAME
        try:
            data = regular_bytes(path)
        except FileNotFoundError as error:
            raise ValueError(f"{folder} is no zero_jax checkpoint: {NAME} is missing") from error
        text, _, digest = data.decode("utf-8", "replace").rstrip("\n").rpartition("\n")
        if digest != _digest(text) or not data.endswith(b"\n"):
            raise Damaged(f"{path} is damaged: its checksum does not match")
        try:
            known = json.loads(text)
            if known.pop("format") > FORMAT:
                raise _Later(
                    f"{path} was written by a later zero_jax "
                    f"({known['versions'].get('zero_jax')}): install that or a later one"
                )
            arrays = {name: _entry(entry) for name, entry in known.pop("arrays").items()}
            manifest = cls(arrays=arrays, **known)
            _check(manifest)
        except _Later:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(
                f"{path} is damaged or forged: {type(error).__name__}, {error}"
            ) from error
        return manifest


class _Later(ValueError):
    """A later version wrote it."""


def _entry(known: dict[str, Any]) -> Entry:
    folder = pathlib.PurePosixPath(str(known["folder"]))
    if folder.is_absolute() or ".." in folder.parts:
        raise ValueError(f"the folder {str(folder)!r} is outside the checkpoint")
    lists = {name: tuple(known[name]) for name in ("shape", "chunk")}
    return Entry(**{**known, **lists, "folder": str(folder)})


def _check(manifest: Manifest) -> None:
    """Raises ValueError if a manifest describes what no save writes.

    Its SHA-256 tells damage only: an editor of the file can recompute it.
    """
    if not _is_count(manifest.step, 0):
        raise ValueError(f"`step` is {manifest.step!r}, not an integer of at least 0")
    if not isinstance(manifest.versions, Mapping):
        raise ValueError(f"`versions` is {manifest.versions!r:.80}, not an object")
    owners: dict[str, str] = {}
    for name, entry in manifest.arrays.items():
        path = pathlib.PurePosixPath(entry.folder)
        if len(path.parts) != 2 or path.parts[0] != "arrays":
            raise ValueError(f"{name} has the folder {entry.folder!r}, not arrays/NUMBER")
        if entry.folder in owners:
            raise ValueError(f"{name} and {owners[entry.folder]} share the folder {entry.folder}")
        owners[entry.folder] = name
        _check_entry(name, entry)


def _check_entry(name: str, entry: Entry) -> None:
    if not all(_is_count(n, 0) for n in entry.shape):
        raise ValueError(f"{name} has the invalid shape {entry.shape}")
    if len(entry.chunk) != len(entry.shape) or not all(_is_count(n, 1) for n in entry.chunk):
        raise ValueError(f"{name} has chunks of {entry.chunk} for the shape {entry.shape}")
    if any(part > max(1, n) for part, n in zip(entry.chunk, entry.shape, strict=True)):
        raise ValueError(f"{name} has chunks of {entry.chunk}, larger than its shape {entry.shape}")
    wanted = "uint32" if str(entry.dtype).startswith("key<") else entry.dtype
    if entry.stored != wanted:
        raise ValueError(f"{name} is {entry.dtype}, and is stored as {entry.stored}")
    if math.prod(entry.shape) * jnp.dtype(entry.stored).itemsize > MOST_BYTES:
        raise ValueError(f"{name} has the shape {entry.shape}, larger than {MOST_BYTES:,} bytes")
    if not _is_count(entry.checksum, 0):
        raise ValueError(f"{name} has the invalid checksum {entry.checksum!r}")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
