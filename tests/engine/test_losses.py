"""Losses: aux, weights, sums over rows and non-finite gradients, against one device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax

X = jax.random.normal(jax.random.key(1), (16, 4))
W = {"w": jax.random.normal(jax.random.key(0), (4, 8))}


def zero_on(n=4, replica=1, axis="data", **settings):
    devices = jax.devices()[: n * replica]
    mesh = zero_jax.make_mesh(n, replica=replica, devices=devices, data_axis=axis)
    return zero_jax.Zero(mesh, **settings)


@pytest.mark.parametrize(
    ("replica", "k", "stage", "axis"),
    [(1, 1, 3, "batch"), (1, 2, 0, "data"), (2, 1, 1, "data"), (2, 2, 3, "data")],
)
def test_aux_means_rows_sums_counters_and_keys(replica, k, stage, axis):
    """Rows return in order, floats as means; counters, keys and sums are equal on all devices."""
    zero = zero_on(4, replica, axis, micro_batches=k, stage=stage)
    assert zero.batch_axes == (("replica", "data") if replica > 1 else (axis,))
    same = lambda x: x  # noqa: E731

    def loss(params, x, count, mean=same, total=same):
        centre = mean(x.mean(0)) if k == 1 else 0.0  # else of a micro-batch
        logits = jnp.tanh((x - centre) @ (params["w"] * params["w/2"]))  # paths that look alike
        aux = {
            "logits": logits,
            "mean": jnp.mean(logits),
            "spread": logits.mean(0),
            "channels": x.mean(0),  # as long as the rows of a device where k is 1, and no rows
            "rows": x.mean(1),
            "n": count + 1,
            "bits": jax.random.key_data(jax.random.key(5)),
            "key": jax.random.key(5),
        }
        if k == 1:
            aux["right"] = total((x[:, 0] > 0).sum())
        return jnp.mean(logits**2), aux

    def sharded(params, x, count):
        over = [lambda x, f=f: f(x, zero.batch_axes) for f in (jax.lax.pmean, jax.lax.psum)]
        return loss(params, x, count, *over)

    start = {"w": W["w"], "w/2": jnp.cos(W["w"])}
    params = zero.shard(start)
    (_, aux), grads = zero.value_and_grad(sharded, has_aux=True)(params, X, jnp.int32(6))
    (_, want), want_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start, X, 6)
    np.testing.assert_array_equal(jax.random.key_data(aux.pop("key")), want["bits"])
    for name in aux:
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, found in zero.full(grads).items():
        np.testing.assert_allclose(found, want_grads[name], rtol=1e-4, atol=1e-7)
    evaluated = zero.evaluate(sharded, has_aux=True)(params, X, jnp.int32(6))[0][1]
    np.testing.assert_allclose(evaluated["logits"], want["logits"], rtol=1e-5, atol=1e-6)


def errors(params, x):
    return (jnp.tanh(x @ params["w"]) - 1.0) ** 2


def normalised(params, x):
    return jnp.mean(errors(params, x - x.mean(0)))


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (lambda p, x: jnp.sum(errors(p, x)[:, :4] * x), r"zero_jax\.Weighted"),
        (normalised, r"zero\.batch_axes"),
    ],
)
def test_a_likely_sum_and_a_statistic_of_one_device_warn_once(loss, word):
    evaluate, params = zero_on().evaluate(loss), zero_on().abstract(lambda: W)
    with pytest.warns(UserWarning, match=word):
        jax.eval_shape(evaluate, params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jax.eval_shape(evaluate, params, jnp.concatenate([X, X]))


def test_a_sum_over_rows_on_one_device_is_one():
    loss = lambda params, x: jnp.sum(errors(params, x))  # noqa: E731
    value = zero_on(1).evaluate(loss)(zero_on(1).shard(W), X)[0]
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-5)


def test_weights_of_parameters_under_stop_gradient_and_loops_over_frozen_leaves():
    def loss(params, x):
        logits = x @ params["w"]
        weight = jax.lax.stop_gradient(jnp.sum(jax.nn.sigmoid(logits)))
        counted = jnp.sum(logits > 0)  # no gradient goes through a comparison
        loop = jax.lax.while_loop(lambda c: c < 9, lambda c: c + params["f"][0] ** 2 + 1, 0.0)
        return zero_jax.Weighted(jnp.sum(logits**2) * loop, weight + counted)

    zero, start = zero_on(frozen="f"), W | {"f": jnp.ones(3)}
    total, weight = loss(start, X)
    value, _ = zero.value_and_grad(loss)(zero.shard(start), X)
    np.testing.assert_allclose(value, total / weight, rtol=1e-5)


def test_fp16_gradients_follow_the_weight_and_not_the_largest_array():
    """A batch with an array of a million numbers, of which one row counts."""
    zero = zero_on(precision="fp16")
    batch = (X, jnp.zeros((16, 2**16)).at[0, 0].set(1.0))

    def loss(params, batch):
        x, mask = batch[0], batch[1][:, 0]
        return zero_jax.Weighted(1e-4 * jnp.sum(mask * jnp.mean(x @ params["w"], 1)), mask.sum())

    _, grads = zero.value_and_grad(loss)(zero.shard(W), batch, loss_scale=1.0)
    want = 1e-4 * np.broadcast_to(np.asarray(X[0])[:, None] / 8, (4, 8))
    np.testing.assert_allclose(zero.full(grads)["w"], want, rtol=2e-2, atol=1e-7)


def stepped(zero, loss, tx, *batches):
    """Full parameters and metrics after each step."""
    tx, params = zero.optimizer(tx), zero.shard(W)
    step, state, found = zero.train_step(loss, tx), tx.init(params), []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        found.append((np.asarray(zero.full(params)["w"]), metrics))
    return found


def test_finite_gradients_whose_squares_overflow_are_applied():
    loss = lambda p, x: 1e20 * jnp.mean(x @ p["w"])  # noqa: E731
    ((found, metrics),) = stepped(zero_on(), loss, optax.sgd(1e-20), X)
    # Of a mean over 16 rows and 8 columns.
    want = 1e20 * np.broadcast_to(np.asarray(X, np.float64).sum(0)[:, None] / (16 * 8), (4, 8))
    assert metrics.skipped == 0
    np.testing.assert_allclose(float(metrics.grad_norm), np.linalg.norm(want), rtol=1e-5)
    np.testing.assert_allclose(found, W["w"] - 1e-20 * want, rtol=1e-5)


@pytest.mark.parametrize(("stage", "guard"), [(3, True), (3, False), (0, False)])
def test_without_the_guard_a_transformation_sees_nan(stage, guard):
    def loss(params, x):
        return jnp.mean(x @ params["w"]) + jnp.sqrt(params["w"][0, 0] - params["w"][0, 0])

    tx = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    ((found, metrics),) = stepped(zero_on(stage=stage, guard=guard), loss, tx, X)
    assert metrics.skipped == guard
    assert np.isfinite(found).all() and (found == np.asarray(W["w"])).all() == guard


@pytest.mark.parametrize(("stage", "k"), [(0, 2), (3, 1)])
def test_a_negative_weight_on_a_device_skips_the_step(stage, k):
    """Weights count rows or tokens. A negative one is an error, also if their sum is positive."""

    def loss(params, batch):
        weight = jnp.sum(batch[1])
        return zero_jax.Weighted(weight * jnp.mean((batch[0] @ params["w"]) ** 2), weight)

    zero, good = zero_on(stage=stage, micro_batches=k), jnp.ones(16)
    batches = (X, good), (X, good.at[0].set(-9.0))
    (before, metrics), (after, bad) = stepped(zero, loss, optax.sgd(0.1), *batches)
    assert (int(metrics.skipped), float(metrics.weight)) == (0, 16)
    assert int(bad.skipped) == 1 and np.isnan(bad.loss)
    np.testing.assert_array_equal(after, before)
