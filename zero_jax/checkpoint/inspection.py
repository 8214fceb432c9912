"""Contents of a directory of checkpoints, and checks for damage.

Checksums are those of each chunk, each array, and the other files; one chunk is read at a time.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zero_jax.checkpoint.arrays import Chunk, Damaged, StoredArray, regular_bytes
from zero_jax.checkpoint.checksum import MODULUS, checksum
from zero_jax.checkpoint.manifest import ITEM, SEAL, Manifest, check_seal
from zero_jax.checkpoint.retention import AFTER, FOLDER, step_folders

_ORBAX_METADATA = "_CHECKPOINT_METADATA"


class Summary(NamedTuple):
    """The summary of a checkpoint."""

    nbytes: int  # of all files
    seconds: float | None  # time of completion since 1970; None if it can't be read
    manifest: Manifest | None  # None if it can't be read
    sealed: bool
    problems: list[str]  # the first of each array: files missing, of another size, or damaged


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


def summary(folder: pathlib.Path, *, read: bool = False) -> Summary:
    """Returns a summary from the names and sizes of files; if `read`, compares all checksums."""
    manifest, problems, root = None, [], folder / ITEM
    try:
        check_seal(folder)
        manifest = Manifest.read(root)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    for name, array in manifest.arrays.items() if manifest else ():
        try:
            for chunk in array.chunks():
                array.check_file(root, chunk)
            for _ in read_checked(root, array) if read else ():
                pass
        except (Damaged, OSError) as error:
            problems.append(f"{name}: {error}")
    nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    try:
        metadata = json.loads(regular_bytes(folder / _ORBAX_METADATA))
        seconds = float(metadata["commit_timestamp_nsecs"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        seconds = None
    return Summary(nbytes, seconds, manifest, (folder / SEAL).exists(), problems)


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
