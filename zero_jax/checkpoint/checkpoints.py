"""Checkpoints that load on any mesh: `Checkpoints(directory).save(step, tree)` and `restore`.

Orbax commits a checkpoint (written to a temporary folder, renamed when every process is done),
deletes old ones, and writes files while training continues. The format is zero_jax's own: full
arrays without padding or mesh (leaves.py), in chunks with checksums (arrays.py), and a manifest
(manifest.py). Reading a checkpoint executes no file of it.

    DIR/120/state/manifest.json
    DIR/120/state/arrays/0007/c/0/3      a chunk
    DIR/.lock                            of the run that writes here
    DIR/.discarded                       folders being deleted (retention.py)

Host memory: `save` copies this process's shards and returns; `restore` takes one leaf at a time.
"""

import dataclasses
import json
import operator
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from zero_jax.checkpoint import retention
from zero_jax.checkpoint.all_processes import by_the_first, over_processes
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.comparison import matched
from zero_jax.checkpoint.leaves import leaves, rebuilt
from zero_jax.checkpoint.manifest import NAME as MANIFEST
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.checkpoint.writer import (
    Handler,
    Save,
    check_seal,
    entries,
    seal,
    snapshot,
    total,
    versions,
)
from zero_jax.cluster.lock import locked

PyTree = Any
ITEM = "state"


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
    config: Any
    extra: Any
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    extra_arrays: tuple[str, ...]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"step {self.step}: restored {len(self.restored)} arrays"]
        for what, names in (
            ("missing", self.missing),
            ("extra", self.extra_arrays),
            ("of another shape or dtype", self.changed),
        ):
            parts.append(f"{what}: {', '.join(names) or 'none'}")
        return "; ".join(parts)


class Checkpoints:
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
                raise ValueError(f"{name}={value!r}: it must be an integer of at least 1, or None")
        self.directory = pathlib.Path(directory).resolve()  # TensorStore takes no ".."
        self._lock = None if read_only else by_the_first(lambda: locked(self.directory))
        self._unsealed: int | None = None
        self._manager = None if read_only else _manager(self.directory, keep, keep_every)
        self._sweeper = None if self._lock is None else retention.Sweeper(self.directory)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending; waits for a save in progress."""
        self.wait()
        found = self.directory.glob(f"*/{ITEM}/{MANIFEST}")
        return sorted(int(p.parts[-3]) for p in found if retention.is_step(p.parts[-3]))

    @property
    def latest(self) -> int | None:
        """The newest step, or None. Every process calls it.

        All processes return the value of the first: shared storage may show a new checkpoint late.
        """
        mine = np.int32(max(self.steps, default=-1))
        last = int(multihost_utils.broadcast_one_to_all(mine))
        return None if last < 0 else last

    def save(self, step: int, tree: PyTree, *, config: Any = None, extra: Any = None) -> None:
        """Copies this process's shards to host memory and writes them asynchronously.

        Waits for the previous save first. Every process calls it.

        Args:
          step: Number of the training step, above that of the newest checkpoint.
          tree: Sharded arrays (parameters, optimizer state, random keys) and numbers.
          config: Settings of the run, as JSON.
          extra: Other state needed to resume, such as the position in the data, as JSON.

        Raises:
          ValueError: The step exists, is below the newest or is not a number, a leaf cannot be
            saved, or the checkpoints are read-only.
          OSError: The disk is full, or an earlier save failed.
        """
        if self._manager is None:
            raise ValueError("read_only=True does not support `save`: open with read_only=False")
        step = self._checked(step)
        json.dumps([config, extra])
        found = leaves(tree)
        needed = sum(leaf.nbytes for leaf in found)
        by_the_first(lambda: _check_space(self.directory, needed, 2 * len(found)))
        manifest = Manifest(step, entries(found), versions(), config, extra)
        args = ocp.args.Composite(**{ITEM: Save(manifest, snapshot(found))})
        self._manager.save(step, args=args)
        self._unsealed = step
        if any(leaf.in_files for leaf in found):
            self.wait()  # the next step writes to those files

    def _checked(self, step: Any) -> int:
        """Returns the step as an int above the newest checkpoint."""
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"step={step!r}: it must be an integer of at least 0")
        there = self.steps
        if number in there:
            raise ValueError(f"{self.directory} already holds step {number}: save a later step")
        if there and number < there[-1]:
            raise ValueError(
                f"step {number} is below step {there[-1]}, the latest in {self.directory}: delete "
                "the later checkpoints, or use another directory"
            )
        return number

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
        except Exception as error:
            raise OSError(f"saving to {self.directory} failed: {error}") from error
        if step is not None and jax.process_index() == 0:
            try:
                seal(self.directory / str(step))
            except OSError as error:  # it is complete without
                _to_stderr(f"checkpoint {step} was saved without its seal: {error}")

    def close(self) -> None:
        """Waits for the last save and releases the lock of the directory.

        Raises:
          OSError: The last save failed; earlier checkpoints are intact.
        """
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
            if self._sweeper is not None:
                self._sweeper.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

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
        steps = self.steps
        step = self.latest if step is None else step
        if step not in steps:
            there = f"steps {', '.join(map(str, steps))}" if steps else "none"
            wanted = "a checkpoint" if step is None else f"step {step}"
            raise ValueError(f"{self.directory} does not hold {wanted}: it holds {there}")
        return self.directory / str(step) / ITEM

    def restore(
        self,
        like: PyTree,
        step: int | None = None,
        *,
        may_differ: str | None = None,
        say: Callable[[str], Any] | None = None,
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
        outcome = matched(wanted, manifest, may_differ, str(folder))
        nodes, sums = [], []
        for leaf in wanted:
            if leaf.name not in outcome["restored"]:
                nodes.append(leaf.node)
                continue
            entry = manifest.arrays[leaf.name]
            nodes.append(leaf.build(entry.array(folder).read))
            sums.append(total(dataclasses.replace(leaf, node=nodes[-1]).pieces()))
        names = [leaf.name for leaf in wanted if leaf.name in outcome["restored"]]
        for name, found in zip(names, over_processes(sums), strict=True):
            if found != manifest.arrays[name].checksum:
                raise Damaged(f"{folder} is damaged: the checksum of {name} does not match")
        tree = rebuilt(like, nodes)
        result = Restored(tree, manifest.step, manifest.config, manifest.extra, **outcome)
        if say is None:
            say = _to_stderr if jax.process_index() == 0 else lambda _: None
        say(str(result))
        return result


def _manager(
    directory: pathlib.Path, keep: int | None, keep_every: int | None
) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        keep_period=keep_every,
        cleanup_tmp_directories=True,
        todelete_subdir=retention.FOLDER,
        save_root_metadata=False,
        # Else files could be written before their folder is made.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(directory, options=options, item_handlers={ITEM: Handler()})


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _check_space(directory: pathlib.Path, needed: int, files: int) -> None:
    """Raises OSError if the file system has too few bytes or files left."""
    known = os.statvfs(directory)
    free = known.f_bavail * known.f_frsize
    if free < needed:
        raise OSError(
            f"{directory} has {free:,} bytes free, and a checkpoint needs {needed:,}: free space, "
            "or keep fewer checkpoints"
        )
    if known.f_files and known.f_favail < files:  # some file systems do not count them
        raise OSError(
            f"{directory} has room for {known.f_favail:,} files, and a checkpoint needs at least "
            f"{files:,}: delete files, or keep fewer checkpoints"
        )
