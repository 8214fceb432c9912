"""Contents of a directory of checkpoints, and checks for damage.

`summary` compares names and sizes of files only. `damage` reads everything, one chunk at a time,
and compares every checksum: of each chunk, each array, and the other files.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np

from zero_jax.checkpoint.arrays import Chunk, Damaged, StoredArray, regular_bytes
from zero_jax.checkpoint.checksum import MODULUS, checksum
from zero_jax.checkpoint.manifest import ITEM, SEAL, Manifest, check_seal
from zero_jax.checkpoint.retention import AFTER, FOLDER, step_folders

_ORBAX_METADATA = "_CHECKPOINT_METADATA"


@dataclasses.dataclass(frozen=True)
class Summary:
    """The summary of a checkpoint."""

    nbytes: int  # of all files
    seconds: float | None  # time of completion since 1970; None if it can't be read
    manifest: Manifest | None  # None if it can't be read
    sealed: bool
    problems: tuple[str, ...]  # files that are missing, of another size, or damaged


def folders(directory: pathlib.Path, step: int | None = None) -> dict[int, pathlib.Path]:
    """Returns the folder of each step, or of one; raises ValueError if there is none.

    Includes folders whose manifest is missing.
    """
    every = step_folders(directory)
    if not every:
        raise ValueError(f"{directory} does not hold a checkpoint")
    if step is not None and step not in every:
        steps = ", ".join(map(str, every))
        raise ValueError(f"{directory} does not hold step {step}: it holds steps {steps}")
    return every if step is None else {step: every[step]}


def unfinished(directory: pathlib.Path) -> list[str]:
    """Returns the names of folders left by an interrupted save; the next run removes them."""
    paths = {p for p in directory.iterdir() if p.is_dir() and not p.name.startswith(AFTER)}
    paths -= {*step_folders(directory).values()}
    return sorted(p.name for p in paths if p.name != FOLDER or any(p.iterdir()))


def summary(folder: pathlib.Path) -> Summary:
    """Returns a summary from the names and sizes of files, without reading arrays."""
    manifest, problems = _problems(folder, read=False)
    nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    try:
        metadata = json.loads(regular_bytes(folder / _ORBAX_METADATA))
        seconds = float(metadata["commit_timestamp_nsecs"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        seconds = None
    return Summary(nbytes, seconds, manifest, (folder / SEAL).exists(), tuple(problems))


def damage(folder: pathlib.Path) -> list[str]:
    """Reads a checkpoint and returns the first difference from its checksums in each array."""
    return _problems(folder, read=True)[1]


def read_checked(root: pathlib.Path, array: StoredArray) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Yields an array chunk by chunk; raises Damaged if a chunk, or in the end the sum, differs."""
    total = 0
    for chunk in array.chunks():
        part = array.read(root, chunk.starts, chunk.stops)
        total += checksum(part, chunk.starts)
        yield chunk, part
        del part  # holds one chunk, not two, while the next is read
    if total % MODULUS != array.checksum:
        raise Damaged(f"its checksum does not match ({root / array.folder})")


def _problems(folder: pathlib.Path, *, read: bool) -> tuple[Manifest | None, list[str]]:
    """Returns the manifest, None if it is damaged, and the first problem of each array."""
    try:
        check_seal(folder)
        manifest = Manifest.read(folder / ITEM)
    except (ValueError, OSError) as error:
        return None, [str(error)]
    problems, root = [], folder / ITEM
    for name, array in manifest.arrays.items():
        try:
            for chunk in array.chunks():
                array.check_file(root, chunk)
            for _ in read_checked(root, array) if read else ():
                pass
        except (Damaged, OSError) as error:
            problems.append(f"{name}: {error}")
    return manifest, problems
