"""Gradients of scanned layers wait in the dtype in which they were sent, where that rounds nothing.

The sum over devices is made in bf16 here, so a stack of such sums may be kept in bf16, bit for bit;
sums of several of them may not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.engine import grads
from zero_jax.models import gpt

L, D, ROWS = 3, 16, 8


def stack(*shape):
    return jax.random.normal(jax.random.key(len(shape)), (L, *shape)) / D**0.5


def scanned(params, x):
    """Every layer read once, in one scan."""
    w = params["w"]

    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


def read_twice(params, x):
    """Each layer opens its weight twice: a gradient is a sum of two."""

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T, None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def used_twice(params, x):
    """Each layer opens its weight once, and uses it in two operations."""

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T, None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def normalised(params, x):
    """A weight and its norm."""

    def layer(x, w):
        return jnp.tanh(x @ (w / jnp.linalg.norm(w))), None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def used_in_remat(params, x):
    """The same in a remat of the layer's own, which is given the opened weight: one operation."""

    def layer(x, w):
        again = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T)
        return again(x, w), None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def scanned_twice(params, x):
    """The same stack under two scans, as in a model whose layers are shared."""
    return scanned(params, x) + scanned(params, x + 1.0)


def scanned_again_and_again(params, x):
    """A scan over the stack within another loop."""

    def step(x, _):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0], None

    return jnp.mean(jax.lax.scan(step, x, None, length=200)[0] ** 2)


def looped_inside(params, x):
    """A loop within the layer that reads its weight in each round: it is opened before."""

    def layer(x, w):
        def step(x, _):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(step, x, None, length=200)[0], None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


LOSSES = [scanned, read_twice, used_twice, normalised, used_in_remat]
LOSSES += [scanned_twice, scanned_again_and_again, looped_inside]


def stacks_in_bf16(zero, loss, params, batch):
    """How often the traced step speaks of a stack of sums over devices in bf16."""
    fn = zero.value_and_grad(loss)
    return str(fn.trace(params, batch).jaxpr).count(f"bf16[{L},{D // zero.shards},{D}]")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients_are_those_without_slots(loss, stage, monkeypatch):
    precision = zero_jax.Precision("fp32", reduce="bf16")
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage, precision=precision)
    params = zero.init(lambda: {"w": stack(D, D)})
    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    traced = grads.GlobalLoss(zero.settings, loss).read(params, batch, ())
    with_slots = traced.leaves[0].waits_in is not None
    value, found = zero.value_and_grad(loss)(params, batch)
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    other, wanted = zero.value_and_grad(loss)(params, batch)
    assert with_slots == (loss in (scanned, used_in_remat, looped_inside))
    assert value == other
    np.testing.assert_array_equal(found["w"], wanted["w"])
    assert found["w"].dtype == jnp.float32


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(D)(x)), None


@pytest.mark.parametrize("own_remat", [False, True])
@pytest.mark.parametrize("remat", ["none", "block", "dots"])
def test_linen_stacks_have_slots(own_remat, remat, monkeypatch):
    layer = nn.remat(Layer, prevent_cse=False) if own_remat else Layer
    model = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()
    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    precision = zero_jax.Precision("fp32", reduce="bf16")
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3, precision=precision, remat=remat)
    params = zero.init(lambda key: model.init(key, batch, None), jax.random.key(0))

    def loss(params, x):
        return jnp.mean(model.apply(params, x, None)[0] ** 2)

    assert stacks_in_bf16(zero, loss, params, batch)
    _, found = zero.value_and_grad(loss)(params, batch)
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    _, wanted = zero.value_and_grad(loss)(params, batch)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"frozen": "mlp/up"}])
def test_a_gpt_trains_the_same_with_and_without(settings, monkeypatch):
    config = gpt.preset("nano", seq=16)
    mesh = zero_jax.make_mesh(replica=2)
    precision = zero_jax.Precision("bf16", reduce="bf16")
    zero = zero_jax.Zero(mesh, 3, precision=precision, remat="block", **settings)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    tokens = jax.random.randint(jax.random.key(2), (32, 17), 0, config.vocab)

    def loss(params, tokens):
        return zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, params), tokens))

    def trained():
        params = zero.init(lambda: nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
        tx = zero.optimizer(optax.adamw(1e-3))
        state, step = tx.init(params), zero.train_step(loss, tx)
        for _ in range(2):
            params, state, metrics = step(params, state, tokens)
        return jax.tree.leaves(params), float(metrics.loss)

    found, value = trained()
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    wanted, other = trained()
    assert value == other
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)
