"""Closed forms of memory and communication: against arrays, and against formulas by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import zoo_params

import zero_jax
from zero_jax.plan import memory

TX = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.ema(0.9))


@pytest.mark.parametrize(("n", "stage"), [(3, 1), (8, 3)])
def test_at_rest_equals_the_bytes_of_the_arrays(n, stage):
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), stage=stage)
    params = zero.init(lambda: zoo_params(2))
    state = zero.optimizer(TX).init(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, state)))
    shapes = jax.eval_shape(lambda: zoo_params(2))
    assert memory.estimate(shapes, shards=n, stage=stage, tx=TX).at_rest == held


@pytest.mark.parametrize(("n", "stage"), [(8, 0), (1, 2)])
def test_one_device_or_stage_0_holds_all_that_optax_has(n, stage):
    shapes = jax.eval_shape(lambda: zoo_params(5))
    leaves = jax.tree.leaves((shapes, jax.eval_shape(TX.init, shapes)))
    held = sum(x.size * x.dtype.itemsize for x in leaves)
    found = memory.estimate(shapes, shards=n, stage=stage, tx=TX).at_rest
    assert found - held == 16, "four scalars of the guard"


PSI, N = 6 * 64 * 65, 8


@pytest.mark.parametrize("k", [1, 4])
def test_terms_and_words_are_those_of_the_paper(k):
    """bf16, Adam, biases replicated nowhere; stage 3 gathers one layer."""
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((6, 64, 64)), "b": jnp.zeros((6, 64))})
    layer, tx = 64 * 65, optax.adam(1e-3)
    settings = {"shards": N, "tx": tx, "precision": "bf16", "window": layer, "micro_batches": k}
    found = [memory.estimate(shapes, stage=stage, **settings) for stage in range(4)]
    assert [x.parameters + x.state - 20 for x in found] == [12 * PSI, *[12 * PSI // N] * 3]
    assert [x.copy for x in found] == [2 * PSI] * 3 + [2 * layer]
    word, shards = (2 if k == 1 else 4), 4 * PSI // N
    first = word * (layer if k == 1 else PSI) + shards
    assert [x.gradients for x in found] == [word * PSI, first, *[2 * layer + shards] * 2]
    totals = [x.total for x in found]
    assert totals == sorted(totals, reverse=True) and totals[3] < totals[0] / 4
    assert [memory.words_per_param(stage, k) for stage in range(4)] == [2, 2, 1 + k, 3 * k]


def test_frozen_leaves_have_neither_state_nor_gradients():
    shapes, tx = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, optax.adam(1e-3)
    free, frozen = (
        memory.estimate(shapes, shards=1, stage=0, tx=tx, frozen=f) for f in (None, "w")
    )
    assert free.state - frozen.state == 2 * 4 * 64
    assert (free.gradients, frozen.gradients) == (4 * 64, 0)
