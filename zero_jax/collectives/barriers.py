"""Optimization barriers that order arrays, in the forward or in the backward pass.

XLA orders operations by their data dependencies. These add dependencies and change no number.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from zero_jax.sharding.paths import PyTree

Arrays = Sequence[jax.Array]


def known(cotangent: jax.Array | SymbolicZero) -> jax.Array | None:
    """Returns a cotangent; None for a symbolic zero: 0 times an infinite derivative is NaN."""
    return cotangent if isinstance(cotangent, jax.Array) else None


def is_float(like: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(like.dtype, jnp.inexact)


@jax.custom_vjp
def waiting(x: jax.Array, others: Arrays) -> jax.Array:
    """Returns the value; its cotangent is available only when the others are."""
    return x


def _waiting_backward(others: Arrays, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return together((cotangent, others))[0], None


waiting.defvjp(lambda x, others: (x, others), _waiting_backward)


@jax.custom_vjp
def instead(computed: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns the stored value with the gradient of the computed one, otherwise dead code."""
    return stored


instead.defvjp(lambda computed, stored: (stored, None), lambda _, cotangent: (cotangent, None))


def together(tree: PyTree) -> PyTree:
    """Returns the arrays; none is available before all are."""
    leaves, treedef = jax.tree.flatten(tree)
    tied = [i for i, x in enumerate(leaves) if _is_number(x)]
    barred = jax.lax.optimization_barrier([leaves[i] for i in tied])
    for i, x in zip(tied, barred, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _is_number(x: jax.Array) -> bool:
    return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
