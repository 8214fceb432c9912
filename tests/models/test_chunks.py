"""Cross entropy in chunks: the numbers of the plain one, in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import ulps

from zero_jax.models.cross_entropy import _logsumexp, chunked_cross_entropy

M, D, V = 26, 16, 61
ARGNUMS = (0, 1, 3)  # hidden states, embedding and weights


@jax.jit
@functools.partial(jax.value_and_grad, argnums=ARGNUMS)
def plain(x, embed, labels, weights):
    logits = jnp.einsum("md,vd->mv", x, embed, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
    return jnp.sum(losses * weights)


chunked_sum = lambda *arrays: chunked_cross_entropy(*arrays)[0]  # noqa: E731
chunked = jax.jit(jax.value_and_grad(chunked_sum, ARGNUMS), static_argnums=4)
ONES, MASK, FRACTIONS = jnp.ones(M), jnp.float32(jnp.arange(M) % 3 > 0), jnp.arange(1.0, M + 1) / M


def batch(dtype=jnp.float32, weights=ONES):
    keys = jax.random.split(jax.random.key(3), 3)
    x, embed = (jax.random.normal(keys[i], (n, D)).astype(dtype) for i, n in enumerate((M, V)))
    return x, embed, jax.random.randint(keys[2], (M,), 0, V), weights


@pytest.mark.parametrize("chunk", [7, 13, 1000])  # 26 = 4 * 7 - 2 = 2 * 13
def test_loss_and_gradients_equal_the_plain_ones(chunk):
    # Sums of 16 and 26 terms in fp32, in another order; a wrong term is millions of ulps.
    for weights in (ONES, MASK, FRACTIONS):
        arrays = batch(weights=weights)
        with jax.numpy_dtype_promotion("strict"):
            found = chunked(*arrays, chunk)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
        assert ulps(found, plain(*arrays)) <= 8
    x, embed, labels, weights = batch(weights=MASK)
    total, weight = chunked_cross_entropy(x, embed, labels, weights > 0, chunk)
    assert weight == M * 2 // 3
    assert ulps(total, plain(x, embed, labels, weights)[0]) <= 8  # without a gradient
    value, grads = chunked(*batch(weights=0 * ONES), chunk)
    assert value == 0.0 and not np.any(grads[0]) and not np.any(grads[1])  # NaN counts as true


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_round_once_from_fp32(dtype):
    x, embed, labels, weights = batch(dtype)
    _, grads = chunked(x, embed, labels, weights, 7)
    _, exact = plain(x.astype(jnp.float32), embed.astype(jnp.float32), labels, weights)
    # softmax - onehot and the result are rounded to the dtype, half an ulp each, of the largest.
    for grad, want in zip(grads[:2], exact[:2], strict=True):
        assert grad.dtype == dtype
        error = np.abs(np.asarray(grad, np.float64) - want).max()
        assert error <= jnp.finfo(dtype).eps * np.abs(want).max()


def test_bf16_gradients_of_hidden_states_are_held_in_bf16_and_rounded_twice_at_most():
    x, embed, labels, weights = batch(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: chunked_sum(x, embed, labels, weights, 13), x)
    assert [k.dtype for k in jax.tree.leaves(vjp) if k.shape == (2, 13, D)] == [jnp.bfloat16]
    wide = [a.astype(jnp.float32) for a in (x, embed)]
    for cotangent in (1.0, 2.0**-9, 0.3):
        exact = cotangent * plain(*wide, labels, weights)[1][0]
        error = np.abs(np.asarray(vjp(jnp.float32(cotangent))[0], np.float64) - exact).max()
        # Half an ulp each for softmax - onehot, dx, and dx times the cotangent.
        assert error <= 1.5 * jnp.finfo(jnp.bfloat16).eps * np.abs(exact).max()


def test_fp16_gradients_neither_underflow_nor_overflow():
    # Probabilities of 1 / 61 under a weight of 2**-20 are 1.6e-8; fp16's smallest number is 6e-8.
    x, embed, labels, _ = batch(jnp.float16)
    embed = embed * jnp.float16(0.01)
    scaled = lambda x, embed, s: s * chunked_sum(x, embed, labels, jnp.ones(M) / s, 7)  # noqa: E731
    grads = jax.jit(jax.grad(scaled, argnums=(0, 1)))
    small, right, large = (grads(x, embed, 2.0**power) for power in (20, 0, -20))
    for a, b, c in zip(small, right, large, strict=True):
        assert np.all(np.any(b, axis=1))
        np.testing.assert_array_equal(a, b)  # powers of two change no digit
        np.testing.assert_array_equal(c, b)


def test_backward_only_scales_and_does_not_keep_the_embedding():
    x, embed, labels, weights = batch(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x, embed: chunked_sum(x, embed, labels, weights, 7), x, embed)
    kept = [x.dtype for x in jax.tree.leaves(vjp) if getattr(x, "shape", ()) == (V, D)]
    assert kept == [jnp.float32]  # the gradient, made in the forward pass
    jaxpr = str(jax.make_jaxpr(vjp)(jnp.float32(1)))
    assert "mul" in jaxpr and "dot_general" not in jaxpr


def test_loss_under_shard_map_equals_one_device():
    # JAX sums the gradient of a replicated embedding itself (check_vma), also of a custom gradient.
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def local(*arrays):
        value, grads = jax.value_and_grad(chunked_sum, ARGNUMS)(*arrays, 7)
        return jax.lax.psum(value, "data"), grads

    specs = P("data"), P(), P("data"), P("data")
    out = P(), (P("data"), P(), P("data"))
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))
    arrays = batch(weights=FRACTIONS)
    assert ulps(sharded(*arrays), plain(*arrays)) <= 8


def test_a_label_that_is_no_token_makes_the_loss_and_its_gradient_nan():
    x, embed, labels, weights = batch()
    for label in (V, 100, -1, -100):
        arrays = x, embed, labels.at[-1].set(label), weights
        value, grads = chunked(*arrays, 7)
        assert jnp.isnan(value) and jnp.isnan(chunked_sum(*arrays, 7))
        assert jnp.isnan(grads[0][-1]).all() and jnp.isfinite(grads[0][:-1]).all()


def test_second_derivatives_are_those_of_the_plain_loss():
    """Sums of the squares of gradients, differentiated again; a wrong term is 10 % or more."""
    x, embed, labels, weights = batch(weights=FRACTIONS)

    def again(f):
        of = lambda x, embed: f(x, embed, labels, weights)  # noqa: E731
        squares = lambda *args: sum(jnp.sum(g**2) for g in jax.grad(of, (0, 1))(*args))  # noqa: E731
        return jax.grad(squares, (0, 1))(x, embed)

    whole = lambda *arrays: plain.__wrapped__(*arrays)[0]  # noqa: E731
    found, expected = again(lambda *arrays: chunked_sum(*arrays, 7)), again(whole)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_logsumexp_in_one_pass_is_that_of_float64_also_with_infinities():
    x = 40 * jax.random.normal(jax.random.key(0), (6, 1000))
    x = x.at[1, :500].set(-jnp.inf).at[2].add(3e38).at[3].add(-3e38).at[4, 7].set(jnp.nan)
    wide = np.asarray(x[:4], np.float64)
    most = wide.max(1)
    expected = most + np.log(np.exp(wide - most[:, None]).sum(1))
    found = jax.jit(_logsumexp)(x)
    np.testing.assert_allclose(found[:4], expected, rtol=1e-6)
    assert jnp.isnan(found[4]) and not jnp.isnan(found[5])
