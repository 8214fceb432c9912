"""Errors and warnings about losses that sum rows, or use statistics of one device's rows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax

N, ROWS, D = 4, 16, 8
X = jax.random.normal(jax.random.key(1), (ROWS, D))
P = {"w": jax.random.normal(jax.random.key(0), (D, D))}


def zero_on(devices=N, **settings):
    mesh = zero_jax.make_mesh(devices, devices=jax.devices()[:devices])
    return zero_jax.Zero(mesh, 3, **settings)


def errors(params, x):
    return (jnp.tanh(x @ params["w"]) - 1.0) ** 2


def summed(params, x):
    return jnp.sum(errors(params, x))


@pytest.mark.parametrize("kind", ["value_and_grad", "evaluate"])
def test_a_sum_over_rows_is_refused(kind):
    zero = zero_on()
    with pytest.raises(ValueError, match=r"zero_jax\.Weighted") as error:
        getattr(zero, kind)(summed)(zero.shard(P), X)
    assert "jnp.mean" in str(error.value)


def test_both_ways_out():
    zero = zero_on()

    def weighted(params, x):
        return zero_jax.Weighted(summed(params, x), len(x) * D)

    wanted = summed(P, X) / X.size
    for loss in (weighted, lambda params, x: jnp.mean(errors(params, x))):
        np.testing.assert_allclose(zero.evaluate(loss)(zero.shard(P), X)[0], wanted, rtol=1e-5)


def test_a_sum_on_one_device_is_one():
    zero = zero_on(1)
    np.testing.assert_allclose(zero.evaluate(summed)(zero.shard(P), X)[0], summed(P, X), rtol=1e-5)


def test_a_sum_with_weights_of_the_batch_warns_once():
    zero = zero_on()
    evaluate = zero.evaluate(lambda params, x: jnp.sum(errors(params, x) * x))
    with pytest.warns(UserWarning, match="seems to return a sum"):
        evaluate(zero.shard(P), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        evaluate(zero.shard(P), jnp.concatenate([X, X]))


def normalised(reduced):
    def loss(params, x):
        mean = reduced(jnp.mean(x, 0))
        deviation = jnp.sqrt(reduced(jnp.mean((x - mean) ** 2, 0)))
        return jnp.mean(errors(params, (x - mean) / deviation))

    return loss


def test_a_statistic_of_one_device_warns_and_one_of_all_does_not():
    zero, params = zero_on(), zero_on().shard(P)
    with pytest.warns(UserWarning, match="zero.batch_axes"):
        zero.value_and_grad(normalised(lambda x: x))(params, X)
    over_all = normalised(lambda x: jax.lax.pmean(x, zero.batch_axes))
    value = zero.value_and_grad(over_all)(params, X)[0]
    np.testing.assert_allclose(value, normalised(lambda x: x)(P, X), rtol=1e-5)
