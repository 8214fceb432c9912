"""NNX: dropout, batch statistics, and `nnx.Optimizer`, which updates a module in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_zero import zero_on

import zero_jax

pytestmark = pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
N, STEPS = 4, 3
TX = optax.sgd(0.05, momentum=0.9)  # Adam would make steps of the rounding of a bias before a norm
X = jnp.sin(jnp.arange(7.0 * 16)).reshape(16, 7)
SEEN = []


def hook(variable, value):
    SEEN.append(value.shape)
    return value


class Net(nnx.Module):
    def __init__(self, axes, rate):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(7, 33, rngs=rngs)
        self.norm = nnx.BatchNorm(33, axis_name=axes, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(33, 1, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(5), on_get_value=hook)

    def __call__(self, x):
        h = self.drop(nnx.relu(self.norm(self.up(x))))
        return self.down(h) * self.scale[...].mean()


@functools.cache
def parts(axes, rate=0.0):
    return nnx.split(Net(axes, rate), nnx.Param, nnx.BatchStat, ...)


def loss_of(graphdef, rest):
    def loss_fn(params, x, stats, key):
        model = nnx.merge(graphdef, params, stats, rest, copy=True)
        nnx.reseed(model, default=key)
        out = model(x)
        return jnp.mean((out - 1) ** 2), (nnx.state(model, nnx.BatchStat), out)

    return loss_fn


@functools.cache
def plain():
    """The loop on one device."""
    model = nnx.merge(*parts(None), copy=True)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(STEPS)]
    return losses, nnx.state(model, (nnx.Param, nnx.BatchStat))


@pytest.mark.parametrize(("stage", "jitted"), [(2, True), (3, False)])
def test_an_optimizer_of_nnx_updates_a_module_in_place(stage, jitted):
    zero = zero_on(N, stage=stage)
    graphdef, start, stats, rest = parts(zero.batch_axes)
    model = nnx.merge(graphdef, zero.shard(start), stats, rest, copy=True)
    optimizer = nnx.Optimizer(model, zero.optimizer(TX), wrt=nnx.Param)
    value_and_grad = zero.value_and_grad(loss_of(graphdef, rest), has_aux=True)

    def step(model, optimizer, key):
        params, stats = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        (loss, (new, _)), grads = value_and_grad(params, X, stats, key)
        optimizer.update(model, grads)
        nnx.update(model, new)
        return loss

    own = nnx.jit(step) if jitted else step
    losses = [float(own(model, optimizer, jax.random.key(1))) for _ in range(STEPS)]
    wanted, state = plain()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    found = zero_jax.logical(nnx.as_pure(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, found, nnx.as_pure(state))
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.size > 5]
    assert moments and all(x.sharding.shard_shape(x.shape) != x.shape for x in moments)


def test_masks_of_dropout_differ_between_steps_and_devices():
    zero = zero_on(N, stage=3)
    graphdef, start, stats, rest = parts(zero.batch_axes, 0.5)
    evaluate = zero.evaluate(loss_of(graphdef, rest), has_aux=True)
    params, alike = zero.shard(start), jnp.tile(X[:2], (8, 1))  # the same rows on every device
    SEEN.clear()
    outs = [evaluate(params, alike, stats, jax.random.key(i))[0] for i in range(3)]
    assert set(SEEN) == {(5,)}, "hooks of a variable see the full array"
    assert len({float(loss) for loss, _ in outs}) == 3
    assert len({bytes(own) for own in np.split(np.asarray(outs[0][1][1]), N)}) == N
