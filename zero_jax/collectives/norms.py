"""The norm of all gradients, the check that they are finite, and the results of skipped steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Partial sums up to this value add up without overflow, for any number of devices.
_LARGE = 1e30
# Squares of numbers times this factor do not overflow fp32, however many are added, and those that
# make a sum exceed `_LARGE` do not underflow.
_DOWN = 2.0**-90


def sum_of_squares(x: jax.Array, factor: jax.Array | float = 1.0) -> jax.Array:
    """Returns the fp32 sum of the squares of the numbers times a factor."""
    return jnp.sum(jnp.square(x.astype(jnp.float32) * factor))


def two_sums(squares: Callable[[jax.Array | float], jax.Array]) -> jax.Array:
    """Returns the sum of this device's squares, or if it is too large, that of scaled numbers.

    Their sums over devices are the argument of `norm_of`. The scaled sum depends on the other: in
    one pass, XLA for GPUs would overlap less of the communication of the last gradients, and hold
    more.

    Args:
      squares: Returns the sum of the squares of all numbers times a factor.
    """
    plain = squares(1.0)
    fits = plain <= _LARGE
    down = squares(jnp.where(fits, 0.0, _DOWN))
    return jnp.stack([jnp.where(fits, plain, 0.0), down])


def norm_of(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the l2 norm, and whether every number is finite, even if squares overflow.

    >>> norm, finite = norm_of(two_sums(lambda factor: sum_of_squares(jnp.full(4, 1e30), factor)))
    >>> round(float(norm) / 1e30, 3), bool(finite)
    (2.0, True)
    """
    roots = jnp.sqrt(sums)
    return jnp.hypot(roots[0], roots[1] / _DOWN), jnp.all(jnp.isfinite(sums))


def unless_skipped(
    finite: jax.Array | bool, new: jax.Array, old: jax.Array | None = None
) -> jax.Array:
    """Returns the new value, or the old one if the step is skipped.

    Args:
      finite: True if every gradient is finite.
      new: The new value.
      old: The old value. None for an update, which becomes -0.0: adding it changes no bit of any
        number, -0.0 included.
    """
    return jnp.where(finite, new, jnp.full_like(new, -0.0) if old is None else old)
