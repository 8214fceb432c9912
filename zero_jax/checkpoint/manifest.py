"""What a checkpoint says about itself: versions, settings, and every array with its checksum.

It is one JSON file whose last line is the SHA-256 of the rest. Nothing in it depends on the mesh
that wrote it, and nothing in it is ever executed.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zero_jax.checkpoint.arrays import Array, Damaged

FORMAT = 1
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array.

    Attributes:
      folder: of its chunks, within the checkpoint.
      shape: logical.
      dtype: as in the tree; "key<threefry2x32>", say, for a random key.
      stored: dtype of what is stored.
      chunk: shape of a chunk.
      checksum: see checksum.py.
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
    """All of it.

    Attributes:
      step: number of the training step.
      arrays: by path.
      versions: of what wrote it.
      config: the settings of the run, as the caller gave them.
      extra: anything else that a run goes on from, as the caller gave it.
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
          Damaged: it is not as it was written.
          ValueError: there is none, or a later version of zero_jax wrote it.
        """
        path = folder / NAME
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise ValueError(f"{folder} is no checkpoint of zero_jax: it has no {NAME}") from error
        text, _, digest = data.decode("utf-8", "replace").rstrip("\n").rpartition("\n")
        if digest != _digest(text) or not data.endswith(b"\n"):
            raise Damaged(f"{path} is damaged: its checksum does not match")
        known = json.loads(text)
        if known.pop("format") > FORMAT:
            raise ValueError(
                f"{path} was written by a later zero_jax ({known['versions'].get('zero_jax')}): "
                "install that or a later one"
            )
        arrays = {name: _entry(entry, path) for name, entry in known.pop("arrays").items()}
        return cls(arrays=arrays, **known)


def _entry(known: dict[str, Any], path: pathlib.Path) -> Entry:
    folder = pathlib.PurePosixPath(str(known["folder"]))
    if folder.is_absolute() or ".." in folder.parts:
        raise Damaged(f"{path} names the folder {str(folder)!r}, which is outside the checkpoint")
    lists = {name: tuple(known[name]) for name in ("shape", "chunk")}
    return Entry(**{**known, **lists})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
