"""Transformations whose state gains or loses leaves at the first update: equal to plain optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.checkpoint.checkpoints import Checkpoints

# Four devices do not divide 63: that leaf is padded.
START = {"w": jnp.linspace(-1, 1, 8 * 63).reshape(8, 63), "b": jnp.ones(63)}
X = jnp.linspace(0.5, 1.5, 4 * 8).reshape(4, 8)
FACTORS = 3.0, 2.0, 1.5  # of the gradient, in the updates of `special_first`


def loss(params, x):
    """Linear: its gradient is the same in every step."""
    return jnp.mean(x @ params["w"]) + jnp.mean(params["b"])


def special_first():
    """The first update takes the initial state's factor; later ones a mean of old and new."""

    def init(params):
        del params
        return {"factor": jnp.float32(3.0), "count": 0}

    def update(grads, state, params=None):
        del params
        if "mean" in state:
            mean = jax.tree.map(lambda old, new: 0.5 * (old + new), state["mean"], grads)
        else:
            mean = jax.tree.map(lambda new: state["factor"] * new, grads)
        return jax.tree.map(jnp.negative, mean), {"mean": mean, "count": state["count"] + 1}

    return optax.GradientTransformation(init, update)


def monitored():
    measures = {"norm": optax.tree.norm, "mean": optax.measure_with_ema(optax.tree.norm, 0.9)}
    return optax.chain(optax.monitor(measures), optax.clip_by_global_norm(0.01), optax.adam(0.1))


def zero_on(**settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:4]), **settings)


def run(zero, tx, batches):
    """Parameters as on one device, and the state."""
    wrapped = zero.optimizer(tx)
    params = zero.shard(START)
    state, step = wrapped.init(params), zero.train_step(loss, wrapped)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return zero.full(params), state


def after(steps):
    """The parameters that `special_first` makes, in closed form."""
    gradient = jax.grad(loss)(START, X)
    return jax.tree.map(lambda w, g: w - sum(FACTORS[:steps]) * g, START, gradient)


def near(found, wanted):
    # Sums over devices come in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), found, wanted)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("guard", [True, False])
def test_measurements_of_a_monitor_are_those_of_optax(stage, guard):
    tx, params = monitored(), START
    wanted = tx.init(params)
    for _ in range(3):
        updates, wanted = tx.update(jax.grad(loss)(params, X), wanted, params)
        params = optax.apply_updates(params, updates)
    found, state = run(zero_on(stage=stage, guard=guard), tx, [X] * 3)
    near(found, params)
    assert jax.tree.structure(zero_jax.logical(state.inner)) == jax.tree.structure(wanted)
    for name in ("norm", "mean"):
        assert float(optax.tree.get(state, name)) == pytest.approx(
            float(optax.tree.get(wanted, name)), rel=1e-5
        )


@pytest.mark.parametrize("settings", [{"states": "8bit"}, {"offload": "optimizer"}], ids=str)
def test_a_monitor_stands_before_states_that_are_updated_in_pieces(settings):
    gradient = jax.grad(loss)(START, X)
    state = run(zero_on(**settings), monitored(), [X] * 2)[1]
    assert float(optax.tree.get(state, "norm")) == pytest.approx(
        float(optax.tree.norm(gradient)), rel=1e-5
    )


@pytest.mark.parametrize(
    "settings", [{"stage": 0}, {"stage": 3}, {"offload": "optimizer"}], ids=str
)
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_first_update_of_its_own_is_made_once_and_by_a_step_that_counts(settings, skipped):
    found, state = run(zero_on(**settings), special_first(), [X * jnp.nan] * skipped + [X] * 3)
    near(found, after(3))
    assert int(state.guard.skipped) == skipped
    assert int(state.inner.inner["count"]) == 3


def test_a_first_update_of_its_own_stands_beside_one_of_whole_matrices():
    """Muon sends matrices to owners, in the branch of the first update and in the other."""
    tx = optax.chain(special_first(), optax.contrib.muon(0.1))
    params, state = START, tx.init(START)
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss)(params, X), state, params)
        params = optax.apply_updates(params, updates)
    found = run(zero_on(), tx, [X] * 3)[0]
    # Newton-Schulz products in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, params)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_before_and_after_the_first_update_is_restored(steps, tmp_path):
    zero, other = zero_on(), zero_on(stage=0)
    tx = zero.optimizer(special_first())
    params = zero.shard(START)
    state, step = tx.init(params), zero.train_step(loss, tx)
    for _ in range(steps):
        params, state, _ = step(params, state, X)
    tx = other.optimizer(special_first())
    like = other.abstract(lambda: START)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(steps, (params, state))
        checkpoints.wait()
        params, state = checkpoints.restore((like, tx.init(like))).tree
    step = other.train_step(loss, tx)
    for _ in range(3 - steps):
        params, state, _ = step(params, state, X)
    near(other.full(params), after(3))


def growing(grads, state, params=None):
    return grads, [*state, jnp.zeros(3)]


def with_curvature(grads, state, params=None, *, curvature, **_):
    return grads, {"curvature": curvature}


def test_a_state_that_changes_at_every_update_is_an_error():
    tx = zero_on().optimizer(optax.GradientTransformation(lambda _: [jnp.zeros(())], growing))
    with pytest.raises(ValueError, match=r"`tx`.*gains 2 \(3,\) and loses no leaf"):
        tx.init(zero_on().abstract(lambda: START))


def test_a_change_that_waits_for_an_argument_by_name_is_an_error():
    zero = zero_on()
    tx = zero.optimizer(optax.GradientTransformationExtraArgs(lambda _: {}, with_curvature))
    params = zero.init(lambda: START)
    step = zero.train_step(loss, tx)
    with pytest.raises(ValueError, match=r"`tx`.*gains curvature .*by name \(curvature, value\)"):
        step(params, tx.init(params), X, curvature=jnp.ones(()))
