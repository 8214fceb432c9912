"""Matrices that are first read after the layers ride through their loop: which, and with what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import Problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax.jaxpr import equations

LAYERS, WIDTH, WORDS, ROWS = 3, 12, 40, 24
TX = optax.sgd(0.1, momentum=0.9)


def stack(key, *shape):
    return 0.4 * jax.random.normal(jax.random.key(key), shape)


def make():
    return {
        "head": stack(0, WIDTH, WORDS),
        "in": stack(1, WIDTH, WIDTH),
        "layers": stack(2, LAYERS, WIDTH, WIDTH),
        "norm": jnp.ones(4 * WIDTH),
        "pair": stack(4, 2, WIDTH, WORDS),
    }


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def scanned(params, x, carry=layer):
    return jax.lax.scan(carry, x @ params["in"], params["layers"])[0]


def with_head(params, x):
    return jnp.mean((scanned(params, x) @ params["head"]) ** 2) * jnp.mean(params["norm"])


def tied(params, x):
    return jnp.mean((scanned(params, x @ params["head"] @ params["head"].T)) @ params["head"])


def cast_before(params, x):
    """What only re-arranges the head stands before the loop."""
    turned = params["head"].T
    return jnp.mean((scanned(params, x) @ turned.T) ** 2) + 0 * jnp.sum(params["norm"])


def two_loops(params, x):
    return with_head(params, jax.lax.scan(layer, x, params["layers"])[0])


def after_a_loss_in_chunks(params, x):
    x = scanned(params, x).reshape(2, -1, WIDTH)
    found, _ = jax.lax.scan(lambda s, x: (s + jnp.mean((x @ params["head"]) ** 2), None), 0.0, x)
    return found * jnp.mean(params["norm"])


def taken_apart(params, x):
    """A stack of two heads is sliced before the loop: its slices have shards of their own."""
    first, second = jnp.unstack(params["pair"])
    x = scanned(params, x)
    return jnp.mean((x @ first) ** 2) + jnp.mean(x @ second)


def after_a_penalty(params, x):
    """A loop over weights without a product, in which nothing can hide."""
    return jnp.sum(jax.lax.map(jnp.sum, params["layers"])) * 0 + with_head(params, x)


def problem(loss):
    return Problem(make, loss, stack(3, ROWS, WIDTH))


def riders(loss, **settings):
    """Of each leaf that rides the kind of the equation that it rides through, and which it is."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), settings.pop("stage", 3), **settings)
    params = zero.abstract(make)
    state = zero.optimizer(TX).init(params)
    traced = zero.train_step(loss, TX).read(
        params, state, jax.ShapeDtypeStruct((ROWS, WIDTH), "f4")
    )
    eqns = traced.closed.jaxpr.eqns
    scans = [at for at, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    return {x.path: scans.index(x.rides) for x in traced.leaves if x.rides is not None}


@pytest.mark.parametrize(
    ("loss", "settings", "want"),
    [
        (with_head, {}, {"head": 0}),
        (with_head, {"remat": "block", "micro_batches": 2}, {"head": 0}),
        (cast_before, {}, {"head": 0}),
        (two_loops, {}, {"head": 1, "in": 0}),
        (after_a_loss_in_chunks, {}, {"head": 0}),
        (after_a_penalty, {}, {"head": 1}),
        (taken_apart, {}, {}),
        (tied, {}, {}),
        (with_head, {"stage": 2}, {}),
        (with_head, {"frozen": "head"}, {}),
        (with_head, {"bucket_bytes": 4 * WIDTH * WORDS}, {"head": 0}),
        (with_head, {"bucket_bytes": 4 * WIDTH * WORDS - 1}, {}),
        (lambda p, x: jnp.mean(x @ p["in"] @ p["head"]), {}, {}),
    ],
)
def test_what_is_first_read_after_the_last_loop_rides_through_it(loss, settings, want):
    """Not a vector, nor what is frozen, or is gathered for the whole step, or travels in pieces."""
    assert riders(loss, **settings) == want


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"remat": "none"},
        {"remat": "block"},
        {"remat": "block_sqrt"},
        {"remat": "dots"},
        {"remat": "block", "micro_batches": 2},
        {"replica": 2, "hierarchical": True},
        {"frozen": "layers"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "loss", [with_head, cast_before, two_loops, after_a_loss_in_chunks, taken_apart]
)
def test_they_train_as_plain_optax(loss, settings, n):
    frozen = optax.multi_transform({"a": TX, "b": optax.set_to_zero()}, _labels)
    want = train_plain(problem(loss), frozen if "frozen" in settings else TX, 3)
    losses, params, _ = train_zero(problem(loss), TX, 3, n, **settings)
    np.testing.assert_allclose(losses, want[0], rtol=1e-6)
    assert ulps(params, want[1]) < 256


def _labels(params):
    return {name: "b" if name == "layers" else "a" for name in params}


def test_its_shard_is_carried_by_both_loops_and_tied_to_every_turn():
    def scans(fn):
        zero = zero_jax.Zero(zero_jax.abstract_mesh(4), 3, remat="block")
        params = zero.abstract(make)
        args = params, zero.optimizer(TX).init(params), jax.ShapeDtypeStruct((ROWS, WIDTH), "f4")
        jaxpr = zero.train_step(fn, TX).trace(*args).jaxpr
        return [e for e in _all(jaxpr.jaxpr) if e.primitive.name == "scan"]

    def carried(eqn):
        start, count = equations.state_of(eqn)
        return [v.aval.shape for v in eqn.invars[start : start + count]]

    def barriers(eqn):
        found = [e for e in _all(equations.inner(eqn).jaxpr) if "barrier" in e.primitive.name]
        return [[v.aval.shape for v in e.invars] for e in found]

    shard, rows = (WIDTH // 4, WORDS), (ROWS // 4, WIDTH)
    forward, backward = scans(with_head)
    for loop in (forward, backward):
        assert shard in carried(loop), carried(loop)
        assert [rows, shard] in barriers(loop), barriers(loop)
    assert all(shard not in carried(loop) for loop in scans(tied))


def _all(jaxpr):
    """Its equations and those of all that they call."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                inside = getattr(one, "jaxpr", one)
                if hasattr(inside, "eqns"):
                    yield from _all(inside)


def test_a_metric_beside_the_activations_gets_no_derivative_from_the_tie():
    """Its derivative is infinite where it begins, and a loop over it has none at all."""

    def turn(carry, w):
        x, metric, count = carry
        x, _ = layer(x, w)
        metric = jnp.sqrt(metric + 0 * jnp.sum(x))
        metric = jax.lax.while_loop(lambda m: m > 1, lambda m: m / 2, metric)
        return (x, metric, count + 1), None

    def loss(params, x):
        start = x @ params["in"], jnp.zeros(()), 0
        x, metric, _ = jax.lax.scan(turn, start, params["layers"])[0]
        return jnp.mean((x @ params["head"]) ** 2) * jnp.mean(params["norm"]), metric

    def alone(params, x):
        return loss(params, x)[0]

    want = train_plain(problem(alone), TX, 2)
    losses, params, _ = train_zero(problem(alone), TX, 2, 4, remat="block")
    np.testing.assert_allclose(losses, want[0], rtol=1e-6)
    assert ulps(params, want[1]) < 256
