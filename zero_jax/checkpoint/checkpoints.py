"""Checkpoints that load on any mesh: `Checkpoints(directory).save(step, tree)` and `restore`.

Orbax writes while training continues, commits a checkpoint by renaming it when every process is
done, and selects old ones to delete. TensorStore stores arrays without padding or mesh, in chunks
with checksums. Reading executes no file. Host memory: `save` copies the shards of this process,
`restore` takes one leaf at a time.

    DIR/120/state/manifest.json          versions, settings, arrays with checksums
    DIR/120/state/arrays/0007/c/0/3      a chunk
    DIR/120/seal.json                    checksums of all files but chunks
    DIR/.discarded                       old checkpoints being deleted
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import operator
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint.multihost import get_barrier_sync_fn

from zero_jax._version import __version__
from zero_jax.checkpoint.arrays import MODULUS, Damaged, Piece, StoredArray, total
from zero_jax.checkpoint.directory import DISCARDED, folders, step_folders, sweep
from zero_jax.checkpoint.leaves import NamedLeaf, leaves, unflatten
from zero_jax.checkpoint.manifest import ITEM, MANIFEST, Json, Manifest, check_seal, write_seal
from zero_jax.distributed.lock import locked
from zero_jax.names import few
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

_BARRIER_TIMEOUT_MS = 1_200_000  # that of Orbax
_save_numbers = itertools.count()  # equal in all processes
Pieces = list[Piece] | Callable[[], list[Piece]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      tree: The tree in the structure of `like`, with the values of the checkpoint.
      step: Training step of the checkpoint.
      config: The `config` given to `save`.
      extra: The `extra` given to `save`.
      restored: Paths that were read.
      missing: Paths that the checkpoint lacks, allowed by `may_differ`; they keep their value.
      extra_arrays: Paths in the checkpoint that `like` lacks, allowed by `may_differ`.
      changed: Paths of another shape or dtype, allowed by `may_differ`; they keep their value.
    """

    tree: PyTree
    step: int
    config: Json
    extra: Json
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    extra_arrays: tuple[str, ...]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        differing = {"missing": self.missing, "extra": self.extra_arrays}
        differing["of another shape or dtype"] = self.changed
        lists = [f"{kind}: {', '.join(names) or 'none'}" for kind, names in differing.items()]
        return f"step {self.step}: restored {len(self.restored)} arrays; {'; '.join(lists)}"


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of a run, in one directory.

    Args:
      directory: Directory on storage that all processes share; created if missing.
      keep: Number of newest checkpoints to keep; None keeps all.
      keep_every: Steps divisible by this number are kept indefinitely.
      read_only: If True, takes no lock, writes nothing and deletes nothing.

    Raises:
      ValueError: Another run writes to `directory`, `directory` is not writable, or `keep` or
        `keep_every` is below 1. If the first process cannot open the directory, the others raise
        OSError.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
    ...     checkpoints.save(1, {"w": jnp.arange(3.0)})
    ...     checkpoints.restore({"w": jnp.zeros(3)}, say=print).tree["w"]
    step 1: restored 1 arrays; missing: none; extra: none; of another shape or dtype: none
    Array([0., 1., 2.], dtype=float32)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}={value!r}`: at least 1, or None, is required")
        self.directory = pathlib.Path(directory).resolve()
        self._manager: ocp.CheckpointManager | None = None
        self._unsealed: int | None = None
        self._at_close = contextlib.ExitStack()
        if read_only:
            return
        lock = on_first_process(lambda: locked(self.directory))
        if lock is not None:
            self._at_close.callback(os.close, lock)
            self._at_close.callback(sweep(self.directory))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            cleanup_tmp_directories=True,
            todelete_subdir=DISCARDED,
            save_root_metadata=False,
            # Else files could be written before their folder is made.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers={ITEM: OrbaxHandler()}
        )
        self._at_close.callback(self._manager.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending; waits for a save in progress."""
        self.wait()
        every = step_folders(self.directory)
        return [step for step, folder in every.items() if (folder / ITEM / MANIFEST).exists()]

    @property
    def latest(self) -> int | None:
        """The newest step, or None. Every process calls it.

        All processes return the value of the first: shared storage may show a new checkpoint late.
        """
        mine = np.int32(max(self.steps, default=-1))
        latest = int(multihost_utils.broadcast_one_to_all(mine))
        return None if latest < 0 else latest

    def save(self, step: int, tree: PyTree, *, config: Json = None, extra: Json = None) -> None:
        """Copies this process's shards to host memory and writes them asynchronously.

        Waits for the previous save first. Every process calls it.

        Args:
          step: Number of the training step, above that of the newest checkpoint.
          tree: Sharded arrays (parameters, optimizer state, random keys) and numbers.
          config: Settings of the run, as JSON.
          extra: Other state needed to resume, such as the position in the data, as JSON.

        Raises:
          ValueError: The step is not above the newest or is not a number, a leaf cannot be saved,
            or the checkpoints are read-only.
          OSError: The disk is full, or an earlier save failed.
        """
        if self._manager is None:
            raise ValueError("`read_only=True` does not support `save`: open with read_only=False")
        newest, number = max(self.steps, default=-1), -1
        with contextlib.suppress(TypeError):
            number = operator.index(step)
        if number <= newest:
            raise ValueError(
                f"`step={step!r}`: an integer above {newest}, the newest step in {self.directory}, "
                "is required. Delete later checkpoints, or use another directory"
            )
        json.dumps([config, extra])
        saved = leaves(tree)
        nbytes = sum(leaf.array.nbytes for leaf in saved)
        on_first_process(lambda: _check_space(self.directory, nbytes, 2 * len(saved)))
        args = save_args(number, saved, config, extra)
        self._manager.save(number, args=ocp.args.Composite(**{ITEM: args}))
        self._unsealed = number
        if any(leaf.in_files for leaf in saved):
            self.wait()  # the next step overwrites those files

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          OSError: The save failed; earlier checkpoints are intact.
        """
        if self._manager is None:
            return
        step, self._unsealed = self._unsealed, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of any type that Orbax raises
            raise OSError(f"saving to {self.directory} failed: {error}") from error
        if step is not None and jax.process_index() == 0:
            try:
                write_seal(self.directory / str(step))
            except OSError as error:  # the checkpoint is complete without
                print(f"checkpoint {step} was saved without its seal: {error}", file=sys.stderr)

    def close(self) -> None:
        """Waits for the last save and releases the lock of the directory.

        Raises:
          OSError: The last save failed; earlier checkpoints are intact.
        """
        try:
            self.wait()
        finally:
            self._at_close.close()

    def manifest(self, step: int | None = None) -> Manifest:
        """Returns the manifest of a checkpoint: versions, settings and arrays.

        Every process calls it.

        Args:
          step: Step of the checkpoint; the newest by default.

        Raises:
          ValueError: There is no such checkpoint.
          Damaged: The manifest was changed after it was written.
        """
        return Manifest.read(self._folder(step))

    def _folder(self, step: int | None) -> pathlib.Path:
        self.wait()
        step = self.latest if step is None else operator.index(step)
        return max(folders(self.directory, step).items())[1] / ITEM

    def restore(
        self,
        like: PyTree,
        step: int | None = None,
        *,
        may_differ: str | None = None,
        say: Callable[[str], object] | None = None,
    ) -> Restored:
        """Restores a checkpoint with the structure and shardings of `like`; verifies checksums.

        Every process calls it. Each process reads the shards of its devices.

        Args:
          like: A sharded tree with the structure given to `save`. Its leaves are arrays, or
            ShapeDtypeStructs with shardings from `zero.eval_shape` and `zero.optimizer(tx).init`.
            Any mesh and stage.
          step: Step of the checkpoint; the newest by default.
          may_differ: Pattern of paths that may be missing, extra or of another shape or dtype. Such
            a leaf keeps the value it has in `like`.
          say: Called with a summary of the restored paths. By default the first process prints it
            to stderr.

        Returns:
          The restored tree, its step and settings, and the paths that differ.

        Raises:
          Damaged: A file differs from its checksum.
          ValueError: There is no such checkpoint, or it does not match `like`.
        """
        folder = self._folder(step)
        check_seal(folder.parent)
        manifest = Manifest.read(folder)
        wanted = leaves(like)
        restored, *others = _compare(wanted, manifest.arrays, may_differ, str(folder))
        nodes, sums = [], []
        for leaf in wanted:
            node = leaf.node
            if leaf.name in restored:
                node = leaf.build(functools.partial(restored[leaf.name].read, folder))
                sums.append(total(dataclasses.replace(leaf, node=node).pieces()))
            nodes.append(node)
        for (name, array), actual in zip(restored.items(), _sum_over_processes(sums), strict=True):
            if actual != array.checksum:
                raise Damaged(f"{folder} is damaged: the checksum of {name} does not match")
        tree, known = unflatten(like, nodes), (manifest.step, manifest.config, manifest.extra)
        missing, extra, changed = map(tuple, others)
        result = Restored(tree, *known, tuple(restored), missing, extra, changed)
        if say is not None:
            say(str(result))
        elif jax.process_index() == 0:
            print(result, file=sys.stderr)
        return result


def _sum_over_processes(values: list[int]) -> list[int]:
    """Adds up each number over all processes, modulo 2^64."""
    halves = np.array(values, np.uint64).view(np.uint32)  # JAX has no 64 bits by default
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(halves))
    return gathered.view(np.uint64).sum(axis=0).tolist()


def on_first_process(work: Callable[[], T]) -> T | None:
    """Runs `work` in process 0 and returns its result there; raises in all if it fails."""
    failure: ValueError | OSError | None = None
    result = None
    if jax.process_index() == 0:
        try:
            result = work()
        except (ValueError, OSError) as error:
            failure = error
    if multihost_utils.broadcast_one_to_all(np.bool_(failure is not None)):
        raise failure or OSError("process 0 can't write checkpoints: see the error that it prints")
    return result


def _compare(
    wanted: Sequence[NamedLeaf], held: Mapping[str, StoredArray], may_differ: str | None, where: str
) -> tuple[dict[str, StoredArray], dict[str, str], dict[str, str], dict[str, str]]:
    """Returns arrays restored, missing, extra and changed; raises ValueError for others."""
    old = {name: f"{x.dtype}{list(x.shape)}" for name, x in held.items()}
    new = {leaf.name: f"{leaf.array.dtype}{list(leaf.array.shape)}" for leaf in wanted}
    missing = {name: "is missing" for name in new if name not in old}
    extra = {name: "is not in `like`" for name in old if name not in new}
    changed = {n: f"is {old[n]}, not {x}" for n, x in new.items() if old.get(n, x) != x}
    problems = missing | extra | changed
    matched = may_differ and problems and paths.matches(may_differ, [*problems], "may_differ")
    allowed = itertools.zip_longest(problems.items(), matched or [])
    refused = [f"{name} {problem}" for (name, problem), is_allowed in allowed if not is_allowed]
    if refused:
        raise ValueError(
            f"{where} does not match `like`: {few(refused)}. Build the same model and optimizer, "
            "or set `may_differ` to a pattern of these paths"
        )
    kept = missing | changed
    for leaf in wanted:
        is_abstract = leaf.in_files or isinstance(leaf.value, jax.ShapeDtypeStruct)
        if leaf.name in kept and is_abstract:
            raise ValueError(f"{leaf.name} is not restored: `like` must have an array for it")
    return {n: held[n] for n in new if n not in kept}, missing, extra, changed


def _check_space(directory: pathlib.Path, nbytes: int, files: int) -> None:
    """Raises OSError if the file system has too few bytes or files left."""
    disk = os.statvfs(directory)
    free, room = disk.f_bavail * disk.f_frsize, disk.f_favail
    if free < nbytes or (disk.f_files and room < files):  # some do not count files
        raise OSError(
            f"{directory} has {free:,} bytes free and room for {room:,} files, a checkpoint needs "
            f"{nbytes:,} and {files:,}: free space"
        )


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
    arrays = {leaf.name: leaf.array for leaf in saved}
    pieces = {leaf.name: leaf.pieces if leaf.in_files else leaf.pieces() for leaf in saved}
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore")
    versions = {"zero_jax": __version__} | {n: importlib.metadata.version(n) for n in packages}
    return SaveArgs(Manifest(step, arrays, versions, config, extra), pieces)


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
