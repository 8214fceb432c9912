"""Check that a step which was traced with products in fp8 was compiled with them."""

import jax.extend.core as jex

from zero_jax.fp8.product import SCOPE
from zero_jax.hlo.fp8_products import Fp8Products, fp8_products
from zero_jax.hlo.hlo_text import Program
from zero_jax.tracing.dataflow import executed
from zero_jax.tracing.jaxpr import alone, dtype_of, products

# Fraction of the traced FLOPs. XLA drops products that nothing reads, as of the batch's gradient.
_LEAST = 0.5


def traced_flops(jaxpr: jex.Jaxpr) -> int:
    """Returns the FLOPs of products in fp8 of a traced step, on all devices of `model`."""
    return sum(
        2 * times * products(alone(eqn).jaxpr)[0]
        for eqn, times in executed(jaxpr)
        if eqn.primitive.name == "dot_general"
        and all(dtype_of(a).itemsize == 1 for a in eqn.invars)
    )


def check(
    program: Program, traced: int, parts: int, where: str, *, of_gpus: bool = True
) -> Fp8Products:
    """Returns the products in fp8 of a compiled step.

    Args:
      program: The compiled step.
      traced: FLOPs in fp8 of the traced step.
      parts: Number of devices that may share a product, the size of `model`.
      where: The device it was compiled for.
      of_gpus: False for CPU devices, which emulate fp8: they multiply rounded numbers in fp32.

    Raises:
      ValueError: Products that were traced in fp8 were compiled in another dtype.
    """
    found = fp8_products(program, SCOPE)
    if of_gpus and (found.others or found.flops < _LEAST * traced / parts):
        names = "; ".join(found.others[:5]) or "their names are not in the program"
        raise ValueError(
            f'`matmul_dtype`="fp8": compiled for {where}, {found.flops / 1e12:.4g} of '
            f"{traced / parts / 1e12:.4g} TFLOP run in fp8. In another dtype: {names}. Use a GPU "
            "with fp8 (H100 and later) and no XLA flags that change matrix products, or leave "
            "`matmul_dtype` out"
        )
    return found
