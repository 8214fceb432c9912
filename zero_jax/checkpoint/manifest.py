"""The manifest of a checkpoint: versions, settings, and every array with its checksum.

One JSON file, whose last line is the SHA-256 of the rest; it does not depend on the mesh. A seal
has the SHA-256 of all files of the checkpoint except chunks, those of Orbax and zarr included.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zero_jax.checkpoint.arrays import Damaged, StoredArray, check_regular

FORMAT = 1
ITEM = "state"  # the folder of the manifest and the arrays in that of a step
MANIFEST = "manifest.json"
SEAL = "seal.json"
Json = Any  # given by the caller


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint. Raises ValueError for values that no save writes.

    Attributes:
      step: Number of the training step.
      arrays: Arrays by path.
      versions: Versions of the packages that wrote the checkpoint.
      config: Settings of the run, as given by the caller.
      extra: Other state needed to resume, as given by the caller.
    """

    step: int
    arrays: Mapping[str, StoredArray]
    versions: Mapping[str, str]
    config: Json = None
    extra: Json = None

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"`step` is {self.step!r}, not an integer of at least 0")
        for number, (name, entry) in enumerate(self.arrays.items()):
            if entry.folder != f"arrays/{number:04d}":
                raise ValueError(f"{name} has the folder {entry.folder!r}, not arrays/{number:04d}")

    def write(self, folder: pathlib.Path) -> None:
        """Writes the file; the caller makes the folder permanent."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)
        (folder / MANIFEST).write_text(f"{text}\n{_sha256(text.encode())}\n")

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Manifest":
        """Reads the file; raises Damaged if it was changed.

        Raises ValueError if there is none, or a later version of zero_jax wrote it.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise ValueError(f"{folder} is no zero_jax checkpoint: {MANIFEST} is missing")
        check_regular(path)
        data = path.read_bytes()
        text, _, digest = data.decode("utf-8", "replace").rstrip("\n").rpartition("\n")
        if digest != _sha256(text.encode()) or not data.endswith(b"\n"):
            raise Damaged(f"{path} is damaged: its checksum does not match")
        # The SHA-256 detects damage only: whoever edits the file can compute it again.
        try:
            fields = json.loads(text)
            version, number = fields["versions"].get("zero_jax"), fields.pop("format")
            if number <= FORMAT:
                entries = fields.pop("arrays").items()
                return cls(arrays={name: StoredArray(**x) for name, x in entries}, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}, {error}"
            raise Damaged(f"{path} is damaged or forged: {problem}") from error
        raise ValueError(f"{path} is of a later zero_jax: install {version} or later")


def write_seal(folder: pathlib.Path) -> None:
    """Writes the SHA-256 of all files but chunks, after Orbax has written its own.

    A process that is killed between the two leaves a complete checkpoint without a seal.
    """
    temporary = folder / f"{SEAL}.tmp"
    temporary.write_text(json.dumps(_metadata_sums(folder), indent=1))
    temporary.rename(folder / SEAL)


def check_seal(folder: pathlib.Path) -> None:
    """Raises Damaged if a file of a checkpoint differs from its seal; it may have none."""
    if not (folder / SEAL).exists():
        return
    check_regular(folder / SEAL)
    try:
        sealed = dict(json.loads((folder / SEAL).read_bytes()))
        actual = _metadata_sums(folder)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise Damaged(f"{folder / SEAL} is damaged: {error}") from error
    for name in sorted({*sealed, *actual}):
        if sealed.get(name) != actual.get(name):
            raise Damaged(f"{folder / name} is damaged: its checksum does not match")


def _metadata_sums(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 by file, without chunks (`state/arrays/0007/c/0/1`)."""
    files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.name != SEAL]
    files = [p for p in files if p.parts[1:2] != ("arrays",) or p.parts[3:4] != ("c",)]
    return {str(path): _sha256((folder / path).read_bytes()) for path in files}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
