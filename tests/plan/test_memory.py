"""Closed forms against arrays."""

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import zoo_params

import zero_jax
from zero_jax.plan import memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_at_rest_equals_the_bytes_of_the_arrays(n, stage):
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), stage=stage)
    tx = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.ema(0.9))
    params = zero.init(lambda: zoo_params(5))
    state = zero.optimizer(tx).init(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, state)))
    shapes = jax.eval_shape(lambda: zoo_params(5))
    assert memory.estimate(shapes, shards=n, stage=stage, tx=tx).at_rest == held


def test_frozen_leaves_have_no_state():
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    free = memory.estimate(shapes, shards=1, stage=0, tx=optax.adam(1e-3))
    frozen = memory.estimate(shapes, shards=1, stage=0, tx=optax.adam(1e-3), frozen="w")
    assert free.state - frozen.state == 2 * 4 * 64
    assert frozen.gradients == 0


def test_a_higher_stage_never_holds_more():
    shapes = jax.eval_shape(
        lambda: {"blocks": {"w": jnp.zeros((6, 64, 64)), "b": jnp.zeros((6, 64))}}
    )
    totals = [
        memory.estimate(
            shapes, shards=8, stage=s, tx=optax.adam(1e-3), precision="bf16", window=64 * 65
        ).total
        for s in range(4)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] < totals[0] / 4
