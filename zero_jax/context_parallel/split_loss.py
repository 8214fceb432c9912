"""A loss traced with a device's tokens: positions made global, and its results checked.

A device's sum and weight are added over `context` as over `data`. That is right if both are sums
over tokens, or neither is, such as a mean and 1. A trace of the full row shows it.
"""

from collections.abc import Callable, Sequence

import jax.extend.core as jex

from zero_jax.context_parallel.token_dims import averages, check_constants, split_tokens
from zero_jax.context_parallel.token_facts import TokenFact


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
      longer: Returns the same for the full row, `size` times as many tokens.
      tokens: For each input, True if its dim 1 has the device's tokens.
      size: C, the size of the `context` axis.
      aux: Paths of the leaves of the aux.

    Raises:
      ValueError: An operation mixes positions, or a result is no sum or mean over tokens.
    """
    made, facts = split_tokens(closed, tokens, size)
    full = longer()
    check_constants(closed, full, tokens)
    of_full = split_tokens(full, tokens, size)[1]
    if not averages(facts[:2], of_full[:2], size):
        raise ValueError(
            "the loss function must return a mean over all tokens of the batch, or "
            "zero_jax.Weighted(sum, weight) with two sums over tokens: each device of the context "
            "axis has a part of each row"
        )
    one = TokenFact(number=1.0)
    for path, fact, other in zip(aux, facts[2:], of_full[2:], strict=True):
        differs = fact.partial and not averages((fact, one), (other, one), size)
        if fact.dims or differs or fact.number != other.number:
            raise ValueError(
                f"aux {path or 'of the loss'} has tokens, their number, or a sum over them, of one "
                "device of the context axis: return a mean over tokens, or "
                "jax.lax.psum(x, 'context')"
            )
    return made
