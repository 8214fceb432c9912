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
pieces, whatever the size of the model, and the new codes of two leaves if low-bit state is on the
device. XLA slices the donated host array and writes the slice back in place (seen in the program
for H100), so host memory holds nothing twice. Bytes per step: all state in host memory, once to
the device and once back. `nvme.py` runs the same update from files.

Source: ZeRO-Offload (arXiv:2101.06840), section 5.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zero_jax.collectives.norms import unless_skipped
from zero_jax.low_bit.state import FP32, LowBitState
from zero_jax.low_bit.storage import Box, Coding, blocks_of, boxes, on_devices, scales_split
from zero_jax.offload import tiers
from zero_jax.offload.tiers import is_on_host
from zero_jax.sharding import layout, paths
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.partition import (
    Partition,
    Partitioner,
    mirrors,
    state_partitions,
)
from zero_jax.sharding.paths import Frozen
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import Graph, needed
from zero_jax.tracing.interpreter import Resized
from zero_jax.tracing.jaxpr import CALLS, runs_on_pieces, shape_of
from zero_jax.tracing.sources import transformation_of

PyTree = Any
Update = Callable[..., tuple[PyTree, PyTree]]
Arrays = list[jax.Array]
Operands = tuple[Arrays, Arrays]  # arrays as stored, and scalars


class CannotStream(ValueError):
    """An update needs all elements of a value that is available in pieces only."""


class Partitioning(NamedTuple):
    """The partition of trees of full shapes, frozen parameters as for `Zero`, and the mesh."""

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
      program: Elementwise equations: (inputs, arrays, scalars) to outputs.
    """

    inputs: list[int]
    arrays: list[jex.Var]
    scalars: list[jex.Var]
    outputs: list[int]
    program: jex.ClosedJaxpr


class PiecewiseUpdate:
    """An update (gradients, state, parameters, ...) -> (updates, state) that runs in pieces.

    Inputs have numbers in tree order: gradients, states, parameters, others. So have outputs:
    updates, states. A state has the same number as an input and as an output.

    Args:
      update: The update of those trees.
      trees: Its arguments, abstract, of full shapes. Parameters may be None.
      streamed: For each state leaf, then for each parameter: True if it is available in pieces
        only. All states of a parameter are streamed if one of them is.
      partitioning: How parameters are partitioned.

    Attributes:
      splits: The partition of each parameter.
      of_state: The partition of each state leaf.
      streamed: As above, for state leaves.
      recipes: The recipe of each parameter that is updated in pieces, by number.
      first_param: The number of the first parameter among the inputs.
      dtypes: The dtype of each output.

    Raises:
      CannotStream: An operation needs all elements of a streamed value.
    """

    def __init__(
        self,
        update: Update,
        trees: tuple[PyTree, ...],
        streamed: Sequence[bool],
        partitioning: Partitioning,
    ):
        like = trees[0] if trees[2] is None else trees[2]
        splitter, frozen, self.mesh = partitioning
        self.splits, self._frozen = splitter(like), paths.frozen_leaves(like, frozen)
        self.of_state = state_partitions(trees[1], like, self.splits)
        owners, count = mirrors(self.of_state, self.splits), len(self.splits)
        self.first_param = count + len(owners)
        flags = list(zip(owners, streamed, strict=False))
        groups = {owner for owner, flag in flags if flag and owner is not None}
        self.streamed = [flag or owner in groups for owner, flag in flags]
        masters = streamed[len(owners) :]
        leaves, treedef = jax.tree.flatten(trees)
        self._all_splits = [*self.splits, *self.of_state, *self.splits]

        def flat(*leaves: jax.Array) -> Arrays:
            return jax.tree.leaves(update(*jax.tree.unflatten(treedef, leaves)))

        self._traced = jax.make_jaxpr(flat)(*map(_abstract, leaves))
        program = jaxprs.written_out(self._traced, CALLS, branches=True)
        self._graph, self._inputs = Graph(program.jaxpr), program.jaxpr.invars
        self._constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        self._outputs = program.jaxpr.outvars
        self.dtypes = list(map(jaxprs.dtype_of, self._outputs))
        self._owners = [*range(count), *owners, *range(len(masters))]
        pairs = zip(self._inputs[count:], [*self.streamed, *masters], strict=False)
        given = {var for var, flag in pairs if flag}
        reads = self._graph.where(lambda eqn: not given.isdisjoint(jaxprs.variables([eqn])))
        self._behind = self._graph.after(reads)  # equations with streamed operands
        self._streamed = given.union(self._graph.made(self._behind))

        self.recipes: dict[int, Recipe] = {}
        for at, cut in enumerate(self.splits):
            states = [j for j, owner in enumerate(owners) if owner == at and self.streamed[j]]
            if cut.shape and not self._frozen[at] and (states or any(masters[at : at + 1])):
                self.recipes[at] = self._recipe(at, [at, *(count + j for j in states)])
        in_recipes = {output for recipe in self.recipes.values() for output in recipe.outputs}
        self._not_streamed = [at for at in range(self.first_param) if at not in in_recipes]
        if any(jaxprs.is_in(self._outputs[at], self._streamed) for at in self._not_streamed):
            raise self._error("a value that is not part of one parameter")

    def _recipe(self, at: int, outputs: list[int]) -> Recipe:
        """Returns the recipe for outputs of the shape of parameter `at`."""
        graph, shape = self._graph, self.splits[at].shape
        results = [self._outputs[i] for i in outputs]

        def rule(eqn: jex.JaxprEqn, used: list[bool]) -> list[bool]:
            return [any(used) and runs_on_pieces(eqn, shape)] * len(eqn.invars)

        wanted = needed(graph.eqns, results, rule)
        part = graph.where(lambda e: not wanted.isdisjoint(e.outvars) and runs_on_pieces(e, shape))
        wanted.difference_update(graph.made(part))
        sliced = zip(self._inputs, self._owners, strict=False)
        inputs = [i for i, (var, owner) in enumerate(sliced) if owner == at and var in wanted]
        wanted.difference_update(self._inputs[i] for i in inputs)
        arrays, scalars = list[jex.Var](), list[jex.Var]()
        for var in (*reversed(graph.made_by), *self._inputs, *self._constants):
            if var not in wanted:
                continue
            if var in self._streamed or shape_of(var) not in ((), shape):
                raise self._error(f"a value of shape {shape_of(var)}")
            (arrays if shape_of(var) == shape else scalars).append(var)
        read = [*(self._inputs[i] for i in inputs), *arrays, *scalars]
        program = jaxprs.stretch(graph.part(part), results, read)
        return Recipe(inputs, arrays, scalars, outputs, program)

    def _error(self, reason: str) -> CannotStream:
        sources: list[jex.JaxprEqn] = []
        for at in self._behind:
            eqn = self._graph.eqns[at]
            if not all(runs_on_pieces(eqn, shape_of(var)) for var in eqn.outvars):
                call = jaxprs.inlined_from(self._traced, at, CALLS, branches=True)
                reason, sources = eqn.primitive.name, [eqn, call]
                break
        return CannotStream(
            f"{transformation_of(sources) or 'the transformation'} cannot be updated in pieces, "
            f"because of {reason}: it needs all elements of a state. `offload`, and "
            "`optimizer_state_dtype` 8bit and bf16, support elementwise transformations, for "
            "example adamw, after transformations of gradients alone, such as "
            "clip_by_global_norm. Leave the setting out, or use another transformation"
        )

    def prepare(
        self, inputs: Mapping[int, jax.Array]
    ) -> tuple[dict[int, jax.Array], dict[int, Operands]]:
        """Computes what precedes the pieces.

        Args:
          inputs: The inputs that are not streamed, as stored, by number.

        Returns:
          Values for `outputs`, and the operands of the pieces of each parameter.
        """
        known = dict(self._constants)
        for at, x in inputs.items():
            is_stored = at < len(self._all_splits)
            known[self._inputs[at]] = _unpadded(x, self._all_splits[at]) if is_stored else x
        wanted = [self._outputs[at] for at in self._not_streamed]
        wanted += [var for r in self.recipes.values() for var in (*r.scalars, *r.arrays)]
        used = needed(self._graph.eqns, wanted)
        part = self._graph.where(lambda eqn: not used.isdisjoint(eqn.outvars))
        program = jaxprs.stretch(self._graph.part(part), wanted, list(known))
        results = iter(jaxprs.as_function(program)(*known.values()))
        values = {at: next(results) for at in self._not_streamed}
        operands = {}
        for at, recipe in self.recipes.items():
            scalars = [next(results) for _ in recipe.scalars]
            arrays = [_stored(next(results), self.splits[at], self.mesh) for _ in recipe.arrays]
            operands[at] = arrays, scalars
        return values, operands

    def outputs(
        self,
        values: Mapping[int, jax.Array],
        inputs: Mapping[int, jax.Array],
        finite: jax.Array | bool,
        *,
        apply: bool,
    ) -> dict[int, jax.Array]:
        """Returns the outputs that are not streamed, as stored, by number.

        With `apply` these are new parameters in place of updates, without frozen ones.
        """
        outputs, count = {}, len(self.splits)
        for at, value in values.items():
            if apply and at < count and self._frozen[at]:
                continue
            cut = self._all_splits[at]
            old = None if at < count else _unpadded(inputs[at], cut)
            outputs[at] = _stored(unless_skipped(finite, value, old), cut, self.mesh)
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
        recipe, (arrays, scalars) = self.recipes[at], operands
        values = [*(pieces[i] for i in recipe.inputs), *arrays, *scalars]
        shape = next(iter(pieces.values())).shape
        update, *states = Resized(shape).run(recipe.program, values)
        new = {
            i: unless_skipped(finite, state, pieces[i]).astype(pieces[i].dtype)
            for i, state in zip(recipe.outputs[1:], states, strict=True)
        }
        return unless_skipped(finite, update), new


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


def _unpadded(x: jax.Array, cut: Partition) -> jax.Array:
    """Removes the padding of a stored array; the gradient of a frozen leaf is a scalar."""
    if cut.dim is None or not cut.padded or x.ndim == 0:
        return x
    return layout.strip_dim(x, cut.dim, cut.size)


def _stored(x: jax.Array, cut: Partition, mesh: AnyMesh) -> jax.Array:
    """Pads and shards a full array, without a `Padded` around it."""
    (stored,) = jax.tree.leaves(layout.constrained([x], [cut], mesh))
    return stored


def _abstract(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # Types of newer JAX have a memory space, and nothing computes in host memory.
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# The update inside a jitted step.

LANES = 2
Key = tuple[int, int]  # the number of an input, and the position among its arrays
Group = dict[Key, jax.Array]


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
      trees: Gradients, state or `LowBitState`, and parameters or None, as stored.
      partition: How parameters are partitioned.
      finite: False if the step is skipped.
      apply: Return new parameters, not updates.
      piece_bytes: Maximum bytes of one piece on a device.

    Returns:
      (updates or parameters, state), as stored.
    """
    grads, state, params = trees
    full = jax.tree.map(_abstract, jax.eval_shape(layout.unpad, trees))
    # The arrays of each input: one, or the codes of low-bit state and their scales.
    states, in_fp32, codings = [[x] for x in jax.tree.leaves(state)], full[1], dict[int, Coding]()
    count, trained = jnp.asarray(0), len(jax.tree.leaves(grads))
    if isinstance(state, LowBitState):
        states, count = state.parts(), state.count
        numbered = enumerate(in_fp32.codings(in_fp32.inner), trained)
        codings = {i: coding for i, coding in numbered if coding is not None}
        in_fp32 = jax.eval_shape(LowBitState.in_fp32, in_fp32)
    first, last = ([[x] for x in jax.tree.leaves(tree)] for tree in (grads, params))
    arrays: list[Arrays] = [*first, *states, *last]
    streamed = [i in codings or is_on_host(x[0]) for i, x in enumerate(arrays)]
    given = full[0], in_fp32, full[2]
    piecewise = PiecewiseUpdate(update, given, streamed[trained:], partition)
    inputs = {i: x[0] for i, x in enumerate(arrays) if not streamed[i]}
    values, operands = piecewise.prepare(inputs)
    always = [jnp.asarray(finite), count]
    leaves = [
        _StreamedLeaf(piecewise, at, arrays, codings, operands[at], always, apply=apply)
        for at in piecewise.recipes
    ]
    groups = _stream(leaves, partition.mesh, piece_bytes)
    outputs = piecewise.outputs(values, inputs, finite, apply=apply)
    new = dict(enumerate(last))  # frozen parameters stay
    new |= {i: [x] for i, x in outputs.items()}
    for leaf, group in zip(leaves, groups, strict=True):
        for i in piecewise.recipes[leaf.at].outputs:
            source = leaf.target if i == leaf.at else i
            new[i] = [group[key] for key in ((source, 0), (source, 1)) if key in group]
    made = [new[i][0] for i in range(trained)]
    result = jax.tree.unflatten(jax.tree.structure(params if apply else grads), made)
    states = [new[i] for i in range(trained, piecewise.first_param)]
    if isinstance(state, LowBitState):
        return result, state.with_parts(states, unless_skipped(finite, count + 1, count))
    return result, jax.tree.unflatten(jax.tree.structure(state), [x for (x,) in states])


class _StreamedLeaf:
    """One parameter and the arrays that are updated with it.

    Args:
      update: The update.
      at: The number of the parameter.
      inputs: The arrays of each input of the update, as stored.
      codings: How low-bit states are stored, by number.
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
        always: Arrays,
        *,
        apply: bool,
    ):
        self.at, self.split, self._update, self._apply = at, update.splits[at], update, apply
        self.scalars = [*always, *operands[1]]
        self.target = update.first_param + at if apply else at
        recipe, count = update.recipes[at], len(inputs)
        numbers = sorted({at, *recipe.inputs, *recipe.outputs[1:], self.target})
        self.arrays: Group = {(i, k): x for i in numbers for k, x in enumerate(inputs[i])}
        self.arrays |= {(i, 0): x for i, x in enumerate(operands[0], count)}
        self._operands = range(count, count + len(operands[0]))
        if not apply and inputs[at][0].dtype != update.dtypes[at]:
            self.target = self._operands.stop
            empty = jnp.zeros(self.split.shape, update.dtypes[at])
            self.arrays[self.target, 0] = _stored(empty, self.split, update.mesh)
        self._codings = {i: on_devices(codings[i], self.split) for i in numbers if i in codings}
        self._blocks = blocks_of(list(self._codings.values()), self.split)
        self._on_host = {key for key, x in self.arrays.items() if is_on_host(x)}
        # Concatenated from its pieces at the end: XLA writes a piece in place where it computes it,
        # but codes are in memory before, and it would copy the whole array for each piece.
        self._joined = {key for key in self.arrays if key[0] in self._codings} - self._on_host
        specs = self.split.stored_spec, scales_split(self.split).stored_spec
        self.specs = {(i, k): specs[k] for i, k in self.arrays}
        # Of one element during the update.
        sizes = [x.dtype.itemsize for (_, k), x in self.arrays.items() if k == 0]
        self.bytes = sum(sizes) + 4 * len(self._codings)

    def run(
        self, arrays: list[Group], at: int, before: int | None, scalars: Arrays, piece_bytes: int
    ) -> None:
        """Updates the leaf's arrays, `arrays[at]`, on a device, after those of leaf `before`."""
        mine, offsets = arrays[at], _offsets(self.split)
        most = max(1, piece_bytes // self.bytes)
        joined: dict[Key, list[tuple[tuple[int, ...], jax.Array]]] = {}
        for places in boxes(self.split.device_shape, most, self._blocks):
            if before is not None:
                _wait(arrays, before, at)
            before = at
            pieces = {key: self._fetch(key, x, places[key[1]]) for key, x in mine.items()}
            starts = [offset + a for offset, a in zip(offsets, places[0][0], strict=True)]
            codes: Group = {}
            for key, piece in self._on_piece(pieces, scalars, starts).items():
                piece, start = piece.astype(mine[key].dtype), places[key[1]][0]
                if key in self._joined:
                    codes[key] = piece
                else:
                    mine[key] = self._store(key, mine[key], piece, start)
            if codes:  # complete before the next piece begins, like those that are stored
                held, codes = jax.lax.optimization_barrier((mine, codes))
                mine.update(held)
            for key, piece in codes.items():
                joined.setdefault(key, []).append((places[key[1]][0], piece))
        for key, rows in joined.items():
            mine[key] = _concatenated(rows, self._blocks.dim).reshape(mine[key].shape)

    def _fetch(self, key: Key, x: jax.Array, box: Box) -> jax.Array:
        piece = jax.lax.slice(x, *box)
        return jax.device_put(piece, jax.memory.Space.Device) if key in self._on_host else piece

    def _store(self, key: Key, x: jax.Array, piece: jax.Array, start: tuple[int, ...]) -> jax.Array:
        moved = jax.device_put(piece, jax.memory.Space.Host) if key in self._on_host else piece
        return jax.lax.dynamic_update_slice(x, moved, start)

    def _on_piece(self, pieces: Group, scalars: Arrays, starts: Sequence[int | jax.Array]) -> Group:
        """Returns the new pieces of the arrays that change, in order, given where they begin."""
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


def _stream(leaves: Sequence[_StreamedLeaf], mesh: AnyMesh, piece_bytes: int) -> list[Group]:
    """Updates leaves in pieces; returns the arrays of each, as stored."""
    if not leaves:
        return []
    specs = [leaf.specs for leaf in leaves]

    def local(arrays: list[Group], scalars: list[Arrays]) -> list[Group]:
        for lane in lanes([sum(x.nbytes for x in group.values()) for group in arrays]):
            for before, at in zip([None, *lane], lane, strict=False):
                leaves[at].run(arrays, at, before, scalars[at], piece_bytes)
        return arrays

    in_specs: Any = specs, PartitionSpec()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
    return mapped([leaf.arrays for leaf in leaves], [leaf.scalars for leaf in leaves])


def lanes(sizes: Sequence[int]) -> list[list[int]]:
    """Assigns leaves to lanes, the largest first, each to the lane with the fewest bytes.

    >>> lanes([5, 4, 3, 2])
    [[0, 3], [1, 2]]
    """
    assigned: list[list[int]] = [[] for _ in range(LANES)]
    for at in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(assigned, key=lambda lane: sum(sizes[i] for i in lane)).append(at)
    return assigned


def _concatenated(pieces: Sequence[tuple[tuple[int, ...], jax.Array]], dim: int) -> jax.Array:
    """Returns the flat array of (starts, piece); pieces of the same block along `dim` are joined
    first."""
    rows = []
    for _, group in itertools.groupby(pieces, lambda pair: pair[0][: dim + 1]):
        first, *others = [piece for _, piece in group]
        if others:
            parts = [x.reshape(x.shape[dim], -1) for x in (first, *others)]
            first = jnp.concatenate(parts, 1)
        rows.append(first.ravel())
    return jnp.concatenate(rows)


def _offsets(cut: Partition) -> list[int | jax.Array]:
    """Returns where the device's shard begins along each dim; inside `shard_map`."""
    axes = [*cut.stored_spec, *[None] * len(cut.shape)]
    pairs = zip(axes, cut.device_shape, strict=False)
    return [0 if axis is None else jax.lax.axis_index(axis) * n for axis, n in pairs]


def _wait(arrays: list[Group], before: int, at: int) -> None:
    """Orders later reads of leaf `at` after all stores to leaf `before`."""
    both = [before] if before == at else [before, at]
    tied = jax.lax.optimization_barrier([arrays[i] for i in both])
    for i, group in zip(both, tied, strict=True):
        arrays[i].update(group)
