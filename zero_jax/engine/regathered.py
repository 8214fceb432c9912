"""An operation that keeps by itself what its backward pass reads, but for the weights it is given.

A loop as a whole is too dear to be run again, and a function with a gradient of its own decides
what it keeps. Of what they keep the weights are told by identity and dropped; the backward pass
gathers them again and puts them back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.collectives.barriers import Arrays, is_float, together
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

        def forward(shards: Any, moving: Arrays) -> Any:
            leaves = opened(shards)
            outs, pull = jax.vjp(whole, leaves, moving)
            kept, treedef = jax.tree.flatten(pull)
            where = tuple(next((i for i, w in enumerate(leaves) if w is x), -1) for x in kept)
            held = [x for x, at in zip(kept, where, strict=True) if at < 0]
            return outs, (Known((treedef, where)), held, shards)

        def backward(residuals: Any, cotangents: Any) -> Any:
            known, held, shards = residuals
            treedef, where = known.value
            shards, cotangents = together((shards, cotangents))
            leaves, scatter = jax.vjp(opened, shards)
            it = iter(held)
            kept = [leaves[at] if at >= 0 else next(it) for at in where]
            grads, moved = jax.tree.unflatten(treedef, kept)(cotangents)
            return scatter(grads)[0], moved

        wrapped.defvjp(forward, backward)
        return wrapped([s.arrays for s in sources], moving)

    return call
