"""An operation that keeps by itself what its backward pass reads, but for the weights it is given.

A loop as a whole is too dear to be run again, and a function with a gradient of its own decides
what it keeps. Of what they keep the weights, re-arranged or not, are told by identity and dropped;
the backward pass gathers them again and puts them back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.collectives.barriers import Arrays, is_float, known, together
from zero_jax.engine.lazy_param import Apart
from zero_jax.remat.recompute import Known

Operation = Callable[..., list[Any]]


def regathered(run: Operation, given: Apart) -> list[Any]:
    """Runs an operation on weights that keeps by itself what its backward pass reads (a loop, a
    `custom_vjp`), but for the weights, which are gathered again.

    Args:
      run: the operation, of whole arrays.
      given: what it is given, weights among it.

    Returns:
      The results.
    """
    own = _Regathered(run, given)
    wrapped = jax.custom_vjp(own.primal)
    wrapped.defvjp(own.forward, own.backward, symbolic_zeros=True)
    return wrapped([s.arrays for s in given.sources], list(filter(is_float, given.plain)))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What the backward pass is told beside arrays.

    Attributes:
      treedef: of the operation's own backward pass.
      where: of each of its arrays the weight that it is, or -1.
      shards: whose arrays have gradients, of the sources.
      trained, moved: which weights, and which other arrays, have gradients.
      likes: types of the results.
    """

    treedef: Any
    where: tuple[int, ...]
    shards: tuple[int, ...]
    trained: tuple[int, ...]
    moved: tuple[int, ...]
    likes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Regathered:
    """What `regathered` was given, and its passes: of shards, and of the arrays that are floats."""

    run: Operation
    given: Apart

    def _whole(self, weights: Arrays, floats: Arrays) -> list[Any]:
        it = iter(floats)
        plain = [next(it) if is_float(x) else x for x in self.given.plain]
        return self.run(*self.given.filled(weights, plain))

    def primal(self, shards: Sequence[Arrays], floats: Arrays) -> list[Any]:
        """Without a gradient."""
        return self._whole(self.given.opened(shards), floats)

    def forward(self, shards: Any, floats: Any) -> tuple[list[Any], Any]:
        """The results, and what the backward pass reads."""
        own = tuple(i for i, arrays in enumerate(shards) if any(x.perturbed for x in arrays))
        moved = tuple(i for i, x in enumerate(floats) if x.perturbed)
        shards, floats = jax.tree.map(lambda x: x.value, (shards, floats), is_leaf=_is_input)
        leaves = self.given.opened(shards)
        trained = tuple(i for i in self.given.moved_by(own) if is_float(leaves[i]))

        # JAX refuses to differentiate what an operation closes over: only what has a gradient.
        def some(weights: Arrays, others: Arrays) -> list[Any]:
            return self._whole(_with(leaves, trained, weights), _with(floats, moved, others))

        outs, pull = jax.vjp(some, [leaves[i] for i in trained], [floats[i] for i in moved])
        arrays, treedef = jax.tree.flatten(pull)
        where = tuple(next((i for i, w in enumerate(leaves) if w is x), -1) for x in arrays)
        held = [x for x, at in zip(arrays, where, strict=True) if at < 0]
        kept = _Kept(treedef, where, own, trained, moved, tuple(map(jax.typeof, outs)))
        return outs, (Known(kept), held, shards)

    def backward(self, residuals: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
        """The gradients of shards and of floats."""
        kept: _Kept = residuals[0].value
        held, shards = residuals[1:]
        cotangents = [_made(c, like) for c, like in zip(cotangents, kept.likes, strict=True)]
        shards, cotangents = together((shards, cotangents))

        def partly(own: Sequence[Arrays]) -> tuple[list[Any], list[Any]]:
            leaves = self.given.opened(_with(shards, kept.shards, own))
            return [leaves[i] for i in kept.trained], leaves

        own = [shards[i] for i in kept.shards]
        _, scatter, leaves = jax.vjp(partly, own, has_aux=True)
        it = iter(held)
        arrays = [leaves[at] if at >= 0 else next(it) for at in kept.where]
        grads, others = jax.tree.unflatten(kept.treedef, arrays)(cotangents)
        none: list[Any] = [[None] * len(own) for own in shards]
        floats = [None] * sum(map(is_float, self.given.plain))
        return _with(none, kept.shards, scatter(grads)[0]), _with(floats, kept.moved, others)


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
