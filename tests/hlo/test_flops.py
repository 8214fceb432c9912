"""FLOPs of compiled programs against closed forms: 2 a multiply-add, nothing else counted."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from hlo_lines import ARGUMENTS, FLOPS, computation, loop, product, program
from test_hlo import compile_on

from zero_jax.hlo import hlo_text
from zero_jax.hlo.flops import Flops


def flops_of(text):
    return Flops(hlo_text.parse(text)).total()


# Programs of eight CPU devices, each of which computes with whole arguments.

B, M, K, N, L, D = 6, 16, 24, 40, 6, 32
IMAGES, H, W, CIN, COUT, KH, KW = 2, 10, 12, 8, 16, 3, 5
ONE_CONVOLUTION = 2 * IMAGES * H * W * COUT * CIN * KH * KW


def convolve(x, kernel, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def two_layers(w0, w1, x):
    return jax.grad(lambda w0, w1: jnp.sum((jnp.tanh(x @ w0) @ w1) ** 2), (0, 1))(w0, w1)


def remat(ws, x):
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.grad(lambda ws: jnp.sum(jax.lax.scan(layer, x, ws)[0]))(ws)


def choose(x, w):
    branches = [lambda: x, lambda: x @ w, lambda: (x @ w) @ w, lambda: x * 2]
    return jax.lax.switch(jnp.int32(x[0, 0]), branches)


PROGRAMS = {
    "batch last": (lambda x, y: jnp.einsum("mkb,nkb->bmn", x, y), [(M, K, B), (N, K, B)],
                   2 * B * M * K * N),
    # Forward and twice that backward, less the gradient of the data, which nobody asks for.
    "backward": (two_layers, [(K, N), (N, M), (B, K)], 2 * B * (3 * (K * N + N * M) - K * N)),
    "grouped": (functools.partial(convolve, groups=4),
                [(IMAGES, H, W, CIN), (KH, KW, CIN // 4, COUT)], ONE_CONVOLUTION // 4),
    "remat": (remat, [(L, D, D), (M, D)], 4 * L * 2 * M * D * D),
    "branches": (choose, [(32, 48), (48, 48)], 2 * 2 * 32 * 48 * 48),  # of the dearest
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_of_programs_are_their_closed_form(name):
    f, shapes, want = PROGRAMS[name]
    assert flops_of(compile_on({"data": 8}, f, *map(jnp.ones, shapes)).as_text()) == want


# Spellings of the GPU compiler; of convolutions one set of labels, that of the forward one.

CONTRACTS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
JSON = f'{{"gemm_backend_config":{{"beta":0,"dot_dimension_numbers":{{{CONTRACTS}}}}}}}'
ESCAPED = '"' + JSON.replace('"', '\\"') + '"'
RESULT = "f32[4,16]{1,0}"
WITH_SPACE = "(f32[4,16]{1,0}, s8[33554432]{0})"  # a workspace, which is no part of the result
UNDER_WAY = f"((f32[4,8]{{1,0}}, f32[8,16]{{1,0}}), {RESULT}, u32[])"
SHAPES = {"x": "f32[2,10,12,8]{3,2,1,0}", "y": "f32[2,10,12,16]{3,2,1,0}"}
SHAPES |= ARGUMENTS | {"kernel": "f32[16,3,5,8]{3,2,1,0}"}
GEMM = computation("gemm", ARGUMENTS, product("d"))
FUSION = f"{RESULT} fusion(%shard, %a, %b), kind=kCustom, calls=%gemm"
DIMS = "window={size=3x5 pad=1_1x2_2}, dim_labels=b01f_o01i->b01f"


def called(result, operands, target, more=""):
    return f'{result} custom-call({operands}), custom_call_target="{target}"{more}'


def cublas(target, config, result=WITH_SPACE):
    return called(result, "%a, %b", f"__cublas${target}", f", backend_config={config}")


def cudnn(target, result, operands):
    return "%c = " + called(f"({result}{{3,2,1,0}}, u8[9])", operands, target, f", {DIMS}")


STARTED = [f"%s = {UNDER_WAY} async-start(%shard, %a, %b), calls=%gemm",
           f"%u = {UNDER_WAY} async-update(%s), calls=%gemm",
           f"%d = {RESULT} async-done(%u), calls=%gemm"]  # fmt: skip
OTHERS = [f"%o{n} = {called('f32[4,8]', '%a', 'mine')}" for n in range(2)] + [
    "%p = " + called("f32[4,8]", "%a", "__cudnn$norm"),
    "%room = " + called("f32[4,8]", "", "AllocateBuffer"),
]
SPELLINGS = {
    "fusions": ([f"%m = {FUSION}", f"%n = {FUSION}"], 2 * FLOPS), "started": (STARTED, FLOPS),
    "gemm": (["%c = " + cublas("gemm", JSON)], FLOPS),
    "lt": (["%c = " + cublas("lt$matmul", ESCAPED)], FLOPS),
    "on another stream": (
        [f"%s = ((f32[4,8], f32[8,16]), {cublas('gemm', JSON, f'{WITH_SPACE}, u32[])')}".replace(
            " custom-call(", " custom-call-start("), f"%d = {WITH_SPACE} custom-call-done(%s)"],
        FLOPS),
    "backward": (
        [cudnn("__cudnn$convBackwardInput", "f32[2,10,12,8]", "%y, %kernel")], ONE_CONVOLUTION),
    "filter": ([cudnn("__cudnn$convBackwardFilter", "f32[16,3,5,8]", "%x, %y")], ONE_CONVOLUTION),
    "library calls": ([*OTHERS, product("d")], FLOPS),
    # What cannot be read is an error that names it.
    "no config": (["%c = " + called(RESULT, "%a, %b", "__cublas$gemm")], None),
    "no such dim": ([product("c").replace("={1}", "={2}")], None),
    "no such labels": ([f"%c = {RESULT} convolution(%a, %b), dim_labels=b01f_01io->b01f"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_flops_in_the_spellings_of_the_gpu_compiler(name):
    lines, want = SPELLINGS[name]
    text = program(SHAPES, *lines, computations=[GEMM])
    if want is None:
        with pytest.raises(ValueError, match=r"\bc\b"):
            flops_of(text)
    else:
        assert flops_of(text) == want
        calls = ("__cudnn$norm", "mine") if lines[0] in OTHERS else ()
        assert Flops(hlo_text.parse(text)).uncounted() == calls


# cuDNN's attention: B rows, N heads of queries and 2 of keys, T tokens, heads of D numbers.

T = 96


def attention(mask="CAUSAL", window=0, documents=1, backward=False, escape=False):
    name = "__cudnn$fmhaSoftmax" + "Backward" * backward
    config = {
        "intermediate_tensor_shape": {
            "element_type": "BF16",
            "dimensions": [*map(str, (B, N, T, T))],
        },
        "mask_type": mask,
        "sliding_window_length": window,
        "max_seg_per_batch": documents,
    }
    config = json.dumps({"cudnn_fmha_backend_config": config})
    config = '"' + config.replace('"', '\\"') + '"' if escape else config
    return "%p = " + called("bf16[9]", "%q, %k, %k", name, f", backend_config={config}")


QKV = {"q": f"bf16[{B},{T},{N},{D}]", "k": f"bf16[{B},{T},2,{D}]"}
HALF, WINDOW = sum(t + 1 for t in range(T)), sum(min(t + 1, 10) for t in range(T))


@pytest.mark.parametrize(
    ("call", "pairs", "products"),
    [({}, HALF, 2), ({"backward": True}, HALF, 5), ({"mask": "NO_MASK"}, T * T, 2),
     ({"window": 10}, WINDOW, 2), ({"window": T + 5, "escape": True}, HALF, 2),
     ({"mask": "PADDING", "documents": 64}, T * T, 2),
     ({"mask": "PADDING_CAUSAL", "documents": 64, "backward": True}, HALF, 5)],
)  # fmt: skip
def test_attention_multiplies_the_pairs_that_its_mask_leaves(call, pairs, products):
    found = Flops(hlo_text.parse(program(QKV, attention(**call))))
    assert found.total() == products * 2 * B * N * pairs * D
    assert found.uncounted() == () and found.documents() == (64 if "documents" in call else 0)


def test_the_loop_over_further_documents_of_a_row_costs_nothing_and_another_is_an_error():
    first = attention(documents=64)
    lines, texts = loop("l", QKV, QKV, [first.replace("%p", "%again")], trips=None)
    named = [
        line + ', metadata={op_name="jit(f)/transpose(jvp(further_documents))/while"}'
        if " while(" in line
        else line
        for line in lines
    ]
    assert flops_of(program(QKV, first, *named, computations=texts)) == 4 * B * N * HALF * D
    with pytest.raises(ValueError, match="trip count"):
        flops_of(program(QKV, first, *lines, computations=texts))
