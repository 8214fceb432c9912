"""A loss traced with a device's tokens: positions made global, and its results checked.

A device's sum and weight are added over `context` as over `data`. That is right if both are sums
over tokens, or neither is, such as a mean and 1. A trace with twice as many tokens shows it: sum
and weight must grow alike.
"""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from zero_jax.context_parallel.token_dims import TokenFact, split_tokens
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.graph import Graph
from zero_jax.tracing.jaxpr import as_function, is_var, stretch


def split_loss(
    closed: jex.ClosedJaxpr,
    longer: Callable[[], jex.ClosedJaxpr],
    tokens: Sequence[bool],
    size: int,
    aux: Sequence[str],
) -> jex.ClosedJaxpr:
    """Returns the loss with global positions.

    Args:
      closed: The loss of one device; its results are sum, weight and the leaves of the aux.
      longer: Returns the same for twice as many tokens.
      tokens: For each input, True if its dim 1 has the device's tokens.
      size: C, the size of the `context` axis.
      aux: Paths of the leaves of the aux.

    Raises:
      ValueError: An operation mixes positions, or a result is no sum or mean over tokens.
    """
    made, facts = split_tokens(closed, tokens, size)
    twice = longer()
    pairs = zip(facts, split_tokens(twice, tokens, size)[1], strict=True)
    growth = [_growth(at, closed, twice, *pair) for at, pair in enumerate(pairs)]
    if growth[0] is None or growth[0] != growth[1]:
        raise ValueError(
            "the loss function must return a mean over all tokens of the batch, or "
            "zero_jax.Weighted(sum, weight) with two sums over tokens: each device of the context "
            "axis has a part of each row. Its sum grows by "
            f"{growth[0] or 'an unknown factor'} with twice as many tokens, its weight by "
            f"{growth[1] or 'an unknown factor'}"
        )
    for path, grown in zip(aux, growth[2:], strict=True):
        if grown != 1.0:
            raise ValueError(
                f"aux {path or 'of the loss'} has tokens, or a sum over them, of one device of the "
                "context axis: return a mean over tokens, or jax.lax.psum(x, 'context')"
            )
    return made


def _growth(
    at: int,
    closed: jex.ClosedJaxpr,
    longer: jex.ClosedJaxpr,
    fact: TokenFact,
    other: TokenFact,
) -> float | None:
    """Returns the factor by which a result grows with twice as many tokens; None if unknown."""
    if fact.dims:
        return None
    if fact.partial:
        return 2.0 * fact.over / other.over if fact.over and other.over else None
    values = _constant(closed, at), _constant(longer, at)
    if values[0] is None or values[1] is None or not values[0]:
        return 1.0
    return values[1] / values[0]


def _constant(closed: jex.ClosedJaxpr, at: int) -> float | None:
    """Returns the value of a scalar result that depends on no input, such as a token count."""
    jaxpr, atom = closed.jaxpr, closed.jaxpr.outvars[at]
    if isinstance(atom, jex.Literal):
        return float(atom.val)
    read, graph = needed(jaxpr.eqns, [atom]), Graph(jaxpr)
    if atom.aval.shape or not read.isdisjoint([*jaxpr.invars, *jaxpr.constvars]):
        return None
    eqns = graph.part({graph.made_by[v] for v in read if is_var(v)})
    with jax.ensure_compile_time_eval():
        (value,) = as_function(stretch(eqns, [atom]))()
    return float(value)
