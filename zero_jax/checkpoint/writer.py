"""Writing of a checkpoint in the background, to the folder and at the time that Orbax chooses."""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint.multihost import get_barrier_sync_fn

from zero_jax._version import __version__
from zero_jax.checkpoint.arrays import MODULUS, Piece, total
from zero_jax.checkpoint.leaves import NamedLeaf
from zero_jax.checkpoint.manifest import MANIFEST, Json, Manifest

_BARRIER_TIMEOUT_MS = 1_200_000  # that of Orbax
_save_numbers = itertools.count()  # equal in all processes
Pieces = list[Piece] | Callable[[], list[Piece]]


class OrbaxHandler(ocp.AsyncCheckpointHandler):
    """Writes one checkpoint, when Orbax calls it."""

    async def async_save(self, directory: os.PathLike[str], args: "SaveArgs") -> list[Future[None]]:
        thread = ThreadPoolExecutor(1)
        future = thread.submit(self.save, directory, args)
        thread.shutdown(wait=False)
        return [future]

    def save(self, directory: os.PathLike[str], args: "SaveArgs") -> None:
        """Writes this process's part; process 0 adds the manifest when all parts are written.

        Raises in every process if one fails: Orbax would leave the others waiting.
        """
        folder, number = pathlib.Path(directory), next(_save_numbers)
        failure: Exception | None = None
        for work in (write_part, _write_manifest):
            try:
                if failure is None:
                    work(folder, args)
            except Exception as error:  # raised below, after the barrier
                failure = error
            barrier = f"zero_jax.{work.__name__}.{number}"
            get_barrier_sync_fn()(key=barrier, timeout_ms=_BARRIER_TIMEOUT_MS)
        if failure is None and not (folder / MANIFEST).exists():
            failure = OSError(f"another process can't write to {folder}: see the error it prints")
        if failure is not None:
            raise failure

    def restore(self, directory: os.PathLike[str], args: object = None) -> Manifest:
        """Returns the manifest; `Checkpoints.restore` reads the arrays."""
        return Manifest.read(pathlib.Path(directory))


@checkpoint_args.register_with_handler(OrbaxHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):
    """The part of a checkpoint that one process saves."""

    manifest: Manifest  # without the checksums of arrays
    pieces: dict[str, Pieces]


def save_args(step: int, saved: Sequence[NamedLeaf], config: Json, extra: Json) -> SaveArgs:
    """Copies this process's pieces to host memory; those in files are read when written."""
    for leaf in saved:
        if isinstance(leaf.value, jax.Array) and not leaf.is_key:
            for shard in leaf.value.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
    pieces = {x.name: x.pieces if x.in_files else x.pieces() for x in saved}
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore")
    versions = {"zero_jax": __version__} | {n: importlib.metadata.version(n) for n in packages}
    return SaveArgs(
        Manifest(step, {x.name: x.array for x in saved}, versions, config, extra), pieces
    )


def write_part(folder: pathlib.Path, args: SaveArgs) -> None:
    """Writes the pieces of this process, and a file of their checksums."""
    sums = {}
    for name, array in args.manifest.arrays.items():
        pieces = args.pieces.pop(name)  # frees its memory after each array
        pieces = pieces() if callable(pieces) else pieces
        array.write(folder, pieces, create=jax.process_index() == 0)
        sums[name] = total(pieces)
    (folder / f"part-{jax.process_index():05d}.json").write_text(json.dumps(sums))


def _write_manifest(folder: pathlib.Path, args: SaveArgs) -> None:
    """Adds up the checksums of all processes and writes the manifest, in process 0."""
    if jax.process_index() != 0:
        return
    parts = sorted(folder.glob("part-*.json"))
    if len(parts) != jax.process_count():
        raise OSError(
            f"{folder} has files of {len(parts)} of {jax.process_count()} processes: see the "
            "errors of the others, or use storage that all processes share"
        )
    sums = [json.loads(part.read_text()) for part in parts]
    for part in parts:
        part.unlink()
    arrays = {
        name: dataclasses.replace(array, checksum=sum(each[name] for each in sums) % MODULUS)
        for name, array in args.manifest.arrays.items()
    }
    dataclasses.replace(args.manifest, arrays=arrays).write(folder)
