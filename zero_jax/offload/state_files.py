"""The third tier: an optimizer's state in files, for states larger than host memory.

Each process keeps the shards of its own devices, 8Ψ/N bytes a device for Adam, twice
(mapped_store.py). With "params" the masters are written beside them, so that the folder alone is
enough to go on from; the device keeps its copy of them in any case, because the next step reads all
of it. Host memory holds two pieces, each once as read and once as it will be written.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from zero_jax.offload import streamable
from zero_jax.offload.mapped_store import RECORD, Store, committed
from zero_jax.offload.piece_stream import boxes
from zero_jax.offload.state_in_files import Stored
from zero_jax.offload.tiers import Offload
from zero_jax.sharding import layout
from zero_jax.sharding.cuts import Split, mirrors, split, state_splits
from zero_jax.sharding.mesh import AnyMesh

PyTree = Any


class Files:
    """Where each leaf of parameters, state and guard is on the disk, and how it gets there.

    Args:
      inner: the transformation.
      mesh: with devices.
      params: parameters at rest.
      guard: the first one.
      cuts: of the parameters.
      offload: the setting.
      resume: whether the files are there already.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        mesh: AnyMesh,
        params: PyTree,
        guard: PyTree,
        cuts: Sequence[Split],
        offload: Offload,
        *,
        resume: bool,
    ):
        full = jax.eval_shape(layout.unpad, params)
        state = jax.eval_shape(inner.init, full)
        self.mesh, self.offload, self.cuts = mesh, offload, list(cuts)
        self.guard, self._inner = guard, inner
        self.state_cuts = state_splits(state, full, cuts)
        self.owner = mirrors(self.state_cuts, self.cuts)
        self.held = streamable.offloaded(self.state_cuts, self.cuts)
        self.state, self.full = state, full
        self.state_leaves = jax.tree.leaves(state)
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[str, dict[jax.Device, str]] = {}
        single = split((), 1)
        kept = self.cuts if offload.params else []
        groups = {
            "param": (jax.tree.leaves(full)[: len(kept)], kept),
            "state": (self.state_leaves, self.state_cuts),
            "guard": (jax.tree.leaves(guard), [single] * len(jax.tree.leaves(guard))),
        }
        self._leaves = {
            f"{group}{i}": (_plain(leaf), cut)
            for group, (leaves, all_cuts) in groups.items()
            for i, (leaf, cut) in enumerate(zip(leaves, all_cuts, strict=True))
        }
        shapes = {
            f"{name}/{place}": (self._shard_shape(name), leaf.dtype)
            for name, (leaf, _) in self._leaves.items()
            for place in sorted(set(self._places(name).values()))
        }
        assert offload.directory is not None
        folder = pathlib.Path(offload.directory) / f"process-{jax.process_index():05d}"
        self.store = Store(folder, shapes, create=not resume)

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, self._leaves[name][1].spec_at_rest)

    def _rest_shape(self, name: str) -> tuple[int, ...]:
        leaf, cut = self._leaves[name]
        return cut.rest_shape if cut.shape == leaf.shape else tuple(leaf.shape)

    def _shard_shape(self, name: str) -> tuple[int, ...]:
        return self.sharding(name).shard_shape(self._rest_shape(name))

    def _places(self, name: str) -> dict[jax.Device, str]:
        """For each device of this process, what its shard is called; equal shards share a name."""
        if name in self._known:
            return self._known[name]
        shape = self._rest_shape(name)
        found = self.sharding(name).addressable_devices_indices_map(shape)
        self._known[name] = {
            device: "-".join(str(s.indices(d)[0]) for s, d in zip(index or (), shape, strict=True))
            for device, index in found.items()
        }
        return self._known[name]

    def split_of(self, name: str) -> Split:
        """How a leaf is cut."""
        return self._leaves[name][1]

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self._leaves[name][0].dtype

    def shards(self, name: str) -> list[tuple[str, tuple[int, ...], bool]]:
        """For each different shard of this process: its name, where it starts, and whether no
        device of an earlier process has it too."""
        shape = self._rest_shape(name)
        first: dict[tuple[int, ...], int] = {}
        for device, index in self.sharding(name).devices_indices_map(shape).items():
            process = device.process_index  # type: ignore[attr-defined]
            starts = tuple(s.indices(n)[0] for s, n in zip(index, shape, strict=True))
            first[starts] = min(process, first.get(starts, process))
        places = sorted(set(self._places(name).values()))
        named = {place: tuple(map(int, place.split("-"))) for place in places}
        own = jax.process_index()
        return [(place, starts, first[starts] == own) for place, starts in named.items()]

    def local_shards(self, name: str) -> int:
        """How many different shards this process keeps."""
        return len(set(self._places(name).values()))

    def fetch(self, step: int, name: str, starts: Sequence[int], stops: Sequence[int]) -> jax.Array:
        """The same part of every shard, as one array over the mesh."""
        places = self._places(name)
        parts = {
            p: self.store.read(step, f"{name}/{p}", starts, stops) for p in set(places.values())
        }
        arrays = [jax.device_put(parts[place], device) for device, place in places.items()]
        whole, shard = self._rest_shape(name), self._shard_shape(name)
        sizes = zip(starts, stops, whole, shard, strict=True)
        shape = tuple((b - a) * (w // max(s, 1)) for a, b, w, s in sizes)
        return jax.make_array_from_single_device_arrays(shape, self.sharding(name), arrays)

    def put(self, step: int, name: str, starts: Sequence[int], value: jax.Array) -> None:
        """Writes what `fetch` would read."""
        places, written = self._places(name), set()
        for shard in value.addressable_shards:
            place = places[shard.device]
            if place not in written:
                written.add(place)
                self.store.write(step, f"{name}/{place}", starts, np.asarray(shard.data))

    def put_whole(self, step: int, name: str, value: jax.Array) -> None:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        self.put(step, name, (0,) * value.ndim, value)

    def put_in_pieces(self, step: int, name: str, value: jax.Array) -> None:
        """As `put_whole`, with one piece in host memory at a time."""
        places = self._places(name)
        for shard in value.addressable_shards:
            for starts, stops in boxes(shard.data.shape, self.most(value.dtype.itemsize, name)):
                size = [b - a for a, b in zip(starts, stops, strict=True)]
                piece = np.asarray(jax.lax.dynamic_slice(shard.data, starts, size))
                self.store.write(step, f"{name}/{places[shard.device]}", starts, piece)

    def most(self, element: int, name: str) -> int:
        """Elements of a device's piece, of which each takes so many bytes in host memory."""
        most = self.offload.piece_bytes // element
        if self.offload.host_bytes is not None:
            most = min(most, self.offload.host_bytes // (2 * element * self.local_shards(name)))
        return max(1, most)

    def fetch_whole(self, step: int, name: str, like: jax.Array) -> jax.Array:
        shape = self._shard_shape(name)
        out = self.fetch(step, name, (0,) * len(shape), shape)
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(out, impl=jax.random.key_impl(like))
        return out

    def count(self, change: int) -> None:
        """Keeps account of the bytes of pieces in host memory."""
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def write_rest(
        self, step: int, params: Sequence[jax.Array], resident: Sequence[jax.Array], guard: PyTree
    ) -> None:
        """Writes what is not updated in pieces, and makes the step the one to resume from."""
        streamed = {self.owner[j] for j, held in enumerate(self.held) if held}
        for k, leaf in enumerate(params if self.offload.params else ()):
            if k not in streamed:
                self.put_whole(step, f"param{k}", leaf)
        others = [j for j, held in enumerate(self.held) if not held]
        for j, leaf in zip(others, resident, strict=True):
            self.put_whole(step, f"state{j}", leaf)
        for i, leaf in enumerate(jax.tree.leaves(guard)):
            self.put_whole(step, f"guard{i}", leaf)
        self.store.commit(step)

    def begin(self, params: PyTree) -> Stored:
        """Writes the first state, one leaf on the device at a time."""
        resident = []
        for j, (held, cut) in enumerate(zip(self.held, self.state_cuts, strict=True)):

            def leaf(params: PyTree, j: int = j, cut: Split = cut) -> jax.Array:
                value = jax.tree.leaves(self._inner.init(layout.unpad(params)))[j]
                return jax.tree.leaves(layout.at_rest([value], [cut]))[0]

            value = jax.jit(leaf, out_shardings=NamedSharding(self.mesh, cut.spec_at_rest))(params)
            if held:
                self.put_in_pieces(0, f"state{j}", value)
            else:
                resident.append(value)
        if self.offload.params:
            for k, value in enumerate(jax.tree.leaves(params)):
                self.put_in_pieces(0, f"param{k}", value)
        self.write_rest(0, jax.tree.leaves(params), resident, self.guard)
        return Stored(resident, self)

    def resume(self, params: PyTree) -> tuple[PyTree, Stored, PyTree]:
        """Parameters, state and guard as of the last step that every process had finished."""
        step = self.store.step
        if jax.process_count() > 1:
            step = int(np.min(multihost_utils.process_allgather(np.int32(step))))
        if step != self.store.step:  # the slot of the later one is written again
            self.store.commit(step)
        like = jax.jit(lambda p: _small(self._inner.init(layout.unpad(p)), self.held))(params)
        others = [j for j, held in enumerate(self.held) if not held]
        pairs = zip(others, like, strict=True)
        resident = [self.fetch_whole(step, f"state{j}", leaf) for j, leaf in pairs]
        guard = self._fetch_tree(step, "guard", self.guard)
        if self.offload.params:
            params = self._fetch_tree(step, "param", params)
        return params, Stored(resident, self), guard

    def _fetch_tree(self, step: int, group: str, like: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(like)
        read = [self.fetch_whole(step, f"{group}{i}", leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, read)


def discard(directory: str) -> None:
    """Gives up what this process has there, so that a state can be begun anew."""
    record = pathlib.Path(directory) / f"process-{jax.process_index():05d}" / RECORD
    record.unlink(missing_ok=True)


def steps_stored(directory: str) -> int:
    """The step that this process would resume from."""
    return committed(pathlib.Path(directory) / f"process-{jax.process_index():05d}")


def _small(state: PyTree, held: Sequence[bool]) -> list[jax.Array]:
    return [x for x, h in zip(jax.tree.leaves(state), held, strict=True) if not h]


def _plain(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, leaf)
    return leaf
