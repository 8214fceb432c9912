"""Models of other libraries, and of Flax, unchanged and without a word of zero_jax in them."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import Problem, train_plain, train_zero, ulps

# Not Adam: it makes steps of the rounding of a gradient that is truly zero, as of keys' biases.
TX = optax.sgd(1e-1)
WIDTH, ROWS = 8, 120
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def equinox_problem():
    def make():
        model = eqx.nn.MLP(WIDTH, 3, 16, 3, key=jax.random.key(0))
        return eqx.filter(model, eqx.is_array)

    static = eqx.filter(
        eqx.filter_eval_shape(eqx.nn.MLP, WIDTH, 3, 16, 3, key=jax.random.key(0)),
        lambda x: not isinstance(x, jax.ShapeDtypeStruct),
    )

    def loss(params, x):
        model = eqx.combine(params, static)
        return jnp.mean(jax.vmap(model)(x) ** 2)

    return Problem(make, loss, X)


def equinox_attention_problem():
    """Attention and norms, of rows of four."""
    rows = X.reshape(-1, 4, WIDTH)

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key)
            self.norm = eqx.nn.LayerNorm(WIDTH)

        def __call__(self, x):
            h = jax.vmap(self.norm)(x)
            return x + self.attention(h, h, h)

    def layers(key):
        return [Layer(k) for k in jax.random.split(key, 3)]

    static = eqx.filter(
        eqx.filter_eval_shape(layers, jax.random.key(0)),
        lambda x: not isinstance(x, jax.ShapeDtypeStruct),
    )

    def loss(params, x):
        for layer in eqx.combine(params, static):
            x = jax.vmap(layer)(x)
        return jnp.mean(x**2)

    batch = jnp.tile(rows, (4, 1, 1))
    return Problem(lambda: eqx.filter(layers(jax.random.key(0)), eqx.is_array), loss, batch)


def haiku_problem():
    def forward(x):
        for _ in range(3):
            x = x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))
        return hk.Linear(3)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    return Problem(
        lambda: model.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        X,
    )


def linen_problem():
    """Attention of rank 3, a norm of weights, a convolution."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x.reshape(-1, 4, WIDTH)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x)
            x = nn.tanh(nn.WeightNorm(nn.Dense(WIDTH))(x))
            return nn.Conv(3, (3,))(x)

    model = Model()
    return Problem(
        lambda: model.init(jax.random.key(0), X[:4]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        jnp.tile(X, (4, 1)),
    )


def mapped_problem():
    """`nn.map_variables`: parameters computed with before a module reads them."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            def doubled(variables):
                return jax.tree.map(lambda w: w + jnp.flip(w, 0), variables)

            dense = nn.map_variables(nn.Dense, "params", doubled, init=True)
            return dense(5)(nn.tanh(dense(WIDTH)(x)))

    model = Model()
    return Problem(
        lambda: model.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        X,
    )


def nnx_problem():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
            self.second = nnx.Linear(16, WIDTH, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            h = nnx.relu(self.first(x))
            tied = self.first.kernel.T @ self.first.kernel
            return self.second(h @ tied.T) * self.scale.sum() + self.first.kernel.size

    def model():
        return Model(nnx.Rngs(0))

    graphdef = nnx.graphdef(nnx.eval_shape(model))
    return Problem(
        lambda: nnx.state(model(), nnx.Param),
        lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2) * 1e-3,
        X,
    )


PROBLEMS = {
    "equinox": equinox_problem,
    "equinox attention": equinox_attention_problem,
    "haiku": haiku_problem,
    "linen": linen_problem,
    "map_variables": mapped_problem,
    "nnx": nnx_problem,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_models_train_as_on_one_device_at_every_stage_and_n(name):
    """To 1e-6: sums in another order. (Keys' biases have a true gradient of zero.)"""
    problem = PROBLEMS[name]()
    want = train_plain(problem, TX, 3)
    for n in (1, 2, 3, 4, 5, 8):
        for stage in (0, 1, 2, 3):
            losses, params, _ = train_zero(problem, TX, 3, n, stage=stage)
            assert ulps(jnp.array(losses), jnp.array(want[0])) < 256, (n, stage)
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want[1]), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=f"{n} {stage}")


@pytest.mark.parametrize("remat", ["block", "dots", jax.checkpoint_policies.everything_saveable])
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_policy_changes_them(name, remat):
    problem = PROBLEMS[name]()
    want = train_plain(problem, TX, 2)
    losses, _, _ = train_zero(problem, TX, 2, 4, stage=3, remat=remat)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < 256
