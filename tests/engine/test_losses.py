"""What a loss may return, what becomes of it, and what is refused before memory is taken."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zero_jax

X = jax.random.normal(jax.random.key(1), (16, 4))
W = {"w": jax.random.normal(jax.random.key(0), (4, 8))}


def zero_on(n=4, replica=1, **settings):
    mesh = zero_jax.make_mesh(n, replica=replica, devices=jax.devices()[: n * replica])
    return zero_jax.Zero(mesh, **settings)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("replica", [1, 2])
def test_rows_come_back_in_order_means_are_means_and_counters_stay(k, replica):
    """An accuracy computed from returned logits is that of one device."""

    def loss(params, x, count):
        logits = jnp.tanh(x @ params["w"])
        aux = {"logits": logits, "mean": jnp.mean(logits), "spread": logits.mean(0), "n": count + 1}
        return jnp.mean(logits**2), aux

    zero = zero_on(4, replica, micro_batches=k)
    grad_fn = zero.value_and_grad(loss, has_aux=True)
    (_, aux), _ = grad_fn(zero.shard(W), X, jnp.int32(6))
    _, want = loss(W, X, 6)
    for name in want:
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-5, atol=1e-6)
    evaluated, _ = zero.evaluate(loss, has_aux=True)(zero.shard(W), X, jnp.int32(6))
    np.testing.assert_allclose(evaluated[1]["logits"], want["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_a_typed_key_that_is_the_same_everywhere_comes_back(k):
    def loss(params, x):
        return jnp.mean(x @ params["w"]), {"key": jax.random.key(5), "old": jax.random.PRNGKey(6)}

    zero = zero_on(micro_batches=k)
    (_, aux), _ = zero.value_and_grad(loss, has_aux=True)(zero.shard(W), X)
    np.testing.assert_array_equal(
        jax.random.key_data(aux["key"]), jax.random.key_data(jax.random.key(5))
    )
    np.testing.assert_array_equal(aux["old"], jax.random.PRNGKey(6))


def test_a_vector_as_long_as_the_rows_of_a_device_is_no_rows():
    """Four rows a device, four channels: statistics, not rows. Only rows grow with the batch."""

    def loss(params, x):
        return jnp.mean(x @ params["w"]), (x.mean(0), x.mean(1))

    (_, (channels, rows)), _ = zero_on().value_and_grad(loss, has_aux=True)(zero_on().shard(W), X)
    np.testing.assert_allclose(channels, X.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(rows, X.mean(1), rtol=1e-5, atol=1e-7)


def test_rows_of_a_loss_for_one_number_of_rows_are_refused_and_statistics_of_it_are_not():
    def loss(params, x, rows=True):
        means = x.reshape(4, 4).mean(0)
        return jnp.mean(x @ params["w"]), {"m": means if rows else means[None]}

    zero = zero_on()
    with pytest.raises(ValueError, match=r"'m'.*4 rows.*can't be told.*8 rows.*\[None\]"):
        zero.value_and_grad(loss, has_aux=True)(zero.shard(W), X)
    step = zero.value_and_grad(lambda p, x: loss(p, x, rows=False), has_aux=True)
    np.testing.assert_allclose(
        step(zero.shard(W), X)[0][1]["m"][0], X.mean(0), rtol=1e-5, atol=1e-7
    )


def test_integers_that_differ_between_devices_are_refused_and_sums_of_them_are_not():
    def loss(params, x, axes=None):
        right = (x[:, 0] > 0).sum()
        return jnp.mean(x @ params["w"]), right if axes is None else jax.lax.psum(right, axes)

    zero = zero_on(4, 2)
    with pytest.raises(ValueError, match=r"differs between devices.*zero\.batch_axes"):
        zero.value_and_grad(loss, has_aux=True)(zero.shard(W), X)
    summed = zero.value_and_grad(lambda p, x: loss(p, x, zero.batch_axes), has_aux=True)
    assert summed(zero.shard(W), X)[0][1] == (X[:, 0] > 0).sum()


def test_a_weight_that_depends_on_parameters_is_refused_unless_it_is_stopped():
    def loss(params, x, stop=False):
        logits = x @ params["w"]
        weight = jnp.sum(jax.nn.sigmoid(logits))
        counted = jnp.sum(logits > 0)  # no gradient goes through a comparison
        weight = jax.lax.stop_gradient(weight) if stop else weight
        return zero_jax.Weighted(jnp.sum(logits**2), weight + counted)

    zero = zero_on()
    with pytest.raises(ValueError, match="depends on the parameters.*stop_gradient"):
        zero.value_and_grad(loss)(zero.shard(W), X)
    value, _ = zero.value_and_grad(lambda p, x: loss(p, x, True))(zero.shard(W), X)
    total, weight = loss(W, X)
    np.testing.assert_allclose(value, total / weight, rtol=1e-6)


def test_fp16_gradients_follow_the_weight_and_not_the_largest_array():
    """A batch with an array of a million numbers, of which one row counts."""
    zero = zero_on(4, precision="fp16")
    batch = (X, jnp.zeros((16, 2**16)).at[0, 0].set(1.0))

    def loss(params, batch):
        x, big = batch
        mask = big[:, 0]
        return zero_jax.Weighted(1e-4 * jnp.sum(mask * jnp.mean(x @ params["w"], 1)), mask.sum())

    params = zero.shard(W)
    _, grads = zero.value_and_grad(loss)(params, batch, loss_scale=1.0)
    want = 1e-4 * np.broadcast_to(np.asarray(X[0])[:, None] / 8, (4, 8))
    np.testing.assert_allclose(zero.full(grads)["w"], want, rtol=2e-2, atol=1e-7)


def test_finite_gradients_whose_squares_overflow_are_no_reason_to_skip():
    zero = zero_on()
    tx = optax.sgd(1e-20)
    step, params = zero.train_step(lambda p, x: 1e20 * jnp.mean(x @ p["w"]), tx), zero.shard(W)
    params, _, metrics = step(params, zero.optimizer(tx).init(params), X)
    assert metrics.skipped == 0
    want = jax.grad(lambda p: 1e20 * jnp.mean(X @ p["w"]))(W)["w"]
    norm = np.linalg.norm(np.asarray(want, np.float64))
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-5)
    np.testing.assert_allclose(zero.full(params)["w"], W["w"] - 1e-20 * want, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_the_guard_a_transformation_sees_gradients_as_they_are(stage):
    def loss(params, x):
        return jnp.mean(x @ params["w"]) + jnp.sqrt(params["w"][0, 0] - params["w"][0, 0])

    for guard, tx, moved in ((True, optax.zero_nans(), False), (False, optax.zero_nans(), True)):
        tx = optax.chain(tx, optax.sgd(1.0))
        zero = zero_on(stage=stage, guard=guard)
        params = zero.shard(W)
        step = zero.train_step(loss, tx)
        params, _, metrics = step(params, zero.optimizer(tx).init(params), X)
        assert metrics.skipped == (not moved)
        assert (np.asarray(zero.full(params)["w"]) != np.asarray(W["w"])).any() == moved
        assert np.isfinite(zero.full(params)["w"]).all()
    with pytest.raises(ValueError, match="guard=False with fp16"):
        zero_on(guard=False, precision="fp16")


@pytest.mark.parametrize("named", [False, True])
def test_batch_norm_over_all_replicas_and_over_an_axis_of_another_name(named):
    """With two replicas the name "data" alone would average over one of them."""
    if named:
        mesh = zero_jax.make_mesh(data_axis="batch")
        zero = zero_jax.Zero(mesh)
        axes = "batch"
    else:
        zero = zero_on(4, 2)
        axes = zero.batch_axes
    assert zero.batch_axes == (("batch",) if named else ("replica", "data"))

    def model(axis):
        norm = nn.BatchNorm(use_running_average=False, axis_name=axis)
        return nn.Sequential([nn.Dense(6), norm])

    variables = model(None).init(jax.random.key(0), X)

    def loss(axis, params, x):
        both = {"params": params, "batch_stats": variables["batch_stats"]}
        y, _ = model(axis).apply(both, x, mutable=["batch_stats"])
        return jnp.mean(jnp.tanh(y) ** 3)

    params = variables["params"]
    value, grads = zero.value_and_grad(lambda p, x: loss(axes, p, x))(zero.shard(params), X)
    want, wanted = jax.value_and_grad(lambda p: loss(None, p, X))(params)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(zero.full(grads)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_gradients_of_each_example_are_refused():
    private = optax.contrib.differentially_private_aggregate(1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"gradient \(4, 8\) of w.*each example"):
        zero_on().optimizer(private).init(zero_on().shard(W))
    wants_more = optax.chain(private, optax.polyak_sgd(0.1))  # can't be tried at init
    zero = zero_on()
    params, tx = zero.shard(W), zero.optimizer(wants_more)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"gradient \(4, 8\) of w.*each example"):
        tx.update(params, state, params, value=jnp.float32(1))


def test_a_loop_without_a_gradient_is_refused_with_what_it_reads():
    def loss(params, x):
        grown = jax.lax.while_loop(
            lambda c: c.sum() < 10, lambda c: c + jnp.abs(params["w"]).sum(), x.sum() * 0
        )
        return jnp.mean(x @ params["w"]) + grown

    zero = zero_on()
    with pytest.raises(ValueError, match=r"loop of unknown length.*reads w, .*lax\.scan"):
        zero.value_and_grad(loss)(zero.shard(W), X)
    frozen = zero_on(frozen="w")
    frozen.evaluate(loss)(frozen.shard(W), X)


def test_paths_that_look_alike_are_told_apart():
    params = {"a": jnp.ones((4, 8)), "a/b": 2 * jnp.ones((4, 8))}
    zero = zero_on()
    value, grads = zero.value_and_grad(lambda p, x: jnp.mean(x @ (p["a"] * p["a/b"])))(
        zero.shard(params), X
    )
    np.testing.assert_allclose(value, jnp.mean(X @ (2 * params["a"])), rtol=1e-6)
    np.testing.assert_allclose(zero.full(grads)["a"], 2 * zero.full(grads)["a/b"], rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_negative_weight_anywhere_skips_the_step(stage, k):
    """Weights count rows or tokens. One that is below zero is a slip, also if the sum is not."""

    def loss(params, batch):
        x, weight_of = batch
        weight = jnp.sum(weight_of)
        return zero_jax.Weighted(weight * jnp.mean((x @ params["w"]) ** 2), weight)

    zero = zero_on(stage=stage, micro_batches=k)
    params, tx = zero.shard(W), zero.optimizer(optax.sgd(0.1))
    step, state = zero.train_step(loss, tx), tx.init(params)
    good = jnp.ones(16)
    params, state, metrics = step(params, state, (X, good))
    assert (int(metrics.skipped), float(metrics.weight)) == (0, 16)
    before = zero.full(params)
    params, state, metrics = step(params, state, (X, good.at[0].set(-9.0)))
    assert int(metrics.skipped) == 1 and np.isnan(metrics.loss)
    np.testing.assert_array_equal(zero.full(params)["w"], before["w"])
