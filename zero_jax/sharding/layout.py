"""Layout of sharded trees: partition, padding if N does not divide, placement and checks.

Only stored arrays are padded, as a `Padded` node that has its unpadded size. The model, the
optimizer, norms and checkpoints use unpadded shapes. See partition.py for the choice of the dim.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from zero_jax.releases import CRASHES_ON_EMPTY
from zero_jax.sharding import paths
from zero_jax.sharding.mesh import AnyMesh
from zero_jax.sharding.partition import Partition
from zero_jax.sharding.paths import Padded, PyTree


def _is_padded(node: object) -> bool:
    return isinstance(node, Padded)


def key_impl(key: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns the name of a random key's generator, also of an abstract key.

    >>> key_impl(jax.eval_shape(lambda: jax.random.key(0)))
    'threefry2x32'
    """
    found: list[str] = []
    # JAX knows the generator of an abstract key only within a trace.
    jax.eval_shape(lambda traced: found.append(str(jax.random.key_impl(traced))), key)
    return found[0]


def strip_dim(value: jax.Array, dim: int, size: int) -> jax.Array:
    """Removes the padding of one dim."""
    return jax.lax.slice_in_dim(value, 0, size, axis=dim % value.ndim)


def pad_dim(value: jax.Array, dim: int, size: int) -> jax.Array:
    """Pads one dim with zeros up to `size`."""
    widths = [(0, 0)] * value.ndim
    widths[dim] = (0, size - value.shape[dim])
    return jnp.pad(value, widths)


def unpad(tree: PyTree) -> PyTree:
    """Removes the padding of sharded leaves; they stay partitioned.

    Use it for statistics of sharded parameters or gradients:
    `optax.global_norm(zero_jax.unpad(grads))`.

    Args:
      tree: Sharded parameters or gradients.

    Returns:
      The tree with unpadded, global shapes.

    >>> unpad({"w": Padded(jnp.ones((8, 4)), -2, 7)})["w"].shape
    (7, 4)
    """

    def one(node: PyTree) -> PyTree:
        if not _is_padded(node):
            return node
        # The gradient of a frozen leaf is a scalar, whatever the leaf's shape.
        return strip_dim(node.value, node.dim, node.size) if node.value.ndim else node.value

    return jax.tree.map(one, tree, is_leaf=_is_padded)


def map_leaves(
    fn: Callable[[jax.Array, Partition], object], tree: PyTree, partitions: Sequence[Partition]
) -> PyTree:
    """Maps a function of a leaf and its partition."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, partitions, strict=True)
    return jax.tree.unflatten(treedef, [fn(x, cut) for x, cut in pairs])


def pad(tree: PyTree, partitions: Sequence[Partition]) -> PyTree:
    """Pads the leaves that need it, the inverse of `unpad`; keeps the tree's structure."""

    def one(leaf: jax.Array, cut: Partition) -> jax.Array | Padded:
        if not cut.padded:
            return leaf
        assert cut.dim is not None
        full = leaf if leaf.ndim == 0 else pad_dim(leaf, cut.dim, cut.shard_size * cut.shards)
        return Padded(full, cut.dim, cut.size)

    return map_leaves(one, tree, partitions)


def constrained(tree: PyTree, partitions: Sequence[Partition], mesh: AnyMesh) -> PyTree:
    """Pads a full tree and constrains it to its shards, inside `jit`.

    The update of a frozen leaf is a scalar, whatever the leaf's shape, and is replicated.
    """
    pairs = zip(partitions, jax.tree.leaves(tree), strict=True)
    placed = [cut if cut.shape == x.shape else Partition(x.shape, None, 1) for cut, x in pairs]
    padded = pad(tree, partitions)
    return jax.lax.with_sharding_constraint(padded, shardings(padded, placed, mesh))


def shardings(tree: PyTree, partitions: Sequence[Partition], mesh: AnyMesh) -> PyTree:
    """Returns NamedShardings for a padded tree."""
    return map_leaves(lambda _, cut: NamedSharding(mesh, cut.stored_spec), tree, partitions)


def with_shardings(abstract: PyTree, placed: PyTree) -> PyTree:
    """Returns ShapeDtypeStructs with their shardings, for lowering without arrays."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
    )


def bytes_per_device(
    partitions: Sequence[Partition], leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]
) -> int:
    """Returns the stored bytes of one device, padding included."""
    pairs = zip(partitions, leaves, strict=True)
    return sum(math.prod(p.device_shape) * np.dtype(x.dtype).itemsize for p, x in pairs)


def check_bytes(tree: PyTree, partitions: Sequence[Partition]) -> None:
    """Checks that each device holds the shards of the layout, and nothing else.

    Raises:
      ValueError: A shard has the wrong shape; the message has its leaf and device.
    """
    for (name, leaf), cut in zip(paths.named_leaves(tree), partitions, strict=True):
        for piece in leaf.addressable_shards:
            if piece.data.shape != cut.device_shape:
                raise ValueError(
                    f"{name} {leaf.shape} holds {piece.data.shape} on {piece.device}, but the "
                    f"layout says {cut.device_shape}. Make it with zero.init or zero.shard. `jit` "
                    "places the shards: remove jax.disable_jit() (jax_disable_jit), or use "
                    "stage=0. jax.debug.print shows values within a loss"
                )


# Of NNX, variables that no optimizer trains.
_NOT_TRAINED = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)


def check_arrays(tree: PyTree) -> None:
    """Checks that a tree has parameters only.

    Raises:
      ValueError: It is a module, has statistics of one, or a leaf is neither an array nor a number.
    """
    split = "graphdef, params, rest = nnx.split(model, nnx.Param, ...)"
    if isinstance(tree, nnx.Module):
        raise ValueError(
            f"the parameters are a module, {type(tree).__name__}: pass its trained variables, "
            f"{split}, and merge them with the others in the loss"
        )
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, node in flat[0]:
        if isinstance(node, _NOT_TRAINED):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"parameter {name!r} is a {type(node).__name__}, which is not trained: pass the "
                f"parameters alone, {split}, and the rest as an argument of the loss"
            )
    for name, leaf in paths.named_leaves(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))):
            raise ValueError(
                f"parameter {name!r} is a {type(leaf).__name__}: parameters are numeric arrays. "
                "Keep other things out of them, in a closure or an argument of the loss"
            )


def check_leaves(tree: PyTree, devices: int, frozen: Sequence[bool]) -> None:
    """Checks that every leaf can be a parameter on this number of devices.

    Raises:
      ValueError: The tree is empty, or a leaf is not supported.
    """
    leaves = paths.named_leaves(tree)
    if not leaves:
        raise ValueError("the parameters have no arrays: return a tree of arrays")
    for (name, leaf), still in zip(leaves, frozen, strict=True):
        if leaf.size == 0 and devices > 1 and jax.lib.__version__ == CRASHES_ON_EMPTY:
            raise ValueError(
                f"parameter {name!r} has shape {leaf.shape}, but jaxlib {CRASHES_ON_EMPTY} "
                "crashes on empty arrays on several devices: install another jaxlib, or leave "
                "such leaves out"
            )
        if advice := _advice(leaf.dtype, still, name):
            raise ValueError(f"parameter {name!r} has dtype {leaf.dtype}: {advice}")


def _advice(dtype: jnp.dtype, frozen: bool, name: str) -> str | None:
    """Returns the reason why a dtype is not supported, and a way out."""
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        return (
            "parameters are numeric arrays. Keep PRNG keys and other state out of them "
            "(nnx.split(model, nnx.Param, ...)) and pass those as extra arguments of the loss"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (
            "parameters are real. Store its real and imaginary parts as two float32 arrays, and "
            "join them in the loss (jax.lax.complex)"
        )
    if dtype == jnp.float64:
        return "parameters are stored in fp32. Convert it to float32"
    if not frozen and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2:
        return (
            "trained parameters are stored in fp32. Convert it with x.astype(jnp.float32), or "
            f"freeze it with `frozen`={name!r}"
        )
    return None
