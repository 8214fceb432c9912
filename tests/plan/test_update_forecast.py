"""Memory and communication of updates that multiply partitioned matrices, from their trace."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.models import optimizers
from zero_jax.plan import update_forecast
from zero_jax.plan.update_forecast import Update

L, A, B = 3, 64, 128


def make():
    return {"up": jnp.zeros((L, A, B)), "down": jnp.zeros((L, B, A)), "bias": jnp.zeros((L, B))}


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def forecast(tx, stage=3):
    tx = optimizers.make(tx, optax.constant_schedule(1e-3)) if isinstance(tx, str) else tx
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage)
    return zero, tx, update_forecast.forecast(zero.settings, tx, jax.eval_shape(make))


def normalised(grads, state, params=None):
    return jax.tree.map(lambda g: g / jnp.sqrt(jnp.tensordot(g, g, g.ndim)), grads), state


WITH_LOSS = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
NORMALISED = optax.GradientTransformation(lambda params: (), normalised)


@pytest.mark.parametrize(
    ("tx", "stage", "want"),
    [
        *((name, 3, Update()) for name in sorted(set(optimizers.RATES) - {"muon"})),
        ("muon", 0, Update()),  # nothing is partitioned
        (WITH_LOSS, 3, Update()),
        # Products of vectors are sums over devices: two elements for each of three numbers.
        (NORMALISED, 3, Update(words=2 * 3)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_updates_that_exchange_no_matrices(tx, stage, want):
    assert forecast(tx, stage)[2] == want


def test_muon_sends_rows_as_long_as_the_busiest_devices_there_and_back():
    """Six matrices for eight devices: one each at most, for which every device has a row."""
    zero, tx, found = forecast("muon")
    assert found.words == 2 * A * B
    rows, matrix = 4 * A * B, 4 * A * B
    assert 2 * rows + matrix < found.held < 2 * rows + 6 * matrix
    (one,) = update_forecast.exchanges(zero.settings, tx, jax.eval_shape(make))
    assert [sum(kind.counts) for kind in one.kinds] == [L, L]
    assert max(map(sum, zip(*(kind.counts for kind in one.kinds), strict=True))) == 1

    shape = jax.ShapeDtypeStruct((8, 4, A), jnp.float32)
    plan = zero.plan(loss, tx, zero.abstract(make), shape, compile=True)
    assert plan.update_words == 2 * A * B
    predicted = dataclasses.replace(plan, compiled=None).words_per_param
    assert plan.words_per_param == pytest.approx(predicted, rel=0.02)
