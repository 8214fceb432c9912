"""An operation that keeps by itself what its backward pass reads, but for the weights it is given.

A loop as a whole is too dear to be run again, and a function with a gradient of its own decides
what it keeps. Of what they keep the weights are told by identity and dropped; the backward pass
gathers them again and puts them back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.collectives.barriers import Arrays, is_float, known, together
from zero_jax.engine.weights import Source
from zero_jax.remat.recompute import Known


def regathered(run: Callable[[Arrays, Arrays], list[Any]]) -> Any:
    """Runs an operation on weights that keeps by itself what its backward pass reads (a loop, a
    `custom_vjp`), but for the weights, which are gathered again.

    Args:
      run: the operation, of whole leaves and of other arrays.

    Returns:
      A function of sources and of these arrays that returns the results.
    """

    def call(sources: Sequence[Source], args: Arrays) -> list[Any]:
        still = [i for i, x in enumerate(args) if not is_float(x)]
        moving = [x for i, x in enumerate(args) if i not in still]

        def opened(shards: Sequence[Arrays]) -> list[Any]:
            return [s.of(own).open() for s, own in zip(sources, shards, strict=True)]

        def whole(leaves: Arrays, moving: Arrays) -> list[Any]:
            it = iter(moving)
            return run(leaves, [x if i in still else next(it) for i, x in enumerate(args)])

        @jax.custom_vjp
        def wrapped(shards: Any, moving: Arrays) -> list[Any]:
            return whole(opened(shards), moving)

        def forward(shards: Any, moving: Any) -> Any:
            trained = [i for i, own in enumerate(shards) if any(x.perturbed for x in own)]
            moved = [i for i, x in enumerate(moving) if x.perturbed]
            shards, moving = jax.tree.map(lambda x: x.value, (shards, moving), is_leaf=_is_input)
            leaves = opened(shards)

            # JAX refuses to differentiate what an operation closes over: only what has a gradient.
            def some(own: Arrays, others: Arrays) -> list[Any]:
                return whole(_with(leaves, trained, own), _with(moving, moved, others))

            given = [leaves[i] for i in trained], [moving[i] for i in moved]
            outs, pull = jax.vjp(some, *given)
            kept, treedef = jax.tree.flatten(pull)
            where = tuple(next((i for i, w in enumerate(leaves) if w is x), -1) for x in kept)
            held = [x for x, at in zip(kept, where, strict=True) if at < 0]
            likes = tuple(map(jax.typeof, outs))
            return outs, (
                Known((treedef, where, tuple(trained), tuple(moved), likes)),
                held,
                shards,
            )

        def backward(residuals: Any, cotangents: Any) -> Any:
            held, shards = residuals[1:]
            treedef, where, trained, moved, likes = residuals[0].value
            cotangents = [_made(c, like) for c, like in zip(cotangents, likes, strict=True)]
            shards, cotangents = together((shards, cotangents))

            def partly(own: Sequence[Arrays]) -> tuple[list[Any], list[Any]]:
                leaves = opened(_with(shards, trained, own))
                return [leaves[i] for i in trained], leaves

            _, scatter, leaves = jax.vjp(partly, [shards[i] for i in trained], has_aux=True)
            it = iter(held)
            kept = [leaves[at] if at >= 0 else next(it) for at in where]
            grads, others = jax.tree.unflatten(treedef, kept)(cotangents)
            none = [[None] * len(own) for own in shards]
            found = _with([None] * len(moving), moved, others)
            return _with(none, trained, scatter(grads)[0]), found

        wrapped.defvjp(forward, backward, symbolic_zeros=True)
        return wrapped([s.arrays for s in sources], moving)

    return call


def _is_input(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _with(values: Sequence[Any], places: Sequence[int], own: Sequence[Any]) -> list[Any]:
    """The values, with others at these places."""
    out = list(values)
    for i, x in zip(places, own, strict=True):
        out[i] = x
    return out


def _made(cotangent: Any, like: Any) -> Any:
    """A cotangent; zeros for one that nobody made."""
    if known(cotangent) is not None:
        return cotangent
    if not is_float(like):
        return np.zeros(like.shape, jax.dtypes.float0)
    return jnp.zeros(like.shape, like.dtype)
