"""Dtypes of parameters, gradients and communication.

Parameters are stored as fp32 master parameters. They are gathered and used in `compute`, and
their gradients are summed over devices in `reduce`. Leaves with fewer than two dims (biases,
norms) are always summed in fp32: they add little communication and lose most accuracy in bf16.
"""

import dataclasses
from collections.abc import Iterable
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
      compute_dtype: Dtype of gathered parameters and of the model: fp32, bf16 or fp16.
      reduce_dtype: Dtype in which gradients are summed over devices: fp32 or bf16.
      param_comm_dtype: Dtype of parameters on the interconnect. "int8" sends matrices as int8 with
        one scale per block, see `quantised`. None sends them in `compute_dtype`.
      grad_comm_dtype: Dtype of gradients on the interconnect. "int8" or "int4" sends gradients of
        matrices in that dtype and sums them in fp32; sums of scanned layers are stored in
        `reduce_dtype` until the update. None sends and sums them in `reduce_dtype`.
      initial_scale: Initial loss scale (fp16 only).
      growth_interval: Number of good steps after which the scale doubles.

    Raises:
      ValueError: A dtype is not supported, or a number is below 1.

    >>> Precision(jnp.bfloat16).compute_dtype
    'bf16'
    """

    compute_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    param_comm_dtype: Literal["int8"] | None = None
    grad_comm_dtype: Literal["int8", "int4"] | None = None
    initial_scale: float = dataclasses.field(default=2.0**16, metadata={"unit": "none"})
    growth_interval: int = dataclasses.field(default=2000, metadata={"unit": "steps"})

    def __post_init__(self) -> None:
        for name, allowed in (("compute_dtype", DTYPES), ("reduce_dtype", ("fp32", "bf16"))):
            dtype = parse_dtype(getattr(self, name), name, allowed)
            object.__setattr__(self, name, dtype)
        if self.param_comm_dtype not in (None, "int8"):
            raise ValueError(
                f'`param_comm_dtype`={self.param_comm_dtype!r}: use "int8", or None for '
                "`compute_dtype`"
            )
        if self.grad_comm_dtype not in (None, "int8", "int4"):
            raise ValueError(
                f'`grad_comm_dtype`={self.grad_comm_dtype!r}: use "int8" or "int4", or None for '
                "`reduce_dtype`"
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
