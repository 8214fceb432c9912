"""What products of matrices that are cut hold and send, foretold from the update's trace."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.models import optimizers
from zero_jax.plan import update_forecast

L, A, B = 3, 64, 128
TURNS = 5  # of Newton and Schulz in `optax.contrib.muon`


def make():
    return {"up": jnp.zeros((L, A, B)), "down": jnp.zeros((L, B, A)), "bias": jnp.zeros((L, B))}


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def of(name, stage=3, **settings):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage, **settings)
    tx = optimizers.make(name, optax.constant_schedule(1e-3))
    return zero, tx, update_forecast.forecast(zero.settings, tx, jax.eval_shape(make))


@pytest.mark.parametrize("name", sorted(set(optimizers.RATES) - {"muon"}))
def test_what_multiplies_no_matrices_sends_nothing(name):
    assert of(name)[2] == update_forecast.Update()


def test_a_transformation_is_given_the_loss():
    """As in a step."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3)
    tx = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    found = update_forecast.forecast(zero.settings, tx, jax.eval_shape(make))
    assert found == update_forecast.Update()


def test_where_nothing_is_cut_nothing_is_sent():
    assert of("muon", stage=0)[2] == update_forecast.Update()


def test_muon_gathers_each_matrix_twice_a_turn_and_its_square_once():
    """In fp32, those with more columns than rows. The others are cut along what is summed over, and
    their square is summed over devices."""
    found = of("muon")[2]
    up, square = L * A * B, L * A * A
    assert found.words == TURNS * (2 * up + square) + TURNS * 2 * square
    assert found.gathered == 4 * (up + square) + 4 * square


def test_the_compiled_program_sends_what_was_foretold():
    zero, tx, _ = of("muon")
    shape = jax.ShapeDtypeStruct((8, 4, A), jnp.float32)
    plan = zero.plan(loss, tx, zero.abstract(make), shape)
    compiled = zero.plan(loss, tx, zero.abstract(make), shape, compile=True)
    assert plan.words_per_param > 8
    assert compiled.words_per_param == pytest.approx(plan.words_per_param, rel=0.02)
