"""Gather and shard by hand, for code that lives inside a `shard_map` of its own.

A loss that is given to `Zero` needs neither: it sees whole arrays.
"""

from typing import Any

import jax

from zero_jax.collectives import gather_scatter
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.sharding.cuts import Splitter

PyTree = Any


def gather(
    tree: PyTree,
    like: PyTree | None = None,
    *,
    axis_name: str = "data",
    compute: Any = None,
    reduce: Any = "float32",
) -> PyTree:
    """Gathers shards that were cut by `zero_jax.shard`, differentiably; inside `shard_map`.

    Args:
      tree: this device's shards; without `like` whole arrays, as a loss of `Zero` has them: those
        come back as they are.
      like: a tree of the logical leaves (arrays or ShapeDtypeStructs).
      axis_name: the mesh axis the shards are spread over.
      compute: dtype to gather in; None keeps the leaf's own.
      reduce: dtype in which the gradient is summed.

    Returns:
      The full leaves. Their gradients arrive as shards, summed over `axis_name`, except those of
      leaves too small to split, which stay local: sum them with `jax.lax.psum`.
    """
    if like is None:
        return tree
    wire = Wire(compute and jax.numpy.dtype(compute), jax.numpy.dtype(reduce))
    cuts = Splitter(jax.lax.axis_size(axis_name), axis=axis_name)(like)
    leaves, treedef = jax.tree.flatten(tree)
    full = [gather_scatter.touch(x, None, None, c, wire) for x, c in zip(leaves, cuts, strict=True)]
    return jax.tree.unflatten(treedef, full)


def shard(tree: PyTree, *, axis_name: str = "data") -> PyTree:
    """This device's pieces of a tree that every device holds in full; inside `shard_map`.

    Args:
      tree: full leaves.
      axis_name: the mesh axis to spread them over.

    Returns:
      The same tree of shards, padded with zeros where N does not divide.
    """
    leaves, treedef = jax.tree.flatten(tree)
    cuts = Splitter(jax.lax.axis_size(axis_name), axis=axis_name)(tree)
    pieces = [
        gather_scatter.local_shard(x, c, axis_name) for x, c in zip(leaves, cuts, strict=True)
    ]
    return jax.tree.unflatten(treedef, pieces)
