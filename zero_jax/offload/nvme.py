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

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from zero_jax.offload.host import Arrays, Offload, Operands, PiecewiseUpdate, applied, as_stored
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
        saved = json.loads(self._record.read_text()) if self._record.exists() else None
        problem = None
        if create and saved is not None:
            problem = f"has the state of step {saved['step']}. Resume it with tx.resume(params), or"
            problem += " use an empty directory"
        elif not create and saved is None:
            problem = "has no state to resume. Start with tx.init(params)"
        elif saved is not None and saved["arrays"] != self._layout:
            problem = "has the state of another model, optimizer or mesh. Resume with the same "
            problem += "ones, or use an empty directory"
        if problem:
            raise ValueError(f"`offload`: {folder} {problem}")
        if saved is None:
            self._create(max(offset, _ALIGN))
        self.step = 0 if saved is None else int(saved["step"])

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"slot{step % 2}.bin"

    def _create(self, size: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for slot in (0, 1):
                with open(self._path(slot), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            for slot in (0, 1):
                with contextlib.suppress(OSError):
                    self._path(slot).unlink()
            raise ValueError(
                f"`offload`: {self.folder} cannot be written ({error.strerror or error}). The "
                f"optimizer state takes {2 * size:,} bytes in two slots. Use another directory"
            ) from error

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

    def fetch(self, part: slice | None = None) -> jax.Array:
        """Returns the array of the last step, or the same part of each device's flat shard."""
        store = self.files.store
        views = {name: store.view(store.step, name) for name in self.names}
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


@jax.tree_util.register_static
class StateFiles:
    """The optimizer state, the guard and perhaps master parameters in files, and their update.

    It is a node without leaves in the place of the transformation's state. With `resume` the files
    exist.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        update: PiecewiseUpdate,
        params: PyTree,
        guard: PyTree,
        offload: Offload,
        *,
        resume: bool,
    ):
        self.mesh, self._offload, self._tx, self._update = update.mesh, offload, tx, update
        self.flat = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        self._guard, full = guard, jax.eval_shape(layout.unpad, params)
        self._abstract = jax.eval_shape(tx.init, full)
        self.params = self._arrays("param", full, update.splits) if offload.params else []
        self.state = self._arrays("state", self._abstract, update.of_state)
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

    @functools.cached_property
    def _at_once(self) -> dict[int, FileArray]:
        """The states that are not updated in pieces, by number: counters, rates."""
        numbered = enumerate(self.state, len(self._update.splits))
        return {i: x for i, x in numbered if i not in self._update.streamed}

    def most(self, array: FileArray, element: int) -> int:
        """Returns the elements of a piece of a shard, each of so many bytes in host memory."""
        most = self._offload.piece_bytes // element
        if self._offload.host_bytes is not None:
            local_shards = len(array.names)
            most = min(most, self._offload.host_bytes // (2 * element * local_shards))
        return max(1, most)

    def begin(self, params: PyTree) -> tuple["StateFiles", PyTree]:
        """Writes the first state, one leaf on the device at a time; returns it and the guard."""

        def leaf(j: int, params: PyTree) -> PyTree:
            value = jax.tree.leaves(self._tx.init(layout.unpad(params)))[j]
            return layout.pad([value], [self._update.of_state[j]])

        for j, (array, cut) in enumerate(zip(self.state, self._update.of_state, strict=True)):
            placed = NamedSharding(self.mesh, cut.stored_spec)
            made = jax.jit(functools.partial(leaf, j), out_shardings=placed)(params)
            array.put_all(0, *jax.tree.leaves(made))
        self._finish(0, zip(self.params, jax.tree.leaves(params), strict=False), self._guard)
        return self, self._guard

    def _finish(
        self, step: int, others: Iterable[tuple[FileArray, jax.Array]], guard: PyTree
    ) -> None:
        """Writes what is not updated in pieces, and completes a step."""
        guards = zip(self.guard, jax.tree.leaves(guard), strict=True)
        for array, value in itertools.chain(others, guards):
            array.put_all(step, value)
        self.store.commit(step)

    def resume(self, params: PyTree) -> tuple[PyTree, "StateFiles", PyTree]:
        """Returns parameters, state and guard of the last step that every process completed."""
        step = self.store.step
        if jax.process_count() > 1:
            step = int(np.min(multihost_utils.process_allgather(np.int32(step))))
        if step != self.store.step:  # the slot of the later step is written again
            self.store.commit(step)

        def fetched(arrays: Sequence[FileArray], like: PyTree) -> PyTree:
            return jax.tree.unflatten(jax.tree.structure(like), [x.fetch() for x in arrays])

        params = fetched(self.params, params) if self.params else params
        return params, self, fetched(self.guard, self._guard)

    def unfolded(self) -> PyTree:
        """Returns the tree of the transformation, with a `FileArray` for each streamed leaf."""
        at_once = list(self._at_once.values())
        nodes = [as_stored(x.fetch() if x in at_once else x, x.cut) for x in self.state]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), nodes)

    def folded(self, tree: PyTree) -> "StateFiles":
        """Returns the state of a tree like that of `unfolded`, whose other leaves it writes."""
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded))
        for array, node in zip(self.state, nodes, strict=True):
            (value,) = jax.tree.leaves(node)
            if value is not array:
                array.replace(value)
        return self

    def step(
        self, grads: PyTree, params: PyTree, guard: PyTree, finite: jax.Array, loss: jax.Array
    ) -> PyTree:
        """Returns the parameters after a step, which is written to the other slot.

        `guard` is that after the step, which counts if `finite`.
        """
        update, now = self._update, self.store.step
        flat, (new, treedef) = jax.tree.leaves(grads), jax.tree.flatten(params)
        count = len(new)
        inputs = dict(enumerate(flat)) | {i: x.fetch() for i, x in self._at_once.items()}
        inputs |= dict(enumerate((*new, loss), update.first_param))
        outputs, operands = self._prepared(inputs, finite)
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
                read = [array.fetch(slice(start, stop)) for array in states]
                program = self._programs(at, stop - start)
                new[at], *values = program(new[at], flat[at], [start, finite], read, operands[at])
                write()
                unwritten = [(a, start, x) for a, x in zip(written, values, strict=False)]
        write()
        others = [(x, new[at]) for at, x in enumerate(self.params) if at not in update.recipes]
        others += [(x, outputs[i]) for i, x in self._at_once.items()]
        self._finish(now + 1, others, guard)
        return jax.tree.unflatten(treedef, new)

    def _prepare(
        self, inputs: Mapping[int, jax.Array], finite: jax.Array
    ) -> tuple[dict[int, jax.Array], dict[int, Operands]]:
        """Computes what is not updated in pieces, and the operands of pieces."""
        values, operands = self._update.prepare(inputs)
        return self._update.outputs(values, inputs, finite, apply=True), operands

    def _program(self, at: int, size: int) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns a program: the parameter with a new piece, and pieces of states and parameter."""
        update, spec = self._update, self._update.splits[at].stored_spec
        states, flat, replicated = update.recipes[at].outputs[1:], self.flat.spec, PartitionSpec()

        def local(
            param: jax.Array, grad: jax.Array, scalars: Arrays, read: Arrays, operands: Operands
        ) -> tuple[jax.Array, ...]:
            start, finite = scalars
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
            in_specs=(spec, spec, replicated, flat, (spec, replicated)),
            out_specs=(spec, *(flat for _ in states), flat),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0)
