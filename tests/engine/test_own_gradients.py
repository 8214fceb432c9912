"""Functions with gradients of their own, and operations without any: taken as JAX takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import zero_jax

N, D, LAYERS = 4, 4, 3
X = np.random.default_rng(0).standard_normal((2 * N, D)).astype(np.float32)
TABLE = np.linspace(0.5, 1.5, D, dtype=np.float32)
POLICY = jax.checkpoint_policies.dots_saveable


def make():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {
        f"l{i}": {"w": jax.random.normal(key, (D, D)) / 2, "b": jnp.full(D, 0.1 * i)}
        for i, key in enumerate(keys)
    }


def check(loss, stage, remat):
    mesh = zero_jax.make_mesh(N, devices=jax.devices()[:N])
    zero = zero_jax.Zero(mesh, stage, remat=remat)
    value, grads = zero.value_and_grad(loss)(zero.init(make), X)

    def whole(params):
        return jnp.mean(jax.vmap(lambda x: loss(params, x))(X.reshape(N, 2, D)))

    wanted, gradients = jax.value_and_grad(whole)(make())
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    for found, gradient in zip(*map(jax.tree.leaves, (zero.full(grads), gradients)), strict=True):
        assert np.isfinite(gradient).all()
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)
    return gradients


@jax.custom_vjp
def straight_through(x):
    return (x > 0).astype(x.dtype)


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, c: (c,))


@jax.custom_jvp
def rounded(x):
    return jnp.sign(lax.stop_gradient(x))


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


@jax.custom_vjp
def injected(x, w):
    """Does not look at w, and gives it a gradient, as scalers of an auxiliary loss do."""
    return x + 1


injected.defvjp(lambda x, w: (injected(x, w), w), lambda w, c: (c, jnp.ones_like(w) * jnp.mean(c)))


@jax.custom_vjp
def closing_over(x, w):
    return (x @ w) * TABLE


closing_over.defvjp(
    lambda x, w: (closing_over(x, w), (x, w)),
    lambda kept, c: ((c * TABLE) @ kept[1].T, kept[0].T @ (c * TABLE)),
)


def doubled_on_the_host(x):
    return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def solved(x, w, b):
    times = jnp.array([0.0, 0.5])
    return odeint(lambda y, t, w, b: jnp.tanh(y @ w + b), x, times, w, b)[-1]


LAYER = {
    "straight through": lambda x, w, b: x @ straight_through(w) / D + x @ w + b,
    "rounded": lambda x, w, b: jnp.tanh(x @ rounded(w)) + b,
    "straight through activations": lambda x, w, b: straight_through(x @ w + b) - 0.5,
    "injected": lambda x, w, b: injected(jnp.tanh(x @ w), b),
    "closing over": lambda x, w, b: jnp.tanh(closing_over(x, w) + b),
    "on the host": lambda x, w, b: jnp.tanh(x @ w + b + doubled_on_the_host(lax.stop_gradient(b))),
    "ode": solved,
}


def unrolled(layer):
    def loss(params, x):
        for own in params.values():
            x = layer(x, own["w"], own["b"])
        return jnp.mean(x**2)

    return loss


def alone(layer):
    """One that is in no layer."""
    return lambda params, x: jnp.mean(layer(x, params["l0"]["w"], params["l1"]["b"]) ** 2)


# Its steps are as long as the error of all rows of a device allows, of which a warning says so.
ODE = pytest.param(
    "ode",
    marks=[
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:the loss function gives rows of the batch a mean"),
    ],
)


@pytest.mark.parametrize(
    "remat",
    ["block", *(pytest.param(r, marks=pytest.mark.slow) for r in ("none", POLICY))],
    ids=["block", "none", "policy"],
)
@pytest.mark.parametrize("form", [unrolled, alone])
@pytest.mark.parametrize("name", [ODE if n == "ode" else n for n in LAYER])
def test_gradients_are_those_of_jax(name, form, remat):
    gradients = check(form(LAYER[name]), 3, remat)
    assert any(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", ["straight through", ODE])
def test_gradients_are_those_of_jax_where_copies_are_kept(name):
    check(unrolled(LAYER[name]), 1, "block")


@pytest.mark.parametrize(
    "remat", ["block", *(pytest.param(r, marks=pytest.mark.slow) for r in ("none", "block_sqrt"))]
)
def test_a_result_of_a_branch_that_nobody_reads_has_no_derivative(remat):
    """A metric whose derivative is infinite, beside an activation, from a loop's turn."""

    def loss(params, x):
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.values())

        def one(x, own):
            return x @ own["w"], jnp.sqrt(jnp.abs(x - x)).sum()

        def other(x, own):
            return x + own["b"], x.sum()

        def body(x, own):
            x, metric = lax.cond(x.mean() > 0, one, other, x, own)
            return jnp.tanh(x), metric

        return jnp.mean(lax.scan(body, x, stack)[0] ** 2)

    check(loss, 3, remat)


def test_a_weight_of_the_loss_that_rounds_parameters_has_a_gradient():
    zero = zero_jax.Zero(zero_jax.make_mesh(N, devices=jax.devices()[:N]), 3)

    def loss(params, x):
        return zero_jax.Weighted(jnp.sum(x), jnp.sum(straight_through(params["l0"]["w"])))

    with pytest.raises(ValueError, match="depends on the parameters"):
        zero.value_and_grad(loss)(zero.init(make), X)
