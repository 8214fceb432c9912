"""The packaged step with its optimizer state in files: gradients in one program, then pieces.

The update of a piece is the very function that streams from host memory (piecewise.Recipe). The
host reads a piece, hands it to the devices and reads the next, while they compute; then it writes
the first to the other slot: two pieces are in flight. A step counts when all of it is on the disk.
"""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.collectives.precision import next_guard
from zero_jax.engine.optimizer import ZeroState, without_frozen
from zero_jax.engine.step import Metrics, TrainStep
from zero_jax.jaxpr.equations import Atom
from zero_jax.offload import streamable
from zero_jax.offload.host_update import applied, logical_of, rest_of
from zero_jax.offload.piece_stream import boxes
from zero_jax.offload.state_files import Files
from zero_jax.offload.state_in_files import Stored
from zero_jax.offload.update_recipes import Recipe
from zero_jax.sharding import paths

PyTree = Any


class NvmeStep(TrainStep):
    """A `TrainStep` whose optimizer state is in files. Made by `Zero.train_step`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._jitted: Any = self._from_files
        self._update: _Update | None = None

    def trace(self, *args: Any) -> Any:
        """Not to be had: the step is no single program."""
        raise ValueError(
            "with the nvme tier a step is many programs, driven by the host: plan it with "
            'offload="optimizer", whose bytes of host memory are what the files hold, twice'
        )

    def lower(self, *args: Any) -> Any:
        """Neither."""
        self.trace()

    def _from_files(
        self, params: PyTree, opt_state: ZeroState, batch: PyTree, *extras: Any
    ) -> tuple[PyTree, ZeroState, Metrics]:
        files = opt_state.inner.files
        if self._update is None or self._update.files is not files:
            self._update = _Update(self, files, self._tx.plain)
        scale = opt_state.guard.loss_scale
        out = self._gradients(params, scale, batch, extras)
        params, opt_state = self._update.run(params, opt_state, out)
        guard = opt_state.guard
        metrics = Metrics(
            loss=out.loss,
            grad_norm=out.grad_norm,
            weight=out.weight,
            skipped=guard.skipped,
            skipped_in_a_row=guard.consecutive,
            loss_scale=scale,
            aux=out.aux,
        )
        return params, opt_state, metrics


class _Update:
    """The update from files, for one layout of parameters."""

    def __init__(self, step: TrainStep, files: Files, plain: Any):
        settings = step.settings
        self.files, self.precision = files, settings.precision
        self.frozen = paths.frozen_leaves(files.full, settings.frozen)
        inner = without_frozen(plain, settings.frozen)
        leaves, treedef = jax.tree.flatten(files.full)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)  # the gradient of a frozen leaf
        grads = [scalar if f else x for x, f in zip(leaves, self.frozen, strict=True)]

        def update(grads: PyTree, state: PyTree, params: PyTree, value: Any) -> Any:
            return inner.update(grads, state, params, value=value)

        trees = (jax.tree.unflatten(treedef, grads), files.state, files.full, scalar)
        still = [False] * len(leaves)
        self.program = streamable.program(update, trees, files.owner, files.held, still)
        self.recipes = streamable.recipes(
            self.program, files.cuts, files.owner, files.held, self.frozen, still
        )
        self._prepare = jax.jit(self._global)
        self._pieces = functools.cache(self._piece_program)

    def run(self, params: PyTree, opt_state: ZeroState, out: Any) -> tuple[PyTree, ZeroState]:
        """One step: from the slot of the last one to the other."""
        files = self.files
        step = files.store.step
        old, treedef = jax.tree.flatten(params)
        grads = jax.tree.leaves(out.grads)
        finite, needed, others, resident, guard = self._prepare(
            *(grads, opt_state.inner.resident, old, opt_state.guard, out.finite, out.loss)
        )
        new = [others.get(at, leaf) for at, leaf in enumerate(old)]
        flying: collections.deque[Any] = collections.deque()
        for at, recipe in self.recipes.items():
            names = [f"state{j - len(old)}" for j in recipe.outputs[1:]]
            scalars, wholes = needed[at]
            # In host memory as read and as written; a master is only written.
            states = [files.state_leaves[int(name[5:])] for name in names]
            element = 2 * sum(x.dtype.itemsize for x in states)
            element += old[at].dtype.itemsize if files.offload.params else 0
            for starts, stops in boxes(files.cuts[at].device_shape, files.most(element, names[0])):
                size = tuple(b - a for a, b in zip(starts, stops, strict=True))
                if 0 in size:
                    continue
                held = math.prod(size) * element * files.local_shards(names[0])
                files.count(held)
                read = [files.fetch(step, name, starts, stops) for name in names]
                call = self._pieces(at, size)
                new[at], made, master = call(
                    new[at], jnp.asarray(starts), [finite, *scalars], read, grads[at], wholes
                )
                kept = [(f"param{at}", master)] if files.offload.params else []
                written = [*zip(names, made, strict=True), *kept]
                flying.append((starts, written, held))
                if len(flying) > 1:
                    self._land(step + 1, flying.popleft())
        while flying:
            self._land(step + 1, flying.popleft())
        files.write_rest(step + 1, new, resident, guard)
        return jax.tree.unflatten(treedef, new), ZeroState(Stored(resident, files), guard)

    def _land(self, step: int, piece: Any) -> None:
        starts, written, held = piece
        for name, value in written:
            self.files.put(step, name, starts, value)
        self.files.count(-held)

    def _global(
        self, grads: Any, resident: Any, params: Any, guard: Any, finite: Any, value: Any
    ) -> Any:
        """What is computed once a step, on the devices: see `piecewise`."""
        files, program = self.files, self.program
        count = len(params)
        kept = [j for j, held in enumerate(files.held) if not held]
        states = dict(zip(kept, resident, strict=True))
        given: dict[Atom, Any] = {}
        for at, slot in enumerate(program.inputs):
            if at < count:
                given[slot] = logical_of(grads[at], files.cuts[at])
            elif at - count in states:
                given[slot] = logical_of(states[at - count], files.state_cuts[at - count])
            elif 0 <= at - count - len(files.held) < count:
                k = at - count - len(files.held)
                given[slot] = logical_of(params[k], files.cuts[k])
            elif at - count - len(files.held) == count:
                given[slot] = value
        made = {o for r in self.recipes.values() for o in r.outputs}
        outputs = [o for o in range(len(program.outputs)) if o not in made]
        wanted = [program.outputs[o] for o in outputs]
        wanted += [s for r in self.recipes.values() for s in (*r.scalars, *r.wholes)]
        values = dict(zip(wanted, program.evaluate(wanted, given), strict=True))
        others, new = {}, []
        for o in outputs:
            result = values[program.outputs[o]]
            if o < count and not self.frozen[o]:
                update = jnp.where(finite, result, jnp.full_like(result, -0.0))
                others[o] = applied(params[o], rest_of(update, files.cuts[o], files.mesh))
            elif o >= count:
                cut = files.state_cuts[o - count]
                before = logical_of(states[o - count], cut)
                new.append(rest_of(jnp.where(finite, result, before), cut, files.mesh))
        needed = {
            at: (
                [values[s] for s in r.scalars],
                [rest_of(values[w], files.cuts[at], files.mesh) for w in r.wholes],
            )
            for at, r in self.recipes.items()
        }
        return finite, needed, others, new, next_guard(guard, finite, self.precision)

    def _piece_program(self, at: int, size: tuple[int, ...]) -> Any:
        """Updates a piece of one leaf, and its part of the parameter in place."""
        recipe, files = self.recipes[at], self.files
        count = len(files.cuts)
        spec, whole = files.cuts[at].spec_at_rest, PartitionSpec()

        def local(
            param: Any, starts: Any, scalars: Any, states: Any, grad: Any, wholes: Any
        ) -> Any:
            def cut(x: Any) -> Any:
                return jax.lax.dynamic_slice(x, [starts[i] for i in range(x.ndim)], size)

            named = {at: cut(grad), count + len(files.held) + at: cut(param)}
            named |= dict(zip(recipe.outputs[1:], states, strict=True))
            finite, *others = scalars
            update, *new = _results(recipe, size, named, [cut(w) for w in wholes], others)
            # -0.0 is the addend that changes no bit of any number, -0.0 included.
            update = jnp.where(finite, update, jnp.full_like(update, -0.0))
            pairs = zip(new, states, strict=True)
            new = [jnp.where(finite, n, o).astype(o.dtype) for n, o in pairs]
            master = applied(cut(param), update)
            begin = [starts[i] for i in range(param.ndim)]
            return jax.lax.dynamic_update_slice(param, master, begin), new, master

        mapped = jax.shard_map(
            local,
            mesh=files.mesh,
            in_specs=(spec, whole, whole, spec, spec, spec),
            out_specs=(spec, spec, spec),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0)


def _results(recipe: Recipe, size: Any, named: Any, wholes: Any, scalars: Any) -> list[Any]:
    return recipe.run(size, [named[i] for i in recipe.inputs], wholes, scalars)
