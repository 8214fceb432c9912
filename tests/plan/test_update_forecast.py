"""Memory and communication of updates that multiply partitioned matrices, from their trace."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import zero_jax
from zero_jax.models import optimizers
from zero_jax.plan import update_forecast
from zero_jax.plan.update_forecast import Update

L, A, B = 3, 64, 128


def make():
    return {"up": jnp.zeros((L, A, B)), "down": jnp.zeros((L, B, A)), "bias": jnp.zeros((L, B))}


def forecast(tx, stage=3):
    tx = optimizers.make(tx, optax.constant_schedule(1e-3)) if isinstance(tx, str) else tx
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage)
    return zero, tx, update_forecast.forecast(zero.settings, tx, jax.eval_shape(make))


def test_updates_that_exchange_no_matrices():
    for name in set(optimizers.RATES) - {"muon"}:
        assert forecast(name)[2] == Update(), name
    assert forecast("muon", 0)[2] == Update(), "nothing is partitioned"
    with_loss = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    assert forecast(with_loss)[2] == Update()
    norm = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / rms(g), grads))
    rms = lambda g: jnp.sqrt(jnp.tensordot(g, g, g.ndim))  # noqa: E731
    # Products of vectors are sums over devices: two elements for each of three numbers.
    assert forecast(norm)[2] == Update(words=2 * 3)


def test_muon_sends_rows_as_long_as_the_busiest_devices_there_and_back():
    """Six matrices for eight devices: one each at most, for which every device has a row."""
    zero, tx, found = forecast("muon")
    assert found.words == 2 * A * B
    rows, matrix = 4 * A * B, 4 * A * B
    assert 2 * rows + matrix < found.held < 2 * rows + 6 * matrix
    (one,) = update_forecast.exchanges(zero.settings, tx, jax.eval_shape(make))
    assert [sum(kind.counts) for kind in one.kinds] == [L, L]
    assert max(map(sum, zip(*(kind.counts for kind in one.kinds), strict=True))) == 1

    def loss(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    shape = jax.ShapeDtypeStruct((8, 4, A), jnp.float32)
    plan = zero.plan(loss, tx, zero.abstract(make), shape, compile=True)
    assert plan.update_words == 2 * A * B
    predicted = dataclasses.replace(plan, compiled=None).words_per_param
    assert abs(plan.words_per_param / predicted - 1) < 0.02
