"""What products of matrices that are cut hold and send, foretold from the update's trace."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.models import optimizers
from zero_jax.plan import update_forecast

L, A, B = 3, 64, 128


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


def test_muon_sends_rows_as_long_as_the_busiest_owners_there_and_back():
    """Six matrices for eight devices: one each at most, for which every device has a row."""
    found = of("muon")[2]
    assert found.words == 2 * A * B
    rows, matrix = 4 * A * B, 4 * A * B
    assert 2 * rows + matrix < found.held < 2 * rows + 6 * matrix


def test_the_compiled_program_sends_what_was_foretold():
    zero, tx, _ = of("muon")
    shape = jax.ShapeDtypeStruct((8, 4, A), jnp.float32)
    plan = zero.plan(loss, tx, zero.abstract(make), shape)
    compiled = zero.plan(loss, tx, zero.abstract(make), shape, compile=True)
    assert plan.update_words == 2 * A * B
    assert compiled.words_per_param == pytest.approx(plan.words_per_param, rel=0.02)


def test_no_owner_has_two_matrices_where_eight_share_six():
    zero, tx, _ = of("muon")
    (one,) = update_forecast.exchanges(zero.settings, tx, jax.eval_shape(make))
    assert [sum(kind.counts) for kind in one.kinds] == [L, L]
    assert max(map(sum, zip(*(kind.counts for kind in one.kinds), strict=True))) == 1


def test_products_of_vectors_are_sums_over_devices():
    """Two words for each number that is summed, as XLA has it."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3)

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: g / jnp.sqrt(jnp.tensordot(g, g, g.ndim)), grads), state

    tx = optax.GradientTransformation(lambda params: (), update)
    found = update_forecast.forecast(zero.settings, tx, jax.eval_shape(make))
    assert found == update_forecast.Update(words=2 * 3)
