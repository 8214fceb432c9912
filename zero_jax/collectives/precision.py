"""Dtypes of parameters, gradients and communication.

Parameters are stored as fp32 master parameters. They are gathered and used in `compute`, and
their gradients are summed over devices in `reduce`. Leaves with fewer than two dims (biases,
norms) are always summed in fp32: they add little communication and lose most accuracy in bf16.
"""

import dataclasses
from typing import Any

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
    """Returns the dtype for 'bf16', 'fp16', 'fp32' or a dtype object.

    Raises:
      ValueError: It is not one of `allowed`.
    """
    name = given if isinstance(given, str) else jnp.dtype(given).name
    dtype = _DTYPES.get(name)
    if dtype is None or dtype not in [_DTYPES[a] for a in allowed]:
        near = nearest(name, allowed)
        raise ValueError(f"{what}={given!r}: use one of {', '.join(allowed)}, for example {near!r}")
    return jnp.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the step, and the schedule of the loss scale.

    Attributes:
      compute: Dtype of gathered parameters and of the model: fp32, bf16 or fp16.
      reduce: Dtype in which gradients are summed over devices: fp32 or bf16.
      gather: Parameter communication dtype. "int8" sends matrices as int8 with one scale per
        block, see `quantised`. None sends them in `compute`.
      scatter: Gradient communication dtype. "int8" or "int4" sends gradients of matrices in that
        dtype and sums them in fp32; sums of scanned layers are stored in `reduce` until the update.
        None sends and sums them in `reduce`.
      initial_scale: Initial loss scale (fp16 only).
      growth_interval: Number of good steps after which the scale doubles.

    Raises:
      ValueError: A dtype is not supported, or a number is below 1.

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
    def gather_bytes(self) -> float:
        """Bytes per parameter element on the interconnect, without the scales of int8."""
        return 1.0 if self.gather else float(self.compute.itemsize)

    @property
    def scatter_bytes(self) -> float:
        """Bytes per gradient element on the interconnect, without the scales of int8 and int4."""
        return {"int8": 1.0, "int4": 0.5}.get(self.scatter or "", float(self.reduce.itemsize))

    @property
    def scaled(self) -> bool:
        """True if a loss scale is used: fp16 gradients underflow without one."""
        return self.compute == jnp.float16


def cast(x: Any, dtype: Any) -> Any:
    """Casts a floating-point leaf; returns others unchanged."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
