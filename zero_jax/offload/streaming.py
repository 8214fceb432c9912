"""Optimizer updates in pieces, for state in host memory, in files, or in 8 or 16 bits.

`PiecewiseUpdate` traces an update once, on full shapes, and sorts its operations:

  global     reads no streamed value: the norm of all gradients, a schedule, a step counter. Runs
             once, on full arrays.
  piecewise  is elementwise along one parameter: the moments, the update. Runs on pieces.

Another operation on streamed values (a norm of updates, a factored moment, a matrix product) raises
`CannotStream`. Updates are exact, because the same operations run on every element.

`update_in_pieces` runs it inside a jitted step. Each device updates its own shards in two lanes of
about equal bytes. A lane fetches a piece after it has stored the previous one, which an
`optimization_barrier` enforces; meanwhile the other lane computes or stores. A device holds two
pieces, whatever the size of the model, and the new codes of two leaves if narrow state is on the
device. XLA slices the donated host array and writes the slice back in place (seen in the program
for H100), so host memory holds nothing twice. Bytes per step: all state in host memory, once to
the device and once back. `nvme.py` runs the same update from files.

Source: ZeRO-Offload (arXiv:2101.06840), section 5.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zero_jax.collectives.norms import unless_skipped
from zero_jax.low_bit.codes import BLOCK, scales_shape
from zero_jax.low_bit.state import FP32, NarrowState
from zero_jax.low_bit.storage import Coding, blocks_span, on_devices, scales_split
from zero_jax.offload import tiers
from zero_jax.offload.tiers import is_on_host
from zero_jax.sharding import layout, paths
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.partition import Partition, Partitioner, mirrors, state_partitions
from zero_jax.sharding.paths import Frozen
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.jaxpr import (
    CALLS,
    Atom,
    as_function,
    is_var,
    new_jaxpr,
    on_piece,
    read,
    runs_on_pieces,
    shape_of,
    variables,
    written_out,
)
from zero_jax.tracing.sources import transformation_of

PyTree = Any
Update = Callable[..., tuple[PyTree, PyTree]]
Values = Mapping[jex.Var, jax.Array]
Operands = tuple[list[jax.Array], list[jax.Array]]  # arrays as stored, and scalars


class CannotStream(ValueError):
    """An update needs all elements of a value that is available in pieces only."""


class Partitioning(NamedTuple):
    """How parameters are partitioned.

    Attributes:
      splitter: Partitions a tree of full shapes.
      frozen: Parameters that are not trained, as for `Zero`.
      mesh: The mesh.
    """

    splitter: Partitioner
    frozen: Frozen
    mesh: AnyMesh


class Recipe(NamedTuple):
    """How the results of one parameter are computed from pieces.

    Attributes:
      inputs: Numbers of the inputs that are sliced.
      arrays: Variables of the parameter's shape that are computed first and sliced.
      scalars: Scalar variables that are computed first.
      outputs: Numbers of the outputs: the update, then the streamed states.
      eqns: Elementwise equations.
    """

    inputs: tuple[int, ...]
    arrays: tuple[jex.Var, ...]
    scalars: tuple[jex.Var, ...]
    outputs: tuple[int, ...]
    eqns: tuple[jex.JaxprEqn, ...]


class PiecewiseUpdate:
    """An update (gradients, state, parameters, ...) -> (updates, state) that runs in pieces.

    Inputs have numbers in tree order: gradients, states, parameters, others. So have outputs:
    updates, states. A state has the same number as an input and as an output.

    Args:
      update: The update of those trees.
      trees: Its arguments, abstract, of full shapes. Parameters may be None.
      streamed: For each state leaf, then for each parameter: True if it is available in pieces
        only. All states of a parameter are streamed if one of them is.
      partition: How parameters are partitioned.

    Attributes:
      splits: The partition of each parameter.
      of_state: The partition of each state leaf.
      streamed: As above, for state leaves.
      recipes: The recipe of each parameter that is updated in pieces, by number.
      first_param: The number of the first parameter among the inputs.

    Raises:
      CannotStream: An operation needs all elements of a streamed value.
    """

    def __init__(
        self,
        update: Update,
        trees: tuple[PyTree, ...],
        streamed: Sequence[bool],
        partition: Partitioning,
    ):
        like = trees[0] if trees[2] is None else trees[2]
        splitter, frozen, self.mesh = partition
        self.splits, self._frozen = splitter(like), paths.frozen_leaves(like, frozen)
        self.of_state = state_partitions(trees[1], like, self.splits)
        self._all_splits = [*self.splits, *self.of_state, *self.splits]
        owners, count = mirrors(self.of_state, self.splits), len(self.splits)
        self.first_param = count + len(owners)
        flags = list(zip(owners, streamed, strict=False))
        groups = {owner for owner, flag in flags if flag and owner is not None}
        self.streamed = [flag or owner in groups for owner, flag in flags]
        masters = streamed[len(owners) :]
        leaves, treedef = jax.tree.flatten(trees)

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(update(*jax.tree.unflatten(treedef, leaves)))

        self._traced = jax.make_jaxpr(flat)(*map(_abstract, leaves))
        body = written_out(self._traced, CALLS, branches=True)
        self._inputs, self._eqns = body.jaxpr.invars, body.jaxpr.eqns
        self._constants = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        self._outputs = [self._variable(atom) for atom in body.jaxpr.outvars]
        numbers = [*range(count), *owners, *range(len(masters))]
        self._owners = dict(zip(self._inputs, numbers, strict=False))
        pairs = zip(self._inputs[count:], [*self.streamed, *masters], strict=False)
        self._streamed = {var for var, flag in pairs if flag}
        self._culprit: int | None = None  # the first equation that needs more than pieces
        for number, eqn in enumerate(self._eqns):
            if not self._streamed.isdisjoint(variables([eqn])):
                self._streamed.update(eqn.outvars)
                on_pieces = (runs_on_pieces(eqn, shape_of(v)) for v in eqn.outvars)
                if self._culprit is None and not all(on_pieces):
                    self._culprit = number

        self.recipes: dict[int, Recipe] = {}
        for at, split in enumerate(self.splits):
            states = [j for j, owner in enumerate(owners) if owner == at and self.streamed[j]]
            if split.shape and not self._frozen[at] and (states or any(masters[at : at + 1])):
                self.recipes[at] = self._recipe(at, [at, *(count + j for j in states)], split.shape)
        in_recipes = {output for recipe in self.recipes.values() for output in recipe.outputs}
        self._not_streamed = [at for at in range(self.first_param) if at not in in_recipes]
        if not self._streamed.isdisjoint(self._outputs[at] for at in self._not_streamed):
            raise self._error("a value that is not part of one parameter")

    def _variable(self, atom: Atom) -> jex.Var:
        """Returns the variable of a result; a literal becomes a constant."""
        if is_var(atom):
            return atom
        var = jex.Var(atom.aval)
        self._constants[var] = read({}, atom)
        return var

    def _recipe(self, at: int, outputs: Sequence[int], shape: tuple[int, ...]) -> Recipe:
        """Returns the recipe for outputs of the shape of parameter `at`."""
        wanted, eqns = {self._outputs[i] for i in outputs}, list[jex.JaxprEqn]()
        for eqn in reversed(self._eqns):
            if not wanted.isdisjoint(eqn.outvars) and runs_on_pieces(eqn, shape):
                eqns.append(eqn)
                wanted.update(variables([eqn]))
        wanted -= {var for eqn in eqns for var in eqn.outvars}
        inputs, arrays, scalars = list[int](), list[jex.Var](), list[jex.Var]()
        results = (var for eqn in reversed(self._eqns) for var in eqn.outvars)
        for var in (*results, *self._inputs, *self._constants):
            if var not in wanted:
                continue
            if self._owners.get(var) == at and shape_of(var) == shape:
                inputs.append(self._inputs.index(var))
            elif var in self._streamed or shape_of(var) not in ((), shape):
                raise self._error(f"a value of shape {shape_of(var)}")
            else:
                (arrays if shape_of(var) == shape else scalars).append(var)
        parts = inputs, arrays, scalars, outputs, reversed(eqns)
        return Recipe(*map(tuple, parts))  # type: ignore[arg-type]

    def _error(self, reason: str) -> CannotStream:
        sources: list[jex.JaxprEqn] = []
        if self._culprit is not None:
            number, sources = self._culprit, [self._eqns[self._culprit]]
            reason = sources[0].primitive.name
            for eqn in self._traced.jaxpr.eqns:
                call = new_jaxpr(list({*variables([eqn])}), eqn.outvars, [eqn])
                body = written_out(jex.ClosedJaxpr(call, ()), CALLS, branches=True)
                number -= len(body.jaxpr.eqns)
                if number < 0:  # the call that it was inlined from
                    sources.append(eqn)
                    break
        return CannotStream(
            f"{transformation_of(sources) or 'the transformation'} cannot be updated in pieces, "
            f"because of {reason}: it needs all elements of a state. `offload`, and "
            "`optimizer_state_dtype` 8bit and bf16, support elementwise transformations, for "
            "example adamw, after transformations of gradients alone, such as "
            "clip_by_global_norm. Leave the setting out, or use another transformation"
        )

    def prepare(self, inputs: Mapping[int, jax.Array]) -> tuple[Values, dict[int, Operands]]:
        """Computes what precedes the pieces.

        Args:
          inputs: The inputs that are not streamed, as stored, by number.

        Returns:
          Values for `outputs`, and the operands of the pieces of each parameter.
        """
        known: dict[Atom, Any] = dict(self._constants)
        for at, x in inputs.items():
            is_stored = at < len(self._all_splits)
            known[self._inputs[at]] = _unpadded(x, self._all_splits[at]) if is_stored else x
        wanted = [self._outputs[at] for at in self._not_streamed]
        wanted += [var for r in self.recipes.values() for var in (*r.scalars, *r.arrays)]
        used = needed(self._eqns, wanted)
        eqns = [eqn for eqn in self._eqns if not used.isdisjoint(eqn.outvars)]
        program = jex.ClosedJaxpr(new_jaxpr(list(known), wanted, eqns), ())
        values = dict(zip(wanted, as_function(program)(*known.values()), strict=True))
        operands = {}
        for at, recipe in self.recipes.items():
            arrays = [_stored(values[var], self.splits[at], self.mesh) for var in recipe.arrays]
            operands[at] = arrays, [values[var] for var in recipe.scalars]
        return values, operands

    def outputs(
        self,
        values: Values,
        inputs: Mapping[int, jax.Array],
        finite: jax.Array | bool,
        *,
        apply: bool,
    ) -> dict[int, jax.Array]:
        """Returns the outputs that are not streamed, as stored, by number.

        With `apply` these are new parameters in place of updates, without frozen ones.
        """
        outputs, count = {}, len(self.splits)
        for at in self._not_streamed:
            if apply and at < count and self._frozen[at]:
                continue
            split = self._all_splits[at]
            old = None if at < count else _unpadded(inputs[at], split)
            new = unless_skipped(finite, values[self._outputs[at]], old)
            outputs[at] = _stored(new, split, self.mesh)
            if apply and at < count:
                outputs[at] = applied(inputs[self.first_param + at], outputs[at])
        return outputs

    def on_piece(
        self, at: int, finite: jax.Array, pieces: Mapping[int, jax.Array], operands: Operands
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """Returns the update and the new states, by number, of a piece of parameter `at`.

        Args:
          at: The number of the parameter.
          finite: False if the step is skipped.
          pieces: Pieces of the recipe's inputs and of its states, by number.
          operands: Pieces of the arrays from `prepare`, and the scalars.
        """
        recipe, shape = self.recipes[at], next(iter(pieces.values())).shape
        env: dict[Any, Any] = {self._inputs[i]: pieces[i] for i in recipe.inputs}
        for names, values in zip((recipe.arrays, recipe.scalars), operands, strict=True):
            env.update(zip(names, values, strict=True))
        for eqn in recipe.eqns:
            atoms = [read(env, atom) for atom in eqn.invars]
            env.update(zip(eqn.outvars, on_piece(eqn, atoms, shape), strict=True))
        new = {i: jnp.broadcast_to(read(env, self._outputs[i]), shape) for i in recipe.outputs}
        update = new.pop(at)
        for i, state in new.items():
            new[i] = unless_skipped(finite, state, pieces[i]).astype(pieces[i].dtype)
        return unless_skipped(finite, update), new

    def dtype_of(self, output: int) -> Any:
        """Returns the dtype of an output."""
        aval: Any = self._outputs[output].aval
        return aval.dtype


def traced_update(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    partition: Partitioning,
    *,
    params_streamed: bool,
    optimizer_state_dtype: str = FP32,
) -> PiecewiseUpdate:
    """Traces the update (gradients, state, parameters, loss) of a transformation.

    Args:
      tx: The transformation, on trained leaves only.
      params: Full parameters, abstract.
      partition: How parameters are partitioned.
      params_streamed: True if the fp32 master parameters are streamed too.
      optimizer_state_dtype: Dtype of the state. Below fp32, all state but scalars is streamed.

    Raises:
      CannotStream: It cannot be updated in pieces; the message has the part that fails.
    """
    leaves, treedef = jax.tree.flatten(params)
    state = jax.eval_shape(tx.init, params)
    streamed = tiers.offloaded(state, params, partition.splitter)
    if optimizer_state_dtype != FP32:
        streamed = [bool(x.shape) for x in jax.tree.leaves(state)]
    # The gradient of a frozen leaf is a scalar.
    pairs = zip(leaves, paths.frozen_leaves(params, partition.frozen), strict=True)
    grads = [jax.ShapeDtypeStruct((), x.dtype) if still else x for x, still in pairs]
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    return PiecewiseUpdate(
        lambda grads, state, params, loss: tx.update(grads, state, params, value=loss),
        (jax.tree.unflatten(treedef, grads), state, params, loss),
        [*streamed, *(params_streamed and bool(x.shape) for x in leaves)],
        partition,
    )


def applied(param: jax.Array, update: jax.Array) -> jax.Array:
    """Returns a parameter after its update, as `optax.apply_updates`."""
    return (param + update).astype(param.dtype)


def _unpadded(x: jax.Array, split: Partition) -> jax.Array:
    """Removes the padding of a stored array; the gradient of a frozen leaf is a scalar."""
    if split.dim is None or not split.padded or x.ndim == 0:
        return x
    return layout.strip_dim(x, split.dim, split.size)


def _stored(x: jax.Array, split: Partition, mesh: AnyMesh) -> jax.Array:
    """Pads and shards a full array, without a `Padded` around it."""
    (stored,) = jax.tree.leaves(layout.constrained([x], [split], mesh))
    return stored


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    # Types of newer JAX have a memory space, and nothing computes in host memory.
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# The update inside a jitted step.

LANES = 2
Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and stops
Arrays = list[jax.Array]  # a stored array, or the codes of a narrow state and their scales
Key = tuple[int, int]  # the number of an input, and the position among its arrays


def update_in_pieces(
    update: Update,
    trees: tuple[PyTree, PyTree, PyTree | None],
    partition: Partitioning,
    *,
    finite: jax.Array | bool,
    apply: bool,
    piece_bytes: int,
) -> tuple[PyTree, PyTree]:
    """Updates stored arrays in pieces, inside `jit`.

    Args:
      update: A function of full (gradients, state, parameters) to (updates, state).
      trees: Gradients, state or `NarrowState`, and parameters or None, as stored.
      partition: How parameters are partitioned.
      finite: False if the step is skipped.
      apply: Return new parameters, not updates.
      piece_bytes: Maximum bytes of one piece on a device.

    Returns:
      (updates or parameters, state), as stored.
    """
    grads, state, params = trees
    full = jax.tree.map(_abstract, jax.eval_shape(layout.unpad, trees))
    states, wide, codings = [[x] for x in jax.tree.leaves(state)], full[1], dict[int, Coding]()
    count, trained = jnp.asarray(0), len(jax.tree.leaves(grads))
    if isinstance(state, NarrowState):
        states, count = list(map(list, state.parts())), state.count
        kinds = enumerate(wide.codings(wide.inner), trained)
        codings = {i: kind for i, kind in kinds if kind is not None}
        wide = jax.eval_shape(NarrowState.wide, wide)
    single = [[[x] for x in jax.tree.leaves(tree)] for tree in (grads, params)]
    arrays: list[Arrays] = [*single[0], *states, *single[1]]
    streamed = [i in codings or is_on_host(x[0]) for i, x in enumerate(arrays)]
    given = full[0], wide, full[2]
    piecewise = PiecewiseUpdate(update, given, streamed[trained:], partition)
    inputs = {i: x[0] for i, x in enumerate(arrays) if not streamed[i]}
    values, operands = piecewise.prepare(inputs)
    always = [jnp.asarray(finite), count]
    leaves = [
        _StreamedLeaf(piecewise, at, arrays, codings, operands[at], always, apply=apply)
        for at in piecewise.recipes
    ]
    streams = _stream(leaves, partition.mesh, piece_bytes)
    outputs = piecewise.outputs(values, inputs, finite, apply=apply)
    new = {i: [x] for i, x in outputs.items()}
    for leaf, group in zip(leaves, streams, strict=True):
        for i in piecewise.recipes[leaf.at].outputs:
            source = leaf.target if i == leaf.at else i
            new[i] = [group[key] for key in ((source, 0), (source, 1)) if key in group]
    still = arrays[piecewise.first_param :]  # frozen parameters
    first = [new[at][0] if at in new else still[at][0] for at in range(trained)]
    made = jax.tree.unflatten(jax.tree.structure(params if apply else grads), first)
    states = [new[i] for i in range(trained, piecewise.first_param)]
    if isinstance(state, NarrowState):
        return made, state.with_parts(states, unless_skipped(finite, count + 1, count))
    return made, jax.tree.unflatten(jax.tree.structure(state), [x for (x,) in states])


class Blocks(NamedTuple):
    """The units of pieces: elements, or blocks along `dim` with their scales."""

    dim: int = 0
    length: int = 1
    scales: int = 1


class _StreamedLeaf:
    """One parameter and the arrays that are updated with it.

    Args:
      update: The update.
      at: The number of the parameter.
      inputs: The inputs of the update, as stored.
      codings: How narrow states are stored, by number.
      operands: Arrays that are sliced too, which get the numbers after the inputs, and scalars.
      always: Whether the step counts, and the number of earlier updates.
      apply: Compute the new parameter, not its update.
    """

    def __init__(
        self,
        update: PiecewiseUpdate,
        at: int,
        inputs: Sequence[Arrays],
        codings: Mapping[int, Coding],
        operands: Operands,
        always: Sequence[jax.Array],
        *,
        apply: bool,
    ):
        self.at, self.split, self._update, self._apply = at, update.splits[at], update, apply
        self.scalars = [*always, *operands[1]]
        self.target = update.first_param + at if apply else at
        recipe, count = update.recipes[at], len(inputs)
        numbers = sorted({at, *recipe.inputs, *recipe.outputs[1:], self.target})
        self.arrays = {(i, k): x for i in numbers for k, x in enumerate(inputs[i])}
        self.arrays |= {(i, 0): x for i, x in enumerate(operands[0], count)}
        self._operands = range(count, count + len(operands[0]))
        dtype = update.dtype_of(at)
        if not apply and inputs[at][0].dtype != dtype:
            self.target = self._operands.stop
            empty = jnp.zeros(self.split.shape, dtype)
            self.arrays[self.target, 0] = _stored(empty, self.split, update.mesh)
        self._codings = {i: on_devices(codings[i], self.split) for i in numbers if i in codings}
        self.on_host = {key for key, x in self.arrays.items() if is_on_host(x)}
        # Concatenated from its pieces at the end: XLA writes a piece in place where it computes it,
        # but codes are in memory before, and it would copy the whole array for each piece.
        self.joined = {key for key in self.arrays if key[0] in self._codings} - self.on_host
        specs = self.split.stored_spec, scales_split(self.split).stored_spec
        self.specs = {(i, k): specs[k] for i, k in self.arrays}
        # Of one element during the update.
        sizes = [x.dtype.itemsize for (_, k), x in self.arrays.items() if k == 0]
        self.bytes = sum(sizes) + 4 * len(self._codings)

    @property
    def blocks(self) -> Blocks:
        """The units of pieces; where blocks span devices, one is all that a device has."""
        dims = [x.block_dim for x in self._codings.values() if x.block_dim is not None]
        if not dims:
            return Blocks()
        if blocks_span(self.split):
            scales = scales_shape(self.split.shape)[dims[0]]
            return Blocks(dims[0], self.split.device_shape[dims[0]], scales)
        return Blocks(dims[0], BLOCK)

    def on_piece(
        self, pieces: Mapping[Key, jax.Array], scalars: Sequence[jax.Array], starts: Sequence[Any]
    ) -> dict[Key, jax.Array]:
        """Returns the new pieces of the arrays that change, in order.

        Args:
          pieces: Pieces of the arrays.
          scalars: The scalars.
          starts: Where the pieces begin in the global arrays.
        """
        finite, count, *others = scalars
        decoded = {i: x for (i, k), x in pieces.items() if k == 0}
        for i, coding in self._codings.items():
            parts = [pieces[key] for key in ((i, 0), (i, 1)) if key in pieces]
            decoded[i] = coding.decode(parts, starts)
        operands = [decoded[i] for i in self._operands], others
        update, states = self._update.on_piece(self.at, finite, decoded, operands)
        new = {(i, 0): state for i, state in states.items()}
        for i, coding in self._codings.items():
            for k, part in enumerate(coding.encode(states[i], starts, count)):
                new[i, k] = unless_skipped(finite, part, pieces[i, k])
        new[self.target, 0] = applied(decoded[self.target], update) if self._apply else update
        return dict(sorted(new.items()))


def _stream(
    leaves: Sequence[_StreamedLeaf], mesh: AnyMesh, piece_bytes: int
) -> list[dict[Key, jax.Array]]:
    """Updates leaves in pieces; returns the arrays of each, as stored."""
    if not leaves:
        return []
    specs = [leaf.specs for leaf in leaves]

    def local(
        arrays: list[dict[Key, jax.Array]], scalars: list[list[jax.Array]]
    ) -> list[dict[Key, jax.Array]]:
        for lane in lanes([sum(x.nbytes for x in group.values()) for group in arrays]):
            _run_lane(lane, leaves, arrays, scalars, piece_bytes)
        return arrays

    in_specs: Any = specs, PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
    return mapped([leaf.arrays for leaf in leaves], [leaf.scalars for leaf in leaves])


def _run_lane(
    lane: Sequence[int],
    leaves: Sequence[_StreamedLeaf],
    arrays: list[dict[Key, jax.Array]],
    scalars: list[list[jax.Array]],
    piece_bytes: int,
) -> None:
    before: int | None = None
    for at in lane:
        leaf, mine, dim = leaves[at], arrays[at], leaves[at].blocks.dim
        offsets = _offsets(leaf.split)
        most = max(1, piece_bytes // leaf.bytes)
        joined: dict[Key, list[tuple[tuple[int, ...], jax.Array]]] = {}
        for places in boxes_of_blocks(leaf.split.device_shape, most, leaf.blocks):
            if before is not None:
                _wait(arrays, before, at)
            before = at
            pieces = {
                key: _fetch(x, places[key[1]], key in leaf.on_host) for key, x in mine.items()
            }
            starts = [offset + a for offset, a in zip(offsets, places[0][0], strict=True)]
            codes: dict[Key, jax.Array] = {}
            for key, piece in leaf.on_piece(pieces, scalars[at], starts).items():
                piece, start = piece.astype(mine[key].dtype), places[key[1]][0]
                if key in leaf.joined:
                    codes[key] = piece
                else:
                    mine[key] = _store(mine[key], piece, start, key in leaf.on_host)
            if codes:  # complete before the next piece begins, like those that are stored
                held, codes = jax.lax.optimization_barrier((mine, codes))
                mine.update(held)
            for key, piece in codes.items():
                joined.setdefault(key, []).append((places[key[1]][0], piece))
        for key, rows in joined.items():
            mine[key] = _concatenated(rows, dim).reshape(mine[key].shape)


def lanes(sizes: Sequence[int]) -> list[list[int]]:
    """Assigns leaves to lanes, the largest first, each to the lane with the fewest bytes.

    >>> lanes([5, 4, 3, 2])
    [[0, 3], [1, 2]]
    """
    assigned: list[list[int]] = [[] for _ in range(LANES)]
    for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(assigned, key=lambda lane: sum(sizes[i] for i in lane)).append(at)
    return assigned


def boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Splits a shape into contiguous pieces of at most `most` elements: (starts, stops).

    >>> list(boxes((3, 4), 8))
    [((0, 0), (2, 4)), ((2, 0), (3, 4))]
    >>> len(list(boxes((3, 4), 2)))
    6
    """
    shape = tuple(shape)
    if math.prod(shape) <= most or not shape:
        yield (0,) * len(shape), shape
        return
    rows = max(1, most // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        for starts, stops in boxes(shape[1:], most):
            yield (start, *starts), (min(start + rows, shape[0]), *stops)


def boxes_of_blocks(shape: Sequence[int], most: int, blocks: Blocks) -> Iterator[tuple[Box, Box]]:
    """Splits a shape into pieces of full blocks: the box of elements and that of scales.

    >>> for box, scales in boxes_of_blocks((2, 5), 4, Blocks(1, 2)):
    ...     print(box, scales)
    ((0, 0), (1, 4)) ((0, 0), (1, 2))
    ((0, 4), (1, 5)) ((0, 2), (1, 3))
    ((1, 0), (2, 4)) ((1, 0), (2, 2))
    ((1, 4), (2, 5)) ((1, 2), (2, 3))
    """
    dim, length, scales = blocks

    def times(position: Sequence[int], factor: int) -> tuple[int, ...]:
        return tuple(n * factor if d == dim else n for d, n in enumerate(position))

    counted = [-(-n // length) if d == dim else n for d, n in enumerate(shape)]
    for starts, stops in boxes(counted, max(1, most // length)):
        last = tuple(map(min, times(stops, length), shape))
        yield (times(starts, length), last), (times(starts, scales), times(stops, scales))


def _concatenated(pieces: Sequence[tuple[tuple[int, ...], jax.Array]], dim: int) -> jax.Array:
    """Returns the flat array of (starts, piece); pieces of the same block along `dim` are joined
    first."""
    groups = itertools.groupby(pieces, lambda pair: pair[0][: dim + 1])
    rows = [[piece for _, piece in group] for _, group in groups]
    return jnp.concatenate(
        [
            jnp.concatenate([x.reshape(x.shape[dim], -1) for x in row], 1).ravel()
            if len(row) > 1
            else row[0].ravel()
            for row in rows
        ]
    )


def _offsets(split: Partition) -> list[Any]:
    """Returns where the device's shard begins along each dim; inside `shard_map`."""
    axes = [*split.stored_spec, *[None] * len(split.shape)]
    pairs = zip(axes, split.device_shape, strict=False)
    return [0 if axis is None else jax.lax.axis_index(axis) * n for axis, n in pairs]


def _wait(arrays: list[dict[Key, jax.Array]], before: int, at: int) -> None:
    """Orders later reads of leaf `at` after all stores to leaf `before`."""
    both = [before] if before == at else [before, at]
    tied = jax.lax.optimization_barrier([arrays[i] for i in both])
    for i, group in zip(both, tied, strict=True):
        arrays[i].update(group)


def _fetch(x: jax.Array, box: Box, on_host: bool) -> jax.Array:
    piece = jax.lax.slice(x, *box)
    return jax.device_put(piece, jax.memory.Space.Device) if on_host else piece


def _store(x: jax.Array, piece: jax.Array, starts: Sequence[int], on_host: bool) -> jax.Array:
    moved = jax.device_put(piece, jax.memory.Space.Host) if on_host else piece
    return jax.lax.dynamic_update_slice(x, moved, starts)
