"""Unchanged models of Equinox, Haiku and linen train as on one device."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import Problem, train_plain, train_zero, ulps

# Not Adam: it makes steps of the rounding of a gradient that is truly zero, as of keys' biases.
TX = optax.sgd(1e-1)
WIDTH, ROWS, STEPS = 8, 120, 3
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
ROWS_OF_FOUR = jnp.tile(X, (4, 1)).reshape(ROWS, 4, WIDTH)


def equinox_layers():
    keys = jax.random.split(jax.random.key(0), 2)
    return [
        (
            eqx.nn.MultiheadAttention(2, WIDTH, key=key),
            eqx.nn.LayerNorm(WIDTH),
            eqx.nn.MLP(WIDTH, WIDTH, 12, 1, key=key),
        )
        for key in keys
    ]


def equinox_problem():
    static = eqx.filter(equinox_layers(), eqx.is_array, inverse=True)

    def loss(params, x):
        def one(x):
            for attention, norm, mlp in eqx.combine(params, static):
                h = jax.vmap(norm)(x)
                x = x + jax.vmap(mlp)(attention(h, h, h))
            return x

        return jnp.mean(jax.vmap(one)(x) ** 2)

    return Problem(lambda: eqx.filter(equinox_layers(), eqx.is_array), loss, ROWS_OF_FOUR)


def of_module(model, x):
    """Returns the problem of a linen model, or of a Haiku model without a key."""

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return Problem(lambda: model.init(jax.random.key(0), x[:1]), loss, x)


def haiku_forward(x):
    for _ in range(2):
        x = x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))
    return hk.Linear(3)(x)


class Linen(nn.Module):
    """Attention with named dims, a norm of weights, a convolution, computed parameters."""

    @nn.compact
    def __call__(self, x):
        def doubled(variables):
            return jax.tree.map(lambda w: w + jnp.flip(w, 0), variables)

        dense = nn.map_variables(nn.Dense, "params", doubled, init=True)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None, None))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, kernel_init=boxed)(x)
        x = nn.tanh(nn.WeightNorm(nn.Dense(WIDTH))(x))
        return dense(5)(nn.tanh(dense(WIDTH)(nn.Conv(3, (3,))(x))))


@functools.cache
def problem():
    """All of them in one loss, each with its own parameters, and their run on one device."""
    haiku = hk.without_apply_rng(hk.transform(haiku_forward))
    problems = [equinox_problem(), of_module(haiku, X), of_module(Linen(), ROWS_OF_FOUR)]

    def loss(params, batch):
        return sum(p.loss(*args) for p, *args in zip(problems, params, batch, strict=True))

    together = Problem(lambda: [p.make() for p in problems], loss, [p.batch for p in problems])
    return together, train_plain(together, TX, STEPS)


SAVE_ALL = jax.checkpoint_policies.everything_saveable
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [(4, 3, "block"), (3, 1, "dots"), SLOW(4, 3, SAVE_ALL), SLOW(1, 3, "none")]
CASES += [SLOW(2, 2, "dots"), SLOW(3, 3, "block"), SLOW(5, 3, "dots"), SLOW(8, 0, "none")]


@pytest.mark.parametrize(("n", "stage", "remat"), CASES)
def test_models_train_as_on_one_device(n, stage, remat):
    """To 1e-6: sums in another order. (Keys' biases have a true gradient of zero.)"""
    together, wanted = problem()
    losses, params, _ = train_zero(together, TX, STEPS, n, stage=stage, remat=remat)
    assert ulps(jnp.array(losses), jnp.array(wanted[0])) < 256
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    for (path, leaf), want in zip(found, jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-5, atol=1e-6, err_msg=str(path))
