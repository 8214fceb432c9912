"""The loss as a program: traced once, with parameters of whole logical shape.

A model only ever sees whole arrays, in the compute dtype. What a step does follows from this trace
alone: which leaves are read layer by layer and how often, which layers there are, what becomes of
the aux. No names, no shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

from zero_jax.engine import annotations, experts, lifetimes, losses, over_rows, reading
from zero_jax.engine.config import Config
from zero_jax.remat import policies
from zero_jax.sharding import paths
from zero_jax.sharding.mesh import AnyMesh, batch_axes, batch_shards, on_gpu
from zero_jax.sharding.model_axis import named_activations
from zero_jax.sharding.partition import Partition
from zero_jax.tracing import passes
from zero_jax.tracing.dataflow import HasGradient, Varies
from zero_jax.tracing.jaxpr import is_float, new_jaxpr, written_out

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced loss.

    Attributes:
      closed: its jaxpr, calls written out: of parameters, a micro-batch and extras, flat, to
        sum, weight and the leaves of the aux.
      leaves: what is known of each parameter.
      layers: which layers there are.
      weighted: whether the loss is a sum with a weight of its own.
      aux: the structure of the aux.
      kinds: what becomes of each leaf of it, see `losses`.
      looped: names of trained leaves that a loop of unknown length reads.
      captured: floats under trace that the loss closes over: its last inputs.
      from_outside: the same loss where more than trained leaves has a derivative: everything, or
        everything and the aux; see `outside.py`.
      outside: whether this is it.
    """

    closed: jex.ClosedJaxpr
    leaves: list[lifetimes.Leaf]
    layers: list[lifetimes.Layers]
    weighted: bool
    aux: Any
    kinds: list[str]
    looped: list[str]
    captured: tuple[Any, ...]
    from_outside: Callable[[bool], "Traced"]
    outside: bool = False

    @property
    def window(self) -> int:
        """Elements that one device gathers at once: the largest layer, or leaf that is in none."""
        alone = [leaf.cut for leaf in self.leaves if not (leaf.in_layer or leaf.by_rows)]
        sizes = [math.prod(cut.shape) // reading.shared(cut) for cut in alone]
        return max([0, *sizes, *(layer.elements for layer in self.layers)])


def trace(
    settings: Config,
    loss_fn: Callable[..., Any],
    full: PyTree,
    cuts: Sequence[Partition],
    batch: PyTree,
    extras: tuple[Any, ...],
    *,
    has_aux: bool,
    grad_accum_steps: int,
    told: set[str],
) -> Traced:
    """Traces a loss as one device of the mesh runs it.

    Args:
      settings: of the run.
      loss_fn: written for one device.
      full: shapes of the parameters, logical.
      cuts: how each is cut.
      batch: the global batch, or its shapes.
      extras: further arguments.
      has_aux: whether it returns (loss, aux).
      grad_accum_steps: Number of gradient-accumulation steps, k.
      told: warnings that were given of this loss; extended.

    Raises:
      ValueError: the loss returns what it can't, see `losses`, or sums rows, see `over_rows`.
    """
    parts = batch_shards(settings.mesh) * grad_accum_steps
    program = _Program(settings, loss_fn, full, extras, has_aux)
    rows = jax.tree.map(lambda x: _rows(x, parts), batch)
    traced = program.of(rows)
    if not on_gpu(settings.mesh):
        traced = passes.with_row_major_ffts(traced)
    closed, captured = _opened(traced)
    names = [name for name, _ in paths.named_leaves(full)]
    frozen = paths.frozen_leaves(full, settings.frozen)
    inputs, results = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    trained = [not still for still in frozen] + [False] * (inputs - len(frozen))
    _check_weight(closed, trained)
    count = len(jax.tree.leaves(rows))
    of_batch = [len(names) <= at < len(names) + count for at in range(inputs)]
    checked = closed, trained, of_batch
    over_rows.check(*checked, parts=parts, weighted=program.weighted, told=told)
    kinds = _kinds(program, closed, rows, batch_axes(settings.mesh), len(names), len(captured))
    stage = functools.partial(_on_a_device, settings.mesh)
    policy = policies.parse(settings.remat)

    def read(moved: Sequence[bool], wanted: Sequence[bool], outside: bool) -> Traced:
        found = passes.without_dead_derivatives(closed, moved, wanted)
        found = experts.at_their_devices(
            *(found, cuts, names, stage), parts=settings.stage < 3 or policy.kind != "none"
        )
        read = reading.Reading(found.jaxpr, cuts, policy)
        life = lifetimes.lifetime(settings.stage, grad_accum_steps)
        leaves = [
            read.leaf(at, name, still, life, settings.wire)
            for at, (name, still) in enumerate(zip(names, frozen, strict=True))
        ]
        if outside:
            leaves = list(map(lifetimes.summed_by_jax, leaves))
        looped = [names[at] for at in sorted(read.read_by("while")) if not frozen[at]]
        known = found, leaves, read.layers, program.weighted, program.aux, kinds, looped, captured
        return Traced(*known, from_outside, outside)

    def from_outside(aux: bool) -> Traced:
        return read([True] * inputs, [at < 2 or aux for at in range(results)], True)

    # The sum alone is differentiated.
    return read(trained, [at == 0 for at in range(results)], False)


def _opened(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, tuple[Any, ...]]:
    """The same with floats under trace, which the loss closes over, as inputs: they may have
    derivatives from outside. Returns these too."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    own = [isinstance(x, jax.core.Tracer) and is_float(v) for v, x in pairs]
    if not any(own):
        return closed, ()
    still = [pair for pair, mine in zip(pairs, own, strict=True) if not mine]
    moved = [pair for pair, mine in zip(pairs, own, strict=True) if mine]
    body = closed.jaxpr
    invars = [*body.invars, *(v for v, _ in moved)]
    constvars = [v for v, _ in still]
    jaxpr = new_jaxpr(invars, body.outvars, body.eqns, body.effects, constvars)
    return jex.ClosedJaxpr(jaxpr, [x for _, x in still]), tuple(x for _, x in moved)


def _rows(x: Any, parts: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)


def _on_a_device(mesh: AnyMesh, fn: Callable[..., Any], *shapes: Any) -> jex.ClosedJaxpr:
    """A function as a jaxpr, as a device of the mesh runs it, its calls written out."""
    annotations.check_context(mesh)
    found = []

    def inside() -> Any:
        with annotations.allowed(mesh):
            found.append(jax.make_jaxpr(fn)(*shapes))
        return jnp.zeros(())

    whole: Any = PartitionSpec()
    mapped = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(),
        out_specs=whole,
        axis_names=set(batch_axes(mesh)),
        check_vma=False,
    )
    jax.eval_shape(mapped)
    return annotations.without(written_out(found[0]), mesh)


class _Program:
    """A loss function as a jaxpr, for micro-batches of given shapes."""

    def __init__(
        self,
        settings: Config,
        loss_fn: Callable[..., Any],
        full: PyTree,
        extras: tuple[Any, ...],
        has_aux: bool,
    ):
        self._settings, self._loss_fn, self._has_aux = settings, loss_fn, has_aux
        self.extras = jax.eval_shape(lambda x: x, extras)
        compute = settings.wire.compute
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _dtype(x, compute)), full)
        self._like = _unboxed(like)
        self.weighted, self.aux = False, None

    def of(self, rows: PyTree) -> jex.ClosedJaxpr:
        """The jaxpr, its calls written out; remembers the structure of what is returned."""
        return _on_a_device(self._settings.mesh, self._call, self._like, rows, *self.extras)

    def _call(self, params: PyTree, rows: PyTree, *extras: Any) -> Any:
        with named_activations(self._settings.model_axis.rules):
            out = self._loss_fn(params, rows, *extras)
        total, weight, aux = losses.taken_apart(out, self._has_aux)
        self.weighted = isinstance(out[0] if self._has_aux else out, losses.Weighted)
        self.aux = jax.eval_shape(lambda: aux)
        return total, weight, aux


def _dtype(x: Any, compute: Any) -> Any:
    return compute if compute is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def _unboxed(tree: PyTree) -> PyTree:
    """Without linen's own boxes (`nn.with_partitioning`): they name axes of another mesh."""

    def one(node: Any) -> Any:
        if not isinstance(node, meta.AxisMetadata):
            return node
        return jax.tree.leaves(node, is_leaf=lambda own: own is not node)[0]

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))


def _check_weight(closed: jex.ClosedJaxpr, trained: Sequence[bool]) -> None:
    """Raises ValueError if the weight of the loss depends on parameters."""
    if HasGradient().run(closed, trained)[1]:
        raise ValueError(
            "`weight` of zero_jax.Weighted(sum, weight) depends on the parameters, but no "
            "gradient is taken through it. Use jax.lax.stop_gradient(weight) to treat it as a "
            "constant, or return a mean"
        )


def _kinds(
    program: _Program,
    closed: jex.ClosedJaxpr,
    rows: PyTree,
    axes: Sequence[str],
    params: int,
    captured: int,
) -> list[str]:
    """What becomes of each leaf of the aux."""
    named = jax.tree_util.tree_flatten_with_path(program.aux)[0]
    if not named:
        return []
    aux = [(jax.tree_util.keystr(path), like) for path, like in named]
    # Keys are folded with the device; other extras are the same everywhere.
    keys = [_is_key(x) for x in jax.tree.leaves(program.extras)]
    own = len(closed.jaxpr.invars) - params - len(keys) - captured
    given = [*[False] * params, *[True] * own, *keys, *[False] * captured]
    differs = Varies(axes).run(closed, given)[2:]
    count = jax.tree.leaves(rows)[0].shape[0]
    maybe = [len(like.shape) > 0 and like.shape[0] == count for _, like in aux]
    if any(maybe):
        unsure = [path for (path, _), m in zip(aux, maybe, strict=True) if m]
        maybe = _grow(program, rows, unsure)
    return losses.kinds_of(aux, differs, maybe)


def _is_key(like: Any) -> bool:
    return jnp.issubdtype(like.dtype, jax.dtypes.prng_key)


def _grow(program: _Program, rows: PyTree, unsure: Sequence[str]) -> list[bool]:
    """Returns True for each aux leaf with the batch as dim 0, which grows with the batch."""
    count = jax.tree.leaves(rows)[0].shape[0]
    longer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), rows
    )
    before = program.aux, program.weighted
    try:
        program.of(longer)
        likes = jax.tree.leaves(program.aux)
    except Exception as error:
        raise ValueError(
            f"aux {', '.join(unsure)}: dim 0 is as long as a micro-batch ({count} rows), but the "
            f"loss cannot be traced with {2 * count} rows. Write the loss for any number of rows, "
            f"or return values other than rows as aux[None]. The error of that trace: {error}"
        ) from error
    finally:
        program.aux, program.weighted = before
    shapes = [like.shape for like in jax.tree.leaves(before[0])]
    pairs = zip(shapes, likes, strict=True)
    return [len(s) > 0 and s[0] == count and x.shape[0] == 2 * count for s, x in pairs]
