"""Values that no trained parameter changes, or that no loss reads, have no derivative in layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from problems import zero_on

from zero_jax.tracing.jaxpr import products
from zero_jax.tracing.passes import without_dead_derivatives
from zero_jax.tracing.sharded_dims import sharded_dims

pytestmark = pytest.mark.filterwarnings("error")  # also JAX's about jaxprs without debug info
KNOWN = jax.checkpoint_policies
N, ROWS, D, LAYERS = 3, 6, 8, 4
X = jax.random.normal(jax.random.key(1), (ROWS, D))


def make():
    w, f = jax.random.normal(jax.random.key(0), (2, LAYERS, D, D)) / 3
    return {"w": w, "frozen": f}


def metric(x, seen, own):
    """Each layer has a metric, which the loss does not read: zero, with an infinite derivative."""
    x = jnp.tanh(x @ own["w"] + x @ own["frozen"])
    return x, seen + jnp.sqrt(jnp.sum((x - x) ** 2, -1, keepdims=True))


def data(x, beside, own):
    """Data pass through all layers beside the activations; a while loop reads them."""
    step = lambda state: (state[0] + 1, jnp.sin(state[1] @ own["frozen"]))  # noqa: E731
    turned = lax.while_loop(lambda state: state[0] < 2, step, (0, beside))[1]
    return jnp.tanh(x @ own["w"]) + turned, beside / 2


def scanned(layer, params, x, beside):
    return lax.scan(lambda c, own: (layer(*c, own), None), (x, beside), params)[0]


def unrolled(layer, params, x, beside):
    for i in range(LAYERS):
        x, beside = layer(x, beside, {name: leaf[i] for name, leaf in params.items()})
    return x, beside


USUAL = [(metric, scanned, "block", 3), (metric, unrolled, KNOWN.dots_saveable, 3),
         (data, scanned, KNOWN.everything_saveable, 1), (data, unrolled, "dots", 3),
         (jax.checkpoint(data), unrolled, "block", 3)]  # fmt: skip


@pytest.mark.parametrize(("form", "loop", "remat", "stage"), USUAL)
def test_gradients_are_those_of_one_device(form, loop, remat, stage):
    def loss(params, x):
        x, beside = loop(form, params, x, 2 * x if form is not metric else 0 * x[:, :1])
        return jnp.mean(x) + lax.stop_gradient(jnp.mean(beside)), beside

    zero = zero_on(N, stage, remat=remat, frozen="frozen")
    (value, _), grads = zero.value_and_grad(loss, has_aux=True)(zero.init(make), X)
    alone = lambda w: loss({**make(), "w": w}, X)[0]  # noqa: E731
    wanted, gradient = jax.value_and_grad(alone)(make()["w"])
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(zero.unshard(grads)["w"], gradient, rtol=1e-4, atol=1e-6)


def test_trained_weights_keep_their_derivative():
    """A scan over weights: only the data, whose derivative is not wanted, loses its own."""
    loss = lambda w, x: lax.scan(lambda x, v: (jnp.tanh(x @ v), None), x, w)[0].sum()  # noqa: E731
    closed = jax.make_jaxpr(loss)(make()["w"], X)
    assert str(without_dead_derivatives(closed, [True, False], [True])).count("stop_gradient") == 1
    closed = jax.make_jaxpr(lambda w: loss(w, X))(make()["w"])
    assert str(without_dead_derivatives(closed, [True], [True])).count("stop_gradient") == 1


def test_products_of_convolutions_loops_and_branches_are_counted():
    """Each output has a product with every element of its kernel; the longest branch counts."""

    def layer(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, numbers), None

    images, kernels = jnp.zeros((2, 8, 8, 3)), jnp.zeros((4, 3, 3, 3, 3))
    jaxpr = jax.make_jaxpr(lambda x, w: lax.scan(layer, x, w)[0] + 1)(images, kernels).jaxpr
    assert products(jaxpr) == [4 * images.size * 3 * 3 * 3, 0]
    branch = lambda x, which: lax.cond(which, lambda x: x @ x @ x, lambda x: x @ x, x)  # noqa: E731
    jaxpr = jax.make_jaxpr(branch)(jnp.zeros((4, 4)), True).jaxpr
    assert max(products(jaxpr)) == 2 * 4**3


def test_values_that_pass_a_barrier_stay_split_along_their_own_dims():
    """Each as it was, although another has a dim of the same size."""
    barrier = jax.make_jaxpr(lambda *x: jax.lax.optimization_barrier(x))
    shapes = [jnp.ones(shape) for shape in ((4, 4), (4, 8), (4,))]
    for dims in ([0, 1, None], [None, None, 0]):
        assert sharded_dims(barrier(*shapes).jaxpr.eqns[0], dims) == dims
