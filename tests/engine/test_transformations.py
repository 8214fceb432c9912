"""Transformations whose state changes at the first update, or that take more than gradients.

`run` is a user's step, which passes functions to the update; `packaged` is `Zero.train_step`, which
passes the loss as `value`, and arrays by name. Both are compared with optax on one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import zero_on
from optax import contrib

import zero_jax

# Four devices do not divide 63: that leaf is padded.
START = {"w": jnp.linspace(-1, 1, 8 * 63).reshape(8, 63), "b": jnp.ones(3), "s": jnp.float32(0.5)}
X = jnp.linspace(0.5, 1.5, 4 * 8).reshape(4, 8)


def linear(params, x):
    """Its gradient is the same in every step."""
    return jnp.mean(x @ params["w"]) + jnp.mean(params["b"]) + params["s"]


def curved(params, x):
    errors = jnp.tanh(x @ params["w"]) - 0.5
    return jnp.mean(errors**2) + jnp.mean((params["b"] - params["s"]) ** 2)


def near(found, wanted, atol=2e-6):
    """Sums over devices are in another order."""
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=atol)
    jax.tree.map(compare, zero_jax.logical(found), wanted)


def run(value_and_grad, tx, params, named=lambda *_: {}, trained=lambda params: params):
    """Parameters and state after three steps; `named` are arguments of the update by name."""

    def step(params, state, number):
        value, grads = value_and_grad(trained(params), X)
        updates, state = tx.update(grads, state, params, **named(value, grads, number))
        return optax.apply_updates(params, updates), state

    state, step = tx.init(params), jax.jit(step)
    for number in range(3):
        params, state = step(params, state, number)
    return params, state


def alone(loss, *args):
    return run(jax.value_and_grad(loss), *args)


def packaged(zero, tx, loss, batches=(X, X, X), named=lambda number: {}):
    params, tx = zero.shard(START), zero.optimizer(tx)
    state, step = tx.init(params), zero.train_step(loss, tx)
    for number, batch in enumerate(batches):
        params, state, _ = step(params, state, batch, **named(number))
    return params, state


@pytest.mark.parametrize(
    "settings", [{"stage": 0}, {"guard": False}, {"states": "8bit"}, {"offload": "optimizer"}]
)
def test_measurements_of_a_monitor_are_those_of_optax(settings):
    measures = {"norm": optax.tree.norm, "mean": optax.measure_with_ema(optax.tree.norm, 0.9)}
    after = optax.clip_by_global_norm(0.01), optax.adam(0.1)
    tx = optax.chain(optax.monitor(measures), *after)
    params, wanted = alone(linear, tx, START)
    found, state = packaged(zero_on(**settings), tx, linear)
    if "states" not in settings:
        near(found, params)
    for name in ("norm", "mean"):
        np.testing.assert_allclose(*(optax.tree.get(s, name) for s in (state, wanted)), rtol=1e-5)


def first_update(grads, state, params=None):
    """Takes the initial state's factor; later ones take a mean of old and new."""
    if "mean" in state:
        mean = jax.tree.map(lambda old, new: 0.5 * (old + new), state["mean"], grads)
    else:
        mean = jax.tree.map(lambda new: state["factor"] * new, grads)
    return jax.tree.map(jnp.negative, mean), {"mean": mean, "count": state["count"] + 1}


SPECIAL = optax.GradientTransformation(
    lambda params: {"factor": jnp.float32(3.0), "count": 0}, first_update
)


@pytest.mark.parametrize(
    ("settings", "skipped"), [({"stage": 0}, 2), ({}, 0), ({"offload": "optimizer"}, 2)]
)
def test_the_first_update_is_made_once_and_not_by_a_skipped_step(settings, skipped):
    batches = [X * jnp.nan] * skipped + [X] * 3
    found, state = packaged(zero_on(**settings), SPECIAL, linear, batches)
    gradient = jax.grad(linear)(START, X)
    # 3, then (3 + 1) / 2, then (2 + 1) / 2 times the gradient.
    near(found, jax.tree.map(lambda w, g: w - 6.5 * g, START, gradient))
    assert int(state.guard.skipped) == skipped
    assert int(state.inner.inner["count"]) == 3


def test_a_special_first_update_beside_muon():
    """Muon updates full matrices on assigned devices, in both branches."""
    tx = optax.chain(SPECIAL, contrib.muon(0.1))
    # Newton-Schulz products in another order.
    near(packaged(zero_on(), tx, linear)[0], alone(linear, tx, START)[0], atol=1e-4)


def scaled(grads, state, params=None, *, factor, offsets, value, **_):
    return jax.tree.map(lambda g, o: -factor * (g + value * o), grads, offsets), state


@pytest.mark.parametrize("stage", [0, 3])
def test_arrays_by_name_reach_the_transformation(stage):
    zero = zero_on(stage=stage)
    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
    offsets = zero.shard(START)  # padded where parameters are
    named = lambda number: {"factor": 0.1 * number, "offsets": offsets}  # noqa: E731
    wanted = lambda value, _, n: {"factor": 0.1 * n, "offsets": START, "value": value}  # noqa: E731
    found = packaged(zero, tx, curved, named=named)[0]
    near(found, alone(curved, tx, START, wanted)[0])


def test_the_wrapped_state_has_the_attributes_of_its_own():
    tx, average = contrib.schedule_free_sgd(0.3), contrib.schedule_free_eval_params
    params, state = packaged(zero_on(), tx, curved)
    wanted, plain_state = alone(curved, tx, START)
    near(average(state, params), average(plain_state, wanted))


LBFGS = optax.lbfgs(0.1, memory_size=2)
SAM = contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
LOOKAHEAD = optax.lookahead(optax.adam(0.1), 2, slow_step_size=0.5)
NEEDS = {
    LBFGS: lambda value, grads, _: {
        "value": value,
        "grad": grads,
        "value_fn": lambda params: curved(params, X),
    },
    SAM: lambda *_: {"grad_fn": lambda params, _: jax.grad(curved)(params, X)},
    LOOKAHEAD: lambda *_: {},
}


@pytest.mark.parametrize(("tx", "stage"), [(LBFGS, 3), (SAM, 2), (LOOKAHEAD, 0), (LOOKAHEAD, 3)])
def test_a_users_step_passes_functions_or_parts_of_parameters(tx, stage):
    zero, start, part = zero_on(stage=stage), START, lambda params: params
    if tx is LOOKAHEAD:
        start, part = optax.LookaheadParams.init_synced(START), lambda params: params.fast
    own = zero.optimizer(tx), zero.shard(start), NEEDS[tx], part
    near(run(zero.value_and_grad(curved), *own)[0], alone(curved, tx, start, NEEDS[tx], part)[0])
