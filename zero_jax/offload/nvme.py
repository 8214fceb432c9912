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
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from zero_jax.offload.streaming import Operands, PiecewiseUpdate, applied
from zero_jax.offload.tiers import Offload
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import names
from zero_jax.sharding.partition import Partition, partition
from zero_jax.sharding.paths import Padded

PyTree = Any
Start = tuple[int, ...]  # where a shard starts in the stored array
RECORD = "step.json"
_ALIGN = 4096


class Store:
    """Arrays of one process by name, in two slots that survive a kill.

    Args:
      folder: The folder of this process.
      shapes: Shape and dtype of each array, by name.
      create: Create the files, which must not exist; otherwise they must, for the same arrays.

    Attributes:
      step: The last complete step.

    Raises:
      ValueError: The folder cannot be written, is full, has a state already, or another one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shapes: Mapping[str, tuple[Sequence[int], DTypeLike]],
        *,
        create: bool,
    ):
        self.folder = folder
        self._record = folder / RECORD
        self._arrays: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            self._arrays[name] = offset, tuple(shape), np.dtype(dtype)
            size = math.prod(shape) * np.dtype(dtype).itemsize
            offset += -(-size // _ALIGN) * _ALIGN
        self.bytes = max(offset, _ALIGN)
        self._layout = {n: [list(s), str(d)] for n, (_, s, d) in self._arrays.items()}
        self.step = self._create() if create else self._open()

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"slot{step % 2}.bin"

    def _create(self) -> int:
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
                    os.posix_fallocate(file.fileno(), 0, self.bytes)
        except OSError as error:
            for path in created:
                path.unlink(missing_ok=True)
            reason = f"cannot be written ({error.strerror or error})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                reason = f"has {shutil.disk_usage(self.folder).free:,} bytes free"
            raise ValueError(
                f"`offload`: {self.folder} {reason}, but the optimizer state takes "
                f"{2 * self.bytes:,} bytes in two slots. Use another directory"
            ) from error
        return 0

    def _open(self) -> int:
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
    """One array in files; for checkpoints a leaf of the optimizer state.

    Attributes:
      files: The files that it is in.
      name: Its name there, for example "state3".
      cut: Its partition; that of the words of a random key.
      dtype: The dtype in files.
      key_impl: The generator of a random key, or None.
    """

    files: "StateFiles"
    name: str
    cut: Partition
    dtype: np.dtype[Any]
    key_impl: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        return self.cut.shape

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return math.prod(self.cut.device_shape)

    @property
    def flat(self) -> PartitionSpec:
        """The partition spec of flat shards."""
        return PartitionSpec(tuple(x for axis in self.cut.stored_spec for x in names(axis or ())))

    @functools.cached_property
    def _all_starts(self) -> dict[jax.Device, Start]:
        """Where the shard of each device of the mesh starts."""
        shape = self.cut.stored_shape
        sharding = NamedSharding(self.files.mesh, self.cut.stored_spec)
        return {
            device: tuple(part.indices(n)[0] for part, n in zip(index, shape, strict=True))
            for device, index in sharding.devices_indices_map(shape).items()
        }

    @functools.cached_property
    def starts(self) -> dict[jax.Device, Start]:
        """Where the shard of each device of this process starts."""
        return {d: x for d, x in self._all_starts.items() if d.process_index == jax.process_index()}

    @functools.cached_property
    def keys(self) -> dict[Start, str]:
        """Names in the store of the shards of this process, by start; in the order of names."""
        names = {x: f"{self.name}/{'-'.join(map(str, x))}" for x in self.starts.values()}
        return dict(sorted(names.items(), key=lambda item: item[1]))

    def shards(self) -> list[tuple[Start, bool]]:
        """Returns the start of each shard here, and if no earlier process has it."""
        here = jax.process_index()
        earlier = {x for device, x in self._all_starts.items() if device.process_index < here}
        return [(start, start not in earlier) for start in self.keys]

    def _view(self, shard: Start, step: int | None = None) -> np.ndarray:
        store = self.files.store
        return store.view(store.step if step is None else step, self.keys[shard])

    def read(self, shard: Start, sizes: Sequence[int]) -> np.ndarray:
        """Reads the first elements along each dim of a shard, at the last step."""
        return np.array(self._view(shard)[tuple(map(slice, sizes))])

    def write(self, shard: Start, values: np.ndarray) -> None:
        """Writes them in place; until the next step there is nothing to resume."""
        self.files.store.forget()
        self._view(shard)[tuple(map(slice, values.shape))] = values

    def _over_mesh(
        self, parts: Mapping[Start, np.ndarray], shape: Sequence[int], spec: PartitionSpec
    ) -> jax.Array:
        """Returns the global array of a part of every shard."""
        arrays = [jax.device_put(parts[shard], device) for device, shard in self.starts.items()]
        sharding = NamedSharding(self.files.mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

    def fetch(self, step: int, start: int, stop: int) -> jax.Array:
        """Returns the same elements of every flat shard, as a flat array over the mesh."""
        parts = {x: np.array(self._view(x, step).reshape(-1)[start:stop]) for x in self.keys}
        shape = [(stop - start) * (math.prod(self.cut.stored_shape) // self.size)]
        return self._over_mesh(parts, shape, self.flat)

    def fetch_all(self, step: int) -> jax.Array:
        """Returns the stored array."""
        parts = {x: np.array(self._view(x, step)) for x in self.keys}
        value = self._over_mesh(parts, self.cut.stored_shape, self.cut.stored_spec)
        return jax.random.wrap_key_data(value, impl=self.key_impl) if self.key_impl else value

    def put(self, step: int, start: int, value: jax.Array) -> None:
        """Writes the flat array that `fetch` returns."""
        for shard, piece in self._local(value).items():
            self._put(step, shard, start, piece)

    def put_all(self, step: int, value: jax.Array) -> None:
        """Writes a stored array, with one piece in host memory at a time."""
        value = jax.random.key_data(value) if self.key_impl else value
        most = self.files.most(self, self.dtype.itemsize)
        for shard, data in self._local(value).items():
            for start in range(0, self.size, most):
                self._put(step, shard, start, _piece(data, start, min(most, self.size - start)))

    def _put(self, step: int, shard: Start, start: int, piece: jax.Array) -> None:
        self._view(shard, step).reshape(-1)[start : start + piece.size] = np.asarray(piece)

    def _local(self, value: jax.Array) -> dict[Start, jax.Array]:
        """Returns the shards of this process, each once."""
        return {self.starts[shard.device]: shard.data for shard in value.addressable_shards}


@functools.partial(jax.jit, static_argnums=2)
def _piece(x: jax.Array, start: int | jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x.reshape(-1), (start,), (size,))


# Bytes in host memory, the first element, and new values by array.
_Piece = tuple[int, int, list[tuple[FileArray, jax.Array]]]


class StateFiles:
    """The optimizer state, the guard and perhaps master parameters in files, and their update.

    Args:
      tx: The transformation, on trained leaves only.
      update: Its update in pieces.
      params: Stored parameters.
      guard: The guard before the first step.
      next_guard: Returns the guard after a step from that before it and whether it counts.
      offload: The setting.
      resume: True if the files exist.

    Attributes:
      live_bytes: Bytes of pieces in host memory; `peak_bytes` is their maximum.
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
        self.mesh, self.offload, self._tx, self._update = update.mesh, offload, tx, update
        self._guard, self._next_guard = guard, next_guard
        self.live_bytes = self.peak_bytes = 0
        full = jax.eval_shape(layout.unpad, params)
        self.abstract = jax.eval_shape(tx.init, full)
        self.params = self._arrays("param", full, update.splits) if offload.params else []
        self.state = self._arrays("state", self.abstract, update.of_state)
        # Counters and rates, which the device keeps too.
        self.resident = [x for x, s in zip(self.state, update.streamed, strict=True) if not s]
        self.guard = self._arrays("guard", guard, [partition((), 1)] * len(jax.tree.leaves(guard)))
        arrays = {
            key: (x.cut.device_shape, x.dtype)
            for x in (*self.params, *self.state, *self.guard)
            for key in x.keys.values()
        }
        assert offload.directory is not None
        self.store = Store(folder_of(offload.directory), arrays, create=not resume)
        self._prepared = jax.jit(self._prepare)
        self._programs = functools.cache(self._program)

    def _arrays(self, group: str, tree: PyTree, splits: Sequence[Partition]) -> list[FileArray]:
        arrays = []
        for i, (leaf, cut) in enumerate(zip(jax.tree.leaves(tree), splits, strict=True)):
            name, impl = f"{group}{i}", None
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf, impl = jax.eval_shape(jax.random.key_data, leaf), layout.key_impl(leaf)
                cut = partition(leaf.shape, 1)
            arrays.append(FileArray(self, name, cut, leaf.dtype, impl))
        return arrays

    def most(self, array: FileArray, element: int) -> int:
        """Returns the elements of a piece of a shard, each of so many bytes in host memory."""
        most = self.offload.piece_bytes // element
        if self.offload.host_bytes is not None:
            local_shards = len(array.keys)
            most = min(most, self.offload.host_bytes // (2 * element * local_shards))
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
            if self._update.streamed[j]:
                array.put_all(0, *jax.tree.leaves(value))
            else:
                resident.append(value)
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
            values = [array.fetch_all(step) for array in arrays]
            return jax.tree.unflatten(jax.tree.structure(like), values)

        resident = [_padded(array.fetch_all(step), array.cut) for array in self.resident]
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
        old, treedef = jax.tree.flatten(params)
        flat, now = jax.tree.leaves(grads), self.store.step
        outputs, operands, guard = self._prepared(flat, stored.resident, old, guard, finite, loss)
        new = [outputs.get(at, leaf) for at, leaf in enumerate(old)]

        def updated() -> Iterator[_Piece]:
            for at, recipe in self._update.recipes.items():
                states = [self.state[i - len(old)] for i in recipe.outputs[1:]]
                written = [*states, *self.params[at : at + 1]]
                # States as read and as written; a master parameter is only written.
                element = sum(x.dtype.itemsize for x in (*states, *written))
                most, size = self.most(states[0], element), states[0].size
                for start in range(0, size, most):
                    stop = min(start + most, size)
                    held = (stop - start) * element * len(states[0].keys)
                    self.live_bytes += held
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    read = [array.fetch(now, start, stop) for array in states]
                    program = self._programs(at, stop - start)
                    new[at], *values = program(new[at], start, finite, read, flat[at], operands[at])
                    yield held, start, list(zip(written, values, strict=False))

        # A piece is written while the devices compute the next one.
        for (held, start, pairs), _ in itertools.pairwise(itertools.chain(updated(), [(0, 0, [])])):
            for array, value in pairs:
                array.put(now + 1, start, value)
            self.live_bytes -= held
        leaves = [x for at, x in sorted(outputs.items()) if at >= len(old)]
        resident = jax.tree.unflatten(jax.tree.structure(stored.resident), leaves)
        stored = self._commit(now + 1, new, resident, guard)
        return jax.tree.unflatten(treedef, new), stored, guard

    def _prepare(
        self,
        grads: Sequence[jax.Array],
        resident: PyTree,
        params: Sequence[jax.Array],
        guard: PyTree,
        finite: jax.Array,
        loss: jax.Array,
    ) -> tuple[dict[int, jax.Array], dict[int, Operands], PyTree]:
        """Computes what is not updated in pieces, the operands of pieces, and the guard."""
        update = self._update
        numbers = (i for i, streamed in enumerate(update.streamed, len(params)) if not streamed)
        inputs = dict(enumerate(grads))
        inputs |= dict(zip(numbers, jax.tree.leaves(resident), strict=True))
        inputs |= dict(enumerate((*params, loss), update.first_param))
        values, operands = update.prepare(inputs)
        outputs = update.outputs(values, inputs, finite, apply=True)
        return outputs, operands, self._next_guard(guard, finite)

    def _program(self, at: int, size: int) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns the program that updates a piece of the states, and of the parameter in place.

        It returns the parameter, the states' pieces and that of the parameter.
        """
        update, spec = self._update, self._update.splits[at].stored_spec
        states = update.recipes[at].outputs[1:]
        flat, replicated = self.state[states[0] - len(update.splits)].flat, PartitionSpec()

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


def _padded(value: jax.Array, cut: Partition) -> PyTree:
    return value if cut.dim is None or not cut.padded else Padded(value, cut.dim, cut.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """An optimizer state whose larger part is in files.

    Attributes:
      resident: Leaves on the device, as stored: counters, rates.
      files: The files of the others.
    """

    resident: list[PyTree]
    files: StateFiles = dataclasses.field(metadata={"static": True})

    def unfolded(self) -> PyTree:
        """Returns the tree of the transformation, with a `FileArray` for each leaf in files."""
        resident = iter(self.resident)
        nodes = [next(resident) if x in self.files.resident else x for x in self.files.state]
        return jax.tree.unflatten(jax.tree.structure(self.files.abstract), nodes)

    def folded(self, tree: PyTree) -> "Stored":
        """Returns the state of a tree like that of `unfolded`."""
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded))
        return Stored([x for x in nodes if not isinstance(x, FileArray)], self.files)
