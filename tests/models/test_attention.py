"""Attention in blocks of queries equals attention at once, and never holds all scores."""

import functools

import jax
import jax.numpy as jnp
import pytest
from problems import equations_of

from zero_jax.models import attend, attention
from zero_jax.models.attend import LONGEST_PACKED
from zero_jax.models.attention import BLOCK, causal_attention

at_once = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")


def masked(q, k, v, segments=None, window=None, scale=None):
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v)


def inputs(B, T, N, H, dtype=jnp.float32, M=None):
    shapes = [(B, T, heads, H) for heads in (N, M or N, M or N, N)]
    keys = jax.random.split(jax.random.key(T), 4)
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(k, s, jnp.bfloat16).astype(dtype) for k, s in pairs]


def results(function, q, k, v, dout):
    out, back = jax.vjp(function, q, k, v)
    return [out, *back(dout)]


compiled = jax.jit(results, static_argnums=0)

# Rows below one block, of one block, one token more, 2 to 3 blocks, and longer than 3 of 8.
# fmt: off
CASES = [
    (1, 3, 3, None, 0, None), (8, 4, 4, None, 3, 0.3), (9, 6, 2, 2, 0, None), (16, 4, 1, 1, 0, 0.3),
    (23, 6, 2, 8, 5, 0.3), (24, 3, 3, 99, 0, None), (31, 6, 3, 11, 7, None),
    (2 * BLOCK + 9, 4, 2, BLOCK + 3, 7, 0.3)]
KERNELS = [
    ("bfloat16", 128, 131072, False, "cudnn"), ("bfloat16", 128, LONGEST_PACKED, True, "cudnn"),
    ("bfloat16", 128, LONGEST_PACKED + 1, True, "xla"), ("float32", 64, 512, False, "xla"),
    ("float16", 256, 512, False, "xla"), ("float16", 12, 512, False, "xla")]
# fmt: on


@pytest.mark.parametrize(("T", "heads", "keys", "window", "documents", "scale"), CASES)
def test_blocks_equal_the_formula(T, heads, keys, window, documents, scale, monkeypatch):
    if T < BLOCK:
        monkeypatch.setattr(attention, "BLOCK", 8)
        monkeypatch.setattr(attention, "BLOCKS", 3)
    arrays, segments = inputs(2, T, heads, 8, M=keys), None
    if documents:
        segments = jnp.sort(jax.random.randint(jax.random.key(1), (2, T), 0, documents), axis=1)
    ours, exact = (
        compiled(lambda *x, f=f: f(*x, segments, window=window, scale=scale), *arrays)
        for f in (causal_attention, masked)
    )
    assert causal_attention(*(x[:, :0] for x in arrays[:3])).shape == (2, 0, heads, 8)
    for got, want in zip(ours, exact, strict=True):
        assert got.dtype == jnp.float32
        assert jnp.max(jnp.abs(got - want)) <= 1e-6 + 1e-5 * jnp.max(jnp.abs(want))


def test_half_precision_is_as_near_to_fp32_as_attention_at_once():
    *qkv, dout = inputs(2, 2 * BLOCK + 5, 3, 64, jnp.float16)
    half = *qkv, (2.0**-9 * dout).astype(jnp.float16)  # gradients near the end of fp16's range
    exact = compiled(at_once, *(x.astype(jnp.float32) for x in half))
    ours, theirs = compiled(causal_attention, *half), results(at_once, *half)
    for got, other, truth in zip(ours, theirs, exact, strict=True):
        assert got.dtype == jnp.float16
        error, usual = (jnp.linalg.norm(x.astype(jnp.float32) - truth) for x in (got, other))
        assert 0 < error < 1.5 * usual  # the sum over blocks is rounded once


def test_no_scores_are_kept_for_the_backward_pass():
    q, k, v, _ = inputs(2, 2 * BLOCK, 3, 8)
    kept, usual = (
        jax.tree.leaves(jax.eval_shape(lambda *x, f=f: jax.vjp(f, *x)[1], q, k, v))
        for f in (causal_attention, at_once)
    )
    assert [x.shape for x in kept] == [q.shape] * 4  # q, k, v and the result
    assert max(x.size for x in usual) >= 2 * 3 * (2 * BLOCK) ** 2


def test_a_gpu_takes_cudnn_where_it_holds_no_bias_of_all_pairs():
    for dtype, head_dim, tokens, packed, kernel in KERNELS:
        found, reason = attend.kernel_for(dtype, head_dim, tokens, packed=packed)
        assert found == kernel and bool(reason) == (kernel == "xla")


def test_long_packed_rows_hold_no_square_of_their_tokens_on_a_gpu(monkeypatch):
    """cuDNN would hold the documents as a bias of T² numbers, 34 GB a row of 128k tokens."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    T = 3 * BLOCK
    monkeypatch.setattr(attend, "LONGEST_PACKED", T - 1)
    row, segments = jnp.ones((1, T, 1, 8), jnp.bfloat16), jnp.ones((1, T), int)
    grad = jax.grad(lambda *x: jnp.sum(attend.attend(*x, segments)), argnums=(0, 1, 2))
    traced = jax.make_jaxpr(grad)(row, row, row)
    largest = max(v.aval.size for eqn in equations_of(traced.jaxpr) for v in eqn.outvars)
    assert largest <= T**2 // 3, "scores of one block of three"
