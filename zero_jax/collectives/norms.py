"""The norm of all gradients, whether all are finite, and what a step leaves that is skipped."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Partial sums up to here add up without overflow, whatever the number of devices.
_LARGE = 1e30
# Squares of numbers so far down cannot overflow fp32, however many are added up, and those that
# make a sum larger than the above do not vanish.
_DOWN = 2.0**-90


def sum_of_squares(x: jax.Array, factor: jax.Array | float = 1.0) -> jax.Array:
    """The fp32 sum of the squares of the numbers times a factor."""
    return jnp.sum(jnp.square(x.astype(jnp.float32) * factor))


def two_sums(squares: Callable[[jax.Array | float], jax.Array]) -> jax.Array:
    """Squares of this device's numbers, added up in the first of two, or scaled in the second.

    Added over devices, they give `norm_of`. The scaled sum waits for the other, and is one of zeros
    unless that is too large. Made in one pass, XLA for GPUs would send the last gradients with less
    to hide behind, and hold more.

    Args:
      squares: the sum of the squares of all numbers times a factor.
    """
    plain = squares(1.0)
    fits = plain <= _LARGE
    down = squares(jnp.where(fits, 0.0, _DOWN))
    return jnp.stack([jnp.where(fits, plain, 0.0), down])


def norm_of(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The l2 norm, and whether every number is finite: also of such as overflow when squared.

    >>> norm, finite = norm_of(two_sums(lambda factor: sum_of_squares(jnp.full(4, 1e30), factor)))
    >>> round(float(norm) / 1e30, 3), bool(finite)
    (2.0, True)
    """
    roots = jnp.sqrt(sums)
    return jnp.hypot(roots[0], roots[1] / _DOWN), jnp.all(jnp.isfinite(sums))


def unless_skipped(
    finite: jax.Array | bool, new: jax.Array, old: jax.Array | None = None
) -> jax.Array:
    """What a step makes of a value: the new one, or the old one if it is skipped.

    Args:
      finite: whether every gradient was.
      new: the value.
      old: the one before; None for an update, of which -0.0 is left: the addend that changes no bit
        of any number, -0.0 included.
    """
    return jnp.where(finite, new, jnp.full_like(new, -0.0) if old is None else old)
