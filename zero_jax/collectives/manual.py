"""Explicit gather and shard for code inside a `shard_map` of the user: `zero_jax.manual`.

A loss given to `Zero` needs neither: it receives full arrays.
"""

import jax
from jax.typing import DTypeLike

from zero_jax.collectives import gather_scatter
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.collectives.precision import DTYPES, parse_dtype
from zero_jax.sharding.layout import Partition, Partitioner, map_leaves
from zero_jax.sharding.paths import PyTree


def gather(
    tree: PyTree,
    like: PyTree,
    *,
    axis_name: str = "data",
    compute_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike = "float32",
) -> PyTree:
    """Gathers shards made by `shard`, differentiably; inside `shard_map`.

    Args:
      tree: Shards of this device.
      like: A tree of the full leaves (arrays or ShapeDtypeStructs).
      axis_name: Mesh axis that the shards are spread over.
      compute_dtype: Dtype to gather in; None keeps the leaf's dtype.
      reduce_dtype: Dtype in which the gradient is summed.

    Returns:
      The full leaves. Their gradients are shards, summed over `axis_name`. Gradients of leaves too
      small to split stay local: sum them with `jax.lax.psum`.
    """
    reduce = DTYPES[parse_dtype(reduce_dtype, "reduce_dtype")]
    compute = None if compute_dtype is None else DTYPES[parse_dtype(compute_dtype, "compute_dtype")]
    wire = Wire(compute, reduce)
    cuts = Partitioner(jax.lax.axis_size(axis_name), axis=axis_name)(like)

    def full(x: jax.Array, cut: Partition) -> jax.Array:
        return gather_scatter.touch(x, None, None, cut, wire, cut.dim is not None)

    return map_leaves(full, tree, cuts)


def shard(tree: PyTree, *, axis_name: str = "data") -> PyTree:
    """Returns this device's shards of a replicated tree; inside `shard_map`.

    Args:
      tree: Full leaves.
      axis_name: Mesh axis to partition them over.

    Returns:
      The same tree of shards, padded with zeros if N does not divide.
    """
    cuts = Partitioner(jax.lax.axis_size(axis_name), axis=axis_name)(tree)
    return map_leaves(lambda x, cut: gather_scatter.local_shard(x, cut, axis_name), tree, cuts)
