"""Which dtype is used where, and what happens when a gradient is not finite.

Parameters rest as fp32 masters, are gathered and used in `compute`, and their gradients are
summed over devices in `reduce`. Leaves with fewer than two dims (biases, norms) are always
summed in fp32: they cost nothing on the wire and lose most in bf16.

The guard skips a step whose gradients are not finite, on every device at once, since the norm
that it looks at is global. With fp16 it also drives a dynamic loss scale (Micikevicius et al.,
arXiv:1710.03740, section 3.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.names import nearest

_DTYPES = {
    "fp32": jnp.float32,
    "float32": jnp.float32,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "fp16": jnp.float16,
    "float16": jnp.float16,
}


def parse_dtype(given: Any, allowed: tuple[str, ...], what: str) -> Any:
    """The dtype behind 'bf16', 'fp16', 'fp32' or a dtype object.

    Raises:
      ValueError: if it is none of `allowed`.
    """
    name = given if isinstance(given, str) else jnp.dtype(given).name
    dtype = _DTYPES.get(name)
    if dtype is None or dtype not in [_DTYPES[a] for a in allowed]:
        near = nearest(name, allowed)
        raise ValueError(f"{what}={given!r}: use one of {', '.join(allowed)}, for example {near!r}")
    return jnp.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the step, and the loss scale's schedule.

    Attributes:
      compute: dtype of gathered parameters, hence of the model: fp32, bf16 or fp16.
      reduce: dtype in which gradients are summed over devices: fp32 or bf16.
      gather: "int8" sends matrices as int8 with a scale a block, see `quantised`; None sends them
        in `compute`.
      scatter: "int8" or "int4" sends gradients of matrices so and sums them in fp32, of which
        scanned layers keep `reduce` until the update; None sends and sums them in `reduce`.
      initial_scale: first loss scale (fp16 only).
      growth_interval: good steps after which the scale doubles.

    >>> Precision("bf16").compute
    dtype(bfloat16)
    """

    compute: Any = "fp32"
    reduce: Any = "fp32"
    gather: str | None = None
    scatter: str | None = None
    initial_scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        compute = parse_dtype(self.compute, ("fp32", "bf16", "fp16"), "compute")
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "reduce", parse_dtype(self.reduce, ("fp32", "bf16"), "reduce"))
        if self.gather not in (None, "int8"):
            raise ValueError(
                f'gather={self.gather!r}: use "int8", or None for the dtype of compute'
            )
        if self.scatter not in (None, "int8", "int4"):
            raise ValueError(
                f'scatter={self.scatter!r}: use "int8" or "int4", or None for the dtype of reduce'
            )
        if self.initial_scale < 1 or self.growth_interval < 1:
            raise ValueError(
                f"initial_scale={self.initial_scale} and growth_interval={self.growth_interval} "
                "must both be at least 1"
            )

    @property
    def scaled(self) -> bool:
        """Whether a loss scale is used: fp16 gradients underflow without one."""
        return self.compute == jnp.float16


def cast(x: Any, dtype: Any) -> Any:
    """Casts floating leaves, leaves the rest as it is."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


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


class Guard(NamedTuple):
    """What the guard remembers, as scalars in the optimizer state.

    Attributes:
      loss_scale: fp32; 1 unless compute is fp16.
      good_steps: int32, steps since the scale last changed.
      skipped: int32, steps skipped in all.
      consecutive: int32, steps skipped in a row up to now.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    consecutive: jax.Array


def init_guard(precision: Precision) -> Guard:
    """The guard before the first step."""
    scale = precision.initial_scale if precision.scaled else 1.0
    zero = jnp.zeros((), jnp.int32)
    return Guard(jnp.asarray(scale, jnp.float32), zero, zero, zero)


def next_guard(guard: Guard, finite: jax.Array, precision: Precision) -> Guard:
    """The guard after a step whose gradients were (not) finite.

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
