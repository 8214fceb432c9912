"""Counters of skipped steps, and the dynamic loss scale of fp16.

A step with non-finite gradients is skipped on all devices, because their norm is global.
`device_step.py` multiplies the loss by the scale. Source: Micikevicius et al. (arXiv:1710.03740),
section 3.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.collectives.precision import Precision


class Guard(NamedTuple):
    """Loss scale and counters of skipped steps: scalars in the optimizer state.

    Attributes:
      loss_scale: fp32; 1 unless compute is fp16.
      good_steps: int32, number of steps since the scale last changed.
      skipped: int32, number of steps skipped so far.
      consecutive: int32, number of steps skipped since the last good step.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    consecutive: jax.Array


def init_guard(precision: Precision) -> Guard:
    """Returns the guard before the first step."""
    scale = precision.initial_scale if precision.scaled else 1.0
    zero = jnp.zeros((), jnp.int32)
    return Guard(jnp.asarray(scale, jnp.float32), zero, zero, zero)


def next_guard(guard: Guard, finite: jax.Array, precision: Precision) -> Guard:
    """Returns the guard after a step, given whether its gradients were finite.

    Doubles the scale after `growth_interval` good steps, halves it on overflow, down to 1.

    >>> g = next_guard(init_guard(Precision("fp16")), jnp.asarray(False), Precision("fp16"))
    >>> float(g.loss_scale), int(g.skipped)
    (32768.0, 1)
    """
    good = jnp.where(finite, guard.good_steps + 1, 0)
    scale = guard.loss_scale
    if precision.scaled:
        grown = good >= precision.growth_interval
        # 2^126: past it the next doubling would be infinite in fp32.
        up = jnp.where(grown, jnp.minimum(scale * 2, 2.0**126), scale)
        scale = jnp.where(finite, up, jnp.maximum(scale / 2, 1.0))
        good = jnp.where(grown, 0, good)
    skip = jnp.where(finite, 0, 1).astype(jnp.int32)
    return Guard(
        scale,
        good.astype(jnp.int32),
        guard.skipped + skip,
        jnp.where(finite, 0, guard.consecutive + 1).astype(jnp.int32),
    )
