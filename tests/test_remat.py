"""What each remat policy keeps, where, and that no policy changes a value.

fp32 tolerance of gradients: 64 ulps of a leaf's largest element after three steps of SGD. The
recomputed forward pass runs the same operations in the same order, but XLA fuses them differently.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from problems import Problem, gpt_problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax import hlo, layers, policies, traced

TX = optax.sgd(1e-1)
ULPS = 64
WIDTH, ROWS, DEPTH = 16, 24, 5
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
POLICIES = ["none", "dots", "block", "block_sqrt", "names:h"]
HOST = ["block@host", "block_sqrt@host", "names@host:h@host"]


class Block(nn.Module):
    """A pre-norm layer, whose input is not what its first parameter is used with."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.tanh(checkpoint_name(h, "h")))


class Unrolled(nn.Module):
    depth: int = DEPTH

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = Block()(x)
        return nn.Dense(3)(nn.LayerNorm()(x))


def linen_problem():
    model = Unrolled()
    return Problem(
        lambda: model.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        X,
    )


def plain_problem():
    """A list of layers, opened all at once before the first is used."""

    def make():
        keys = jax.random.split(jax.random.key(0), DEPTH)
        return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.ones(WIDTH)} for k in keys]

    def loss(params, x):
        for p in zero_jax.gather(params):
            x = x + jnp.tanh(checkpoint_name(x @ p["w"] + p["b"], "h"))
        return jnp.mean(x**2)

    return Problem(make, loss, X)


def scanned_problem():
    """Six scanned layers, each with a key of its own, and a count in the carry."""

    def make():
        w = jax.random.normal(jax.random.key(0), (6, WIDTH, WIDTH)) / 4
        return {"w": w, "b": jnp.ones((6, WIDTH))}

    def loss(params, x):
        def layer(carry, given):
            (x, count), (p, key) = carry, given
            p = zero_jax.gather(p)
            h = checkpoint_name(x @ p["w"] + p["b"], "h")
            noise = jax.random.normal(key, (WIDTH,))
            return (x + jnp.tanh(h + 0.1 * noise), count + 1), jnp.mean(x**2)

        keys = jax.random.split(jax.random.key(3), 6)
        (x, count), sizes = jax.lax.scan(layer, (x, 0), (params, keys))
        return jnp.mean(x**2) / count + 1e-3 * jnp.mean(sizes)

    return Problem(make, loss, X)


PROBLEMS = {
    "linen": linen_problem,
    "plain": plain_problem,
    "scanned": scanned_problem,
    "gpt": gpt_problem,
}


@functools.cache
def problem(name):
    return PROBLEMS[name]()


@functools.cache
def plain(name):
    return train_plain(problem(name), TX, 3)


def assert_same(name, stage, remat):
    losses, params, _ = train_zero(problem(name), TX, 3, 4, stage=stage, remat=remat)
    want = plain(name)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS
    assert want[0][-1] < want[0][0]


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_policy_changes_a_value(name, stage, remat):
    assert_same(name, stage, remat)


@pytest.mark.parametrize("remat", HOST)
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_place_changes_a_value(name, remat):
    assert_same(name, 3, remat)


@pytest.mark.parametrize("remat", ["block_sqrt", "block@host"])
@pytest.mark.parametrize("stage", [2, 3])
def test_no_policy_changes_a_gpt(stage, remat):
    assert_same("gpt", stage, remat)
