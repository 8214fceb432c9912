"""Sharded parameters, initialised without the full model on any device, or made of full arrays."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from zero_jax.collectives.precision import cast
from zero_jax.engine.config import Config
from zero_jax.offload.host import place
from zero_jax.sharding import checks, layout, paths
from zero_jax.sharding.mesh import check_there
from zero_jax.sharding.paths import PyTree


def init(config: Config, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Initialises sharded parameters; see `Zero.init`."""
    check_there(config.mesh)
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise ValueError(
            "`jax_threefry_partitionable` is off, so initial values would depend on the mesh: "
            "remove the setting"
        )
    initialize, abstract, placed = _initializer(config, fn, args)
    params = jax.jit(initialize, out_shardings=placed)(*args)
    checks.check_bytes(params, config.resolved.splitter(jax.eval_shape(layout.unpad, abstract)))
    return params


def eval_shape(config: Config, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns the result of `init` as ShapeDtypeStructs with shardings; allocates nothing."""
    _, abstract, placed = _initializer(config, fn, args)
    return layout.with_shardings(abstract, placed)


def shard(config: Config, params: PyTree) -> PyTree:
    """Shards existing full arrays; see `Zero.shard`."""
    for name, leaf in paths.named_leaves(params):
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise ValueError(
                f"parameter {name!r} is a {type(leaf).__name__}: parameters are arrays, for "
                "example jnp.asarray(...)"
            )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    _, abstract, placed = _initializer(config, lambda tree: tree, (shapes,))

    def place(x: ArrayLike, like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        host = np.zeros(like.shape, like.dtype)
        host[tuple(map(slice, np.shape(x)))] = np.asarray(x)
        return jax.make_array_from_callback(like.shape, sharding, lambda index: host[index])

    leaves = zip(*map(jax.tree.leaves, (params, abstract, placed)), strict=True)
    return jax.tree.unflatten(jax.tree.structure(abstract), [place(*leaf) for leaf in leaves])


def _initializer(
    config: Config, user_fn: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """Returns a function that makes sharded parameters, its abstract result and shardings."""

    def fn(*args: PyTree) -> PyTree:
        # Variables that name their dims would be placed by Flax as soon as they are made.
        with nnx.use_eager_sharding(False):
            made = user_fn(*args)
        checks.check_arrays(made)
        return made

    full = jax.eval_shape(fn, *args)
    frozen = paths.frozen_leaves(full, config.frozen if jax.tree.leaves(full) else None)
    checks.check_leaves(full, config.mesh.size, frozen)
    cuts = config.resolved.splitter(full)

    def initialize(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(fn(*args))
        masters = [
            x if f else cast(x, jnp.promote_types(x.dtype, jnp.float32))
            for x, f in zip(leaves, frozen, strict=True)
        ]
        return layout.pad(jax.tree.unflatten(treedef, masters), cuts)

    abstract = jax.eval_shape(initialize, *args)
    placed = layout.shardings(abstract, cuts, config.mesh)
    return initialize, abstract, place(placed, abstract, config.offload)
