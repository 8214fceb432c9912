"""What each remat policy keeps, where, and that no policy changes a value.

fp32 tolerance of gradients: 64 ulps of a leaf's largest element after three steps of SGD. The
recomputed forward pass runs the same operations in the same order, but XLA fuses them differently.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from problems import Problem, gpt_problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax.plan import flat_trace

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
        for p in params:
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


@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_policy_changes_a_value(name, stage, remat):
    assert_same(name, stage, remat)


@pytest.mark.slow
@pytest.mark.parametrize("remat", HOST)
@pytest.mark.parametrize("name", ["linen", "plain", "scanned"])
def test_no_place_changes_a_value(name, remat):
    assert_same(name, 3, remat)


@pytest.mark.parametrize("remat", ["block_sqrt", "block@host"])
@pytest.mark.parametrize("stage", [2, 3])
def test_no_policy_changes_a_gpt(stage, remat):
    assert_same("gpt", stage, remat)


# What is kept.


def step_of(name, remat, stage=3, **mesh):
    """A traced step of four devices, and its count of parameters."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4, **mesh), stage, remat=remat)
    p = problem(name)
    params = zero.abstract(p.make)
    batch = jax.ShapeDtypeStruct(p.batch.shape, p.batch.dtype)
    args = (params, zero.optimizer(TX).init(params), batch)
    return zero.train_step(p.loss, TX).trace(*args)


def stacks(jaxpr):
    """Shapes of what forward loops over layers hand to the backward pass, with their places."""
    part = flat_trace.device_part(jaxpr)
    found = []
    for eqn in part.eqns:
        if eqn.primitive.name == "scan" and "transpose(" not in str(eqn.source_info.name_stack):
            # Of rank 3 or more: not the loss and the sizes that the loop returns.
            found += [v.aval for v in eqn.outvars if v.aval.ndim > 2]
    return found


SHARE = (6, ROWS // 4, WIDTH)  # what each of six layers keeps of a value, on one of four devices


@pytest.mark.parametrize(
    ("remat", "shapes"),
    [
        ("block", [SHARE]),
        ("names:h", [SHARE, SHARE]),
        ("dots", [SHARE, SHARE]),
        ("block_sqrt", [(3, *SHARE[1:])]),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_scanned_layers_keep_what_the_policy_says(remat, shapes, stage):
    assert [v.shape for v in stacks(step_of("scanned", remat, stage).jaxpr)] == shapes


@pytest.mark.parametrize(
    ("remat", "where"),
    [
        ("block@host", [True]),
        ("names:h@host", [False, True]),
        ("names@host:h", [True, False]),
        ("block_sqrt@host", [True]),
    ],
)
def test_kept_values_are_where_the_policy_says(remat, where):
    found = stacks(step_of("scanned", remat).jaxpr)
    assert [v.memory_space == jax.memory.Space.Host for v in found] == where


def test_a_product_that_the_backward_pass_does_not_read_is_not_kept():
    """The second product of an MLP is only added to its input."""

    def loss(params, x):
        def layer(x, w):
            up, down = w
            return x + jnp.tanh(x @ up) @ down, None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), remat="dots")
    params = zero.abstract(lambda: (jnp.zeros((6, WIDTH, 40)), jnp.zeros((6, 40, WIDTH))))
    args = (params, zero.optimizer(TX).init(params), jax.ShapeDtypeStruct(X.shape, X.dtype))
    found = stacks(zero.train_step(loss, TX).trace(*args).jaxpr)
    assert [v.shape for v in found] == [SHARE, (6, ROWS // 4, 40)]


# FLOPs, of compiled programs. Of unrolled layers: see test_prove_remat.py, since XLA's CPU compiler
# takes the barriers out and merges what it finds twice.


@functools.cache
def flops(remat, stage):
    """Of a step of `scanned_problem` on four devices."""
    zero = zero_jax.Zero(zero_jax.make_mesh(4, devices=jax.devices()[:4]), stage, remat=remat)
    p = problem("scanned")
    return zero.plan(p.loss, TX, zero.abstract(p.make), p.batch, compile=True).compiled.flops


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("remat", "forwards"), [("dots", 0), ("names:h", 0), ("block", 1), ("block_sqrt", 2)]
)
def test_layers_run_forward_as_often_as_the_policy_says(remat, forwards, stage):
    one = 6 * 2 * (ROWS // 4) * WIDTH * WIDTH
    assert flops("none", stage) == 3 * one
    assert flops(remat, stage) - flops("none", stage) == forwards * one


def test_no_policy_gathers_a_third_time_or_keeps_a_gathered_weight():
    """Words at stage 3: 2 gathers, but for block_sqrt 3, and 1 reduction. Biases (1 of 17 words)
    are not gathered again where what they are added to is kept."""
    p = problem("scanned")
    for policy, gathers in (("dots", 2), ("names:h", 2), ("block", 2), ("block_sqrt", 3)):
        zero = zero_jax.Zero(zero_jax.make_mesh(4, devices=jax.devices()[:4]), 3, remat=policy)
        plan = zero.plan(p.loss, TX, zero.abstract(p.make), p.batch, compile=True)
        words = {k: v / plan.num_params for k, v in plan.compiled.words.items()}
        assert words["all-gather"] == pytest.approx(gathers, abs=0.06), policy
        assert words["reduce-scatter"] == pytest.approx(1, abs=0.05), policy
