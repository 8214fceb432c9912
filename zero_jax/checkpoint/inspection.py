"""Contents of a folder of checkpoints, and checks that they are undamaged.

`glance` compares names and sizes of files only. `damage` reads everything, one chunk at a time, and
compares every checksum: of each chunk, of each array, and of the other files.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from zero_jax.checkpoint.arrays import CRC_BYTES, Damaged, regular_bytes
from zero_jax.checkpoint.checkpoints import ITEM
from zero_jax.checkpoint.checksum import MODULUS, checksum
from zero_jax.checkpoint.manifest import Entry, Manifest
from zero_jax.checkpoint.retention import AFTER, FOLDER, is_step
from zero_jax.checkpoint.writer import SEAL, check_seal

MANY = 10_000  # chunks of an array, beyond which files are counted before each is looked at
_TIMES = "_CHECKPOINT_METADATA"  # of Orbax


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of an array.

    Attributes:
      path: within the folder of the array.
      starts: where it begins.
      stops: where it ends in the array; its file is always of a whole chunk.
    """

    path: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One checkpoint, at a glance.

    Attributes:
      step: number.
      folder: of it.
      nbytes: of all its files.
      seconds: when it was finished, since 1970; None if that can't be read.
      manifest: None if it can't be read.
        sealed: whether it has its seal, the checksums of its metadata.
        problems: files that are missing, of another size, or damaged.
    """

    step: int
    folder: pathlib.Path
    nbytes: int
    seconds: float | None
    manifest: Manifest | None
    sealed: bool
    problems: tuple[str, ...]

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds or 0))
        state = "complete" if self.sealed else f"complete, without {SEAL}"
        return (
            f"step {self.step}  {when if self.seconds else 'no time'}  "
            f"{self.nbytes / 1e6:,.3f} MB  {'INCOMPLETE' if self.problems else state}"
        )


def folders(directory: pathlib.Path, step: int | None = None) -> dict[int, pathlib.Path]:
    """Returns the folder of each step, or of one; includes folders without a manifest.

    Raises:
      ValueError: There is no such checkpoint.
    """
    found = directory.iterdir() if directory.is_dir() else iter(())
    every = {int(p.name): p for p in sorted(found) if is_step(p.name) and p.is_dir()}
    if not every:
        raise ValueError(f"{directory} does not hold a checkpoint")
    if step is not None and step not in every:
        there = ", ".join(map(str, sorted(every)))
        raise ValueError(f"{directory} does not hold step {step}: it holds steps {there}")
    return {n: every[n] for n in sorted(every) if step in (None, n)}


def unfinished(directory: pathlib.Path) -> list[str]:
    """Returns the names of folders left by an interrupted save; the next run removes them."""
    found = (p for p in directory.iterdir() if p.is_dir() and not p.name.startswith(AFTER))
    kept = (p.name for p in found if p.name != FOLDER or any(p.iterdir()))
    return sorted(name for name in kept if not is_step(name))


def chunks(entry: Entry) -> Iterator[Chunk]:
    """Every chunk of an array."""
    counts = [-(-size // part) for size, part in zip(entry.shape, entry.chunk, strict=True)]
    for at in itertools.product(*map(range, counts)):
        starts = tuple(i * part for i, part in zip(at, entry.chunk, strict=True))
        ends = (a + part for a, part in zip(starts, entry.chunk, strict=True))
        stops = tuple(min(b, size) for b, size in zip(ends, entry.shape, strict=True))
        yield Chunk("/".join(["c", *map(str, at)]), starts, stops)


def glance(step: int, folder: pathlib.Path) -> Step:
    """A checkpoint by the names and sizes of its files; its arrays are not read."""
    problems, manifest = [], None
    try:
        check_seal(folder)
        manifest = Manifest.read(folder / ITEM)
        problems = [
            p for name, entry in manifest.arrays.items() for p in _sizes(folder, name, entry)
        ]
    except (ValueError, OSError) as error:
        problems.append(str(error))
    files = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
    sealed = (folder / SEAL).exists()
    return Step(step, folder, sum(files), _finished(folder), manifest, sealed, tuple(problems))


def damage(folder: pathlib.Path) -> list[str]:
    """Reads all of a checkpoint; says what is not as it was written, nothing if it is."""
    try:
        check_seal(folder)
        manifest = Manifest.read(folder / ITEM)
    except (ValueError, OSError) as error:
        return [str(error)]
    found = (_damage(folder / ITEM, name, entry) for name, entry in manifest.arrays.items())
    return [text for text in found if text is not None]


def _damage(folder: pathlib.Path, name: str, entry: Entry) -> str | None:
    try:
        for _ in read_checked(folder, name, entry):
            pass
    except (Damaged, OSError) as error:
        return str(error)
    return None


def read_checked(
    folder: pathlib.Path, name: str, entry: Entry
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Yields an array chunk by chunk, each once; compares its checksum after the last.

    Raises:
      Damaged: A chunk or the checksum differs.
    """
    if few := _too_few_files(folder, entry):
        raise Damaged(f"{name}: {few}")
    array, total = entry.array(folder), 0
    for chunk in chunks(entry):
        try:
            part = array.read(chunk.starts, chunk.stops)
        except Damaged as error:
            raise Damaged(f"{name}: {error}") from error
        total += checksum(part, chunk.starts)
        yield chunk, part
        del part  # or two chunks would be held while the next is read
    if total % MODULUS != entry.checksum:
        raise Damaged(f"{name}: its checksum does not match ({folder / entry.folder})")


def _too_few_files(folder: pathlib.Path, entry: Entry) -> str:
    """Says that there are fewer files than chunks; empty if not, or if there are few chunks.

    To list the chunks of a forged shape would take all memory.
    """
    count = math.prod(-(-n // part) for n, part in zip(entry.shape, entry.chunk, strict=True))
    if count <= MANY:
        return ""
    own = folder / entry.folder
    there = sum(path.is_file() for path in (own / "c").rglob("*"))
    return f"{own} has {there:,} files of {count:,} chunks" if there < count else ""


def _sizes(folder: pathlib.Path, name: str, entry: Entry) -> Iterator[str]:
    wanted = math.prod(entry.chunk) * jnp.dtype(entry.stored).itemsize + CRC_BYTES
    if few := _too_few_files(folder / ITEM, entry):
        yield f"{name}: {few}"
        return
    for chunk in chunks(entry):
        path = folder / ITEM / entry.folder / chunk.path
        found = path.stat().st_size if path.is_file() else None
        if found != wanted:
            said = "is missing" if found is None else f"has {found} bytes, not {wanted}"
            yield f"{name}: {path} {said}"


def _finished(folder: pathlib.Path) -> float | None:
    try:
        return float(json.loads(regular_bytes(folder / _TIMES))["commit_timestamp_nsecs"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return None
