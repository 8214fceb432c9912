"""Zero as a user meets it: birth, step, frozen leaves, aux, evaluation, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import gpt_problem, zoo_params

import zero_jax


def zero_on(n=4, **settings):
    return zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:n]), **settings)


def loss(params, x):
    p = params
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def make():
    key = jax.random.key(3)
    return {"w": jax.random.normal(key, (10, 7)), "b": jnp.full((7,), -0.0)}


X = jax.random.normal(jax.random.key(1), (24, 10))


@pytest.mark.parametrize("make", [gpt_problem().make, lambda: zoo_params(5)], ids=["gpt", "zoo"])
def test_initial_values_are_bitwise_equal_for_every_n_and_stage(make):
    runs = [
        jax.tree.leaves(zero_on(n, stage=stage).full(zero_on(n, stage=stage).init(make)))
        for n, stage in ((1, 0), (2, 1), (3, 3), (8, 3), (8, 0))
    ]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)
            )
    largest = max(runs[0], key=lambda x: x.size)
    assert len(np.unique(largest)) > largest.size // 2, "constant values would prove nothing"


def test_init_does_not_depend_on_optional_threefry():
    with jax.threefry_partitionable(False):
        with pytest.raises(ValueError, match="jax_threefry_partitionable is off"):
            zero_on().init(make)


def test_shard_places_loaded_arrays_as_init_does():
    zero = zero_on(3, stage=3)
    born, placed = zero.init(make), zero.shard(jax.tree.map(np.asarray, make()))
    assert jax.tree.structure(born) == jax.tree.structure(placed)
    for a, b in zip(jax.tree.leaves(born), jax.tree.leaves(placed), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_masters_are_fp32_whatever_the_model_was_born_in():
    params = zero_on(stage=1).init(lambda: {"w": jnp.ones((8, 8), jnp.bfloat16)})
    assert params["w"].dtype == jnp.float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_four_lines_in_a_users_own_jit(stage):
    zero = zero_on(stage=stage)
    params = zero.init(make)
    tx = zero.optimizer(optax.adamw(1e-2))
    opt_state = tx.init(params)
    grad_fn = zero.value_and_grad(loss)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(4):
        params, opt_state, value = step(params, opt_state, X)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    packaged = zero.train_step(loss, optax.adamw(1e-2))
    params, state, out = zero.init(make), tx.init(zero.init(make)), []
    for _ in range(4):
        params, state, metrics = packaged(params, state, X)
        out.append(float(metrics.loss))
    np.testing.assert_allclose(out, losses, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_metrics_report_the_norm_before_clipping_and_the_weight(stage):
    zero = zero_on(3, stage=stage, micro_batches=2)
    step = zero.train_step(loss, optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0)))
    params = zero.init(make)
    before = jax.tree.map(np.asarray, zero.full(params))
    state = zero.optimizer(optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))).init(
        params
    )
    params, _, metrics = step(params, state, X)
    grads = jax.grad(loss)(before, X)
    np.testing.assert_allclose(metrics.grad_norm, optax.global_norm(grads), rtol=1e-5)
    assert float(metrics.weight) == 3 * 2
    moved = jax.tree.map(lambda a, b: a - b, zero.full(params), before)
    np.testing.assert_allclose(optax.global_norm(moved), 1e-3, rtol=1e-3)


@pytest.mark.parametrize("order", [1, 2, np.inf])
def test_norms_of_returned_gradients_equal_those_of_one_device(order):
    grads = zero_on(3, stage=3).value_and_grad(loss)(zero_on(3, stage=3).init(make), X)[1]
    want = jax.grad(loss)(make(), X)
    flat = lambda t: np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)])  # noqa: E731
    norm = lambda t: np.linalg.norm(flat(t), order)  # noqa: E731
    np.testing.assert_allclose(norm(grads), norm(want), rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_leaves_have_no_state_and_do_not_change_a_bit(stage):
    zero = zero_on(stage=stage, frozen="base/")

    def born():
        base = {"w": jnp.full((10, 8), -0.0).at[0].set(1.0), "ids": jnp.arange(8)}
        return {"base": base, "head": {"w": jnp.ones((8, 3))}}

    def objective(params, x):
        p = params
        return jnp.mean((x @ p["base"]["w"] @ p["head"]["w"]) ** 2)

    tx = zero.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-1)))
    params = zero.init(born)
    state = tx.init(params)
    step = zero.train_step(objective, tx)
    for _ in range(2):
        params, state, _ = step(params, state, X)
    got, want = zero.full(params), born()
    for name in ("w", "ids"):
        a, b = np.asarray(got["base"][name]), np.asarray(want["base"][name])
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    assert (np.asarray(got["head"]["w"]) != 1).all()
    moments = [x for x in jax.tree.leaves(state.inner) if x.ndim]
    assert [x.shape for x in moments] == [(8, 3), (8, 3)]
    grads = zero.value_and_grad(objective)(params, X)[1]
    assert grads["base"]["w"].shape == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_leaves_may_need_padding(stage):
    zero = zero_on(stage=stage, frozen="base")

    def born():
        return {"base": jnp.ones((10, 7)), "ids": jnp.arange(6), "head": jnp.ones((7, 4))}

    def objective(params, x):
        p = params
        return jnp.mean((x @ p["base"] @ p["head"])[:, p["ids"][:2]] ** 2)

    step, params = zero.train_step(objective, optax.adam(1e-2)), zero.init(born)
    state = zero.optimizer(optax.adam(1e-2)).init(params)
    for _ in range(2):
        params, state, _ = step(params, state, X)
    got = zero.full(params)
    np.testing.assert_array_equal(got["base"], born()["base"])
    np.testing.assert_array_equal(got["ids"], born()["ids"])
    assert (np.asarray(got["head"])[:, :2] != 1).all()


def test_optimizers_that_look_at_the_loss_get_it():
    tx = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    zero = zero_on(stage=3)
    params = zero.init(make)
    _, state, metrics = zero.train_step(loss, tx)(params, zero.optimizer(tx).init(params), X)
    np.testing.assert_allclose(state.inner[1].best_value, metrics.loss)


def test_evaluate_gives_the_loss_and_weight_without_gradients():
    zero = zero_on(3, stage=3, micro_batches=4)  # evaluation works off the batch at once
    params = zero.init(make)
    value, weight = zero.evaluate(loss)(params, X[:21])
    np.testing.assert_allclose(value, loss(make(), X[:21]), rtol=1e-6)
    assert float(weight) == 3


def test_floating_aux_is_averaged_over_devices_and_micro_batches():
    def with_aux(params, x):
        return loss(params, x), {"mean": jnp.mean(x), "count": jnp.asarray(7)}

    for k in (1, 2):
        zero = zero_on(3, stage=2, micro_batches=k)
        (_, aux), _ = zero.value_and_grad(with_aux, has_aux=True)(zero.init(make), X)
        np.testing.assert_allclose(aux["mean"], jnp.mean(X), rtol=1e-5)
        assert int(aux["count"]) == 7


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_sum_their_gradients(stage):
    mesh = zero_jax.make_mesh(data=2, replica=3, devices=jax.devices()[:6])
    zero = zero_jax.Zero(mesh, stage=stage)
    value, grads = zero.value_and_grad(loss)(zero.init(make), X)
    want, want_grads = jax.value_and_grad(loss)(make(), X)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(zero.full(grads)["w"], want_grads["w"], rtol=1e-4, atol=1e-6)


def test_a_second_step_does_not_recompile_and_leaks_nothing():
    zero = zero_on(3, stage=3)
    step, params = zero.train_step(loss, optax.adam(1e-2)), zero.init(make)
    state = zero.optimizer(optax.adam(1e-2)).init(params)
    params, state, _ = step(params, state, X)
    events = []

    def heard(name, *_, **__):
        events.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    jax.jit(lambda: 0)()
    compiled = [name for name in events if "compile" in name]
    assert compiled, "compilations are heard of"
    live = None
    for _ in range(50):
        old = jax.tree.leaves((params, state))
        params, state, _ = step(params, state, X)
        assert all(x.is_deleted() for x in old), "donated buffers live on"
        now = sum(x.nbytes for x in jax.live_arrays())
        assert live is None or now <= live + 64
        live = now if live is None else live
    jax.monitoring.unregister_event_duration_listener(heard)
    assert [name for name in events if "compile" in name] == compiled


def test_after_an_exception_the_step_goes_on():
    zero = zero_on(stage=3)
    step, params = zero.train_step(loss, optax.sgd(1e-2)), zero.init(make)
    state = zero.optimizer(optax.sgd(1e-2)).init(params)
    with pytest.raises(ValueError, match="21 rows"):
        step(params, state, X[:21])
    params, state, metrics = step(params, state, X)
    assert np.isfinite(float(metrics.loss))


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_nnx_variables_keep_their_type_and_own_hooks():
    seen = []
    zero = zero_on(stage=3)

    def hook(variable, value):
        seen.append(value.shape)
        return value

    params = zero.init(lambda: {"w": nnx.Param(jnp.ones((8, 8)), on_get_value=hook)})
    seen.clear()
    zero.value_and_grad(lambda p, x: jnp.mean(x @ p["w"][...]))(params, jnp.ones((4, 8)))
    assert seen and set(seen) == {(8, 8)}, "the user's hook sees the full leaf"


def test_statistics_of_leaves_at_rest_are_taken_without_their_padding():
    zero = zero_on(4)
    params = zero.shard({"w": jnp.ones((7, 5))})
    moved = jax.tree.map(lambda x: x + 1, params)  # the padding too
    assert optax.global_norm(zero_jax.logical(moved)) == pytest.approx(2 * 35**0.5)
    assert jax.jit(lambda p: zero_jax.logical(p)["w"].mean())(moved) == 2
