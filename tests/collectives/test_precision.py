"""Dtypes, the loss scale's schedule, and the guard against gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.collectives.precision import Precision
from zero_jax.engine.loss_scale import init_guard, next_guard


def loss(params, x):
    y = x @ params["w"]
    return jnp.mean(y.astype(jnp.float32) ** 2)  # 2^16, the first loss scale, is infinite in fp16


def setup(precision, n=4, stage=3, **kwargs):
    zero = zero_jax.Zero(
        zero_jax.make_mesh(devices=jax.devices()[:n]), stage=stage, precision=precision
    )
    params = zero.init(lambda: {"w": jnp.ones((8, 3)), "unused": jnp.full((5,), -0.0)})
    tx = zero.optimizer(optax.adam(1e-2))
    return zero, params, tx.init(params), zero.train_step(loss, tx, **kwargs)


def test_the_loss_scale_follows_its_schedule():
    """Growth window 3, start 8: written by hand from the rule ×2, ÷2, floor 1."""
    precision = Precision("fp16", initial_scale=8.0, growth_interval=3)
    guard = init_guard(precision)
    events = "gg.ggg....g"  # g good, . overflow
    scales = [8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    for event, want in zip(events, scales, strict=True):
        guard = next_guard(guard, jnp.asarray(event == "g"), precision)
        assert float(guard.loss_scale) == want
    assert int(guard.skipped) == 5
    assert int(guard.consecutive) == 0


def test_two_thousand_good_steps_double_the_scale():
    precision = Precision("fp16")
    guard = init_guard(precision)._replace(good_steps=jnp.asarray(1999, jnp.int32))
    assert float(guard.loss_scale) == 2**16
    assert float(next_guard(guard, jnp.asarray(True), precision).loss_scale) == 2**17


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_infinity_on_one_device_makes_all_skip(stage, precision):
    _, params, state, step = setup(precision, stage=stage)
    good = jnp.full((8, 8), 0.1)
    params, state, metrics = step(params, state, good)
    assert int(metrics.skipped) == 0
    before = jax.tree.map(np.asarray, (params, state.inner))
    bad = good.at[6, 0].set(jnp.inf)  # row 6 belongs to device 3 of 4
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1
    assert float(metrics.loss_scale) == (2**16 if precision == "fp16" else 1)
    after = jax.tree.map(np.asarray, (params, state.inner))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert a.tobytes() == b.tobytes()
    assert step.first_bad_leaf(params, state, bad) == "w"
    assert step.first_bad_leaf(params, state, good) is None
    params, state, metrics = step(params, state, good)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
    assert float(metrics.loss_scale) == (2**15 if precision == "fp16" else 1)


def test_skips_in_a_row_raise_and_name_the_leaf():
    _, params, state, step = setup("bf16", max_skips=3)
    bad = jnp.full((8, 8), jnp.nan)
    with pytest.raises(zero_jax.NonFiniteError, match=r"3 steps in a row .*gradient of w;"):
        for _ in range(10):
            params, state, _ = step(params, state, bad)
    assert int(state.guard.skipped) <= 3 + 2, "the host looks at most two steps late"


def test_fp16_survives_a_loss_that_plain_fp16_loses():
    """Gradients of 2^-30 are zero in fp16 (smallest 2^-24); the scale carries them."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=2, precision="fp16")
    params = zero.init(lambda: {"w": jnp.ones((8, 8))})

    rows = jnp.ones((2048, 8))  # many rows: a mean must not be scaled down by their number

    def tiny(params, x):
        return jnp.mean(x @ params["w"]).astype(jnp.float32) * 2.0**-24

    _, grads = zero.value_and_grad(tiny)(params, rows, loss_scale=2.0**16)
    np.testing.assert_allclose(zero.full(grads)["w"], 2.0**-27, rtol=1e-2)
    _, lost = zero.value_and_grad(tiny)(params, rows, loss_scale=1.0)
    assert not np.asarray(zero.full(lost)["w"]).any(), "the scale was not needed: a vacuous test"


def test_summed_fp16_losses_do_not_overflow_at_the_first_scale():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, precision="fp16")
    params = zero.init(lambda: {"w": jnp.ones((16, 16)) / 16})

    def pair(params, x):
        rows = (x.astype(jnp.float16) @ params["w"]).astype(jnp.float32)
        return zero_jax.Weighted(jnp.sum(rows), jnp.float32(rows.size))

    step = zero.train_step(pair, optax.sgd(1e-2))
    state = zero.optimizer(optax.sgd(1e-2)).init(params)
    _, _, metrics = step(params, state, jnp.ones((512, 16)))
    assert int(metrics.skipped) == 0
    assert float(metrics.weight) == 512 * 16
    np.testing.assert_allclose(float(metrics.loss), 1.0, rtol=1e-3)


def test_fp16_without_a_scale_is_refused():
    zero, params, _, _ = setup("fp16")
    with pytest.raises(ValueError, match=r"loss_scale=opt_state\.guard\.loss_scale"):
        zero.value_and_grad(loss)(params, jnp.ones((8, 8)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute": "bf15"}, "'bf16'"),
        ({"reduce": "fp16"}, "reduce='fp16'"),
        ({"compute": jnp.int32}, "int32"),
        ({"growth_interval": 0}, "growth_interval=0"),
    ],
)
def test_unknown_dtypes_are_refused_with_the_nearest(given, message):
    with pytest.raises(ValueError, match=message):
        Precision(**given)
