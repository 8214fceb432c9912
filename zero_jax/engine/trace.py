"""The loss as a program, traced with parameters of full shape in the compute dtype.

How a step gathers and reduces follows from this trace alone: which parameters layers read and how
often, which layers there are, how the aux is combined over devices. Nothing depends on names.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

from zero_jax.context_parallel import chunks
from zero_jax.context_parallel.attention import exchanged_by
from zero_jax.context_parallel.split_loss import split_loss
from zero_jax.engine import (
    annotations,
    experts,
    fp8_params,
    lifetimes,
    losses,
    over_rows,
    param_plan,
)
from zero_jax.engine.config import Config
from zero_jax.fp8 import rewrite
from zero_jax.remat import policies
from zero_jax.sharding import paths
from zero_jax.sharding.mesh import (
    AnyMesh,
    batch_axes,
    batch_shards,
    context_size,
    model_size,
    on_gpu,
)
from zero_jax.sharding.model_axis import named_activations
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing import passes
from zero_jax.tracing.dataflow import HasGradient, Varies
from zero_jax.tracing.jaxpr import is_float, new_jaxpr, written_out
from zero_jax.tracing.products import ProductDims


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced loss.

    Attributes:
      closed: Its jaxpr with inlined calls. Inputs are the parameters, a micro-batch and the extras,
        flat; results are sum, weight and the leaves of the aux.
      leaves: The plan of each parameter.
      fp8: The parameters that are multiplied in fp8. Their codes and their scales are inputs too,
        after the parameters.
      not_fp8: Paths of other matrices that are in products or layers, if some are.
      layers: The layers found.
      positions: Where they are.
      weighted: True if the loss is a `Weighted`.
      aux: Shapes of the aux.
      kinds: For each leaf of the aux how it is combined, see `losses`.
      undifferentiable: Text that names the parameters which loops of unknown length read; "" if
        there is no such loop.
      tokens: For each leaf of the batch, True if its dim 1 is split over `context`.
      captured: Floats under an outer trace that the loss closes over: the last inputs.
      from_outside: Returns the same loss where more than trained parameters has a derivative:
        everything, or everything and the aux; see `outside.py`.
      outside: True if this is the result of `from_outside`.
    """

    closed: jex.ClosedJaxpr
    leaves: list[lifetimes.Leaf]
    fp8: list[fp8_params.Fp8Param]
    not_fp8: list[str]
    layers: list[lifetimes.Layers]
    positions: lifetimes.Positions
    weighted: bool
    aux: PyTree
    kinds: list[str]
    undifferentiable: str
    tokens: Sequence[bool]
    captured: tuple[jax.Array, ...]
    from_outside: Callable[[bool], "Traced"]
    outside: bool = False

    @property
    def window(self) -> int:
        """Elements that one device gathers at once: the largest layer, or leaf outside layers."""
        alone = [leaf.cut for leaf in self.leaves if not (leaf.in_layer or leaf.by_rows)]
        sizes = [math.prod(cut.shape) // param_plan.shared(cut) for cut in alone]
        return max([0, *sizes, *(layer.elements for layer in self.layers)])


def trace(
    settings: Config,
    loss_fn: losses.LossFn,
    full: PyTree,
    batch: PyTree,
    extras: tuple[PyTree, ...],
    *,
    has_aux: bool,
    grad_accum_steps: int,
    told: set[str],
) -> Traced:
    """Traces a loss as one device of the mesh runs it, given shapes of full parameters and batch.

    Warnings that were given are added to `told`, and not given again.

    Raises:
      ValueError: The result is no supported loss, see `losses`, or sums rows, see `over_rows`.
    """
    parts = batch_shards(settings.mesh) * grad_accum_steps
    count = jax.tree.leaves(batch)[0].shape[0] // parts
    extras, size = jax.eval_shape(lambda x: x, extras), context_size(settings.mesh)
    leaves, treedef = jax.tree.flatten(batch)
    tokens = chunks.has_tokens(batch, size)

    def program(count: int, times: int = 1) -> tuple[jex.ClosedJaxpr, bool, PyTree]:
        """Returns the loss of so many rows, and of so many times a device's tokens."""
        rows = []
        for x, has in zip(leaves, tokens, strict=True):
            _, *dims = x.shape
            if has:
                dims[0] = dims[0] // size * times
            rows.append(jax.ShapeDtypeStruct((count, *dims), x.dtype))
        args = full, jax.tree.unflatten(treedef, rows), extras, has_aux
        return _program(settings, loss_fn, *args)

    closed, weighted, aux = program(count)
    if not on_gpu(settings.mesh):
        closed = passes.with_row_major_ffts(closed)
    closed, captured = _opened(closed)
    cuts = settings.splitter(full)
    names = [name for name, _ in paths.named_leaves(full)]
    frozen = paths.frozen_leaves(full, settings.frozen)
    inputs, results = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    arrays = len(leaves)
    trained = [not still for still in frozen] + [False] * (inputs - len(frozen))
    _check_weight(closed, trained)
    if size > 1:
        split = [*[False] * len(names), *tokens]
        split += [False] * (inputs - len(split))
        flat = jax.tree_util.tree_flatten_with_path(aux)[0]
        named = [jax.tree_util.keystr(path) for path, _ in flat]
        closed = split_loss(closed, lambda: _opened(program(count, size)[0])[0], split, size, named)
    of_batch = [len(names) <= at < len(names) + arrays for at in range(inputs)]
    over_rows.check(closed, trained, of_batch, parts=parts, weighted=weighted, told=told)
    # Keys are folded with the device; other extras are the same everywhere.
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(extras)]
    varying = [*[False] * len(names), *[True] * arrays, *keys, *[False] * len(captured)]
    axes = batch_axes(settings.mesh)
    differs = Varies(axes).run(closed, varying)[2:] if jax.tree.leaves(aux) else []
    kinds = losses.kinds_of(aux, differs, count, lambda: program(2 * count)[2])
    stage = functools.partial(_on_a_device, settings.mesh)
    policy, precision = policies.parse(settings.remat), settings.precision
    by_row = precision.matmul_dtype == "fp8_rowwise"

    def read(moved: Sequence[bool], wanted: Sequence[bool], outside: bool) -> Traced:
        found = passes.without_dead_derivatives(closed, moved, wanted)
        if any(cut.experts is not None for cut in cuts):
            in_parts = settings.stage < 3 or policy.kind != "none"
            found = experts.at_their_devices(found, cuts, names, stage, parts=in_parts)
        # Sizes of a trace are those of all devices of `model`.
        bucket = settings.bucket_bytes * model_size(settings.mesh)
        life = lifetimes.lifetime(settings.stage, grad_accum_steps)

        def reading(found: jex.ClosedJaxpr, fp8: Mapping[int, ProductDims]) -> param_plan.Reading:
            own = [*cuts, *(cuts[at] for at in fp8)]
            return param_plan.Reading(found.jaxpr, own, policy, bucket, [*fp8])

        def plans(read: param_plan.Reading, fp8: Mapping[int, ProductDims]) -> list[lifetimes.Leaf]:
            known = [*names, *(names[at] for at in fp8)], [*frozen, *[True] * len(fp8)]
            leaves = read.leaves(*known, life, settings.wire)
            return list(map(lifetimes.summed_by_jax, leaves)) if outside else leaves

        products, not_fp8 = dict[int, ProductDims](), list[str]()
        read = reading(found, products)
        if precision.matmul_dtype is not None:
            own = names, plans(read, products), precision, stage
            products, not_fp8 = fp8_params.chosen(found, *own)
            given = len(names), products, stage
            found = rewrite.in_fp8(found, *given, dtype=precision.compute, by_row=by_row)
            read = reading(found, products)
        planned = plans(read, products)
        leaves, codes = planned[: len(names)], planned[len(names) :]
        fp8 = [
            fp8_params.Fp8Param(at, rewrite.shared(dims, by_row=by_row), leaf)
            for (at, dims), leaf in zip(products.items(), codes, strict=True)
        ]
        undifferentiable, loops = "", _DifferentiatedLoops()
        loops.run(found, [*moved[: len(names)], *[False] * 2 * len(fp8), *moved[len(names) :]])
        if loops.found:
            looped = [names[at] for at in sorted(read.read_by("while")) if not frozen[at]]
            undifferentiable = ", ".join(looped) or "values derived from parameters"
        known = found, leaves, fp8, not_fp8, read.layers, read.positions(planned, life)
        of_loss = weighted, aux, kinds, undifferentiable
        return Traced(*known, *of_loss, tokens, captured, from_outside, outside)

    def from_outside(aux: bool) -> Traced:
        return read([True] * inputs, [at < 2 or aux for at in range(results)], True)

    # The sum alone is differentiated.
    return read(trained, [at == 0 for at in range(results)], False)


def _opened(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, tuple[jax.Array, ...]]:
    """Makes floats under an outer trace, which the loss closes over, the last inputs.

    They may have derivatives from outside. Returns the jaxpr and these floats.
    """
    body, consts = closed.jaxpr, list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    captured = {v: x for v, x in consts if isinstance(x, jax.core.Tracer) and is_float(v)}
    if not captured:
        return closed, ()
    rest = {v: x for v, x in consts if v not in captured}
    invars = [*body.invars, *captured]
    jaxpr = new_jaxpr(invars, body.outvars, body.eqns, body.effects, list(rest))
    return jex.ClosedJaxpr(jaxpr, list(rest.values())), tuple(captured.values())


def _on_a_device(mesh: AnyMesh, fn: Callable[..., PyTree], *shapes: PyTree) -> jex.ClosedJaxpr:
    """Returns the jaxpr of a function as a device of the mesh runs it, with inlined calls."""
    annotations.check_context(mesh)
    found = []

    def inside() -> jax.Array:
        with annotations.allowed(mesh):
            found.append(jax.make_jaxpr(fn)(*shapes))
        return jnp.zeros(())

    mapped = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        axis_names=set(batch_axes(mesh)),
        check_vma=False,
    )
    jax.eval_shape(mapped)
    return annotations.without(written_out(found[0]), mesh)


def _program(
    settings: Config,
    loss_fn: losses.LossFn,
    full: PyTree,
    rows: PyTree,
    extras: tuple[PyTree, ...],
    has_aux: bool,
) -> tuple[jex.ClosedJaxpr, bool, PyTree]:
    """Returns the jaxpr of a loss for a micro-batch, whether it is weighted, its aux's shapes."""
    found: list[tuple[bool, PyTree]] = []

    def call(params: PyTree, rows: PyTree, *extras: PyTree) -> PyTree:
        with (
            named_activations(settings.model_axis.rules),
            exchanged_by(settings.context_exchange),
        ):
            out = loss_fn(params, rows, *extras)
        total, weight, aux, weighted = losses.taken_apart(out, has_aux)
        found.append((weighted, jax.eval_shape(lambda: aux)))
        return total, weight, aux

    def in_compute_dtype(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, settings.wire.compute if floating else x.dtype)

    like = _unboxed(jax.tree.map(in_compute_dtype, full))
    closed = _on_a_device(settings.mesh, call, like, rows, *extras)
    return closed, *found[-1]


def _unboxed(tree: PyTree) -> PyTree:
    """Removes linen's own boxes (`nn.with_partitioning`): they name axes of another mesh."""

    def one(node: PyTree) -> PyTree:
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


class _DifferentiatedLoops(HasGradient):
    """Finds loops of unknown length whose results depend on trained leaves.

    JAX has no gradient of them; the loss may not need one.
    """

    found = False

    def while_loop(self, eqn: jex.JaxprEqn, values: list[bool]) -> Sequence[bool]:
        made = super().while_loop(eqn, values)
        self.found |= any(has and is_float(v) for has, v in zip(made, eqn.outvars, strict=True))
        return made
