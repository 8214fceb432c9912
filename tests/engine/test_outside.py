"""Derivatives that the caller takes of a loss, or of its gradients: by batch, extras, any leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero_jax

SLOW = pytest.mark.slow
N, ROWS, D = 4, 16, 8
X = jax.random.normal(jax.random.key(1), (ROWS, D))
IDS = 2 * jnp.arange(ROWS)


def make(layers=2):
    w, v = jax.random.normal(jax.random.key(0), (2, layers, D, D)) / 3
    # So many rows that a device is sent those it reads.
    table = jax.random.normal(jax.random.key(2), (5 * D, D))
    bias = jnp.linspace(-1.0, 1.0, layers * D).reshape(layers, D)
    return {"w": w, "bias": bias, "table": table, "frozen": jnp.eye(D) + v[1]}


def layer(x, w, bias):
    return jnp.tanh(x @ w + bias)


def scanned(params, x):
    return lax.scan(lambda x, own: (layer(x, *own), None), x, (params["w"], params["bias"]))[0]


def unrolled(params, x, layer=layer):
    for own in zip(params["w"], params["bias"], strict=True):
        x = layer(x, *own)
    return x


def checkpointed(params, x):
    policy = jax.checkpoint_policies.dots_saveable
    return unrolled(params, x, jax.checkpoint(layer, policy=policy))


def own_gradient(params, x):
    @jax.custom_vjp
    def turned(x, w):
        return jnp.sin(x @ w)

    def backward(kept, ct):
        x, w = kept
        ct = ct * jnp.cos(x @ w)
        return ct @ w.T, x.T @ ct

    turned.defvjp(lambda x, w: (turned(x, w), (x, w)), backward)
    return unrolled(params, x, lambda x, w, bias: turned(x, w) + bias)


def loss_of(layers, params, batch, scale):
    x, ids = batch
    y = layers(params, x + params["table"][ids]) @ params["frozen"]
    errors = jnp.sum((y * scale["temperature"] - 1.0) ** 2, axis=1)
    weights = jax.nn.sigmoid(scale["weight"] * x[:, 0])
    return errors, weights


def mean(layers, params, batch, scale):
    return jnp.mean(loss_of(layers, params, batch, scale)[0])


def weighted(layers, params, batch, scale):
    errors, weights = loss_of(layers, params, batch, scale)
    return zero_jax.Weighted(jnp.sum(errors * weights), jnp.sum(weights))


def number(loss):
    return loss.sum / loss.weight if isinstance(loss, zero_jax.Weighted) else loss


SCALE = {"temperature": jnp.float32(0.7), "weight": jnp.float32(0.4)}


def of_loss(loss_and_grads, params, x, scale):
    return loss_and_grads(params, (x, IDS), scale)[0]


def of_gradients(loss_and_grads, params, x, scale):
    loss, grads = loss_and_grads(params, (x, IDS), scale)
    return loss + sum(jnp.sum(jnp.sin(g) ** 2) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "layers, remat, stage, k",
    [
        (scanned, "block", 3, 1),
        (unrolled, "block", 3, 1),
        pytest.param(checkpointed, "none", 3, 1, marks=SLOW),
        (own_gradient, "none", 3, 1),
        pytest.param(scanned, "none", 0, 2, marks=SLOW),
        (unrolled, "block", 1, 2),
        pytest.param(scanned, "dots", 3, 2, marks=SLOW),
        pytest.param(unrolled, "dots", 3, 1, marks=SLOW),
        pytest.param(scanned, "block_sqrt", 3, 1, marks=SLOW),
        pytest.param(checkpointed, "block", 2, 1, marks=SLOW),
        pytest.param(unrolled, "none", 2, 2, marks=SLOW),
        pytest.param(scanned, "block", 1, 1, marks=SLOW),
    ],
)
@pytest.mark.parametrize("form", [mean, weighted])
def test_derivatives_by_everything(form, layers, remat, stage, k):
    loss = functools.partial(form, layers)
    mesh = zero_jax.make_mesh(N, devices=jax.devices()[:N])
    zero = zero_jax.Zero(mesh, stage, remat=remat, micro_batches=k, frozen="frozen")
    params = make(4 if remat == "block_sqrt" else 2)
    own = zero.shard(params)

    def alone(params, batch, scale):
        held = {"frozen": params["frozen"]}
        free = {name: leaf for name, leaf in params.items() if name != "frozen"}
        return jax.value_and_grad(lambda p: number(loss({**p, **held}, batch, scale)))(free)

    for of, ours in (
        (of_loss, zero.evaluate(loss)),
        (of_loss, zero.value_and_grad(loss)),
        (of_gradients, zero.value_and_grad(loss)),
    ):
        wanted = jax.grad(functools.partial(of, alone), (0, 1, 2))(params, X, SCALE)
        got = jax.grad(functools.partial(of, ours), (0, 1, 2))(own, X, SCALE)
        got = zero.full(got[0]), *got[1:]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), got, wanted
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_loss_closes_over_and_keys(stage):
    """A captured array under trace has a derivative; keys and counts beside it have none."""
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), stage)
    own, key = zero.shard(make()), jax.random.key(3)

    def ours(scale):
        def loss(params, batch, key, count):
            noise = jax.random.uniform(key, ()) * 0 + count
            return mean(scanned, params, batch, scale) + noise

        return zero.value_and_grad(loss)(own, (X, IDS), key, 1)[0]

    wanted = jax.grad(lambda scale: mean(scanned, make(), (X, IDS), scale))(SCALE)
    for got in (jax.grad(ours)(SCALE), jax.jit(jax.grad(ours))(SCALE)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted
        )


@pytest.mark.parametrize("of", [lambda out: out[0], lambda out: out[1]["squares"]])
@pytest.mark.parametrize("stage", [0, 3])
def test_aux_and_its_metrics(stage, of):
    """An aux has derivatives; one that are infinite does not reach those of the loss."""
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), stage)

    def loss(params, batch, scale):
        x, _ = batch

        def one(carry, own):
            x, seen = carry
            x = layer(x * scale, *own)
            return (x, seen + jnp.sqrt(jnp.sum((x - x) ** 2))), None

        carry = lax.scan(one, (x, 0.0), (params["w"], params["bias"]))[0]
        return jnp.mean(carry[0]), {"seen": carry[1], "squares": jnp.mean(carry[0] ** 2)}

    ours = zero.value_and_grad(loss, has_aux=True)
    own = zero.shard(make())
    wanted = jax.grad(lambda x, a: of(loss(make(), (x, IDS), a)), (0, 1))(X, 1.1)
    got = jax.grad(lambda x, a: of(ours(own, (x, IDS), a)[0]), (0, 1))(X, 1.1)
    for a, b in zip(got, wanted, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=SLOW), 3])
def test_what_is_sent_as_integers_has_derivatives(stage):
    """Rounding has none: they are those of what is rounded, and no zeros."""
    precision = zero_jax.Precision(gather="int8", scatter="int8")
    mesh = zero_jax.make_mesh(N, devices=jax.devices()[:N])
    zero = zero_jax.Zero(mesh, stage, precision=precision)
    wide = {"w": jax.random.normal(jax.random.key(0), (64, 64)) / 8}
    x = jax.random.normal(jax.random.key(1), (ROWS, 64))

    def loss(params, x, scale):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2) * scale

    def of(loss_and_grads, params, x, scale):
        value, grads = loss_and_grads(params, x, scale)
        return value + jnp.sum(grads["w"] ** 2)

    wanted = jax.grad(functools.partial(of, jax.value_and_grad(loss)), (0, 1, 2))(wide, x, 1.1)
    ours = functools.partial(of, zero.value_and_grad(loss))
    got = jax.grad(ours, (0, 1, 2))(zero.shard(wide), x, 1.1)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)  # int8 is off by up to 1/255


def test_through_a_step():
    """Returns the parameters after a step as a function of an extra argument."""
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), 3)
    tx = zero.optimizer(optax.sgd(0.1))
    step = zero.train_step(functools.partial(mean, scanned), tx).function
    own = zero.shard(make())

    def after(scale):
        return jnp.sum(step(own, tx.init(own), (X, IDS), scale)[0]["w"] ** 2)

    def wanted(scale):
        grads = jax.grad(lambda p: mean(scanned, p, (X, IDS), scale))(make())
        return jnp.sum((make()["w"] - 0.1 * grads["w"]) ** 2)

    got, want = jax.jit(jax.grad(after))(SCALE), jax.grad(wanted)(SCALE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
