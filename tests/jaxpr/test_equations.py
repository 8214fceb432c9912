"""Matrix products of equations, and jaxprs that are built without deprecated calls."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.jaxpr import equations


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
