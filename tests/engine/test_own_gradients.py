"""`custom_vjp`, `custom_jvp`, Python scalars and operations without gradients, against JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_zero import zero_on

N, D, LAYERS = 4, 4, 3
X = np.random.default_rng(0).standard_normal((2 * N, D)).astype(np.float32)
TABLE = np.linspace(0.5, 1.5, D, dtype=np.float32)
POLICY = jax.checkpoint_policies.dots_saveable
SLOW = pytest.mark.slow


def make():
    w = jax.random.normal(jax.random.key(0), (LAYERS, D, D)) / 2
    return [{"w": w[i], "b": jnp.full(D, 0.1 * i)} for i in range(LAYERS)]


def with_vjp(fn, forward, backward):
    own = jax.custom_vjp(fn)
    own.defvjp(forward, backward)
    return own


def sign(x):
    return (x > 0).astype(x.dtype)


straight_through = with_vjp(sign, lambda x: (sign(x), None), lambda _, c: (c,))
# Ignores w and gives it a gradient, as scalers of an auxiliary loss do.
injected = with_vjp(
    lambda x, w: x + 1, lambda x, w: (x + 1, w), lambda w, c: (c, jnp.ones_like(w) * jnp.mean(c))
)
closing_over = with_vjp(
    lambda x, w: (x @ w) * TABLE,
    lambda x, w: ((x @ w) * TABLE, (x, w)),
    lambda kept, c: ((c * TABLE) @ kept[1].T, kept[0].T @ (c * TABLE)),
)


def gated(w, y, done):
    return jnp.where(done, y, jnp.tanh(y @ w))


gated_vjp = with_vjp(
    gated,
    lambda w, y, done: (gated(w, y, done), (w, y)),
    lambda kept, c: (kept[1].T @ c, c @ kept[0].T, None),
)
gated_jvp = jax.custom_jvp(gated)
gated_jvp.defjvp(lambda primals, tangents: (gated(*primals), tangents[1] @ primals[0]))


def on_the_host(x):
    return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def scanned(x, w, b):
    """A carry with a number of each kind, which JAX wraps, and one that NumPy has wrapped."""
    start = (x + b, False, 1, 2.0, 1j, np.bool_(True))
    return lax.scan(lambda c, _: ((gated(w, *c[:2]), *c[1:]), None), start, None, length=2)[0][0]


def scanned_layers(x, w, b):
    """Each layer takes a `bool`, and returns one for the next and one for the stack."""
    step = jax.checkpoint(lambda c, w: ((gated(w, *c), False), True))
    return lax.scan(step, (x + b, False), jnp.stack([w, w.T]))[0][0]


def returned(x, w, b):
    run = jax.checkpoint(lambda w, y: (jnp.tanh(y @ w), False), policy=POLICY)
    return gated(w, *run(w, x)) + b


def with_unused_metric(x, w, b):
    """The derivative of the metric is infinite; it comes from a branch in a loop."""

    def body(x, _):
        one = lambda x: (x @ w, jnp.sqrt(jnp.abs(x - x)).sum())  # noqa: E731
        x, metric = lax.cond(x.mean() > 0, one, lambda x: (x + b, x.sum()), x)
        return jnp.tanh(x), metric

    return lax.scan(body, x, None, length=2)[0]


# fmt: off
LAYER = {
    "straight through": lambda x, w, b: x @ straight_through(w) / D + x @ w + b,
    "straight through activations": lambda x, w, b: straight_through(x @ w + b) - 0.5,
    "injected": lambda x, w, b: injected(jnp.tanh(x @ w), b),
    "closing over": lambda x, w, b: jnp.tanh(closing_over(x, w) + b),
    "on the host": lambda x, w, b: jnp.tanh(x @ w + b + on_the_host(lax.stop_gradient(b))),
    "unused metric": with_unused_metric,
    "bool in scan": scanned,
    "bool in layers": scanned_layers,
    "bool in cond": lambda x, w, b: lax.cond(
        jnp.sum(w) > 1e9, lambda w, y, done: y, gated, w, x + b, False),
    "bool in custom_vjp": lambda x, w, b: gated_vjp(w, x + b, False),
    "bool in custom_jvp": lambda x, w, b: gated_jvp(w, x + b, False),
    "bool in checkpoint": lambda x, w, b: jax.checkpoint(gated)(w, x + b, False),
    "bool as a result": returned,
}
CASES = [
    (3, 3, "block"),
    (1, 0, "none"),
    (1, 3, "none"),
    pytest.param(3, 3, POLICY, marks=SLOW),
    pytest.param(3, 3, "block_sqrt", marks=SLOW),
]
# fmt: on


@pytest.mark.parametrize(("count", "stage", "remat"), CASES)
def test_gradients_are_those_of_jax(count, stage, remat):
    """The loss is a mean over devices of that of their two rows each."""

    def one(layer, params, x):
        for own in params:
            x = layer(x, own["w"], own["b"])
        return jnp.mean(x**2)

    def loss(params, x):
        return sum(one(layer, params[name], x) for name, layer in LAYER.items())

    def mean(params):
        return jnp.mean(jax.vmap(lambda x: loss(params, x))(X.reshape(N, 2, D)))

    zero, params = zero_on(N, stage=stage, remat=remat), {name: make()[-count:] for name in LAYER}
    value, grads = zero.value_and_grad(loss)(zero.shard(params), X)
    wanted, gradients = jax.jit(jax.value_and_grad(mean))(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    for name, found in zero.full(grads).items():
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(gradients[name]), strict=True)
        for leaf, gradient in pairs:
            assert np.isfinite(gradient).all()
            np.testing.assert_allclose(leaf, gradient, rtol=1e-4, atol=1e-6, err_msg=name)
        assert max(np.abs(g).max() for g in jax.tree.leaves(gradients[name])) > 1e-4, name
