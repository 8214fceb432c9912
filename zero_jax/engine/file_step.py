"""The packaged step with its optimizer state in files: gradients in one program, then pieces.

The update of a piece is the very function that streams from host memory (`Piecewise.on_piece`). The
host reads a piece, hands it to the devices and reads the next, while they compute; then it writes
the first to the other slot: two pieces are in flight. A step counts when all of it is on the disk.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zero_jax.engine import grads
from zero_jax.engine.config import Config
from zero_jax.engine.loss_scale import Guard, next_guard
from zero_jax.engine.optimizer import ZeroState, guard_of
from zero_jax.engine.step import Metrics, TrainStep, reported
from zero_jax.engine.transformations import without_frozen
from zero_jax.offload.piece_stream import boxes
from zero_jax.offload.piecewise import Piecewise, applied
from zero_jax.offload.state_files import Files
from zero_jax.offload.state_in_files import Stored
from zero_jax.sharding import paths

PyTree = Any


class NvmeStep(TrainStep):
    """A `TrainStep` whose optimizer state is in files. Made by `Zero.train_step`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._jitted: Any = self._from_files
        self._update: _FileUpdate | None = None

    def trace(self, *args: Any, **named: Any) -> NoReturn:
        """Raises ValueError: the step is not a single program."""
        raise ValueError(
            "`offload`: with the nvme tier a step is many programs and cannot be traced as one. "
            'Plan with offload="optimizer"; the files take twice its bytes of host memory'
        )

    def lower(self, *args: Any, **named: Any) -> NoReturn:
        """Raises ValueError, as `trace`."""
        self.trace()

    def _from_files(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: Any, **named: Any
    ) -> tuple[PyTree, ZeroState, Metrics]:
        if named:
            raise ValueError(
                f"{', '.join(named)}: with the nvme tier a transformation gets `value`, the loss, "
                'and no other named argument. Use offload="optimizer" (host memory)'
            )
        scale = guard_of(opt_state).loss_scale
        files = opt_state.inner.files
        if self._update is None or self._update.files is not files:
            self._update = _FileUpdate(self.settings, files, self._tx.plain)
        out = self._gradients(params, batch, extras, scale)
        params, opt_state = self._update.run(params, opt_state, out)
        return params, opt_state, reported(out, opt_state.guard, scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _First:
    """What is computed once a step, on the devices.

    Attributes:
      outputs: new parameters and states that don't stream, by the number of the output.
      scalars: for each leaf that streams, whether the step counts and what its pieces need.
      wholes: for each, what is cut into pieces with it.
      guard: after this step.
    """

    outputs: dict[int, jax.Array]
    scalars: dict[int, list[jax.Array]]
    wholes: dict[int, list[jax.Array]]
    guard: Guard


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A piece that the devices work on: what is to be written, where, and its bytes."""

    starts: tuple[int, ...]
    written: dict[str, jax.Array]
    bytes: int


class _FileUpdate:
    """The update from files, for one layout of parameters."""

    def __init__(self, settings: Config, files: Files, plain: optax.GradientTransformation):
        self.files, self.precision = files, settings.precision
        frozen = paths.frozen_leaves(files.full, settings.frozen)
        inner = without_frozen(plain, settings.frozen)
        leaves, treedef = jax.tree.flatten(files.full)
        # The gradient of a frozen leaf is a scalar.
        pairs = zip(leaves, frozen, strict=True)
        own = [jax.ShapeDtypeStruct((), x.dtype) if still else x for x, still in pairs]

        loss = jax.ShapeDtypeStruct((), jnp.float32)

        def update(
            grads: PyTree, state: PyTree, params: PyTree, value: jax.Array
        ) -> tuple[PyTree, PyTree]:
            return inner.update(grads, state, params, value=value)

        self._update = Piecewise(
            update,
            (jax.tree.unflatten(treedef, own), files.state, files.full, loss),
            mesh=files.mesh,
            cuts=files.cuts,
            state_cuts=files.state_cuts,
            state_held=files.held,
            params_held=[False] * len(leaves),
            frozen=frozen,
        )
        self._prepare = jax.jit(self._first)
        self._pieces = functools.cache(self._piece_program)

    def run(
        self, params: PyTree, opt_state: ZeroState, out: grads.Result
    ) -> tuple[PyTree, ZeroState]:
        """One step: from the slot of the last one to the other."""
        files, step = self.files, self.files.store.step
        old, treedef = jax.tree.flatten(params)
        own = jax.tree.leaves(out.grads)
        resident = opt_state.inner.resident
        first = self._prepare(own, resident, old, opt_state.guard, out.finite, out.loss)
        new = [first.outputs.get(at, leaf) for at, leaf in enumerate(old)]
        flying: collections.deque[_InFlight] = collections.deque()
        for at in self._update.recipes:
            for starts, stops in self._boxes(at):
                new[at], piece = self._start(at, starts, stops, new[at], own[at], first)
                flying.append(piece)
                if len(flying) > 1:
                    self._land(step + 1, flying.popleft())
        while flying:
            self._land(step + 1, flying.popleft())
        resident = [x for at, x in sorted(first.outputs.items()) if at >= len(old)]
        files.write_rest(step + 1, new, resident, first.guard)
        state = ZeroState(Stored(resident, files), first.guard)
        return jax.tree.unflatten(treedef, new), state

    def _first(
        self,
        grads: Sequence[jax.Array],
        resident: Sequence[jax.Array],
        params: Sequence[jax.Array],
        guard: Guard,
        finite: jax.Array,
        value: jax.Array,
    ) -> _First:
        update, count = self._update, len(params)
        kept = (count + j for j, held in enumerate(self.files.held) if not held)
        given = dict(enumerate(grads)) | dict(zip(kept, resident, strict=True))
        given |= dict(enumerate((*params, value), update.first_param))
        values = update.values(given)
        return _First(
            outputs=update.outputs(values, given, finite, apply=True),
            scalars={at: [finite, *update.scalars(at, values)] for at in update.recipes},
            wholes={at: update.wholes(at, values) for at in update.recipes},
            guard=next_guard(guard, finite, self.precision),
        )

    def _names(self, at: int) -> list[str]:
        """What the states of a leaf are called in the files."""
        return [f"state{j - len(self.files.cuts)}" for j in self._update.recipes[at].outputs[1:]]

    def _element(self, at: int) -> int:
        """Bytes that a piece has in host memory for each of its elements."""
        files = self.files
        # As read and as written; a master is only written.
        states = 2 * sum(files.dtype_of(name).itemsize for name in self._names(at))
        return states + (files.dtype_of(f"param{at}").itemsize if files.offload.params else 0)

    def _boxes(self, at: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The pieces of a leaf that have elements: (starts, stops)."""
        most = self.files.most(self._element(at), self._names(at)[0])
        found = boxes(self.files.cuts[at].device_shape, most)
        return [(a, b) for a, b in found if all(i < j for i, j in zip(a, b, strict=True))]

    def _start(
        self,
        at: int,
        starts: tuple[int, ...],
        stops: tuple[int, ...],
        param: jax.Array,
        grad: jax.Array,
        first: _First,
    ) -> tuple[jax.Array, _InFlight]:
        """Reads a piece and hands it to the devices: the parameter, and what is to be written."""
        files, names = self.files, self._names(at)
        size = tuple(b - a for a, b in zip(starts, stops, strict=True))
        held = math.prod(size) * self._element(at) * files.local_shards(names[0])
        files.count(held)
        read = [files.fetch(files.store.step, name, starts, stops) for name in names]
        param, made, master = self._pieces(at, size)(
            param, jnp.asarray(starts), first.scalars[at], read, grad, first.wholes[at]
        )
        written = dict(zip(names, made, strict=True))
        if files.offload.params:
            written[f"param{at}"] = master
        return param, _InFlight(starts, written, held)

    def _land(self, step: int, piece: _InFlight) -> None:
        for name, value in piece.written.items():
            self.files.put(step, name, piece.starts, value)
        self.files.count(-piece.bytes)

    def _piece_program(
        self, at: int, size: tuple[int, ...]
    ) -> Callable[..., tuple[jax.Array, list[jax.Array], jax.Array]]:
        """Updates a piece of one leaf, and its part of the parameter in place."""
        update, states = self._update, self._update.recipes[at].outputs[1:]
        spec, whole = self.files.cuts[at].spec_at_rest, PartitionSpec()

        def local(
            param: jax.Array,
            starts: jax.Array,
            scalars: list[jax.Array],
            read: list[jax.Array],
            grad: jax.Array,
            wholes: list[jax.Array],
        ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
            begin = [starts[i] for i in range(param.ndim)]

            def cut(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice(x, begin, size)

            finite, *others = scalars
            pieces = {at: cut(grad), update.first_param + at: cut(param)}
            pieces |= dict(zip(states, read, strict=True))
            made, new = update.on_piece(at, finite, pieces, [cut(w) for w in wholes], others)
            master = applied(pieces[update.first_param + at], made)
            return jax.lax.dynamic_update_slice(param, master, begin), new, master

        mapped = jax.shard_map(
            local,
            mesh=self.files.mesh,
            in_specs=(spec, whole, whole, spec, spec, spec),
            out_specs=(spec, spec, spec),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0)
