"""`zero_jax.gather` and `zero_jax.shard` inside a `shard_map` of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax

PARAMS = {"w": jax.random.normal(jax.random.key(0), (7, 5)), "scale": jnp.float32(1.5)}
X = jax.random.normal(jax.random.key(1), (24, 7))


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2) + params["scale"] * jnp.sum(x)


@pytest.mark.parametrize("n", [3, 8])
def test_gathered_shards_are_the_leaves_and_their_gradients_are_summed_shards(n):
    def f(params, x):
        shards = zero_jax.shard(params)
        grads = jax.grad(lambda s: loss(zero_jax.gather(s, params), x))(shards)
        assert grads["w"].shape == shards["w"].shape and shards["w"].size * n < 2 * 35
        grads["scale"] = jax.lax.psum(grads["scale"], "data")  # too small to split: stays local
        rounded = zero_jax.gather(shards, params, compute="bfloat16")
        return zero_jax.gather(shards, params), zero_jax.gather(grads, params), rounded

    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    run = jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs))
    full, grads, rounded = run(PARAMS, X)
    want = jax.grad(loss)(PARAMS, X)
    for name in PARAMS:
        np.testing.assert_array_equal(full[name], PARAMS[name])
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-5, atol=1e-5)
        assert rounded[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded[name], PARAMS[name].astype(jnp.bfloat16))
    assert zero_jax.gather(PARAMS) is PARAMS  # a loss has full arrays already
