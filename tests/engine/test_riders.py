"""Matrices that are first read after the layers: their shards are carried through the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import Case, check_parity
from problems import equations_of

import zero_jax
from zero_jax.jaxpr import equations

LAYERS, WIDTH, WORDS, ROWS = 3, 12, 40, 24
TX = optax.sgd(0.1, momentum=0.9)
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), "f4")


def make():
    shapes = {"head": (WIDTH, WORDS), "in": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH)}
    draw, shapes = np.random.default_rng(0).normal, shapes | {"pair": (2, WIDTH, WORDS)}
    params = {name: jnp.float32(draw(0, 0.4, shape)) for name, shape in shapes.items()}
    return params | {"norm": jnp.ones(4 * WIDTH)}


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def scanned(params, x):
    return jax.lax.scan(layer, x @ params["in"], params["layers"])[0]


def with_head(params, x):
    return jnp.mean((scanned(params, x) @ params["head"]) ** 2) * jnp.mean(params["norm"])


def transposed_before(params, x):
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


def metric_in_the_loop(params, x):
    """Its derivative is infinite at the start, and a while loop has none."""

    def turn(carry, w):
        x, metric, count = carry
        x, _ = layer(x, w)
        metric = jnp.sqrt(metric + 0 * jnp.sum(x))
        metric = jax.lax.while_loop(lambda m: m > 1, lambda m: m / 2, metric)
        return (x, metric, count + 1), None

    x, _, _ = jax.lax.scan(turn, (x @ params["in"], jnp.zeros(()), 0), params["layers"])[0]
    return jnp.mean((x @ params["head"]) ** 2) * jnp.mean(params["norm"])


def begun(stage=3, **settings):
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), stage, **settings)
    params = zero.abstract(make)
    return zero, (params, zero.optimizer(TX).init(params), BATCH)


# fmt: off
CARRIED = [
    (with_head, {}, {"head": 0}),
    (with_head, {"remat": "block", "micro_batches": 2}, {"head": 0}),
    (transposed_before, {}, {"head": 0}),
    (two_loops, {}, {"head": 1, "in": 0}),
    (after_a_loss_in_chunks, {}, {"head": 0}),
    # A loop over weights without a product can hide no communication.
    (lambda p, x: 0 * jax.lax.map(jnp.sum, p["layers"])[0] + with_head(p, x), {}, {"head": 1}),
    (taken_apart, {}, {}),
    (lambda p, x: with_head(p, x @ p["head"] @ p["head"].T), {}, {}),
    (with_head, {"stage": 2}, {}),
    (with_head, {"frozen": "head"}, {}),
    (with_head, {"bucket_bytes": 4 * WIDTH * WORDS}, {"head": 0}),
    (with_head, {"bucket_bytes": 4 * WIDTH * WORDS - 1}, {}),
    (lambda p, x: jnp.mean(x @ p["in"] @ p["head"]), {}, {}),
]
# fmt: on


@pytest.mark.parametrize(("loss", "settings", "want"), CARRIED)
def test_leaves_that_are_carried_and_the_loop_that_carries_them(loss, settings, want):
    """No vector, and nothing frozen, gathered for the whole step or larger than a bucket."""
    zero, args = begun(**settings)
    traced = zero.train_step(loss, TX).read(*args)
    eqns = traced.closed.jaxpr.eqns
    scans = [at for at, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    assert {x.path: scans.index(x.rides) for x in traced.leaves if x.rides is not None} == want


@pytest.mark.parametrize(
    ("loss", "sizes", "settings"),
    [
        (with_head, {"data": 3}, {"remat": "none"}),
        (transposed_before, {"data": 3}, {"remat": "block_sqrt"}),
        (two_loops, {"data": 2}, {"remat": "block", "micro_batches": 2}),
        (two_loops, {"data": 3}, {"remat": "dots"}),
        (after_a_loss_in_chunks, {"replica": 2, "data": 2}, {"hierarchical": True}),
        (taken_apart, {"data": 2}, {"frozen": "layers"}),
        (metric_in_the_loop, {"data": 4}, {"remat": "block"}),
    ],
)
def test_steps_equal_plain_optax(loss, sizes, settings):
    def of_trained(params, x):
        still = {"layers"} & {settings.get("frozen")}
        return loss(params | {k: jax.lax.stop_gradient(params[k]) for k in still}, x)

    own = Case(make, of_trained, np.asarray(jax.random.normal(jax.random.key(3), BATCH.shape)))
    check_parity(own, sizes, TX, 3, **settings)


def test_a_shard_is_carried_by_both_loops_and_tied_to_every_iteration():
    def loops(loss):
        """Shapes of what each loop carries, and of what its barriers tie."""
        zero, args = begun(remat="block")
        jaxpr = zero.train_step(loss, TX).trace(*args).jaxpr.jaxpr
        for eqn in equations_of(jaxpr):
            if eqn.primitive.name == "scan":
                start, count = equations.state_of(eqn)
                body = equations_of(equations.inner(eqn).jaxpr)
                ties = [e.invars for e in body if "barrier" in e.primitive.name]
                carried = eqn.invars[start : start + count]
                yield [v.aval.shape for v in carried], [[v.aval.shape for v in e] for e in ties]

    shard, rows = (WIDTH // 4, WORDS), (ROWS // 4, WIDTH)
    forward, backward = loops(with_head)
    for carried, ties in (forward, backward):
        assert shard in carried and [rows, shard] in ties
    without = loops(lambda p, x: jnp.mean(p["head"]) + with_head(p, x))
    assert all(shard not in carried for carried, _ in without)
