"""Transformations that take more than gradients, by name through the step or in a step of one's
own, against optax on one device."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import zero_jax

N, STEPS = 4, 5
START = {"w": jnp.linspace(-1.0, 1.0, 15).reshape(5, 3), "b": jnp.ones(3), "s": jnp.float32(0.5)}
ROWS = jnp.sin(jnp.arange(40.0)).reshape(8, 5)


def loss_fn(params, rows):
    return jnp.mean((jnp.tanh(rows @ params["w"]) + params["b"] - params["s"]) ** 2)


def zero_of(stage, **options):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:N]), stage, **options)


def near(found, wanted):
    chex.assert_trees_all_close(zero_jax.logical(found), wanted, rtol=2e-5, atol=2e-6)


def reference(tx, update):
    """The parameters after some steps of plain optax."""
    params, state = START, tx.init(START)
    for number in range(STEPS):
        updates, state = update(tx, params, state, number)
        params = optax.apply_updates(params, updates)
    return params, state


def plainly(tx, params, state, number, **more):
    value, grads = jax.value_and_grad(loss_fn)(params, ROWS)
    return tx.update(grads, state, params, value=value, **more)


def scaled_by_factor():
    def update(grads, state, params=None, *, factor, offsets, value, **_):
        return jax.tree.map(lambda g, o: -factor * (g + value * o), grads, offsets), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_arrays_by_name_reach_the_transformation(stage):
    zero, tx = zero_of(stage), scaled_by_factor()
    params = zero.init(lambda: START)
    own = zero.optimizer(tx)
    state, step = own.init(params), zero.train_step(loss_fn, own)

    def update(tx, params, state, number):
        return plainly(tx, params, state, number, factor=0.1 * number, offsets=START)

    for number in range(STEPS):
        offsets = zero.init(lambda: START)  # at rest, padded where parameters are
        params, state, _ = step(params, state, ROWS, factor=0.1 * number, offsets=offsets)
    near(params, reference(tx, update)[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_to_evaluate_come_from_the_wrapped_state(stage):
    tx, zero = contrib.schedule_free_sgd(0.3), zero_of(stage)
    params = zero.init(lambda: START)
    own = zero.optimizer(tx)
    state, step = own.init(params), zero.train_step(loss_fn, own)
    for _ in range(STEPS):
        params, state, _ = step(params, state, ROWS)
    wanted = reference(tx, plainly)
    near(
        contrib.schedule_free_eval_params(state, params),
        contrib.schedule_free_eval_params(wanted[1], wanted[0]),
    )
    with pytest.raises(AttributeError, match="neither ZeroState nor .* has 'nonsense'"):
        state.nonsense  # noqa: B018


def in_a_step_of_ones_own(zero, tx, start, loss_of, more):
    """The parameters after some steps with `value_and_grad` and `update`."""
    params = zero.init(lambda: start)
    own = zero.optimizer(tx)
    value_and_grad = zero.value_and_grad(loss_fn)

    @jax.jit
    def step(params, state):
        value, grads = value_and_grad(loss_of(params), ROWS)
        updates, state = own.update(grads, state, params, **more(value, grads))
        return optax.apply_updates(params, updates), state

    state = own.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def lbfgs_needs(value, grads):
    return {"value": value, "grad": grads, "value_fn": lambda p: loss_fn(p, ROWS)}


def sam_needs(value, grads):
    return {"grad_fn": lambda params, _: jax.grad(loss_fn)(params, ROWS)}


SAM = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)),
                  opaque_mode=True)  # fmt: skip


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("tx", "needs"), [(optax.lbfgs(0.1), lbfgs_needs), (SAM, sam_needs)], ids=["lbfgs", "sam"]
)
def test_functions_are_given_in_a_step_of_ones_own(tx, needs, stage):
    found = in_a_step_of_ones_own(zero_of(stage), tx, START, lambda p: p, needs)

    def update(tx, params, state, _):
        value, grads = jax.value_and_grad(loss_fn)(params, ROWS)
        return tx.update(grads, state, params, **needs(value, grads))

    near(found, reference(tx, update)[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lookahead_in_a_step_of_ones_own(stage):
    tx = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    start = optax.LookaheadParams.init_synced(START)
    found = in_a_step_of_ones_own(zero_of(stage), tx, start, lambda p: p.fast, lambda *_: {})
    params, state = start, tx.init(start)
    for _ in range(STEPS):
        updates, state = tx.update(jax.grad(loss_fn)(params.fast, ROWS), state, params)
        params = optax.apply_updates(params, updates)
    near(found, params)


@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (optax.lbfgs(0.1), "value_fn"),
        (SAM, "grad_fn"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), ""),
    ],
    ids=["lbfgs", "sam", "lookahead"],
)
def test_what_a_step_can_not_give_is_refused_with_the_way(tx, said):
    zero = zero_of(3)
    params = zero.init(lambda: START)
    own = zero.optimizer(tx)
    step = zero.train_step(loss_fn, own)
    with pytest.raises(ValueError, match=f"did not take .*{said}.*zero.value_and_grad.*tx.update"):
        step(params, own.init(params), ROWS)


def test_states_in_host_memory_take_no_arrays_by_name():
    zero = zero_of(3, offload="optimizer")
    with pytest.raises(ValueError, match="'factor' and 'offsets'.*not where states rest in host"):
        zero.optimizer(scaled_by_factor()).init(zero.init(lambda: START))


@pytest.mark.parametrize(
    ("named", "said"),
    [({"value": 1.0}, "gives the transformation its own value"),
     ({"grad_fn": loss_fn}, "no functions.*zero.value_and_grad")],
)  # fmt: skip
def test_arguments_that_a_step_can_not_pass_on_are_refused(named, said):
    zero = zero_of(3)
    params = zero.init(lambda: START)
    own = zero.optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=said):
        zero.train_step(loss_fn, own)(params, own.init(params), ROWS, **named)
