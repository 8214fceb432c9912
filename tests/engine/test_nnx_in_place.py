"""NNX as its users write it: dropout, batch statistics and `nnx.Optimizer`, in place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zero_jax
from zero_jax.sharding.paths import Padded

N = 4
TX = optax.sgd(0.05, momentum=0.9)  # Adam would make steps of the rounding of a bias before a norm
X = jnp.sin(jnp.arange(7.0 * 16)).reshape(16, 7)


class Net(nnx.Module):
    def __init__(self, axes, rate, rngs):
        self.up = nnx.Linear(7, 33, rngs=rngs)
        self.norm = nnx.BatchNorm(33, axis_name=axes, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(33, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def parts(axes, rate=0.0):
    return nnx.split(Net(axes, rate, nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)


def loss_of(graphdef, rest):
    def loss_fn(params, x, stats, key):
        model = nnx.merge(graphdef, params, stats, rest, copy=True)
        nnx.reseed(model, default=key)
        return jnp.mean((model(x) - 1) ** 2), nnx.state(model, nnx.BatchStat)

    return loss_fn


def plain(steps):
    """The loop on one device."""
    graphdef, params, stats, rest = parts(None)
    model = nnx.merge(graphdef, params, stats, rest)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    losses = []
    for _ in range(steps):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(model)
        optimizer.update(model, grads)
        losses.append(float(loss))
    return losses, nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_of_nnx_updates_a_module_in_place(stage, jitted):
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:N]), stage)
    graphdef, start, stats, rest = parts(zero.batch_axes)
    model = nnx.merge(graphdef, zero.init(lambda: start), stats, rest)
    optimizer = nnx.Optimizer(model, zero.optimizer(TX), wrt=nnx.Param)
    value_and_grad = zero.value_and_grad(loss_of(graphdef, rest), has_aux=True)

    def step(model, optimizer, key):
        params, stats = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        (loss, new), grads = value_and_grad(params, X, stats, key)
        optimizer.update(model, grads)
        nnx.update(model, new)
        return loss

    own = nnx.jit(step) if jitted else step
    losses = [float(own(model, optimizer, jax.random.key(1))) for _ in range(4)]
    wanted, params, stats = plain(4)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    found = zero_jax.logical(nnx.as_pure(nnx.state(model, nnx.Param)))
    chex.assert_trees_all_close(found, nnx.as_pure(params), rtol=1e-4, atol=1e-5)
    own_stats = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    chex.assert_trees_all_close(own_stats, nnx.as_pure(stats), rtol=1e-4, atol=1e-5)
    if stage:
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.size > N]
        assert moments and all(x.sharding.shard_shape(x.shape) != x.shape for x in moments)


def test_masks_of_dropout_differ_between_steps_and_devices():
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:N]), 3)
    graphdef, start, stats, rest = parts(zero.batch_axes, 0.5)
    loss = zero.evaluate(loss_of(graphdef, rest), has_aux=True)
    params = zero.init(lambda: start)
    alike = jnp.tile(X[:2], (8, 1))  # every device has the same rows
    found = {float(loss(params, alike, stats, jax.random.key(i))[0][0]) for i in range(3)}
    assert len(found) == 3

    def rows(params, x, stats, key):
        model = nnx.merge(graphdef, params, stats, rest, copy=True)
        nnx.reseed(model, default=key)
        return jnp.float32(0), model(x)

    values = zero.evaluate(rows, has_aux=True)(params, alike, stats, jax.random.key(0))[0][1]
    assert len({bytes(own) for own in np.split(np.asarray(values), N)}) == N


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(X),
        lambda model: jnp.sum(model.up.kernel.get_value()),
        lambda model: 2 * model.up.kernel.get_value(),
        lambda model: X @ model.up.kernel.get_value(),
        lambda model: model.up.kernel.get_value()[0],
        lambda model: model.up.kernel.get_value().T,
        lambda model: np.asarray(model.up.kernel.get_value()),
    ],
    ids=["call", "sum", "times", "product", "row", "transposed", "numpy"],
)
def test_a_padded_parameter_says_what_it_is_where_it_is_used(use):
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:N]), 3)
    graphdef, start, stats, rest = parts(None)
    model = nnx.merge(graphdef, zero.init(lambda: start), stats, rest)
    assert isinstance(model.up.kernel.get_value(), Padded)
    said = r"parameter at rest, \(7, 33\) padded to \(7, 36\).*zero_jax.logical.*zero.full"
    with pytest.raises((TypeError, AttributeError), match=said):
        use(model)
