"""Parameters in fp8: which ones, their scales, and their codes.

The largest numbers of all matrices are found once a step, by one small all-reduce. So codes are the
same bits for every N and every stage. Each device encodes its shard, and codes are gathered.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

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
    in_layers: Sequence[bool],
    precision: Precision,
    stage: rewrite.Stage,
) -> dict[int, rewrite.Dims]:
    """Returns the parameters that are multiplied in fp8, by position, and their dims.

    Args:
      closed: The loss, with inlined calls. Its first inputs are the parameters.
      paths_of: The path of each parameter.
      in_layers: For each parameter, True if layers alone read it.
      precision: The settings.
      stage: Traces a function.

    Raises:
      ValueError: None can be, or one that a pattern chooses cannot.
    """
    found = rewrite.multiplied(closed, len(paths_of), precision.compute, stage)
    if precision.fp8_params is None:
        shapes = list(map(shape_of, closed.jaxpr.invars))
        able = {
            at: dims
            for at, dims in found.items()
            if in_layers[at] and rewrite.is_large(shapes[at], dims)
        }
        if not able:
            raise ValueError(
                f"`matmul_dtype`={precision.matmul_dtype!r}: no parameter of a layer is read in "
                f"matrix products in {precision.compute_dtype} alone, with at least "
                f"{rewrite.LEAST} inputs and outputs, multiples of {rewrite.ALIGNED}. Choose "
                "smaller ones by `fp8_params`, or leave `matmul_dtype` out"
            )
        return able
    hits = paths.matches(precision.fp8_params, paths_of, "fp8_params")
    named = list(itertools.compress(range(len(hits)), hits))
    for at in named:
        if at not in found:
            known = ", ".join(paths_of[i] for i in found) or "none"
            raise ValueError(
                f"`fp8_params`={precision.fp8_params!r}: {paths_of[at]!r} is not read in matrix "
                f"products in {precision.compute_dtype} alone; those that are: {known}"
            )
    return {at: found[at] for at in named}


def scales_of(
    shards: Sequence[jax.Array], params: Sequence[Fp8Param], wire: Wire
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the scales of all codes, and those of this device's shards.

    Args:
      shards: This device's shards of all parameters.
      params: Those in fp8.
      wire: Its compute dtype is that of the numbers which are quantised.
    """
    largest = [
        jnp.max(jnp.abs(wire.cast(jax.lax.stop_gradient(shards[p.at]))), p.shared, keepdims=True)
        for p in params
    ]
    full = _over_devices([x.astype(jnp.float32) for x in largest], params)
    pairs = [(scale_for(x, E4M3), p) for x, p in zip(full, params, strict=True)]
    own = [_part(scale, p.codes.cut, p.shared) for scale, p in pairs]
    return [_unpadded(scale, p.codes.cut, p.shared) for scale, p in pairs], own


def gather(shard: jax.Array, scale: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Returns the codes of a full parameter, from every device's shard of it and their scales."""
    codes = encode(wire.cast(jax.lax.stop_gradient(shard)), scale, E4M3)
    as_they_are = dataclasses.replace(wire, compute=None, gather_bits=None)
    return gather_scatter.gather(codes, cut, as_they_are)


def _over_devices(largest: Sequence[jax.Array], params: Sequence[Fp8Param]) -> list[jax.Array]:
    """Returns the largest numbers over all devices: one all-reduce for all parameters."""
    full = [_placed(x, p.codes.cut, p.shared) for x, p in zip(largest, params, strict=True)]
    for axes in {_axes(p.codes.cut) for p in params} - {()}:
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


def _part(scale: jax.Array, cut: Partition, shared: Sequence[int]) -> jax.Array:
    """Returns the scales of this device's shard."""
    if not _is_split(cut, shared):
        return scale
    assert cut.dim is not None
    size = scale.shape[cut.dim] // (cut.shards * cut.parts)
    start = jax.lax.axis_index(_axes(cut)) * size
    return jax.lax.dynamic_slice_in_dim(scale, start, size, cut.dim % scale.ndim)


def _unpadded(scale: jax.Array, cut: Partition, shared: Sequence[int]) -> jax.Array:
    if not (_is_split(cut, shared) and cut.padded):
        return scale
    assert cut.dim is not None
    return strip_dim(scale, cut.dim, cut.size)
