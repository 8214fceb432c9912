"""Names of dims: of parameters as they are made, and of activations between layers."""

from typing import Any

import jax
from flax import linen as nn
from flax import nnx


def named(init: Any, *names: str | None) -> Any:
    """An initializer whose parameters carry the names of their dims."""
    # Not eager: Flax would want a mesh as soon as the model is built.
    return nnx.with_partitioning(init, names, eager_sharding=False)


def residual(x_BxTxD: jax.Array) -> jax.Array:
    """The residual stream, whose tokens sequence parallelism splits."""
    return nn.with_logical_constraint(x_BxTxD, ("batch", "seq", "embed"))


def whole(x_BxTxD: jax.Array) -> jax.Array:
    """What attention and matmuls need whole."""
    return nn.with_logical_constraint(x_BxTxD, ("batch", "length", "embed"))
