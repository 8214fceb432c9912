"""Steps with products in fp8, compiled for H100s ahead of time."""

import dataclasses

import pytest

import zero_jax
from zero_jax.commands.case import Case
from zero_jax.fp8.product import SCOPE
from zero_jax.hlo.fp8_products import fp8_products
from zero_jax.hlo.hlo_text import parse
from zero_jax.models import families
from zero_jax.plan import fp8_check

pytestmark = pytest.mark.compile


def planned(kind, model="llama-3.1-8b", axes=None, stage=3, remat="block", **changes):
    precision = zero_jax.Precision("bf16", reduce_dtype="bf16", matmul_dtype=kind)
    mesh = zero_jax.abstract_mesh(**(axes or {"data": 8}))
    config = dataclasses.replace(families.preset(model), **changes)
    rows = 4 * mesh.shape["data"]
    zero = zero_jax.Zero(mesh, stage, precision=precision, remat=remat)
    return Case(config, zero, "adamw", rows, 1024).plan(stage, target="h100")


def test_llama_in_fp8_is_a_quarter_faster_in_the_memory_of_bf16():
    plain, found = planned(None), planned("fp8")
    assert found.time.seconds <= 0.75 * plain.time.seconds
    assert found.total_bytes <= 1.02 * plain.total_bytes and abs(found.error) < 0.03
    assert found.elements_per_param == pytest.approx(plain.elements_per_param, rel=1e-3)
    # All products of the layers: 6.98e9 parameters times 4096 tokens, forward, twice backward, and
    # again but for `down`, whose result is not needed.
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    again = layer - 4096 * 14336
    assert found.fp8.flops == 2 * 4096 * 32 * (3 * layer + again)
    assert found.fp8.others == () and found.not_fp8 == ()
    # q, k and v are one product, and gate and up: 4 forward, 3 again, dx and dw of the 7.
    assert found.fp8.count >= 32 * (4 + 3)
    gathers = [c for c in found.compiled.collectives if c.in_loop and c.kind == "all-gather"]
    assert gathers and all("f8e4m3fn" in c.dtype for c in gathers)
    # Norms are gathered in bf16.
    assert all(c.bytes <= c.elements + 2 * 4096 for c in gathers)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("fp8", {"remat": "dots"}),
        ("fp8", {"axes": {"data": 4, "model": 2}}),
        ("fp8_rowwise", {"stage": 2, "remat": "none"}),
        ("fp8", {"model": "qwen3-30b-a3b"}),
    ],
)
def test_all_products_are_in_fp8(kind, settings):
    found = planned(kind, layers=4, vocab=4096, **settings)
    assert found.fp8.count > 0 and found.fp8.others == ()
    others = ("blocks/mlp/router/kernel",) if "model" in settings else ()
    assert found.not_fp8 == others


TEXT = """HloModule step, is_scheduled=true, num_partitions=1
ENTRY %main (p: bf16[4,8], q: bf16[8,2]) -> f32[4,2] {
  %p = bf16[4,8]{1,0} parameter(0)
  %q = bf16[8,2]{1,0} parameter(1)
  ROOT %d = f32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/mlp/fp8_product/dot_general"}
}"""  # noqa: E501


def test_step_whose_products_are_not_in_fp8_is_an_error_that_names_them():
    program = parse(TEXT)
    found = fp8_products(program, SCOPE)
    assert found.count == 0 and "mlp/fp8_product/dot_general (bf16 x bf16)" in found.others[0]
    with pytest.raises(ValueError, match="`matmul_dtype`.*mlp/fp8_product/dot_general"):
        fp8_check.check(program, 128, 1, "h100")
    # CPU devices emulate fp8.
    assert fp8_check.check(program, 128, 1, "cpu", of_gpus=False).count == 0
    unnamed = parse(TEXT.replace("fp8_product", "x"))
    with pytest.raises(ValueError, match="`matmul_dtype`"):
        fp8_check.check(unnamed, 128, 1, "h100")
