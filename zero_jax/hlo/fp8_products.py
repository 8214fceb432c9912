"""Matrix products in fp8 of a compiled program, and products that were to be in fp8 but are not."""

import dataclasses

from zero_jax.hlo.collectives import executions
from zero_jax.hlo.flops import Flops, is_fp8, is_product
from zero_jax.hlo.hlo_text import Program


@dataclasses.dataclass(frozen=True)
class Fp8Products:
    """Matrix products of one step on one device.

    Attributes:
      count: Number of products in fp8 that run; in a loop of unknown length they count once.
      flops: Their FLOPs.
      others: Names of products traced in fp8 that have operands of another dtype, with the dtypes.
    """

    count: int
    flops: int
    others: tuple[str, ...]


def fp8_products(program: Program, scope: str) -> Fp8Products:
    """Finds the products in fp8 of a program.

    Args:
      program: A compiled program, parsed.
      scope: The name scope of products that were traced in fp8.

    Example:
      >>> from zero_jax.hlo import hlo_text
      >>> text = '''HloModule step, is_scheduled=true, num_partitions=1
      ... ENTRY %main (p: f8e4m3fn[4,8], q: f8e4m3fn[8,2]) -> f32[4,2] {
      ...   %p = f8e4m3fn[4,8]{1,0} parameter(0)
      ...   %q = f8e4m3fn[8,2]{1,0} parameter(1)
      ...   ROOT %d = f32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ... }'''
      >>> fp8_products(hlo_text.parse(text), "fp8_product")
      Fp8Products(count=1, flops=128, others=())
    """
    costs, count, flops, others = Flops(program), 0, 0, dict[str, None]()
    for i, _, times in executions(program.entry):
        if not is_product(i):
            continue
        if is_fp8(i):
            runs = 1 if times is None else times  # at least once in a loop of unknown length
            count, flops = count + runs, flops + runs * costs.count(i)
        elif scope in i.op_name:
            dtypes = " x ".join(operand.arrays[0].dtype for operand in i.inputs[:2])
            others[f"{i.op_name} ({dtypes})"] = None
    return Fp8Products(count, flops, tuple(others))
