"""`Zero`: initialisation, a step, frozen leaves, evaluation and replicas, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
START, TARGET = make(), jax.jit(jax.value_and_grad(loss))


def assert_same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("make", "n", "stage"),
    [
        (gpt_problem().make, 3, 3),
        (functools.partial(zoo_params, 5), 8, 0),
        (functools.partial(zoo_params, 5), 3, 1),
    ],
    ids=["gpt", "zoo 8", "zoo 3"],
)
def test_initial_values_do_not_depend_on_n_and_stage(make, n, stage):
    zero, wanted = zero_on(n, stage=stage), jax.jit(make)()
    params = zero.init(make)
    full = zero.full(params)
    assert_same_bits(full, wanted)
    placed = zero.shard(jax.tree.map(np.asarray, full))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    assert_same_bits(placed, params)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, params)
    largest = max(jax.tree.leaves(wanted), key=lambda x: x.size)
    assert len(np.unique(largest)) > largest.size // 2, "random values"


def test_trained_leaves_are_fp32_and_frozen_ones_keep_their_dtype():
    zero = zero_on(frozen="fp8")
    tree = {"w": jnp.ones((8, 8), jnp.bfloat16), "fp8": jnp.ones(8, jnp.float8_e4m3fn)}
    for params in (zero.init(lambda: tree), zero.shard(tree)):
        assert (params["w"].dtype, params["fp8"].dtype) == (jnp.float32, jnp.float8_e4m3fn)


@pytest.mark.parametrize(("stage", "n", "k"), [(0, 2, 2), (1, 3, 2), (2, 4, 1), (3, 3, 2)])
def test_metrics_have_loss_weight_and_the_norm_before_clipping(stage, n, k):
    """The transformation gets the loss."""
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1), plateau)
    zero = zero_on(n, stage=stage, micro_batches=k)
    params = zero.shard(START)
    step, state = zero.train_step(loss, tx), zero.optimizer(tx).init(params)
    params, state, metrics = step(params, state, X)
    value, grads = TARGET(START, X)
    norm = optax.global_norm(grads)
    np.testing.assert_allclose((metrics.loss, metrics.grad_norm), (value, norm), rtol=1e-5)
    assert float(metrics.weight) == n * k and state.inner[2].best_value == metrics.loss
    for name, leaf in zero.full(params).items():
        wanted = START[name] - 0.1 * 0.5 / norm * grads[name]
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)


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
    assert_same_bits(found["base"], base)
    np.testing.assert_allclose(found["head"]["w"], wanted["w"], rtol=1e-5)
    moments = jax.tree.leaves(zero_jax.logical(state.inner))
    assert [x.shape for x in moments if x.ndim] == [(7, 3), (7, 3)]
    grads = jax.eval_shape(zero.value_and_grad(objective), params, X)[1]
    assert [x.shape for x in jax.tree.leaves(grads["base"])] == [(), ()]


def test_evaluate_returns_loss_and_weight():
    """In one micro-batch; parameters may have fewer bits."""
    zero = zero_on(3, stage=3, micro_batches=4)
    params, evaluate = zero.shard(START), zero.evaluate(loss)
    value, weight = evaluate(params, X[:21])
    np.testing.assert_allclose(value, loss(START, X[:21]), rtol=1e-6)
    assert float(weight) == 3
    narrow = evaluate(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), X[:21])[0]
    np.testing.assert_allclose(narrow, value, rtol=2**-7)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replicas_sum_their_gradients(stage):
    """The padding of gradients is zero, and does not count in their norms."""
    zero = zero_jax.Zero(zero_jax.make_mesh(2, replica=3, devices=jax.devices()[:6]), stage)
    value, grads = zero.value_and_grad(loss)(zero.shard(START), X)
    want, wanted = TARGET(START, X)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for name, leaf in zero.full(grads).items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-4, atol=1e-6)
    for order in (1, 2, np.inf):
        trees = [jax.tree.leaves(tree) for tree in (grads, wanted)]
        norms = [np.linalg.norm(np.concatenate(list(map(np.ravel, x))), order) for x in trees]
        np.testing.assert_allclose(*norms, rtol=1e-5)


def test_statistics_of_padded_leaves_leave_out_the_padding():
    moved = jax.tree.map(lambda x: x + 1, zero_on().shard({"w": np.ones((7, 5), np.float32)}))
    statistics = jax.jit(lambda x: (optax.global_norm(x), x["w"].mean()))
    assert statistics(zero_jax.logical(moved)) == (pytest.approx(2 * 35**0.5), 2)


def test_steps_donate_and_compile_once():
    zero = zero_on(3, stage=3)
    tx = zero.optimizer(optax.adam(1e-2))
    step, params = zero.train_step(loss, tx), zero.shard(START)
    params, state, _ = step(params, tx.init(params), X)
    with pytest.raises(ValueError, match="22"):
        step(params, state, X[:22])
    events, live = [], []

    def heard(name, *_, **__):
        events.append(name)

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
