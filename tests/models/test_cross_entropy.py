"""The chunked loss: the numbers of the plain one, in a fraction of the memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.models.cross_entropy import chunked_cross_entropy

M, D, V = 26, 16, 61


def plain_cross_entropy(x, embed, labels, weights):
    logits = jnp.einsum("md,vd->mv", x, embed, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
    return jnp.sum(losses * weights)


def chunked_sum(x, embed, labels, weights, chunk):
    return chunked_cross_entropy(x, embed, labels, weights, chunk)[0]


ARGNUMS = (0, 1, 3)  # hidden states, embedding and weights
plain_value_and_grad = jax.jit(jax.value_and_grad(plain_cross_entropy, ARGNUMS))
chunked_value_and_grad = jax.jit(jax.value_and_grad(chunked_sum, ARGNUMS), static_argnums=4)
chunked_value = jax.jit(chunked_sum, static_argnums=4)


def batch(dtype=jnp.float32, mask="ones"):
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (M, D)).astype(dtype)
    embed = jax.random.normal(keys[1], (V, D)).astype(dtype)
    labels = jax.random.randint(keys[2], (M,), 0, V)
    weights = {
        "ones": jnp.ones(M),
        "mask": (jnp.arange(M) % 3 > 0).astype(jnp.float32),
        "fractions": jax.random.uniform(keys[3], (M,)),
        "zeros": jnp.zeros(M),
    }[mask]
    return x, embed, labels, weights


def ulps(got, expected):
    """Largest difference in fp32 ulps of the largest expected value."""
    scale = np.finfo(np.float32).eps * np.abs(expected).max()
    return np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max() / scale


@pytest.mark.parametrize("mask", ["ones", "mask", "fractions"])
@pytest.mark.parametrize("chunk", [7, 13, 1000])  # 26 = 4 * 7 - 2 = 2 * 13
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk, mask):
    # Both round every product, exponential and sum in fp32, in another order: sums of D = 16
    # and M = 26 terms, so 8 ulps of the largest value is generous and a wrong term is millions.
    arrays = batch(mask=mask)
    got, got_grads = chunked_value_and_grad(*arrays, chunk)
    expected, grads = plain_value_and_grad(*arrays)
    assert ulps(got, expected) <= 8
    assert ulps(chunked_value(*arrays, chunk), expected) <= 8  # not differentiated
    for got_grad, grad in zip(got_grads, grads, strict=True):
        assert got_grad.dtype == jnp.float32
        assert ulps(got_grad, grad) <= 8


def test_a_batch_without_weight_has_no_gradient_and_no_nan():
    x, embed, labels, weights = batch(mask="zeros")
    value, grads = chunked_value_and_grad(x, embed, labels, weights, 7)
    assert value == 0.0
    assert not np.any(grads[0])  # NaN would count as true
    assert not np.any(grads[1])
    assert chunked_cross_entropy(x, embed, labels, weights, 7)[1] == 0.0


def test_boolean_mask_counts_its_tokens():
    x, embed, labels, weights = batch(mask="mask")
    total, weight = chunked_cross_entropy(x, embed, labels, weights > 0, 7)
    assert weight == M * 2 // 3
    assert ulps(total, plain_cross_entropy(x, embed, labels, weights)) <= 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_round_once_from_fp32(dtype):
    x, embed, labels, weights = batch(dtype, mask="fractions")
    _, grads = chunked_value_and_grad(x, embed, labels, weights, 7)
    _, exact = plain_value_and_grad(
        x.astype(jnp.float32), embed.astype(jnp.float32), labels, weights
    )
    # softmax - onehot and the result are rounded to the dtype, half an ulp each, of the largest.
    for grad, right in zip(grads[:2], exact[:2], strict=True):
        assert grad.dtype == dtype
        error = np.abs(np.asarray(grad, np.float64) - right).max()
        assert error <= jnp.finfo(dtype).eps * np.abs(right).max()


def test_fp16_gradients_neither_underflow_nor_overflow():
    # Near-uniform probabilities of 1 / 61 under a weight of 2**-20 are 1.6e-8, nothing in fp16
    # (its smallest number is 6e-8); under a loss scale of 2**20 the gradients are ordinary.
    x, embed, labels, _ = batch(jnp.float16)
    embed = embed * jnp.float16(0.01)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(power):
        def scaled(x, embed):
            weights = jnp.full(M, 2.0**-power)
            return chunked_sum(x, embed, labels, weights, 7) * 2.0**power

        return jax.grad(scaled, argnums=(0, 1))(x, embed)

    for small, right, large in zip(grads(20), grads(0), grads(-20), strict=True):
        assert np.all(np.any(right, axis=1))
        np.testing.assert_array_equal(small, right)  # powers of two change no digit
        np.testing.assert_array_equal(large, right)


def test_backward_only_scales_and_does_not_keep_the_embedding():
    x, embed, labels, weights = batch(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x, embed: chunked_sum(x, embed, labels, weights, 7), x, embed)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0)]
    assert (V, D) in {leaf.shape for leaf in kept}  # the fp32 gradient, made in the forward pass
    assert not any(leaf.shape == (V, D) and leaf.dtype == jnp.bfloat16 for leaf in kept)
    jaxpr = str(jax.make_jaxpr(vjp)(jnp.float32(1)))
    assert "mul" in jaxpr
    assert "dot_general" not in jaxpr


def test_compiled_loss_needs_no_room_for_the_logits_of_the_batch():
    tokens, width, vocab = 1024, 16, 8192
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((tokens, width), jnp.bfloat16),
            ((vocab, width), jnp.bfloat16),
            ((tokens,), jnp.int32),
            ((tokens,), jnp.float32),
        ]
    ]

    def temp(chunk):
        compiled = chunked_value_and_grad.lower(*arrays, chunk).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # In fp32: a few copies of a chunk's logits, and the gradients and the embedding once or
    # twice each. All of that is a quarter of the logits of the batch.
    logits = 4 * tokens * vocab
    assert temp(16) < 4 * (4 * 16 * vocab + 4 * (tokens + vocab) * width) < logits / 4
    assert temp(tokens) >= logits  # not vacuous


def test_chunked_loss_under_shard_map_equals_one_device():
    # With a replicated embedding jax itself sums its gradient over the axis, which a custom
    # gradient must not lose; check_vma, the default, types every array inside.
    P = jax.sharding.PartitionSpec
    devices = jax.devices()[: 2 if len(jax.devices()) > 1 else 1]

    def local(x, embed, labels, weights):
        value, grads = jax.value_and_grad(chunked_sum, ARGNUMS)(x, embed, labels, weights, 7)
        return jax.lax.psum(value, "data"), grads

    sharded = jax.shard_map(
        local,
        mesh=jax.sharding.Mesh(devices, ("data",)),
        in_specs=(P("data"), P(), P("data"), P("data")),
        out_specs=(P(), (P("data"), P(), P("data"))),
    )
    arrays = batch(mask="fractions")
    value, grads = jax.jit(sharded)(*arrays)
    expected, right = plain_value_and_grad(*arrays)
    assert ulps(value, expected) <= 8
    assert max(map(ulps, grads, right)) <= 8


@pytest.mark.parametrize("label", [5, 100, -1, -100])
def test_a_label_that_is_no_token_makes_the_loss_and_its_gradient_nan(label):
    """Not zero: the run would go on, and learn nothing from such rows."""
    x, embed = jax.random.normal(jax.random.key(0), (2, 5, 4))
    labels, weights = jnp.array([0, 1, 2, 3, label]), jnp.ones(5)

    def loss(x):
        return chunked_cross_entropy(x, embed, labels, weights, 2)[0]

    value, grad = jax.value_and_grad(loss)(x)
    assert jnp.isnan(value) and jnp.isnan(loss(x)) and jnp.isnan(grad[4]).all()
    assert jnp.isfinite(grad[:4]).all()


def test_it_promotes_nothing_by_itself():
    args = batch()
    wanted = chunked_value_and_grad(*args, 8)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.value_and_grad(chunked_sum, ARGNUMS), static_argnums=4)(*args, 8)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
