"""Gathers and shards by hand, in a `shard_map` of one's own."""

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


def on(n, f, out_specs):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    specs = {"in_specs": (P(), P("data")), "out_specs": out_specs}
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs))(PARAMS, X)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_gathered_shards_are_the_leaves_and_their_gradients_are_summed_shards(n):
    def f(params, x):
        shards = zero_jax.shard(params)
        grads = jax.grad(lambda s: loss(zero_jax.gather(s, params), x))(shards)
        assert grads["w"].shape == shards["w"].shape and shards["w"].size * n < 2 * 35
        grads["scale"] = jax.lax.psum(grads["scale"], "data")  # too small to split: stays local
        return zero_jax.gather(shards, params), zero_jax.gather(grads, params)

    full, grads = on(n, f, (P(), P()))
    want = jax.grad(loss)(PARAMS, X)
    for name in PARAMS:
        np.testing.assert_array_equal(full[name], PARAMS[name])
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-5, atol=1e-5)


def test_the_dtype_to_gather_in_is_that_of_what_comes_back():
    def f(params, _):
        return zero_jax.gather(zero_jax.shard(params), params, compute="bfloat16")

    full = on(3, f, P())
    assert {name: x.dtype for name, x in full.items()} == dict.fromkeys(PARAMS, jnp.bfloat16)
    np.testing.assert_array_equal(full["w"], PARAMS["w"].astype(jnp.bfloat16))


def test_without_the_leaves_whole_arrays_come_back_as_they_are():
    assert zero_jax.gather(PARAMS) is PARAMS
