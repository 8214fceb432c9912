"""Mixed precision: dtypes of parameters, gradients and communication; norms; skipped steps.

Parameters are stored as fp32 master parameters. They are gathered and used in `compute`, and
their gradients are summed over devices in `reduce`. Leaves with fewer than two dims (biases,
norms) are always summed in fp32: they add little communication and lose most accuracy in bf16.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.names import nearest

DTYPES = {
    "fp32": jnp.dtype("float32"),
    "bf16": jnp.dtype("bfloat16"),
    "fp16": jnp.dtype("float16"),
}
# Partial sums up to this value add up without overflow, for any number of devices.
_LARGE = 1e30
# Squares of numbers times this factor do not overflow fp32, however many are added, and those that
# make a sum exceed `_LARGE` do not underflow.
_DOWN = 2.0**-90


def parse_dtype(given: DTypeLike, what: str, allowed: Iterable[str] = DTYPES) -> str:
    """Returns "fp32", "bf16" or "fp16" for such a name, a dtype object, or its name.

    Raises:
      ValueError: It is not one of `allowed`.
    """
    name = given if isinstance(given, str) else jnp.dtype(given).name
    for short in allowed:
        if name in (short, DTYPES[short].name):
            return short
    near = nearest(name, allowed)
    raise ValueError(f"`{what}`={given!r}: use one of {', '.join(allowed)}, for example {near!r}")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the step, and the schedule of the loss scale.

    Attributes:
      compute_dtype: Dtype of gathered parameters and of the model.
      reduce_dtype: Dtype of gradient sums over devices.
      param_comm_dtype: Dtype of sent parameters (default: `compute_dtype`). "int8" sends matrices
        as int8 with one scale per block, see `quantised`. Matrices that are multiplied in fp8 are
        always sent in fp8, and only they are with "fp8".
      grad_comm_dtype: Dtype of sent gradients (default: `reduce_dtype`). "int8" or "int4" sends
        gradients of matrices in that dtype and sums them in fp32; sums of scanned layers are stored
        in `reduce_dtype` until the update.
      matmul_dtype: Dtype of products: fp8 or fp8_rowwise (default: `compute_dtype`). "fp8"
        multiplies matrices of layers in 8-bit floats, forward and backward, with one scale per
        tensor, "fp8_rowwise" with one per row; see `zero_jax.fp8`. Evaluations use `compute_dtype`.
      fp8_params: Pattern of parameters for fp8 (default: large matrices of layers). Large ones have
        at least 128 inputs and outputs.
      initial_scale: Initial loss scale (fp16 only).
      growth_interval: Number of good steps after which the scale doubles.

    Raises:
      ValueError: A dtype is not supported, or a number is below 1.

    >>> Precision(jnp.bfloat16).compute_dtype
    'bf16'
    """

    compute_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    param_comm_dtype: Literal["int8", "fp8"] | None = None
    grad_comm_dtype: Literal["int8", "int4"] | None = None
    matmul_dtype: Literal["fp8", "fp8_rowwise"] | None = None
    fp8_params: str | None = None
    initial_scale: float = dataclasses.field(default=2.0**16, metadata={"unit": "none"})
    growth_interval: int = dataclasses.field(default=2000, metadata={"unit": "steps"})

    def __post_init__(self) -> None:
        for name, allowed in (("compute_dtype", DTYPES), ("reduce_dtype", ("fp32", "bf16"))):
            dtype = parse_dtype(getattr(self, name), name, allowed)
            object.__setattr__(self, name, dtype)
        for name, allowed in (
            ("matmul_dtype", ("fp8", "fp8_rowwise")),
            ("param_comm_dtype", ("int8", "fp8")),
            ("grad_comm_dtype", ("int8", "int4")),
        ):
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(
                    f"`{name}`={getattr(self, name)!r}: use one of {', '.join(allowed)}, or None"
                )
        if self.matmul_dtype is None and (self.param_comm_dtype == "fp8" or self.fp8_params):
            raise ValueError(
                f"`param_comm_dtype`={self.param_comm_dtype!r} and `fp8_params`="
                f"{self.fp8_params!r}: only matrix products in fp8 read parameters in fp8. Set "
                'matmul_dtype="fp8", or leave these out'
            )
        if self.initial_scale < 1 or self.growth_interval < 1:
            raise ValueError(
                f"`initial_scale`={self.initial_scale} and "
                f"`growth_interval`={self.growth_interval}: both must be at least 1"
            )

    @property
    def compute(self) -> jnp.dtype:
        """`compute_dtype` as a dtype."""
        return DTYPES[self.compute_dtype]

    @property
    def reduce(self) -> jnp.dtype:
        """`reduce_dtype` as a dtype."""
        return DTYPES[self.reduce_dtype]

    @property
    def scaled(self) -> bool:
        """True if a loss scale is used: fp16 gradients underflow without one."""
        return self.compute == jnp.float16


def as_precision(given: Precision | str) -> Precision:
    """Returns a `Precision`, made of a compute dtype if that is given."""
    return given if isinstance(given, Precision) else Precision(given)


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts a floating-point leaf; returns others unchanged."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


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
