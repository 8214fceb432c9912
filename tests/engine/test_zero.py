"""`Zero` and losses, against one device: initialisation, steps, frozen leaves, aux, weights."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import zero_on
from problems import assert_bitwise, gpt_problem, zoo_params

import zero_jax


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def make():
    key = jax.random.key(3)
    return {"w": jax.random.normal(key, (10, 7)), "b": jnp.full((7,), -0.0)}


X = jax.random.normal(jax.random.key(1), (24, 10))
START = make()


ZOO = functools.partial(zoo_params, 5)


@pytest.mark.parametrize(
    ("make", "n", "stage"), [(gpt_problem().make, 3, 3), (ZOO, 8, 0), (ZOO, 3, 1)]
)
def test_initial_values_do_not_depend_on_n_and_stage(make, n, stage):
    zero, wanted = zero_on(n, stage=stage), jax.jit(make)()
    params = zero.init(make)
    full = zero.full(params)
    assert_bitwise(full, wanted)
    placed = zero.shard(jax.tree.map(np.asarray, full))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    assert_bitwise(zero.full(placed), wanted)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, params)
    largest = max(jax.tree.leaves(wanted), key=lambda x: x.size)
    assert len(np.unique(largest)) > largest.size // 2, "random values"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_leaves_have_no_state_and_keep_their_bits(stage):
    """`base/w` is padded; weight decay and the norm of the clip leave frozen leaves out. Alone,
    optax.adamw raises under strict promotion of dtypes."""
    base = {"w": np.full((10, 7), -0.0, np.float32), "ids": np.arange(6, dtype=np.int32)}
    base["w"][:3] = 1.0
    start = {"base": base, "head": {"w": np.ones((7, 3), np.float32)}}

    def objective(params, x):
        base = params["base"]
        return jnp.mean((x[:, base["ids"]] @ base["w"][:6] @ params["head"]["w"]) ** 2)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-1))
    wanted, plain = start["head"], tx.init(start["head"])
    grad_fn = jax.jit(jax.grad(lambda head: objective({"base": base, "head": head}, X)))
    for _ in range(2):
        updates, plain = tx.update(grad_fn(wanted), plain, wanted)
        wanted = optax.apply_updates(wanted, updates)
    with jax.numpy_dtype_promotion("strict"):
        zero = zero_on(stage=stage, frozen="base/")
        params, tx = zero.shard(start), zero.optimizer(tx)
        step, state = zero.train_step(objective, tx), tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, X)
    found = zero.full(params)
    assert_bitwise(found["base"], base)
    np.testing.assert_allclose(found["head"]["w"], wanted["w"], rtol=1e-5)
    moments = jax.tree.leaves(zero_jax.logical(state.inner))
    assert [x.shape for x in moments if x.ndim] == [(7, 3), (7, 3)]
    grads = jax.eval_shape(zero.value_and_grad(objective), params, X)[1]
    assert [x.shape for x in jax.tree.leaves(grads["base"])] == [(), ()]


def test_evaluate_returns_loss_and_weight():
    """In one micro-batch; parameters may have fewer bits."""
    zero = zero_on(3, micro_batches=4)
    params, evaluate = zero.shard(START), zero.evaluate(loss)
    value, weight = evaluate(params, X[:21])
    np.testing.assert_allclose(value, loss(START, X[:21]), rtol=1e-6)
    assert float(weight) == 3
    narrow = evaluate(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), X[:21])[0]
    np.testing.assert_allclose(narrow, value, rtol=2**-7)
    one, total = zero_on(1), lambda p, x: jnp.sum((x @ p["w"]) ** 2)  # a sum over all rows
    found = one.evaluate(total)(one.shard(START), X)[0]
    np.testing.assert_allclose(found, total(START, X), rtol=1e-5)


def test_statistics_of_padded_leaves_leave_out_the_padding():
    moved = jax.tree.map(lambda x: x + 1, zero_on().shard({"w": np.ones((7, 5), np.float32)}))
    statistics = jax.jit(lambda x: (optax.global_norm(x), x["w"].mean()))
    assert statistics(zero_jax.logical(moved)) == (pytest.approx(2 * 35**0.5), 2)


def test_steps_donate_and_compile_once():
    zero = zero_on(3)
    tx = zero.optimizer(optax.adam(1e-2))
    step, params = zero.train_step(loss, tx), zero.shard(START)
    params, state, _ = step(params, tx.init(params), X)
    with pytest.raises(ValueError, match="22"):
        step(params, state, X[:22])
    events, live = [], []
    heard = lambda name, *_, **__: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(heard)
    jax.jit(lambda: 0)()
    compiled = [name for name in events if "compile" in name]
    assert compiled, "the listener works"
    for _ in range(20):
        old = jax.tree.leaves((params, state))
        params, state, _ = step(params, state, X)
        assert all(x.is_deleted() for x in old)
        live.append(sum(x.nbytes for x in jax.live_arrays()))
    jax.monitoring.unregister_event_duration_listener(heard)
    assert max(live) <= live[0] + 64
    assert [name for name in events if "compile" in name] == compiled


SMALL, W = X[:16, :4], {"w": jax.random.normal(jax.random.key(0), (4, 8))}


@pytest.mark.parametrize(
    ("replica", "k", "stage", "axis"),
    [(1, 1, 3, "batch"), (1, 2, 0, "data"), (2, 1, 1, "data"), (2, 2, 3, "data")],
)
def test_aux_means_rows_sums_counters_and_keys(replica, k, stage, axis):
    """Rows return in order, floats as means; counters, keys and sums are equal on all devices."""
    devices = jax.devices()[: 4 * replica]
    mesh = zero_jax.make_mesh(4, replica=replica, devices=devices, data_axis=axis)
    zero = zero_jax.Zero(mesh, stage, micro_batches=k)
    assert zero.batch_axes == (("replica", "data") if replica > 1 else (axis,))
    same = lambda x: x  # noqa: E731

    def loss(params, x, count, mean=same, total=same):
        centre = mean(x.mean(0)) if k == 1 else 0.0  # else of a micro-batch
        logits = jnp.tanh((x - centre) @ (params["w"] * params["w/2"]))  # paths that look alike
        aux = {
            "logits": logits,
            "mean": jnp.mean(logits),
            "spread": logits.mean(0),
            "channels": x.mean(0),  # as long as the rows of a device where k is 1, and no rows
            "rows": x.mean(1),
            "n": count + 1,
            "bits": jax.random.key_data(jax.random.key(5)),
            "key": jax.random.key(5),
        }
        if k == 1:
            aux["right"] = total((x[:, 0] > 0).sum())
        return jnp.mean(logits**2), aux

    def sharded(params, x, count):
        over = [lambda x, f=f: f(x, zero.batch_axes) for f in (jax.lax.pmean, jax.lax.psum)]
        return loss(params, x, count, *over)

    start = {"w": W["w"], "w/2": jnp.cos(W["w"])}
    params = zero.shard(start)
    (_, aux), grads = zero.value_and_grad(sharded, has_aux=True)(params, SMALL, jnp.int32(6))
    (_, want), want_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start, SMALL, 6)
    np.testing.assert_array_equal(jax.random.key_data(aux.pop("key")), want["bits"])
    for name in aux:
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, found in zero.full(grads).items():
        np.testing.assert_allclose(found, want_grads[name], rtol=1e-4, atol=1e-7)
    evaluated = zero.evaluate(sharded, has_aux=True)(params, SMALL, jnp.int32(6))[0][1]
    np.testing.assert_allclose(evaluated["logits"], want["logits"], rtol=1e-5, atol=1e-6)


def errors(params, x):
    return (jnp.tanh(x @ params["w"]) - 1.0) ** 2


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (lambda p, x: jnp.sum(errors(p, x)[:, :4] * x), r"zero_jax\.Weighted"),
        (lambda p, x: jnp.mean(errors(p, x - x.mean(0))), r"zero\.batch_axes"),
    ],
)
def test_a_likely_sum_and_a_statistic_of_one_device_warn_once(loss, word):
    evaluate, params = zero_on().evaluate(loss), zero_on().abstract(lambda: W)
    with pytest.warns(UserWarning, match=word):
        jax.eval_shape(evaluate, params, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jax.eval_shape(evaluate, params, jnp.concatenate([SMALL, SMALL]))


def test_weights_of_parameters_under_stop_gradient_and_loops_over_frozen_leaves():
    def loss(params, x):
        logits = x @ params["w"]
        weight = jax.lax.stop_gradient(jnp.sum(jax.nn.sigmoid(logits)))
        counted = jnp.sum(logits > 0)  # no gradient goes through a comparison
        loop = jax.lax.while_loop(lambda c: c < 9, lambda c: c + params["f"][0] ** 2 + 1, 0.0)
        return zero_jax.Weighted(jnp.sum(logits**2) * loop, weight + counted)

    zero, start = zero_on(frozen="f"), W | {"f": jnp.ones(3)}
    total, weight = loss(start, SMALL)
    value, _ = zero.value_and_grad(loss)(zero.shard(start), SMALL)
    np.testing.assert_allclose(value, total / weight, rtol=1e-5)


def stepped(zero, loss, tx, *batches):
    """Full parameters and metrics after each step."""
    tx, params = zero.optimizer(tx), zero.shard(W)
    step, state, found = zero.train_step(loss, tx), tx.init(params), []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        found.append((np.asarray(zero.full(params)["w"]), metrics))
    return found


def test_finite_gradients_whose_squares_overflow_are_applied():
    loss = lambda p, x: 1e20 * jnp.mean(x @ p["w"])  # noqa: E731
    ((found, metrics),) = stepped(zero_on(), loss, optax.sgd(1e-20), SMALL)
    # Of a mean over 16 rows and 8 columns.
    want = 1e20 * np.broadcast_to(np.asarray(SMALL, np.float64).sum(0)[:, None] / (16 * 8), (4, 8))
    assert metrics.skipped == 0
    np.testing.assert_allclose(float(metrics.grad_norm), np.linalg.norm(want), rtol=1e-5)
    np.testing.assert_allclose(found, W["w"] - 1e-20 * want, rtol=1e-5)


@pytest.mark.parametrize(("stage", "guard"), [(3, True), (3, False), (0, False)])
def test_without_the_guard_a_transformation_sees_nan(stage, guard):
    def loss(params, x):
        return jnp.mean(x @ params["w"]) + jnp.sqrt(params["w"][0, 0] - params["w"][0, 0])

    tx = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    ((found, metrics),) = stepped(zero_on(stage=stage, guard=guard), loss, tx, SMALL)
    assert metrics.skipped == guard
    assert np.isfinite(found).all() and (found == np.asarray(W["w"])).all() == guard


@pytest.mark.parametrize(("stage", "k"), [(0, 2), (3, 1)])
def test_a_negative_weight_on_a_device_skips_the_step(stage, k):
    """Weights count rows or tokens. A negative one is an error, also if their sum is positive."""

    def loss(params, batch):
        weight = jnp.sum(batch[1])
        return zero_jax.Weighted(weight * jnp.mean((batch[0] @ params["w"]) ** 2), weight)

    zero, good = zero_on(stage=stage, micro_batches=k), jnp.ones(16)
    batches = (SMALL, good), (SMALL, good.at[0].set(-9.0))
    (before, metrics), (after, bad) = stepped(zero, loss, optax.sgd(0.1), *batches)
    assert (int(metrics.skipped), float(metrics.weight)) == (0, 16)
    assert int(bad.skipped) == 1 and np.isnan(bad.loss)
    np.testing.assert_array_equal(after, before)
