"""Offload settings, states in host memory, and optimizer updates in pieces.

`Zero(mesh, offload="optimizer,params")` moves the optimizer state, 8Ψ/N bytes per device for Adam,
and fp32 master parameters, 4Ψ/N bytes, to JAX's `pinned_host` memory, which devices read and write
directly. The tier `nvme=DIR` uses memory-mapped files (nvme.py).

`PiecewiseUpdate` traces an update once, on full shapes. Operations that read no streamed value (the
norm of all gradients, a schedule, a step counter) run once, on full arrays. Operations that are
elementwise along one parameter (moments, the update) run on pieces. Any other one on streamed
values (a norm of updates, a factored moment, a matrix product) raises `CannotStream`. Updates are
exact, because the same operations run on every element.

`update_in_pieces` runs it inside a jitted step, for state in host memory or in 8 or 16 bits. Each
device updates its own shards in two lanes of about equal bytes. A lane fetches a piece after it has
stored the previous one, which an `optimization_barrier` enforces; meanwhile the other lane computes
or stores. A device holds two pieces, whatever the size of the model, and the new codes of two
leaves if low-bit state is on the device. XLA slices the donated host array and writes the slice
back in place (seen in the program for H100), so host memory holds nothing twice. Bytes per step:
all state in host memory, once to the device and once back.

Sources: ZeRO, section 9; ZeRO-Offload (arXiv:2101.06840), section 5.
"""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from zero_jax.collectives.precision import unless_skipped
from zero_jax.low_bit.state import FP32, LowBitState
from zero_jax.low_bit.storage import Coding, boxes, on_devices, scales_split
from zero_jax.sharding import layout, paths
from zero_jax.sharding.layout import Partition, Partitioner, mirrors, state_partitions
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.paths import Frozen, Padded, PyTree
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.evaluator import Resized
from zero_jax.tracing.graph import Graph
from zero_jax.tracing.jaxpr import CALLS, runs_on_pieces, shape_of
from zero_jax.tracing.sources import transformation_of

HOST = "pinned_host"
STATES = ("optimizer", "params", "activations")
GRAMMAR = "optimizer,params,activations[:host|nvme=DIR|auto]"
_SETTING = re.compile(
    r"((?:{0})(?:\s*,\s*(?:{0}))*)(?::(?:(host|auto)|nvme=(.+)))?".format("|".join(STATES))
)
PIECE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Offload:
    """States stored outside device memory.

    Attributes:
      optimizer: Offload the optimizer state.
      params: Also offload the fp32 master parameters.
      activations: Offload saved activations; `Zero` applies it through its remat policy.
      tier: "host" or "nvme".
      directory: Directory of the nvme tier.
      auto: Keep the states on the device, with a warning, if it has no host memory kind.
      piece_bytes: Maximum bytes of state, update and master parameters in one piece of the update.
        Two pieces are on the device at once.
      host_bytes: Maximum bytes of pieces in host memory per process of the nvme tier. None derives
        it from `piece_bytes`.

    Raises:
      ValueError: `piece_bytes` is below 4 KiB, `host_bytes` is below 16 KiB, or `params` is set
        without `optimizer`.
    """

    optimizer: bool = False
    params: bool = False
    activations: bool = False
    tier: str = "host"
    directory: str | None = None
    auto: bool = False
    piece_bytes: int = PIECE_BYTES
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.piece_bytes, int) or self.piece_bytes < 4096:
            raise ValueError(
                f"`piece_bytes`={self.piece_bytes!r}: at least 4096 bytes are required. The "
                f"default is {PIECE_BYTES} (64 MiB)"
            )
        if self.host_bytes is not None and self.host_bytes < 1 << 14:
            raise ValueError(f"`host_bytes`={self.host_bytes!r}: at least 16384 bytes are required")
        if self.params and not self.optimizer:
            raise ValueError(
                '`offload`="params": only the update uses fp32 master parameters, so the '
                'optimizer state must be offloaded too. Use offload="optimizer,params"'
            )

    @property
    def streams(self) -> bool:
        """True if states in host memory are streamed through the device in the step."""
        return self.optimizer and self.tier == "host"

    @property
    def in_files(self) -> bool:
        """True if states are stored in files and updated by the host."""
        return self.optimizer and self.tier == "nvme"

    @property
    def streams_params(self) -> bool:
        """True if fp32 master parameters are also streamed from host memory."""
        return self.params and self.tier == "host"

    def __str__(self) -> str:
        words = [word for word in STATES if getattr(self, word)]
        place = {"nvme": f":nvme={self.directory}"}.get(self.tier, ":auto" if self.auto else "")
        return ",".join(words) + place if words else "none"


NONE = Offload()


def parse(given: "str | Offload | None") -> Offload:
    """Parses the setting: an `Offload`, None, or names as on the command line.

    >>> parse("optimizer,params").params, parse("optimizer:nvme=/scratch").directory
    (True, '/scratch')
    """
    if isinstance(given, Offload):
        return given
    if given is None or given == "none":
        return NONE
    match = _SETTING.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None:
        raise ValueError(
            f'`offload`={given!r}: write {GRAMMAR}. For example, offload="optimizer" keeps the '
            "optimizer state in host memory"
        )
    states, tier, directory = match.groups()
    return Offload(
        **dict.fromkeys(re.split(r"\s*,\s*", states), True),
        tier="nvme" if directory else "host",
        directory=directory,
        auto=tier == "auto",
    )


def settle(offload: Offload, mesh: AnyMesh) -> Offload:
    """Returns the offload that the devices of a mesh support; warns if "auto" disables it."""
    if not offload.streams or isinstance(mesh, AbstractMesh):
        return offload
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST in kinds:
        return offload
    lacks = f'`offload`="{offload}": {device.device_kind} has no {HOST} memory in this JAX (it has '
    lacks += f"{', '.join(kinds)})"
    if not offload.auto:
        raise ValueError(
            f'{lacks}. Leave `offload` out, or use offload="{offload}:auto" to offload only where '
            "it is supported"
        )
    warnings.warn(f"{lacks}, so the state stays on the device", stacklevel=4)
    return dataclasses.replace(offload, optimizer=False, params=False)


def place(placed: PyTree, leaves: PyTree, offload: Offload) -> PyTree:
    """Returns shardings of master parameters: in host memory if offloaded, from rank 1 on."""
    shapes = (x.shape for x in jax.tree.leaves(leaves))
    return place_state(placed, [offload.streams_params and bool(shape) for shape in shapes])


def offloaded(state: PyTree, params: PyTree, splitter: Partitioner) -> list[bool]:
    """Returns True for each state leaf that is offloaded: it mirrors a parameter with a dim."""
    splits = splitter(params)
    of_state = state_partitions(state, params, splits)
    owners = mirrors(of_state, splits)
    return [o is not None and bool(x.shape) for x, o in zip(of_state, owners, strict=True)]


def place_state(placed: PyTree, offloaded: Sequence[bool]) -> PyTree:
    """Returns shardings: in host memory for the leaves that are offloaded."""
    flags = jax.tree.unflatten(jax.tree.structure(placed), offloaded)
    return jax.tree.map(lambda s, flag: s.with_memory_kind(HOST) if flag else s, placed, flags)


def is_on_host(leaf: Any) -> bool:
    """Returns True for an array, a traced value or a ShapeDtypeStruct in host memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    if kind is None and isinstance(leaf, jax.core.Tracer):
        return bool(jax.typeof(leaf).memory_space == jax.memory.Space.Host)
    return kind == HOST


def to_device(tree: PyTree) -> PyTree:
    """Moves leaves from host memory to the device; for use inside `jit`."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


# The update in pieces.

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
    """How the results of one parameter are computed from pieces."""

    inputs: list[int]  # numbers of those that are sliced
    arrays: list[jex.Var]  # of the parameter's shape: computed first, then sliced
    scalars: list[jex.Var]  # computed first
    outputs: list[int]  # numbers of the update, then of the streamed states
    program: jex.ClosedJaxpr  # elementwise, of (inputs, arrays, scalars)


class PiecewiseUpdate:
    """An update (gradients, state, parameters, ...) -> (updates, state) that runs in pieces.

    Inputs have numbers in tree order: gradients, states, parameters, others. So have outputs:
    updates, states. A state has the same number as an input and as an output.

    Args:
      update: The update; CannotStream is raised if it needs all elements of a streamed value.
      trees: Its arguments, abstract, of full shapes. Parameters may be None.
      streamed: For each state leaf, then for each parameter: True if it is available in pieces
        only. All states of a parameter are streamed if one of them is.
      partitioning: How parameters are partitioned.

    Attributes:
      splits: The partition of each parameter.
      of_state: The partition of each state leaf.
      streamed: The numbers of streamed inputs.
      recipes: The recipe of each parameter that is updated in pieces, by number.
      first_param: The number of the first parameter among the inputs.
      dtypes: The dtype of each output.
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
        full = [Partition((), None, 1)] * len(jax.tree.leaves(trees[3:]))  # such as the loss
        self._all_splits = [*self.splits, *self.of_state, *self.splits, *full]
        self._owners = mirrors(self._all_splits, self.splits)
        count, self.first_param = len(self.splits), len(self.splits) + len(self.of_state)
        states = range(count, self.first_param)
        self.streamed = {i for i, flag in enumerate(streamed, count) if flag}
        groups = {self._owners[i] for i in self.streamed.intersection(states)} - {None}
        self.streamed.update(i for i in states if self._owners[i] in groups)
        leaves, treedef = jax.tree.flatten(trees)

        def flat(*leaves: jax.Array) -> Arrays:
            return jax.tree.leaves(update(*jax.tree.unflatten(treedef, leaves)))

        self._traced = jax.make_jaxpr(flat)(*map(_abstract, leaves))
        program = jaxprs.written_out(self._traced, CALLS, branches=True)
        self._graph, self._inputs = Graph(program.jaxpr), program.jaxpr.invars
        self._constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        self._outputs = program.jaxpr.outvars
        self.dtypes = list(map(jaxprs.dtype_of, self._outputs))
        given = {self._inputs[i] for i in self.streamed}
        reads = self._graph.where(lambda eqn: not given.isdisjoint(jaxprs.variables([eqn])))
        self._behind = self._graph.after(reads)  # equations with streamed operands
        self._in_pieces = given.union(self._graph.made(self._behind))

        self.recipes: dict[int, Recipe] = {}
        for at, cut in enumerate(self.splits):
            mine = [i for i in states if self._owners[i] == at and i in self.streamed]
            has_any = mine or self.first_param + at in self.streamed
            if has_any and cut.shape and not self._frozen[at]:
                self.recipes[at] = self._recipe(at, [at, *mine])
        in_recipes = {output for recipe in self.recipes.values() for output in recipe.outputs}
        self._at_once = [at for at in range(self.first_param) if at not in in_recipes]
        if any(jaxprs.is_in(self._outputs[at], self._in_pieces) for at in self._at_once):
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
        owned = enumerate(zip(self._owners, self._inputs, strict=False))
        inputs = [i for i, (owner, var) in owned if owner == at and var in wanted]
        wanted.difference_update(self._inputs[i] for i in inputs)
        arrays, scalars = list[jex.Var](), list[jex.Var]()
        for var in (*reversed(graph.made_by), *self._inputs, *self._constants):
            if var not in wanted:
                continue
            if var in self._in_pieces or shape_of(var) not in ((), shape):
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
        """Returns values for `outputs`, and operands of each parameter; inputs are as stored."""
        known = dict(self._constants)
        for at, x in inputs.items():
            known[self._inputs[at]] = layout.unpad(as_stored(x, self._all_splits[at]))
        wanted = [self._outputs[at] for at in self._at_once]
        wanted += [var for r in self.recipes.values() for var in (*r.scalars, *r.arrays)]
        used = needed(self._graph.eqns, wanted)
        part = self._graph.where(lambda eqn: not used.isdisjoint(eqn.outvars))
        program = jaxprs.stretch(self._graph.part(part), wanted, list(known))
        results = iter(jaxprs.as_function(program)(*known.values()))
        values = {at: next(results) for at in self._at_once}
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
        """Returns the outputs that are not streamed, as stored; with `apply` new parameters."""
        outputs, count = {}, len(self.splits)
        for at, value in values.items():
            if apply and at < count and self._frozen[at]:
                continue
            cut = self._all_splits[at]
            old = None if at < count else layout.unpad(as_stored(inputs[at], cut))
            outputs[at] = _stored(unless_skipped(finite, value, old), cut, self.mesh)
            if apply and at < count:
                outputs[at] = applied(inputs[self.first_param + at], outputs[at])
        return outputs

    def on_piece(
        self, at: int, finite: jax.Array, pieces: Mapping[int, jax.Array], operands: Operands
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """Returns the update and the new states of a piece, given its inputs, states, operands."""
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
    """Traces the update (gradients, state, parameters, loss) of full, abstract parameters."""
    leaves, treedef = jax.tree.flatten(params)
    state = jax.eval_shape(tx.init, params)
    streamed = offloaded(state, params, partition.splitter)
    if optimizer_state_dtype != FP32:  # all but scalars
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


def as_stored(value: PyTree, cut: Partition) -> PyTree:
    """Returns a stored array as the node that it is in a sharded tree."""
    return value if cut.dim is None or not cut.padded else Padded(value, cut.dim, cut.size)


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
    """Returns (updates, state), or with `apply` (parameters, state), as stored; for use in `jit`.

    Args:
      update: A function of full (gradients, state, parameters) to (updates, state).
      trees: Gradients, state or `LowBitState`, and parameters or None, as stored.
      piece_bytes: Maximum bytes of one piece on a device.
    """
    grads, state, params = trees
    is_plain = not isinstance(state, LowBitState)
    if is_plain:
        no_seeds = (None,) * len(jax.tree.leaves(state))
        state = LowBitState(state, (), jnp.asarray(0), no_seeds, FP32)
    full = jax.tree.map(_abstract, jax.eval_shape(layout.unpad, (grads, state, params)))
    trained = len(jax.tree.leaves(grads))
    numbered = enumerate(full[1].codings(full[1].inner), trained)
    codings = {i: coding for i, coding in numbered if coding is not None}
    # The arrays of each input: one, or the codes of low-bit state and their scales.
    first, last = ([[x] for x in jax.tree.leaves(tree)] for tree in (grads, params))
    arrays: list[Arrays] = [*first, *state.parts(), *last]
    streamed = [i in codings or is_on_host(x[0]) for i, x in enumerate(arrays)]
    given = full[0], jax.eval_shape(LowBitState.in_fp32, full[1]), full[2]
    piecewise = PiecewiseUpdate(update, given, streamed[trained:], partition)
    inputs = {i: x[0] for i, x in enumerate(arrays) if not streamed[i]}
    values, operands = piecewise.prepare(inputs)
    always = [jnp.asarray(finite), state.count]
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
    state = state.with_parts(states, unless_skipped(finite, state.count + 1, state.count))
    return result, state.inner if is_plain else state


class _StreamedLeaf:
    """Parameter `at` and the arrays that are updated with it.

    Operands that are sliced get the numbers after the inputs. `always` are two scalars: whether the
    step counts, and the number of earlier updates.
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
        self._on_host = {key for key, x in self.arrays.items() if is_on_host(x)}
        # Concatenated from its pieces at the end: XLA writes a piece in place where it computes it,
        # but codes are in memory before, and it would copy the whole array for each piece.
        of_codes = [key for key in sorted(self.arrays) if key[0] in self._codings]
        self._joined = [key for key in of_codes if key not in self._on_host]
        specs = self.split.stored_spec, scales_split(self.split).stored_spec
        self.specs = {(i, k): specs[k] for i, k in self.arrays}
        # Of one element during the update.
        sizes = [x.dtype.itemsize for (_, k), x in self.arrays.items() if k == 0]
        self.bytes = sum(sizes) + 4 * len(self._codings)

    def run(
        self, arrays: list[Group], at: int, before: int | None, scalars: Arrays, piece_bytes: int
    ) -> None:
        """Updates the leaf's arrays, `arrays[at]`, on a device, after those of leaf `before`."""
        mine, axes = arrays[at], [*self.split.stored_spec, *[None] * len(self.split.shape)]
        pairs = list(zip(axes, self.split.device_shape, strict=False))
        offsets = [0 if axis is None else jax.lax.axis_index(axis) * n for axis, n in pairs]
        most = max(1, piece_bytes // self.bytes)
        joined = {key: list[tuple[tuple[int, ...], jax.Array]]() for key in self._joined}
        coding = next(iter(self._codings.values()), None)  # all have equal blocks
        for places in boxes(self.split, most, coding):
            if before is not None:  # reads of this leaf follow all stores to leaf `before`
                both = [before] if before == at else [before, at]
                tied = jax.lax.optimization_barrier([arrays[i] for i in both])
                for i, group in zip(both, tied, strict=True):
                    arrays[i].update(group)
            before = at
            pieces: Group = {}
            for key, x in mine.items():
                piece = jax.lax.slice(x, *places[key[1]])
                pieces[key] = to_device(piece) if key in self._on_host else piece
            starts = [offset + a for offset, a in zip(offsets, places[0][0], strict=True)]
            new = self._on_piece(pieces, scalars, starts)
            codes = {key: new.pop(key) for key in self._joined}
            for key, piece in new.items():
                if key in self._on_host:
                    piece = jax.device_put(piece, jax.memory.Space.Host)
                start = places[key[1]][0]
                mine[key] = jax.lax.dynamic_update_slice(mine[key], piece, start)
            if codes:  # complete before the next piece begins, like those that are stored
                held, codes = jax.lax.optimization_barrier((mine, codes))
                mine.update(held)
            for key, piece in codes.items():
                joined[key].append((places[key[1]][0], piece))
        for key, rows in joined.items():
            dim = self._codings[key[0]].block_dim or 0
            mine[key] = _concatenated(rows, dim).reshape(mine[key].shape)

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
    """Returns the flat array of (starts, piece); those of a block along `dim` are joined first."""
    rows = []
    for _, group in itertools.groupby(pieces, lambda pair: pair[0][: dim + 1]):
        first, *others = [piece for _, piece in group]
        if others:
            parts = [x.reshape(x.shape[dim], -1) for x in (first, *others)]
            first = jnp.concatenate(parts, 1)
        rows.append(first.ravel())
    return jnp.concatenate(rows)
