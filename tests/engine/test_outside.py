"""Derivatives of a loss and of its gradients that the caller takes, by every argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from test_zero import zero_on

import zero_jax

SLOW = pytest.mark.slow
ROWS, D = 16, 8
X = jax.random.normal(jax.random.key(1), (ROWS, D))
IDS = 2 * jnp.arange(ROWS)
SCALE = {"temperature": jnp.float32(0.7), "weight": jnp.float32(0.4)}
# The table has so many rows that a device is sent those it reads.
SHAPES = {"scanned": (2, D, D), "unrolled": (2, D, D), "table": (5 * D, D), "bias": (2, D)}
KEYS = jax.random.split(jax.random.key(0), len(SHAPES))
START = {n: jax.random.normal(k, SHAPES[n]) / 3 for n, k in zip(SHAPES, KEYS, strict=True)}
START["frozen"] = jnp.eye(D) + START["scanned"][1]


@jax.custom_vjp
def turned(x, w):
    return jnp.sin(x @ w)


def backward(kept, ct):
    x, w = kept
    ct = ct * jnp.cos(x @ w)
    return ct @ w.T, x.T @ ct


turned.defvjp(lambda x, w: (turned(x, w), (x, w)), backward)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def checkpointed(x, w, bias):
    return jnp.tanh(x @ w + bias)


def errors(params, batch, scale):
    """Layers in a scan, layers with gradients of their own, and layers with a policy."""
    x, ids = batch
    x = x + params["table"][ids]
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["scanned"])[0]
    for w, bias in zip(params["unrolled"], params["bias"], strict=True):
        x = turned(x, w) + bias
    for w, bias in zip(params["scanned"], params["bias"], strict=True):
        x = checkpointed(x, w, bias)
    return jnp.sum((x @ params["frozen"] * scale["temperature"] - 1.0) ** 2, axis=1)


def mean(params, batch, scale):
    return jnp.mean(errors(params, batch, scale))


def weighted(params, batch, scale):
    weights = jax.nn.sigmoid(scale["weight"] * batch[0][:, 0])
    return zero_jax.Weighted(jnp.sum(errors(params, batch, scale) * weights), jnp.sum(weights))


def near(found, wanted, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-6


def of_loss(loss_and_grads, params, x, scale):
    return loss_and_grads(params, (x, IDS), scale)[0]


def of_gradients(loss_and_grads, params, x, scale):
    loss, grads = loss_and_grads(params, (x, IDS), scale)
    return loss + sum(jnp.sum(jnp.sin(g) ** 2) for g in jax.tree.leaves(grads))


def derivatives(cases, params):
    """By parameters, batch and extra argument, in one program."""
    fns = [jax.grad(functools.partial(of, fn), (0, 1, 2)) for of, fn in cases]
    return jax.jit(lambda *args: [fn(*args) for fn in fns])(params, X, SCALE)


# Rounding to int8 has no derivatives: they are those of the values before it.
INT8 = zero_jax.Precision(gather="int8", scatter="int8")


@pytest.mark.parametrize(
    ("loss", "remat", "stage", "settings"),
    [
        (weighted, "block", 3, {}),
        (mean, "none", 1, {"micro_batches": 2}),
        (mean, "none", 3, {"precision": INT8}),
        pytest.param(mean, "dots", 3, {"micro_batches": 2}, marks=SLOW),
        pytest.param(weighted, "none", 0, {"micro_batches": 2}, marks=SLOW),
        pytest.param(weighted, "dots", 2, {"precision": INT8}, marks=SLOW),
    ],
)
def test_derivatives_by_everything(loss, remat, stage, settings):
    zero = zero_on(stage=stage, remat=remat, frozen="frozen", **settings)

    def alone(params, batch, scale):
        def objective(trained):
            out = loss({**params, **trained}, batch, scale)
            return out.sum / out.weight if loss is weighted else out

        return jax.value_and_grad(objective)({n: x for n, x in params.items() if n != "frozen"})

    grad_fn = zero.value_and_grad(loss)
    ours = [(of_loss, zero.evaluate(loss)), (of_loss, grad_fn), (of_gradients, grad_fn)]
    wanted = derivatives([(of_loss, alone), (of_gradients, alone)], START)
    pairs = zip(derivatives(ours, zero.shard(START)), (wanted[0], *wanted), strict=True)
    for found, want in pairs:
        found = (zero.full(found[0]), *found[1:])
        near(found, want, 0.1 if "precision" in settings else 1e-3)


def test_captured_arrays_and_steps():
    """A captured array under trace has a derivative; keys and counts beside it have none."""
    zero, tx = zero_on(), optax.sgd(0.1)
    params, key = zero.shard(START), jax.random.key(3)

    def ours(scale):
        def loss(params, batch, key, count):
            return mean(params, batch, scale) + jax.random.uniform(key, ()) * 0 + count

        return zero.value_and_grad(loss)(params, (X, IDS), key, 1)[0]

    def stepped(scale):
        own = zero.optimizer(tx)
        step = zero.train_step(mean, own).function
        return jnp.sum(step(params, own.init(params), (X, IDS), scale)[0]["unrolled"] ** 2)

    def stepped_alone(scale):
        grads = jax.grad(mean)(START, (X, IDS), scale)
        return jnp.sum((START["unrolled"] - 0.1 * grads["unrolled"]) ** 2)

    def both(*fns):
        return jax.jit(lambda scale: [jax.grad(fn)(scale) for fn in fns])(SCALE)

    wanted = both(lambda scale: mean(START, (X, IDS), scale), stepped_alone)
    near(both(ours, stepped), wanted)
    near(jax.grad(ours)(SCALE), wanted[0])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 3])
def test_an_infinite_derivative_of_a_metric_stays_out_of_the_loss(stage):
    def loss(params, batch, scale):
        def one(carry, w):
            x, seen = carry
            x = jnp.tanh(x * scale @ w)
            return (x, seen + jnp.sqrt(jnp.sum((x - x) ** 2))), None

        x, seen = lax.scan(one, (batch, 0.0), params["scanned"])[0]
        return jnp.mean(x), {"seen": seen, "squares": jnp.mean(x**2)}

    def both(of, params):
        outs = [lambda x, a, at=at: jax.tree.leaves(of(params, x, a))[at] for at in (0, 2)]
        return jax.jit(lambda *args: [jax.grad(out, (0, 1))(*args) for out in outs])(X, 1.1)

    ours = zero_on(stage=stage).value_and_grad(loss, has_aux=True)
    near(both(lambda *args: ours(*args)[0], zero_on(stage=stage).shard(START)), both(loss, START))
