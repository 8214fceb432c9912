"""Writes a checkpoint beside the training, in the place and at the time that Orbax says."""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint.multihost import get_barrier_sync_fn

from zero_jax._version import __version__
from zero_jax.checkpoint.arrays import Damaged, chunk_shape, regular_bytes
from zero_jax.checkpoint.checksum import MODULUS, checksum
from zero_jax.checkpoint.leaves import Leaf, Piece
from zero_jax.checkpoint.manifest import NAME as MANIFEST
from zero_jax.checkpoint.manifest import Entry, Manifest

SEAL = "seal.json"
_LONGEST_WAIT_MS = 1_200_000  # as long as Orbax waits
_saves = itertools.count()  # alike in all processes
Pieces = list[Piece] | Callable[[], list[Piece]]


def entries(found: Sequence[Leaf]) -> dict[str, Entry]:
    return {
        leaf.name: Entry(
            folder=f"arrays/{at:04d}",
            shape=leaf.shape,
            dtype=leaf.dtype,
            stored=leaf.stored_dtype,
            chunk=chunk_shape(leaf.shape, leaf.shard_shape, jnp.dtype(leaf.stored_dtype).itemsize),
        )
        for at, leaf in enumerate(found)
    }


def snapshot(found: Sequence[Leaf]) -> dict[str, Pieces]:
    """Copies of what this process saves; of a leaf in files what will make them."""
    for leaf in found:
        leaf.fetch()
    return {leaf.name: leaf.pieces if leaf.in_files else leaf.pieces() for leaf in found}


def total(pieces: Sequence[Piece]) -> int:
    return sum(checksum(piece, starts) for starts, piece in pieces) % MODULUS


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore")
    return {"zero_jax": __version__, **{name: importlib.metadata.version(name) for name in names}}


class Handler(ocp.AsyncCheckpointHandler):
    """Writes one checkpoint, when Orbax says so."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def async_save(self, directory: Any, args: "Save") -> list[Future[None]]:
        return [self._thread.submit(self.save, directory, args)]

    def save(self, directory: Any, args: "Save") -> None:
        _write_together(pathlib.Path(os.fspath(directory)), args)

    def restore(self, directory: Any, args: Any = None) -> Manifest:
        """What the checkpoint says about itself; its arrays need the places they go to."""
        return Manifest.read(pathlib.Path(os.fspath(directory)))

    def close(self) -> None:
        self._thread.shutdown()


@checkpoint_args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """What one process saves."""

    manifest: Manifest
    pieces: dict[str, Pieces]


def _write_together(folder: pathlib.Path, args: Save) -> None:
    """Writes this process's part; the first adds the manifest when all parts are there.

    It fails in every process if it does in one: Orbax would leave the others waiting.
    """
    trouble: Exception | None = None
    number = next(_saves)

    def attempt(work: Callable[[pathlib.Path, Save], None]) -> None:
        nonlocal trouble
        try:
            if trouble is None:
                work(folder, args)
        except Exception as error:
            trouble = error
        wait = get_barrier_sync_fn()
        wait(key=f"zero_jax.{work.__name__}.{number}", timeout_ms=_LONGEST_WAIT_MS)

    attempt(write_part)
    attempt(_write_manifest)
    if trouble is None and not (folder / MANIFEST).exists():
        trouble = OSError(f"another process could not write to {folder}: see the error it prints")
    if trouble is not None:
        raise trouble


def write_part(folder: pathlib.Path, args: Save) -> None:
    sums = {}
    for name, entry in args.manifest.arrays.items():
        array = entry.array(folder)
        if jax.process_index() == 0:
            array.create()
        pieces = args.pieces.pop(name)  # its memory is free as soon as it is written
        pieces = pieces() if callable(pieces) else pieces
        array.write(pieces)
        sums[name] = total(pieces)
    part = folder / f"part-{jax.process_index():05d}.json"
    part.write_text(json.dumps(sums))


def _write_manifest(folder: pathlib.Path, args: Save) -> None:
    """In the first process: adds up the checksums."""
    if jax.process_index() != 0:
        return
    sums: dict[str, int] = dict.fromkeys(args.manifest.arrays, 0)
    parts = sorted(folder.glob("part-*.json"))
    if len(parts) != jax.process_count():
        raise OSError(
            f"{folder} has files of {len(parts)} of {jax.process_count()} processes: see the "
            "errors of the others, or use storage that all processes share"
        )
    for part in parts:
        for name, value in json.loads(part.read_text()).items():
            sums[name] = (sums[name] + value) % MODULUS
        part.unlink()
    arrays = {
        name: dataclasses.replace(entry, checksum=sums[name])
        for name, entry in args.manifest.arrays.items()
    }
    dataclasses.replace(args.manifest, arrays=arrays).write(folder)


def seal(folder: pathlib.Path) -> None:
    """Notes the SHA-256 of every file of a finished checkpoint that is no chunk.

    Orbax writes its own last, so this can only be done after it. A process that is killed in
    between leaves a checkpoint that is whole, without its seal.
    """
    sums = {name: _sha256(folder / name) for name in _others(folder)}
    beside = folder / f"{SEAL}.tmp"
    beside.write_text(json.dumps(sums, indent=1))
    beside.rename(folder / SEAL)


def check_seal(folder: pathlib.Path) -> None:
    """Compares those files with the seal.

    Raises:
      Damaged: naming the first that differs.
    """
    if not (folder / SEAL).exists():
        return
    try:
        sums = dict(json.loads(regular_bytes(folder / SEAL)))
        found = {name: _sha256(folder / name) for name in _others(folder)}
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise Damaged(f"{folder / SEAL} is damaged: {error}") from error
    for name in sorted({*sums, *found}):
        if sums.get(name) != found.get(name):
            raise Damaged(f"{folder / name} is damaged: its checksum does not match")


def _others(folder: pathlib.Path) -> list[str]:
    """Names of the files that are no chunks; those, `c/0/1` in an array, have their own sums."""
    found = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    return [str(p) for p in found if p.name != SEAL and not _is_chunk(p)]


def _is_chunk(path: pathlib.PurePath) -> bool:
    return len(path.parts) > 3 and path.parts[1] == "arrays" and path.parts[3] == "c"


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
