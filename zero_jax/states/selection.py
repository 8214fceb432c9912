"""Which leaves of a state are kept in fewer bits: read from what they are, not from names.

They are like a parameter, fp32, and of at least 4096 elements. What starts as the parameters do
(averages of them, slow copies) is a weight and no statistic, and stays; the trace of `init` says
so.
"""

import zlib
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero_jax.jaxpr.equations import CALLS, is_var, written_out
from zero_jax.jaxpr.reads import needed
from zero_jax.sharding import paths
from zero_jax.sharding.cuts import Splitter, mirrors, state_splits

PyTree = Any
SMALL = 4096  # elements


class Kept(NamedTuple):
    """A leaf that is kept in fewer bits.

    Attributes:
      at: its position in the state.
      number: what its rounding depends on: its parameter's path, and which of the parameter's
        states it is. So nothing about other leaves changes its bits.
    """

    at: int
    number: int


def selected(tx: optax.GradientTransformation, params: PyTree) -> tuple[Kept, ...]:
    """Those of a transformation's state.

    Args:
      tx: the transformation.
      params: logical parameters, arrays or shapes.

    >>> shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    >>> [kept.at for kept in selected(optax.adam(1e-3), shapes)]  # after the counter mu and nu
    [1, 2]
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    closed = written_out(closed, CALLS)  # a call makes all of its results of all that it is given
    cuts, own = Splitter(1)(params), set(closed.jaxpr.invars)
    owners = mirrors(state_splits(state, params, cuts), cuts)
    names = [name for name, _ in paths.named_leaves(params)]
    found, states = [], Counter[int]()
    known = zip(jax.tree.leaves(state), owners, closed.jaxpr.outvars, strict=True)
    for at, (leaf, owner, made) in enumerate(known):
        if owner is None:
            continue
        states[owner] += 1
        large = leaf.dtype == jnp.float32 and leaf.size >= SMALL
        weight = is_var(made) and not own.isdisjoint(needed(closed.jaxpr.eqns, [made]))
        if large and not weight:
            found.append(Kept(at, zlib.crc32(names[owner].encode()) + states[owner]))
    return tuple(found)
