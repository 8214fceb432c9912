"""FLOPs of compiled programs against closed forms: 2 a multiply-add, nothing else counted."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import compile_on_8, snippet
from jax.sharding import PartitionSpec

from zero_jax.hlo import auditor, hlo_text
from zero_jax.hlo.flops import Flops


def flops_of(program):
    """Of a compiled program or of text."""
    text = program if isinstance(program, str) else program.as_text()
    return Flops(hlo_text.parse(text)).total()


def flops_on_8(f, *shapes, **specs):
    """Of one of eight devices, each of which runs `f` on whole arguments."""
    return flops_of(compile_on_8(f, *(jnp.ones(s) for s in shapes), **specs))


def text_of(*lines, computations=()):
    """Arguments %a (4, 8) and %b (8, 16), then these lines."""
    arguments = ["%a = f32[4,8]{1,0} parameter(0)", "%b = f32[8,16]{1,0} parameter(1)"]
    return snippet([*arguments, *lines[:-1], f"ROOT {lines[-1]}"], *computations)


DOT = "f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DOT_FLOPS = 2 * 4 * 8 * 16
GEMM = (
    "%gemm (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {\n  %a = f32[4,8]{1,0} parameter(0)\n"
    f"  %b = f32[8,16]{{1,0}} parameter(1)\n  ROOT %d = {DOT}\n}}\n"
)


# Matrix products.


def test_a_product_is_two_m_k_n():
    assert flops_on_8(jnp.matmul, (32, 48), (48, 80)) == 2 * 32 * 48 * 80


def test_batch_dims_multiply_once():
    B, M, K, N = 6, 16, 24, 40
    both = functools.partial(jnp.einsum, "bmk,bkn->bmn")
    assert flops_on_8(both, (B, M, K), (B, K, N)) == 2 * B * M * K * N
    last = functools.partial(jnp.einsum, "mkb,nkb->bmn")
    assert flops_on_8(last, (M, K, B), (N, K, B)) == 2 * B * M * K * N


def test_all_contracted_dims_multiply():
    f = functools.partial(jnp.einsum, "mjk,jkn->mn")
    assert flops_on_8(f, (16, 3, 24), (3, 24, 40)) == 2 * 16 * 3 * 24 * 40


def test_elementwise_work_and_reductions_are_not_counted():
    assert flops_on_8(lambda x: jnp.exp(x) * x - jnp.sum(x**3), (32, 48)) == 0


def test_a_backward_pass_costs_twice_its_forward_pass():
    """Less the product for the gradient of the data, which nobody asks for."""
    B, D0, D1, D2 = 16, 24, 40, 56

    def loss(weights, x):
        return jnp.sum((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    def step(w0, w1, x):
        return jax.value_and_grad(loss)((w0, w1), x)

    forward = 2 * B * (D0 * D1 + D1 * D2)
    assert flops_on_8(step, (D0, D1), (D1, D2), (B, D0)) == 3 * forward - 2 * B * D0 * D1


def test_each_device_counts_its_own_part():
    spec = PartitionSpec("data")
    flops = flops_on_8(jnp.matmul, (64, 48), (48, 80), in_specs=(spec, PartitionSpec()))
    assert flops == 2 * (64 // 8) * 48 * 80


# Convolutions.

N, H, W, CIN, COUT, KH, KW = 2, 10, 12, 8, 16, 3, 5
ONE_CONVOLUTION = 2 * N * H * W * COUT * CIN * KH * KW


def convolve(x, kernel, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def test_a_convolution_is_its_closed_form():
    assert flops_on_8(convolve, (N, H, W, CIN), (KH, KW, CIN, COUT)) == ONE_CONVOLUTION


def test_a_grouped_convolution_sees_its_group_only():
    grouped = functools.partial(convolve, groups=4)
    shapes = (N, H, W, CIN), (KH, KW, CIN // 4, COUT)
    assert flops_on_8(grouped, *shapes) == ONE_CONVOLUTION // 4


CUDNN = {
    "convForward": ("f32[2,10,12,16]", "%x, %kernel"),
    "convBiasActivationForward": ("f32[2,10,12,16]", "%x, %kernel, %bias"),
    "convBackwardInput": ("f32[2,10,12,8]", "%y, %kernel"),
    "convBackwardFilter": ("f32[16,3,5,8]", "%x, %y"),
}


@pytest.mark.parametrize("call", CUDNN)
def test_cudnn_convolutions_and_both_gradients_cost_the_same(call):
    """As the GPU compiler spells them: one set of labels, that of the forward convolution."""
    result, operands = CUDNN[call]
    lines = [
        "%x = f32[2,10,12,8]{3,2,1,0} parameter(0)",
        "%kernel = f32[16,3,5,8]{3,2,1,0} parameter(1)",
        "%y = f32[2,10,12,16]{3,2,1,0} parameter(2)",
        "%bias = f32[16]{0} parameter(3)",
        (
            f"ROOT %c = ({result}{{3,2,1,0}}, u8[1024]{{0}}) custom-call({operands}), "
            "window={size=3x5 pad=1_1x2_2}, dim_labels=b01f_o01i->b01f, "
            f'custom_call_target="__cudnn${call}"'
        ),
    ]
    assert (N, H, W, CIN, COUT, KH, KW) == (2, 10, 12, 8, 16, 3, 5)
    assert flops_of(snippet(lines)) == ONE_CONVOLUTION


# Fusions, calls, loops, branches.


def test_a_fusion_counts_each_time_it_runs():
    fusion = "f32[4,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm"
    assert flops_of(text_of(f"%x = {fusion}", f"%y = {fusion}", computations=[GEMM])) == (
        2 * DOT_FLOPS
    )


@pytest.mark.parametrize("calls", [", calls=%gemm", ""], ids=["0.10", "0.12"])
def test_an_asynchronous_product_counts_once(calls):
    result = "((f32[4,8]{1,0}, f32[8,16]{1,0}), f32[4,16]{1,0}, u32[])"
    lines = [
        f"%s = {result} async-start(%a, %b), calls=%gemm",
        f"%u = {result} async-update(%s){calls}",
        f"%d = f32[4,16]{{1,0}} async-done(%u){calls}",
    ]
    assert flops_of(text_of(*lines, computations=[GEMM])) == DOT_FLOPS
    fused = [
        f"%s = {result} fusion-start(%a, %b), kind=kCustom, calls=%gemm",
        f"%d = f32[4,16]{{1,0}} fusion-done(%s){calls}",
    ]
    assert flops_of(text_of(*fused, computations=[GEMM])) == DOT_FLOPS


def scanned(x, w, *lengths):
    """h @ w in loops of these lengths, the outermost first."""
    if not lengths:
        return jnp.tanh(x @ w)
    return jax.lax.scan(lambda h, _: (scanned(h, w, *lengths[1:]), None), x, None, lengths[0])[0]


@pytest.mark.parametrize("lengths", [(7,), (7, 3), (5, 3, 2)])
def test_loops_multiply(lengths):
    flops = flops_on_8(lambda x, w: scanned(x, w, *lengths), (32, 48), (48, 48))
    assert flops == 2 * 32 * 48 * 48 * math.prod(lengths)


def test_rematerialised_layers_run_forward_twice():
    L, B, D = 6, 16, 32

    def loss(ws, x, layer):
        return jnp.sum(jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0])

    def layer(h, w):
        return jnp.tanh(h @ w)

    def gradient(layer):
        return flops_on_8(functools.partial(jax.grad(loss), layer=layer), (L, D, D), (B, D))

    product = 2 * B * D * D
    assert gradient(layer) == 3 * L * product
    assert gradient(jax.checkpoint(layer)) == 4 * L * product


def test_the_dearer_branch_counts():
    def choose(x, w):
        cheap = [lambda: x, lambda: x @ w]
        return jax.lax.switch(jnp.int32(x[0, 0]), [*cheap, lambda: (x @ w) @ w, lambda: x * 2])

    assert flops_on_8(choose, (32, 48), (48, 48)) == 2 * (2 * 32 * 48 * 48)


def test_a_branch_in_a_loop_counts_as_the_dearer_one_each_time():
    def body(h, w):
        return jax.lax.cond(h[0, 0] > 0, lambda: jnp.tanh(h @ w), lambda: -h), None

    flops = flops_on_8(lambda x, ws: jax.lax.scan(body, x, ws)[0], (32, 48), (5, 48, 48))
    assert flops == 5 * 2 * 32 * 48 * 48


def test_the_products_of_a_condition_count_once_more_than_the_trips():
    def loop(x):
        return jax.lax.while_loop(
            lambda s: (s[0] < 6) & (jnp.sum(s[1] @ s[1]) > -1.0), lambda s: (s[0] + 1, s[1]), (0, x)
        )

    text = compile_on_8(loop, jnp.ones((16, 16))).as_text()
    known = re.sub(
        r"( while\(.*)", r'\1, backend_config={"known_trip_count":{"n":"6"}}', text, count=1
    )
    assert flops_of(known) == (6 + 1) * 2 * 16 * 16 * 16


def until_large(f):
    return lambda x: jax.lax.while_loop(lambda s: jnp.sum(s) < 1e3, f, x)


def test_an_unknown_trip_count_raises():
    program = compile_on_8(until_large(lambda s: jnp.tanh(s @ s)), jnp.ones((16, 16)))
    with pytest.raises(ValueError, match=r"no trip count.*fixed length"):
        flops_of(program)
    assert auditor.audit(program).flops is None


def test_an_unknown_loop_without_products_costs_nothing():
    program = compile_on_8(lambda x: until_large(jnp.exp)(x @ x), jnp.ones((16, 16)))
    assert auditor.audit(program).flops == 2 * 16 * 16 * 16


# Library calls.

CONTRACTS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
CONFIGS = {
    "json": f'{{"gemm_backend_config":{{"beta":0,"dot_dimension_numbers":{{{CONTRACTS}}}}}}}',
    "escaped": '"{'
    + f'"gemm_backend_config":{{"dot_dimension_numbers":{{{CONTRACTS}}}}}'.replace('"', '\\"')
    + '}"',
}


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_cublas_call_counts_as_its_product(target, config):
    """The result comes with a workspace, which is no part of it."""
    call = (
        "%c = (f32[4,16]{1,0}, s8[33554432]{0}) custom-call(%a, %b), "
        f'custom_call_target="{target}", backend_config={CONFIGS[config]}'
    )
    program = hlo_text.parse(text_of(call))
    assert Flops(program).total() == DOT_FLOPS
    assert Flops(program).uncounted() == ()


def test_a_cublas_call_on_another_stream_counts_too():
    lines = [
        (
            "%s = ((f32[4,8]{1,0:T(8,128)}, f32[8,16]{1,0}), (f32[4,16]{1,0}, s8[64]{0}), u32[]) "
            f'custom-call-start(%a, %b), custom_call_target="__cublas$gemm", '
            f"backend_config={CONFIGS['json']}"
        ),
        "%d = (f32[4,16]{1,0}, s8[64]{0}) custom-call-done(%s)",
    ]
    assert flops_of(text_of(*lines)) == DOT_FLOPS


def test_other_library_calls_are_named_and_not_counted():
    lines = [
        '%x = f32[4,8]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"',
        '%y = f32[4,8]{1,0} custom-call(%x), custom_call_target="my_kernel"',
        '%z = f32[4,8]{1,0} custom-call(%y), custom_call_target="my_kernel"',
        '%room = f32[4,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
        f"%d = {DOT}",
    ]
    program = hlo_text.parse(text_of(*lines))
    assert Flops(program).uncounted() == ("__cudnn$fmhaSoftmax", "my_kernel")
    assert Flops(program).total() == DOT_FLOPS


@pytest.mark.parametrize(
    "line",
    [
        '%c = f32[4,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm"',
        "%c = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={2}, rhs_contracting_dims={0}",
        "%c = f32[4,16]{1,0} convolution(%a, %b), dim_labels=b01f_01io->b01f",
    ],
)
def test_a_product_that_cannot_be_read_is_an_error(line):
    with pytest.raises(ValueError, match="cannot read the .* of .*c: "):
        flops_of(text_of(line))
