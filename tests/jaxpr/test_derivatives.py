"""Values that no trained parameter changes, or that no loss reads, have no derivative in layers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero_jax
from zero_jax.jaxpr import derivatives, equations

KNOWN = jax.checkpoint_policies
N, ROWS, D, LAYERS = 3, 6, 8, 4
X = jax.random.normal(jax.random.key(1), (ROWS, D))


def make():
    w, f = jax.random.normal(jax.random.key(0), (2, LAYERS, D, D)) / 3
    return {"w": w, "frozen": f}


def distance(x):
    """Zero, with a derivative that is infinite."""
    return jnp.sqrt(jnp.sum((x - x) ** 2, -1))


def turned(f, x):
    body = lambda state: (state[0] + 1, jnp.sin(state[1] @ f))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]


def scanned(layer, params, x, beside):
    return lax.scan(lambda c, own: (layer(*c, own), None), (x, beside), params)[0]


def unrolled(layer, params, x, beside):
    for i in range(LAYERS):
        x, beside = layer(x, beside, {name: leaf[i] for name, leaf in params.items()})
    return x, beside


def checkpointed(layer, params, x, beside):
    return unrolled(jax.checkpoint(layer), params, x, beside)


def metric(loop):
    """Each layer has a metric, which the loss does not read."""

    def layer(x, seen, own):
        x = jnp.tanh(x @ own["w"] + x @ own["frozen"])
        return x, seen + distance(x)

    def loss(params, x):
        x, seen = loop(layer, params, x, jnp.zeros(x.shape[0]))
        return jnp.mean(x), seen

    return loss


def data(loop):
    """Data pass through all layers beside the activations; a while loop reads them."""

    def layer(x, beside, own):
        return jnp.tanh(x @ own["w"]) + turned(own["frozen"], beside), beside / 2

    return lambda params, x: (jnp.mean(loop(layer, params, x, 2 * x)[0]), None)


# fmt: off
USUAL = [
    (metric, scanned, "block", 3), (metric, unrolled, KNOWN.dots_saveable, 3),
    (data, scanned, KNOWN.everything_saveable, 1), (data, unrolled, "dots", 3),
    (data, checkpointed, "block", 3),
]
MORE = [
    (metric, scanned, "none", 1), (metric, scanned, "dots", 3), (metric, unrolled, "block_sqrt", 3),
    (metric, checkpointed, "dots", 1), (data, scanned, "block_sqrt", 3),
    (data, unrolled, "none", 3), (data, checkpointed, KNOWN.dots_saveable, 1),
]
# fmt: on


@pytest.mark.parametrize(
    ("form", "loop", "remat", "stage"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_gradients_are_those_of_one_device(form, loop, remat, stage):
    loss = form(loop)
    mesh = zero_jax.make_mesh(N, devices=jax.devices()[:N])
    zero = zero_jax.Zero(mesh, stage, remat=remat, frozen="frozen")
    (value, _), grads = zero.value_and_grad(loss, has_aux=True)(zero.init(make), X)

    def alone(w):
        return loss({**make(), "w": w}, X)[0]

    wanted, gradient = jax.value_and_grad(alone)(make()["w"])
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(zero.full(grads)["w"], gradient, rtol=1e-4, atol=1e-6)


def test_trained_weights_keep_their_derivative():
    """A scan over weights: only the data, whose derivative is not wanted, loses its own."""

    def loss(w, x):
        return lax.scan(lambda x, own: (jnp.tanh(x @ own), None), x, w)[0].sum()

    closed = jax.make_jaxpr(loss)(make()["w"], X)
    settled = str(derivatives.settled(closed, [True, False], [True]))
    assert settled.count("stop_gradient") == 1
    weights_alone = jax.make_jaxpr(lambda w: loss(w, X))(make()["w"])
    again = derivatives.settled(weights_alone, [True], [True])
    assert str(again).count("stop_gradient") == 1


# Products, and jaxprs that are built without deprecated calls.


def test_products_of_a_convolution_in_a_loop_are_counted_in_each_iteration():
    """Each output has a product with every element of its kernel: k x k x input channels."""
    images, side, c, k, turns = 2, 8, 3, 3, 4

    def layer(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, numbers), None

    def f(x, kernels):
        return jax.lax.scan(layer, x, kernels)[0] + 1

    shapes = ((images, side, side, c), (turns, k, k, c, c))
    jaxpr = jax.make_jaxpr(f)(*map(jnp.zeros, shapes)).jaxpr
    outputs = images * side * side * c
    assert equations.products(jaxpr) == [turns * outputs * k * k * c, 0]


def test_products_of_a_branch_are_those_of_the_longest():
    def f(x, which):
        return jax.lax.cond(which, lambda x: x @ x @ x, lambda x: x @ x, x)

    jaxpr = jax.make_jaxpr(f)(jnp.zeros((4, 4)), True).jaxpr
    assert max(equations.products(jaxpr)) == 2 * 4**3


@pytest.mark.parametrize(
    ("remat", "states", "tx"),
    [("block", "8bit", optax.adamw(1e-3)), ("none", "fp32", optax.contrib.muon(1e-3))],
)
def test_no_jaxpr_is_built_that_jax_deprecates(remat, states, tx):
    """`python -W error` includes JAX's warning about a jaxpr that is built without debug info."""

    def loss(params, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] ** 2)

    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, remat=remat, states=states)
    params = zero.abstract(lambda: {"w": jnp.ones((2, 64, 64))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = zero.train_step(loss, tx)
        step.lower(params, step.transformation.init(params), jnp.ones((8, 64)))
