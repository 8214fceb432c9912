"""Attention in blocks of queries: the same numbers as at once, in a fraction of the memory."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import zero_jax
from zero_jax.hlo import prove, targets
from zero_jax.models.attend import LONGEST_PACKED, attend, kernel_for
from zero_jax.models.attention import BLOCK, BLOCKS, causal_attention


def at_once(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def inputs(B, T, N, H, dtype):
    keys = jax.random.split(jax.random.key(T), 4)
    return [jax.random.normal(key, (B, T, N, H), jnp.bfloat16).astype(dtype) for key in keys]


def results(attend, dtype, *shape, scale=1.0):
    q, k, v, dout = inputs(*shape, dtype)
    out, back = jax.vjp(attend, q, k, v)
    return [out, *back((scale * dout).astype(dtype))]


# Up to a block, one token more, blocks that T fills and does not fill, more than BLOCKS of BLOCK.
LENGTHS = [1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 7]
LONG = pytest.param(BLOCKS * BLOCK + 100, marks=pytest.mark.slow)


@pytest.mark.parametrize("T", [*LENGTHS, LONG])
def test_blocks_equal_attention_at_once(T):
    B, N = (2, 3) if T < 1000 else (1, 1)
    found = results(causal_attention, jnp.float32, B, T, N, 8)
    wanted = results(at_once, jnp.float32, B, T, N, 8)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == jnp.float32
        assert jnp.max(jnp.abs(mine - theirs)) <= 5e-6 * jnp.max(jnp.abs(theirs))


# A small loss scale leaves gradients of scores near the end of fp16's range.
@pytest.mark.parametrize("dtype, scale", [(jnp.bfloat16, 1.0), (jnp.float16, 2.0**-9)])
def test_blocks_are_as_near_to_fp32_as_attention_at_once(dtype, scale):
    shape = (2, 2 * BLOCK + 5, 3, 64)
    exact = results(at_once, jnp.float32, *shape, scale=scale)  # of the same numbers
    ours, theirs = (results(f, dtype, *shape, scale=scale) for f in (causal_attention, at_once))
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == dtype
        error, usual = (jnp.linalg.norm(x.astype(jnp.float32) - truth) for x in (mine, other))
        assert 0 < error < 1.5 * usual  # what each block adds to keys and values is rounded once


def masked(q, k, v, segments=None, window=None, scale=None):
    """As the words of the docstring say it, every score at once."""
    T, heads = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, heads, axis=2) for x in (k, v))
    far = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = (far >= 0) & (far < (window or T))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v)


@pytest.mark.parametrize(
    ("T", "window", "documents"),
    [
        *((5, None, 0), (5, 2, 0), (5, 9, 3)),
        *((2 * BLOCK + 9, w, d) for w in (None, 1, BLOCK, BLOCK + 3) for d in (0, 7)),
    ],
)
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (6, 2)])
def test_groups_windows_and_documents_are_those_of_the_mask(T, heads, keys, window, documents):
    q, _, _, dout = inputs(2, T, heads, 8, jnp.float32)
    k, v, *_ = (x[:, :, :keys] for x in inputs(2, T + 1, heads, 8, jnp.float32))
    k, v = k[:, :T], v[:, :T]
    segments = None
    if documents:
        cuts = jax.random.randint(jax.random.key(1), (2, T), 0, documents)
        segments = jnp.sort(cuts, axis=1)

    def results(attend):
        out, back = jax.vjp(lambda *x: attend(*x, segments, window=window, scale=0.3), q, k, v)
        return [out, *back(dout)]

    for mine, other in zip(results(causal_attention), results(masked), strict=True):
        assert jnp.max(jnp.abs(mine - other)) <= 1e-6 + 1e-5 * jnp.max(jnp.abs(other))


def test_no_bit_of_a_document_depends_on_another():
    T = 2 * BLOCK
    q, k, v, _ = inputs(1, T, 2, 8, jnp.float32)
    segments = (jnp.arange(T) >= 100)[None].astype(int)

    def second(shift):
        moved = [x.at[:, :100].add(shift) for x in (q, k, v)]
        found, back = jax.vjp(lambda *x: causal_attention(*x, segments)[:, 100:], *moved)
        return [x[:, -T + 100 :] for x in (found, *back(jnp.ones_like(found)))]

    assert all(map(jnp.array_equal, second(0.0), second(3.0)))


def test_rows_without_tokens_attend_to_nothing():
    assert [x.shape for x in results(causal_attention, jnp.float32, 2, 0, 3, 8)] == [
        (2, 0, 3, 8)
    ] * 4


@pytest.mark.parametrize("T", [BLOCK, 2 * BLOCK])
def test_no_scores_are_kept_for_the_backward_pass(T):
    q, k, v, _ = inputs(2, T, 3, 8, jnp.float32)
    kept = jax.tree.leaves(jax.vjp(causal_attention, q, k, v)[1])
    assert [x.shape for x in kept] == [q.shape] * 4  # queries, keys, values, the result
    assert max(x.size for x in jax.tree.leaves(jax.vjp(at_once, q, k, v)[1])) >= 2 * 3 * T**2


def test_a_position_sees_no_later_one():
    q, k, v, _ = inputs(1, 2 * BLOCK, 1, 4, jnp.float32)
    at = BLOCK + 3
    before = causal_attention(q, k, v)
    after = causal_attention(q, k.at[:, at:].add(9.0), v.at[:, at:].add(9.0))
    assert jnp.array_equal(before[:, :at], after[:, :at])
    assert not jnp.allclose(before[:, at:], after[:, at:])


def test_fewer_keys_than_queries_are_refused():
    q, k, v, _ = inputs(1, 2 * BLOCK, 1, 4, jnp.float32)
    with pytest.raises(ValueError, match=r"float32\[1, 512, 1, 4\], float32\[1, 500, 1, 4\]"):
        causal_attention(q, k[:, :500], v[:, :500])
    with pytest.raises(ValueError, match="same shape and dtype"):
        causal_attention(q.astype(jnp.bfloat16), k, v)
    with pytest.raises(ValueError, match="2 heads of keys do not divide 1"):
        causal_attention(q, jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1)))
    with pytest.raises(ValueError, match=r"segments are \[1, 5\], but rows are \[1, 512\]"):
        causal_attention(q, k, v, jnp.ones((1, 5), int))
    with pytest.raises(ValueError, match="window=0: .*1 or more"):
        causal_attention(q, k, v, window=0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tokens", "packed", "kernel"),
    [
        ("bfloat16", 128, 131072, False, "cudnn"),
        ("bfloat16", 128, LONGEST_PACKED, True, "cudnn"),
        ("bfloat16", 128, LONGEST_PACKED + 1, True, "xla"),
        ("float32", 64, 512, False, "xla"),
        ("float16", 256, 512, False, "xla"),
        ("float16", 12, 512, False, "xla"),
    ],
)
def test_a_gpu_takes_cudnn_where_it_holds_no_bias_of_all_pairs(
    dtype, head_dim, tokens, packed, kernel
):
    found, reason = kernel_for(dtype, head_dim, tokens, packed=packed)
    assert found == kernel and bool(reason) == (kernel == "xla")


def test_long_packed_rows_hold_no_square_of_their_tokens_on_a_gpu(monkeypatch):
    """cuDNN was given documents as a bias of T² numbers, 34 GB a row of 128k tokens."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    T = 2 * LONGEST_PACKED
    row = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, segments):
        return jnp.sum(attend(q, k, v, segments))

    def largest(jaxpr):
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        inner = [largest(sub) for eqn in jaxpr.eqns for sub in jex.jaxprs_in_params(eqn.params)]
        return max([0, *sizes, *inner])

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(row, row, row, segments)
    assert largest(traced.jaxpr) <= T**2 // BLOCKS, "scores of one block of queries"


@pytest.mark.compile
def test_scores_exist_for_a_block_at_a_time(every_pass):
    """In the program of an H100: the CPU's compiler takes the blocks apart."""
    N, T = 8, 8 * BLOCK
    shape = jax.ShapeDtypeStruct((1, T, N, 64), jnp.bfloat16)

    def temporaries(attend):
        def loss(q, k, v):
            return jnp.sum(attend(q, k, v).astype(jnp.float32) ** 2)

        step = jax.grad(loss, argnums=(0, 1, 2))
        target = targets.target("h100")
        mesh = zero_jax.abstract_mesh(1)
        return prove.compile_for(target, step, (shape,) * 3, mesh, donated=0).temp_bytes

    scores = N * T**2 * 4
    assert temporaries(at_once) > scores
    assert temporaries(causal_attention) < 0.4 * scores
