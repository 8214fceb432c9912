"""Reports losses that sum the rows of a batch, or use statistics of one device's rows."""

import warnings
from collections.abc import Sequence

import jax.extend.core as jex

from zero_jax.jaxpr import rows

_SUM = (
    "the loss function {doubt} a sum over the rows of the batch (dim 0). Losses are averaged "
    "over {parts} parts of the batch (devices x micro-batches), so its value and gradients would "
    "be 1/{parts} of those of one device. Return a mean, jnp.mean(errors), or "
    "zero_jax.Weighted(jnp.sum(errors), weight), where `weight` is the number of rows or tokens"
)
_MIXED = (
    "the loss function uses a mean over rows (normalised advantages, a softmax over the batch, "
    "batch norm, products of all pairs of rows). Each device and micro-batch has its own, over "
    "1/{parts} of the batch. Use jax.lax.pmean(jnp.mean(x, 0), zero.batch_axes) for the mean "
    "over all devices, and jax.lax.all_gather for their rows. Compute values without a gradient "
    "before the loss. See docs/models.md, Statistics over rows"
)


def check(
    closed: jex.ClosedJaxpr,
    trained: Sequence[bool],
    batch: Sequence[bool],
    *,
    parts: int,
    weighted: bool,
    told: set[str],
) -> None:
    """Raises for a certain sum over rows; warns, once a loss, of a likely one and of statistics.

    Args:
      closed: the traced loss.
      trained: which of its inputs are trained leaves.
      batch: which are arrays of the batch.
      parts: devices times micro-batches.
      weighted: whether the loss is `Weighted`.
      told: what was said already; extended.

    Raises:
      ValueError: the loss is a sum over rows.
    """
    if parts == 1:
        return
    found = rows.read(closed, trained, batch)
    loss = found.loss
    if loss.is_sum and loss.sure and not weighted:
        raise ValueError(_SUM.format(doubt="returns", parts=parts))
    if loss.is_sum and not weighted:
        _warn(_SUM.format(doubt="seems to return", parts=parts), told)
    if found.mixed:
        _warn(_MIXED.format(parts=parts), told)


def _warn(message: str, told: set[str]) -> None:
    if message not in told:
        told.add(message)
        warnings.warn(message, stacklevel=2)
