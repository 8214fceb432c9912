"""Ties between arrays: what is there only when others are, in the forward pass or in the backward.

XLA orders what a program does by what depends on what. These say what must not come early, or
late, and change no number.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arrays = Sequence[Any]


def known(cotangent: Any) -> jax.Array | None:
    """A cotangent, or None for a zero that nobody made: 0 times an infinite derivative is NaN."""
    return cotangent if isinstance(cotangent, jax.Array) else None


def is_float(like: Any) -> bool:
    return jnp.issubdtype(like.dtype, jnp.inexact)


def tied(arrays: Arrays) -> list[Any]:
    """The same arrays; their gradients are there only when all of them are.

    So that the gradients of a layer are sent before the layer before it runs backward, and not
    those of all layers together. Floats alone: JAX's `cond` fails on a predicate that goes through
    a function with a gradient of its own.
    """
    out = list(arrays)
    floats = [i for i, x in enumerate(out) if is_float(x)]
    for i, x in zip(floats, _tied([out[i] for i in floats]), strict=True):
        out[i] = x
    return out


@jax.custom_vjp
def _tied(arrays: list[Any]) -> list[Any]:
    return arrays


def _tied_forward(arrays: list[Any]) -> tuple[list[Any], None]:
    return [x.value for x in arrays], None


def _tied_backward(_: None, cotangents: Arrays) -> tuple[list[jax.Array | None]]:
    return (together([known(c) for c in cotangents]),)


_tied.defvjp(_tied_forward, _tied_backward, symbolic_zeros=True)


@jax.custom_vjp
def abreast(arrays: list[Any]) -> list[Any]:
    """The same floats, none of which is there before all are; and so are their gradients."""
    return list(together(arrays))


def _abreast_forward(arrays: list[Any]) -> tuple[list[Any], None]:
    return list(together([x.value for x in arrays])), None


abreast.defvjp(_abreast_forward, _tied_backward, symbolic_zeros=True)


@jax.custom_vjp
def waiting(x: jax.Array, others: Arrays) -> jax.Array:
    """The same value, whose cotangent goes on when the others are there."""
    return x


def _waiting_backward(others: Arrays, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return together((cotangent, others))[0], None


waiting.defvjp(lambda x, others: (x, others), _waiting_backward)


@jax.custom_vjp
def instead(computed: jax.Array, stored: jax.Array) -> jax.Array:
    """The stored value; its gradient goes to the computed one, which is dead code otherwise."""
    return stored


instead.defvjp(lambda computed, stored: (stored, None), lambda _, cotangent: (cotangent, None))


def together(tree: Any) -> Any:
    """Ties arrays together: none is there before all are."""
    leaves, treedef = jax.tree.flatten(tree)
    tied = [i for i, x in enumerate(leaves) if _is_number(x)]
    barred = jax.lax.optimization_barrier([leaves[i] for i in tied])
    for i, x in zip(tied, barred, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _is_number(x: Any) -> bool:
    return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
