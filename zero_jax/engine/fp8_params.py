"""Parameters in fp8: which ones, their scales, and their codes.

The largest numbers of all matrices are found once a step, by one small all-reduce. So codes are the
same bits for every N and every stage. Each device encodes its shard, and codes are gathered.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from zero_jax.collectives import gather_scatter
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.collectives.precision import Precision
from zero_jax.engine.lifetimes import Leaf
from zero_jax.fp8 import rewrite
from zero_jax.fp8.formats import E4M3, encode, scale_for
from zero_jax.sharding import paths
from zero_jax.sharding.layout import Partition, strip_dim
from zero_jax.sharding.mesh import REPLICA, names
from zero_jax.tracing.jaxpr import shape_of
from zero_jax.tracing.products import ProductDims


@dataclasses.dataclass(frozen=True)
class Fp8Param:
    """A parameter that is multiplied in fp8.

    Attributes:
      at: Its position among all parameters.
      shared: The dims along which its numbers share a scale, counted from the end.
      codes: The plan of its codes.
    """

    at: int
    shared: tuple[int, ...]
    codes: Leaf


def chosen(
    closed: jex.ClosedJaxpr,
    paths_of: Sequence[str],
    leaves: Sequence[Leaf],
    precision: Precision,
    stage: rewrite.Stage,
) -> tuple[dict[int, ProductDims], list[str]]:
    """Chooses the parameters that are multiplied in fp8.

    Args:
      closed: The loss, with inlined calls. Its first inputs are the parameters.
      paths_of: The path of each parameter.
      leaves: The plan of each parameter.
      precision: The settings.
      stage: Traces a function.

    Returns:
      The dims of those that are, by position; the paths of other matrices in products or layers.

    Raises:
      ValueError: None can be, or one that a pattern chooses cannot.
    """
    found = rewrite.multiplied(closed, len(paths_of), precision.compute, stage)
    if precision.fp8_params is not None:
        named = _named(found, paths_of, precision)
    else:
        shapes = list(map(shape_of, closed.jaxpr.invars))
        named = [
            at
            for at, dims in found.items()
            if leaves[at].in_layer and rewrite.is_large(shapes[at], dims)
        ]
    if not named:
        raise ValueError(
            f"`matmul_dtype`={precision.matmul_dtype!r}: no matrix of a layer has at least "
            f"{rewrite.LEAST} inputs and outputs, multiples of {rewrite.ALIGNED}, and is read "
            f"in products in {precision.compute_dtype} alone. Choose others by `fp8_params`, "
            f"of {_listed(found, paths_of)}, or leave `matmul_dtype` out"
        )
    others = [
        path
        for at, (path, leaf) in enumerate(zip(paths_of, leaves, strict=True))
        if at not in named and (at in found or (leaf.in_layer and _is_matrix(leaf.cut)))
    ]
    return {at: found[at] for at in named}, others


def _named(
    found: Mapping[int, ProductDims], paths_of: Sequence[str], precision: Precision
) -> list[int]:
    """Returns the parameters that `fp8_params` chooses."""
    assert precision.fp8_params is not None
    hits = paths.matches(precision.fp8_params, paths_of, "fp8_params")
    named = list(itertools.compress(range(len(hits)), hits))
    for at in named:
        if at not in found:
            raise ValueError(
                f"`fp8_params`={precision.fp8_params!r}: {paths_of[at]!r} is not read in matrix "
                f"products in {precision.compute_dtype} alone, always along the same dims. "
                f"Correct the pattern: those that are: {_listed(found, paths_of)}"
            )
    return named


def _is_matrix(cut: Partition) -> bool:
    """Returns False for vectors, also those with several dims, as biases of attention heads."""
    per_layer = cut.shape[len(cut.shape) - cut.layer_rank :]
    return cut.layer_rank > 1 and math.prod(per_layer) >= rewrite.LEAST**2


def _listed(found: Mapping[int, ProductDims], paths_of: Sequence[str]) -> str:
    return ", ".join(paths_of[at] for at in found) or "none"


def scales_of(
    shards: Sequence[jax.Array], params: Sequence[Fp8Param], wire: Wire
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the scales of all codes, and those of this device's shards.

    Args:
      shards: This device's shards of all parameters.
      params: Those in fp8.
      wire: Its compute dtype is that of the numbers which are quantised.

    Parts of a shard over `replica` are joined before they are encoded.
    """
    largest = [
        jnp.max(jnp.abs(wire.cast(jax.lax.stop_gradient(shards[p.at]))), p.shared, keepdims=True)
        for p in params
    ]
    full = _over_devices([x.astype(jnp.float32) for x in largest], params)
    pairs = [(scale_for(x, E4M3), p) for x, p in zip(full, params, strict=True)]
    own = [
        gather_scatter.local_shard(scale, p.codes.cut, p.codes.cut.axis)
        if _is_split(p.codes.cut, p.shared)
        else scale
        for scale, p in pairs
    ]
    return [_unpadded(scale, p.codes.cut, p.shared) for scale, p in pairs], own


def gather(shard: jax.Array, scale: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns the codes of a full parameter, from every device's shard of it and their scales."""
    codes = encode(wire.cast(jax.lax.stop_gradient(shard)), scale, E4M3)
    if (cut.dim is None or cut.shards == 1) and cut.model_shards == 1:
        # Products in fp8 read their operands along the summed dims. Where nothing is gathered, XLA
        # would transpose the fp32 parameters of all layers for that.
        codes = with_layout_constraint(codes, Layout(major_to_minor=tuple(range(codes.ndim))))
    as_they_are = dataclasses.replace(wire, compute=None, gather_bits=None)
    return gather_scatter.gather(codes, cut, as_they_are)


def _over_devices(largest: Sequence[jax.Array], params: Sequence[Fp8Param]) -> list[jax.Array]:
    """Returns the largest numbers over all devices.

    One all-reduce for all parameters that are sharded over the same mesh axes.
    """
    full = [_placed(x, p.codes.cut, p.shared) for x, p in zip(largest, params, strict=True)]
    # In the same order in every process.
    for axes in filter(None, dict.fromkeys(_axes(p.codes.cut) for p in params)):
        mine = [i for i, p in enumerate(params) if _axes(p.codes.cut) == axes]
        flat = jax.lax.pmax(jnp.concatenate([full[i].reshape(-1) for i in mine]), axes)
        ends = list(itertools.accumulate(full[i].size for i in mine))
        for i, part in zip(mine, jnp.split(flat, ends[:-1]), strict=True):
            full[i] = part.reshape(full[i].shape)
    return full


def _axes(cut: Partition) -> tuple[str, ...]:
    """Returns the mesh axes over which the parameter is sharded."""
    if cut.dim is None:
        return ()
    return (*names(cut.axis), REPLICA) if cut.parts > 1 else names(cut.axis)


def _is_split(cut: Partition, shared: Sequence[int]) -> bool:
    """Returns whether a device's shard has some of the scales, not a part of the numbers of all."""
    return cut.dim is not None and cut.dim not in shared


def _placed(x: jax.Array, cut: Partition, shared: Sequence[int]) -> jax.Array:
    """Returns an array for all scales, with this device's at their places and zeros elsewhere."""
    if not _is_split(cut, shared):
        return x
    assert cut.dim is not None
    shape, size = list(x.shape), x.shape[cut.dim]
    shape[cut.dim] *= cut.shards * cut.parts
    start = jax.lax.axis_index(_axes(cut)) * size
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape), x, start, cut.dim % x.ndim)


def _unpadded(scale: jax.Array, cut: Partition, shared: Sequence[int]) -> jax.Array:
    if not (_is_split(cut, shared) and cut.padded):
        return scale
    assert cut.dim is not None
    return strip_dim(scale, cut.dim, cut.size)
