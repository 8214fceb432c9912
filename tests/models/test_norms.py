"""The layer norm of the GPT: values and gradients of Flax's, and what its backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zero_jax.models.norms import EPS, LayerNorm

D = 24


def both(dtype):
    """Both norms with the same parameters, their input and the cotangent of their result."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, dout = (1 + 2 * jax.random.normal(k, (2, 5, D)) for k in keys[:2])
    weights = [1 + jax.random.normal(k, (D,)) for k in keys[2:]]
    norms = (
        LayerNorm(D, nnx.Rngs(0)),
        nnx.LayerNorm(D, epsilon=EPS, use_fast_variance=False, rngs=nnx.Rngs(0)),
    )

    def run(norm):
        def call(x, scale, bias):
            state = nnx.State({"scale": nnx.Param(scale), "bias": nnx.Param(bias)})
            return nnx.merge(nnx.graphdef(norm), state)(x)

        return call

    return [run(norm) for norm in norms], [a.astype(dtype) for a in (x, *weights)], dout


@pytest.mark.parametrize(("dtype", "ulp"), [("float32", 2**-21), ("bfloat16", 2**-7)])
def test_values_and_gradients_are_those_of_flax(dtype, ulp):
    """Beside Flax in fp32, on the same inputs: bf16 rounds results by half an ulp."""
    (ours, reference), args, dout = both(dtype)
    wide = [a.astype(jnp.float32) for a in args]
    out, back = jax.vjp(ours, *args)
    expected, expected_back = jax.vjp(reference, *wide)
    dout = dout.astype(dtype)
    found = [out, *back(dout)]
    assert [x.dtype for x in found] == [jnp.dtype(dtype)] * 4
    for x, y in zip(found, [expected, *expected_back(dout.astype(jnp.float32))], strict=True):
        most = 4 * ulp * float(jnp.abs(y).max())
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=0, atol=most)


def test_it_has_second_derivatives():
    (ours, reference), args, dout = both("float32")
    found, expected = (
        jax.grad(lambda *args, f=f: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, *args[1:]) * dout))(
            args[0]) ** 2), (0, 1))(*args) for f in (ours, reference))  # fmt: skip
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_the_backward_pass_keeps_the_input_and_two_numbers_a_token():
    (ours, reference), args, _ = both("bfloat16")
    kept, before = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, *args)[1]))
        for f in (ours, reference)
    )
    tokens, weights = args[0].size // D, 2 * 2 * D
    assert kept <= args[0].nbytes + 2 * 4 * tokens + weights
    assert before > 2 * kept
