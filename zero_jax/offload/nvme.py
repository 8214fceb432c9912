"""Optimizer state in files, for state larger than host memory.

Each process stores the shards of its devices, 8Ψ/N bytes per device for Adam, in two slots. Step t
is read from slot t mod 2, and step t + 1 is written to the other. Once that is on disk, a small
record that names t + 1 replaces the old one in a single rename. A process killed at any instant
resumes from its last complete step. With "params" the fp32 master parameters are written too, so
the folder suffices to resume; the device keeps its copy, which the next step reads.

The update is `PiecewiseUpdate`, as for host memory, driven by the host: it reads a piece, hands it
to the devices and reads the next while they compute, then writes the first to the other slot. Host
memory holds two pieces, each once as read and once as written.
"""

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from zero_jax.offload.host import Offload, Operands, PiecewiseUpdate, applied, as_stored
from zero_jax.sharding import layout
from zero_jax.sharding.layout import Partition, partition
from zero_jax.sharding.paths import Padded, PyTree

Shards = dict[str, jax.Array]  # those of this process, each once, by name in the store
RECORD = "step.json"
_ALIGN = 4096


class Store:
    """Arrays of one process by name, in two slots that survive a kill.

    Args:
      folder: The folder of this process.
      shapes: Shape and dtype of each array, by name, in the order of the files.
      create: Create the files, which must not exist; otherwise they must, for the same arrays.

    Attributes:
      step: The last complete step.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shapes: Mapping[str, tuple[Sequence[int], DTypeLike]],
        *,
        create: bool,
    ):
        self.folder, self._record = folder, folder / RECORD
        self._layout = {n: [list(shape), str(np.dtype(d))] for n, (shape, d) in shapes.items()}
        self._arrays: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            self._arrays[name] = offset, tuple(shape), np.dtype(dtype)
            size = math.prod(shape) * np.dtype(dtype).itemsize
            offset += -(-size // _ALIGN) * _ALIGN
        if create:
            self._create(max(offset, _ALIGN))
        self.step = 0 if create else self._saved_step()

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"slot{step % 2}.bin"

    def _create(self, size: int) -> None:
        if self._record.exists():
            step = json.loads(self._record.read_text())["step"]
            raise ValueError(
                f"`offload`: {self.folder} has the state of step {step}. Resume it with "
                "tx.resume(params), or use an empty directory"
            )
        created: list[pathlib.Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for slot in (0, 1):
                with open(self._path(slot), "wb") as file:
                    created.append(self._path(slot))
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            for path in created:
                path.unlink(missing_ok=True)
            reason = f"cannot be written ({error.strerror or error})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                reason = f"has {shutil.disk_usage(self.folder).free:,} bytes free"
            raise ValueError(
                f"`offload`: {self.folder} {reason}, but the optimizer state takes "
                f"{2 * size:,} bytes in two slots. Use another directory"
            ) from error

    def _saved_step(self) -> int:
        if not self._record.exists():
            raise ValueError(
                f"`offload`: {self.folder} has no state to resume. Start with tx.init(params)"
            )
        record = json.loads(self._record.read_text())
        if record["arrays"] != self._layout:
            raise ValueError(
                f"`offload`: {self.folder} has the state of another model, optimizer or mesh. "
                "Resume with the same ones, or use an empty directory"
            )
        return int(record["step"])

    def view(self, step: int, name: str) -> np.ndarray:
        """Returns an array of a step, to read and write; mapped pages count as process memory."""
        offset, shape, dtype = self._arrays[name]
        return np.memmap(self._path(step), dtype, "r+", offset, shape)

    def commit(self, step: int) -> None:
        """Makes a step the one that a process resumes from."""
        _sync(self._path(step))
        fresh = self.folder / (RECORD + ".new")
        fresh.write_text(json.dumps({"step": step, "arrays": self._layout}))
        _sync(fresh)
        os.replace(fresh, self._record)
        _sync(self.folder)
        self.step = step

    def forget(self) -> None:
        """Removes the record: until the next commit there is nothing to resume from."""
        self._record.unlink(missing_ok=True)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_of(directory: str) -> pathlib.Path:
    """Returns the folder of this process in the directory of `Offload`."""
    return pathlib.Path(directory) / f"process-{jax.process_index():05d}"


def discard(directory: str) -> None:
    """Gives up the state of this process, so that another one can be initialised there."""
    (folder_of(directory) / RECORD).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, eq=False)
class FileArray:
    """One array in files; for checkpoints a leaf of the optimizer state."""

    files: "StateFiles"
    name: str  # in the files, for example "state3"
    cut: Partition
    dtype: np.dtype[Any]
    key_impl: str | None = None  # of a random key: its words are in the files

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape, padding included."""
        return self.cut.stored_shape

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the array that `fetch` returns."""
        return NamedSharding(self.files.mesh, self.cut.stored_spec)

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return math.prod(self.cut.device_shape)

    @functools.cached_property
    def keys(self) -> dict[jax.Device, str]:
        """Names in the store of the shards of this process: the array's, and where it starts."""
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        starts = {d: [str(part.start or 0) for part in at or ()] for d, at in indices.items()}
        return {device: f"{self.name}/{'-'.join(start)}" for device, start in starts.items()}

    @property
    def names(self) -> list[str]:
        """The same, each once and sorted, as they follow each other in the files."""
        return sorted(set(self.keys.values()))

    def fetch(self, step: int | None = None, part: slice | None = None) -> jax.Array:
        """Returns the array of a step, or the same part of the flat shard of every device."""
        store = self.files.store
        step = store.step if step is None else step
        views = {name: store.view(step, name) for name in self.names}
        shape, sharding = self.shape, self.sharding
        if part is not None:
            shape, sharding = (sharding.mesh.size * (part.stop - part.start),), self.files.flat
            views = {name: view.reshape(-1)[part] for name, view in views.items()}
        copies = {name: np.array(view) for name, view in views.items()}
        arrays = [jax.device_put(copies[name], device) for device, name in self.keys.items()]
        value = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
        return jax.random.wrap_key_data(value, impl=self.key_impl) if self.key_impl else value

    def replace(self, value: jax.Array) -> None:
        """Overwrites the last step, which cannot be resumed any more; the next one can."""
        self.files.store.forget()
        self.put_all(self.files.store.step, value)

    def local(self, value: jax.Array) -> Shards:
        """Returns the shards of an array over the mesh."""
        return {self.keys[shard.device]: shard.data for shard in value.addressable_shards}

    def put(self, step: int, start: int, pieces: Shards) -> None:
        """Writes flat pieces of shards that begin at element `start` of them."""
        for name, piece in pieces.items():
            flat = self.files.store.view(step, name).reshape(-1)
            flat[start : start + piece.size] = np.asarray(piece)

    def put_all(self, step: int, value: jax.Array) -> None:
        """Writes a stored array, with one piece of each shard in host memory at a time."""
        shards = self.local(jax.random.key_data(value) if self.key_impl else value)
        most = self.files.most(self, self.dtype.itemsize)
        for start in range(0, self.size, most):
            size = min(most, self.size - start)
            self.put(step, start, {x: _piece(data, start, size) for x, data in shards.items()})


@functools.partial(jax.jit, static_argnums=2)
def _piece(x: jax.Array, start: int | jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x.reshape(-1), (start,), (size,))


class StateFiles:
    """The optimizer state, the guard and perhaps master parameters in files, and their update.

    With `resume` the files exist. `next_guard` returns the guard after a step, given that before it
    and whether the step counts.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        update: PiecewiseUpdate,
        params: PyTree,
        guard: PyTree,
        next_guard: Callable[[PyTree, jax.Array], PyTree],
        offload: Offload,
        *,
        resume: bool,
    ):
        self.mesh, self._offload, self._tx, self._update = update.mesh, offload, tx, update
        self.flat = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        self._guard, self._next_guard = guard, next_guard
        full = jax.eval_shape(layout.unpad, params)
        self.abstract = jax.eval_shape(tx.init, full)
        self.params = self._arrays("param", full, update.splits) if offload.params else []
        self.state = self._arrays("state", self.abstract, update.of_state)
        # Counters and rates, which the device keeps too.
        numbered = enumerate(self.state, len(update.splits))
        self.resident = [x for i, x in numbered if i not in update.streamed]
        self.guard = self._arrays("guard", guard, [partition((), 1)] * len(jax.tree.leaves(guard)))
        arrays = {
            name: (x.cut.device_shape, x.dtype)
            for x in (*self.params, *self.state, *self.guard)
            for name in x.names
        }
        assert offload.directory is not None
        self.store = Store(folder_of(offload.directory), arrays, create=not resume)
        self._prepared = jax.jit(self._prepare)
        self._programs = functools.cache(self._program)

    def _arrays(self, group: str, tree: PyTree, splits: Sequence[Partition]) -> list[FileArray]:
        arrays = []
        for i, (leaf, cut) in enumerate(zip(jax.tree.leaves(tree), splits, strict=True)):
            impl = None
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf, impl = jax.eval_shape(jax.random.key_data, leaf), layout.key_impl(leaf)
                cut = partition(leaf.shape, 1)
            arrays.append(FileArray(self, f"{group}{i}", cut, leaf.dtype, impl))
        return arrays

    def most(self, array: FileArray, element: int) -> int:
        """Returns the elements of a piece of a shard, each of so many bytes in host memory."""
        most = self._offload.piece_bytes // element
        if self._offload.host_bytes is not None:
            local_shards = len(array.names)
            most = min(most, self._offload.host_bytes // (2 * element * local_shards))
        return max(1, most)

    def begin(self, params: PyTree) -> tuple["Stored", PyTree]:
        """Writes the first state, one leaf on the device at a time; returns it and the guard."""
        resident = []
        for j, (array, cut) in enumerate(zip(self.state, self._update.of_state, strict=True)):

            def leaf(params: PyTree, j: int = j, cut: Partition = cut) -> PyTree:
                value = jax.tree.leaves(self._tx.init(layout.unpad(params)))[j]
                return layout.pad([value], [cut])[0]

            placed = NamedSharding(self.mesh, cut.stored_spec)
            value = jax.jit(leaf, out_shardings=placed)(params)
            if array in self.resident:
                resident.append(value)
            else:
                array.put_all(0, *jax.tree.leaves(value))
        leaves = jax.tree.leaves(params)
        for array, value in zip(self.params, leaves, strict=False):
            array.put_all(0, value)
        return self._commit(0, leaves, resident, self._guard), self._guard

    def _commit(
        self, step: int, params: Sequence[jax.Array], resident: list[PyTree], guard: PyTree
    ) -> "Stored":
        """Writes what is not updated in pieces, and completes a step."""
        for at, array in enumerate(self.params):
            if at not in self._update.recipes:
                array.put_all(step, params[at])
        leaves = jax.tree.leaves((resident, guard))
        for array, value in zip((*self.resident, *self.guard), leaves, strict=True):
            array.put_all(step, value)
        self.store.commit(step)
        return Stored(resident, self)

    def resume(self, params: PyTree) -> tuple[PyTree, "Stored", PyTree]:
        """Returns parameters, state and guard of the last step that every process completed."""
        step = self.store.step
        if jax.process_count() > 1:
            step = int(np.min(multihost_utils.process_allgather(np.int32(step))))
        if step != self.store.step:  # the slot of the later step is written again
            self.store.commit(step)

        def fetched(arrays: Sequence[FileArray], like: PyTree) -> PyTree:
            return jax.tree.unflatten(jax.tree.structure(like), [x.fetch(step) for x in arrays])

        resident = [as_stored(array.fetch(step), array.cut) for array in self.resident]
        params = fetched(self.params, params) if self.params else params
        return params, Stored(resident, self), fetched(self.guard, self._guard)

    def step(
        self,
        grads: PyTree,
        stored: "Stored",
        params: PyTree,
        guard: PyTree,
        finite: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, "Stored", PyTree]:
        """Returns parameters, state and guard after a step, which is written to the other slot."""
        update, now = self._update, self.store.step
        flat, (new, treedef) = jax.tree.leaves(grads), jax.tree.flatten(params)
        count, first = len(new), update.first_param
        resident = [i for i in range(count, first) if i not in update.streamed]
        inputs = dict(enumerate(flat)) | dict(enumerate((*new, loss), first))
        inputs |= dict(zip(resident, jax.tree.leaves(stored.resident), strict=True))
        outputs, operands, guard = self._prepared(inputs, guard, finite)
        new = [outputs.get(at, leaf) for at, leaf in enumerate(new)]
        # A piece is written while the devices compute the next one.
        unwritten: list[tuple[FileArray, int, jax.Array]] = []

        def write() -> None:
            for array, start, value in unwritten:
                array.put(now + 1, start, array.local(value))

        for at, recipe in update.recipes.items():
            states = [self.state[i - count] for i in recipe.outputs[1:]]
            written = [*states, *self.params[at : at + 1]]
            # States as read and as written; a master parameter is only written.
            most = self.most(states[0], sum(x.dtype.itemsize for x in (*states, *written)))
            for start in range(0, states[0].size, most):
                stop = min(start + most, states[0].size)
                read = [array.fetch(now, slice(start, stop)) for array in states]
                program = self._programs(at, stop - start)
                new[at], *values = program(new[at], start, finite, read, flat[at], operands[at])
                write()
                unwritten = [(a, start, x) for a, x in zip(written, values, strict=False)]
        write()
        leaves = [outputs[i] for i in resident]
        new_resident = jax.tree.unflatten(jax.tree.structure(stored.resident), leaves)
        stored = self._commit(now + 1, new, new_resident, guard)
        return jax.tree.unflatten(treedef, new), stored, guard

    def _prepare(
        self, inputs: Mapping[int, jax.Array], guard: PyTree, finite: jax.Array
    ) -> tuple[dict[int, jax.Array], dict[int, Operands], PyTree]:
        """Computes what is not updated in pieces, the operands of pieces, and the guard."""
        values, operands = self._update.prepare(inputs)
        outputs = self._update.outputs(values, inputs, finite, apply=True)
        return outputs, operands, self._next_guard(guard, finite)

    def _program(self, at: int, size: int) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns a program: the parameter with a new piece, and pieces of states and parameter."""
        update, spec = self._update, self._update.splits[at].stored_spec
        states, flat, replicated = update.recipes[at].outputs[1:], self.flat.spec, PartitionSpec()

        def local(
            param: jax.Array,
            start: jax.Array,
            finite: jax.Array,
            read: list[jax.Array],
            grad: jax.Array,
            operands: Operands,
        ) -> tuple[jax.Array, ...]:
            grad, old, *arrays = (_piece(x, start, size) for x in (grad, param, *operands[0]))
            pieces = {at: grad, update.first_param + at: old}
            pieces |= dict(zip(states, read, strict=True))
            change, new = update.on_piece(at, finite, pieces, (arrays, operands[1]))
            master = applied(old, change)
            stored = jax.lax.dynamic_update_slice(param.reshape(-1), master, (start,))
            return stored.reshape(param.shape), *new.values(), master

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(spec, replicated, replicated, flat, spec, (spec, replicated)),
            out_specs=(spec, *(flat for _ in states), flat),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """An optimizer state whose larger part is in files."""

    resident: list[PyTree]  # leaves on the device, as stored: counters, rates
    files: StateFiles = dataclasses.field(metadata={"static": True})

    def unfolded(self) -> PyTree:
        """Returns the tree of the transformation, with a `FileArray` for each leaf in files."""
        resident, files = iter(self.resident), self.files
        nodes = [
            next(resident) if x in files.resident else as_stored(x, x.cut) for x in files.state
        ]
        return jax.tree.unflatten(jax.tree.structure(files.abstract), nodes)

    def folded(self, tree: PyTree) -> "Stored":
        """Returns the state of a tree like that of `unfolded`."""
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded))
        pairs = zip(nodes, self.files.state, strict=True)
        return Stored([node for node, x in pairs if x in self.files.resident], self.files)
