"""Python scalars beside a parameter: carries, arguments and results that JAX keeps as a `bool`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zero_jax

D = 4
X = np.random.default_rng(0).standard_normal((8, D)).astype(np.float32)


def make():
    return {"w": jax.random.normal(jax.random.key(0), (D, D)), "layers": jnp.ones((2, D, D)) / D}


def layer(w, y, done):
    return jnp.where(done, y, jnp.tanh(y @ w))


@jax.custom_vjp
def own(w, y, done):
    return layer(w, y, done)


own.defvjp(
    lambda w, y, done: (own(w, y, done), (w, y)),
    lambda kept, c: (kept[1].T @ c, c @ kept[0].T, None),
)


@jax.custom_jvp
def own_forward(w, y, done):
    return layer(w, y, done)


own_forward.defjvp(lambda primals, tangents: (own_forward(*primals), tangents[1] @ primals[0]))


def scanned(p, x):
    """Beside a number of each kind, which JAX wraps, and one that NumPy has wrapped."""
    start = (x, False, 1, 2.0, 1j, np.bool_(True))
    step = lambda c, _: ((layer(p["w"], *c[:2]), *c[1:]), None)  # noqa: E731
    return lax.scan(step, start, None, length=2)[0][0]


def scanned_layers(p, x):
    """Each layer takes a `bool`, and returns one for the next and one for the stack."""
    step = jax.checkpoint(lambda c, w: ((layer(w, *c), False), True))
    return lax.scan(step, (x, False), p["layers"])[0][0]


def looped(p, x):
    return lax.fori_loop(0, 2, lambda _, c: (layer(p["w"], *c), c[1]), (x, False))[0]


def branched(p, x):
    return lax.cond(jnp.sum(p["w"]) > 1e9, lambda w, y, done: y, layer, p["w"], x, False)


def returned(p, x):
    run = jax.checkpoint(
        lambda w, y: (jnp.tanh(y @ w), False), policy=jax.checkpoint_policies.dots_saveable
    )
    return layer(p["w"], *run(p["w"], x))


FORMS = {
    "scan": scanned,
    "layers": scanned_layers,
    "fori_loop": looped,
    "cond": branched,
    "custom_vjp": lambda p, x: own(p["w"], x, False),
    "custom_jvp": lambda p, x: own_forward(p["w"], x, False),
    "checkpoint": lambda p, x: jax.checkpoint(layer)(p["w"], x, False),
    "result": returned,
}
CASES = [(name, 3, "none") for name in FORMS] + [("checkpoint", 0, "none"), ("layers", 3, "block")]


@pytest.mark.parametrize(("name", "stage", "remat"), CASES)
def test_a_bool_beside_a_parameter_changes_nothing(name, stage, remat):
    def loss(p, x):
        return jnp.mean(FORMS[name](p, x) ** 2)

    mesh = zero_jax.make_mesh(devices=jax.devices()[:4])
    zero = zero_jax.Zero(mesh, stage=stage, remat=remat)
    value, grads = zero.value_and_grad(loss)(zero.init(make), X)
    expected, gradients = jax.value_and_grad(loss)(make(), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found, gradient in zip(*map(jax.tree.leaves, (zero.full(grads), gradients)), strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)
