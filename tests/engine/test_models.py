"""Models stay as they are for one device: linen, NNX, plain functions, scan and remat."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import Problem, train_plain, train_zero, ulps

import zero_jax

TX = optax.sgd(1e-1)
X = jax.random.normal(jax.random.key(1), (24, 10))


def assert_same(make, loss, batch=X, **settings):
    problem = Problem(make, loss, batch)
    want = train_plain(problem, TX, 3)
    for n, stage in ((4, 1), (4, 2), (4, 3), (3, 3)):
        losses, params, _ = train_zero(problem, TX, 3, n, stage=stage, **settings)
        assert ulps(jnp.array(losses), jnp.array(want[0])) < 64
        assert ulps(params, want[1]) < 64


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(10)(nn.LayerNorm()(x))), None


class Stack(nn.Module):
    """Four scanned layers, with or without the model's own remat."""

    remat: bool
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scanned = nn.scan(
            layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=4
        )
        return nn.Dense(3)(scanned()(x, None)[0])


@pytest.mark.parametrize("own_remat", [False, True])
@pytest.mark.parametrize("policy", ["none", "block"])
def test_linen_scan(policy, own_remat):
    model = Stack(own_remat)
    assert_same(
        lambda: model.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(model.apply(params, x) ** 2),
        remat=policy,
    )


def test_linen_with_partitioned_boxes_of_its_own():
    dense = nn.Dense(
        6, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    )
    assert_same(
        lambda: dense.init(jax.random.key(0), X[:1]),
        lambda params, x: jnp.mean(dense.apply(params, x) ** 2),
    )


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(10, rngs=rngs)
        self.dense = nnx.Linear(10, 10, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(self.norm(x)))


class NnxStack(nnx.Module):
    def __init__(self, rngs, remat):
        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def stacked(rngs):
            return NnxLayer(rngs)

        self.remat = remat
        self.layers = stacked(rngs)
        self.head = nnx.Linear(10, 3, rngs=rngs)

    def __call__(self, x):
        def layer(x, block):
            return block(x)

        body = nnx.remat(layer) if self.remat else layer
        return self.head(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


@pytest.mark.parametrize("own_remat", [False, True])
def test_nnx_scan(own_remat):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NnxStack(nnx.Rngs(0), own_remat)))
    assert_same(
        lambda: nnx.state(NnxStack(nnx.Rngs(0), own_remat), nnx.Param),
        lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2),
        remat="dots",
    )


def test_a_plain_function_with_a_scan_over_its_layers():
    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["w"] + w["b"]), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def make():
        keys = jax.random.split(jax.random.key(0), 4)
        return {
            "w": jax.vmap(lambda k: jax.random.normal(k, (10, 10)))(keys),
            "b": jnp.ones((4, 10)),
        }

    assert_same(make, loss, remat="block")


def test_jnp_functions_take_parameters():
    assert_same(
        lambda: {"w": jax.random.normal(jax.random.key(0), (10, 8))},
        lambda params, x: jnp.mean(jnp.dot(x, params["w"]) ** 2) + jnp.mean(x @ params["w"]),
    )


def test_tied_weights_are_one_leaf_and_move_on_every_device():
    def loss(params, x):
        w = params["w"]
        return jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2)

    assert_same(lambda: {"w": jax.random.normal(jax.random.key(0), (10, 7))}, loss)


def test_a_penalty_on_all_leaves_sees_whole_leaves():
    def loss(params, x):
        penalty = sum(jnp.sum(p**2) / p.size for p in jax.tree.leaves(params))
        return jnp.mean((x @ params["deep"]["w"]) ** 2) + penalty

    assert_same(lambda: {"deep": {"w": jax.random.normal(jax.random.key(0), (10, 7))}}, loss)


def summed_squares(tree):
    return sum(jnp.sum(q**2) for q in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: summed_squares(jax.jit(lambda p: jax.tree.map(jnp.ravel, p))(p)) * x.mean(),
        lambda p, x: jnp.vdot(jax.grad(lambda p: jnp.mean(x @ p["w"] ** 2))(p)["w"], p["w"]),
    ],
    ids=["through a jitted function", "differentiated inside the loss"],
)
def test_what_a_loss_does_with_parameters_is_done_with_whole_ones(loss):
    assert_same(lambda: {"w": jax.random.normal(jax.random.key(0), (10, 8))}, loss)


def test_a_parameter_may_be_returned():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(lambda: {"w": jnp.arange(30.0).reshape(10, 3)})
    (_, aux), _ = zero.value_and_grad(lambda p, x: (jnp.mean(x @ p["w"]), p["w"].T), has_aux=True)(
        params, X
    )
    np.testing.assert_array_equal(aux, np.arange(30.0).reshape(10, 3).T)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stack_of_vectors_alone_is_scanned_like_any_other(stage):
    """One gain a layer looks like a plain matrix."""
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:4]), stage=stage)

    def make():
        return {"gain": jnp.arange(4.0)[:, None]}

    def loss(params, x):
        def layer(h, gain):
            return h + gain * jnp.tanh(h), None

        return jnp.mean(jax.lax.scan(layer, x[:, :4], params["gain"])[0] ** 2)

    value, grads = zero.value_and_grad(loss)(zero.init(make), X)
    wanted = jax.value_and_grad(loss)(make(), X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(zero.full(grads)["gain"], wanted[1]["gain"], rtol=1e-5)


def test_parameters_are_rows_slices_and_operands_on_either_side():
    def loss(params, x):
        rows = [row for row in params["w"]]
        return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(2 * params["w"] + 1) + rows[3][0]

    assert len(X) % 3 == 0
    assert_same(lambda: {"w": jax.random.normal(jax.random.key(0), (10, 8))}, loss)


def test_what_a_loss_sees_is_the_whole_leaf_in_the_compute_dtype():
    seen = {}

    def loss(params, x):
        w, ids = params["w"], params["ids"]
        seen.update(shape=w.shape, size=w.size, dtype=w.dtype, ids=ids.dtype, same=w is not None)
        return jnp.mean(x @ w) + jnp.mean(ids)

    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, precision="bf16")
    params = zero.init(lambda: {"w": jnp.ones((10, 16)), "ids": jnp.arange(16)})
    zero.value_and_grad(loss)(params, X)
    assert seen == {
        "shape": (10, 16),
        "size": 160,
        "dtype": jnp.bfloat16,
        "ids": jnp.int32,
        "same": True,
    }


def test_parameters_that_the_loss_casts_itself():
    def loss(params, x):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return jnp.mean((x @ half["w"]) ** 2)

    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, precision="bf16")
    params = zero.init(lambda: {"w": jnp.ones((16, 8))})
    value, _ = zero.value_and_grad(loss)(params, jnp.ones((8, 16)))
    assert float(value) == 256


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))


def test_dropout_keys_differ_between_devices_and_micro_batches():
    """With the key folded per part, N x k parts give the same masks however they are spread."""
    model = Dropped()
    same_rows = jnp.ones((8, 10))

    def loss(params, x, key):
        out = model.apply(params, x, True, rngs={"dropout": key})
        return jnp.mean(out**2), jnp.mean(out)

    values = []
    for n, k in ((8, 1), (4, 2), (2, 4), (1, 8)):
        zero = zero_jax.Zero(
            zero_jax.make_mesh(devices=jax.devices()[:n]), stage=3, micro_batches=k
        )
        params = zero.init(lambda: model.init(jax.random.key(0), X[:1], False))
        grad_fn = zero.value_and_grad(loss, has_aux=True)
        (value, aux), _ = grad_fn(params, same_rows, jax.random.key(7))
        (other, _), _ = grad_fn(params, same_rows, jax.random.key(8))
        assert value != other
        values.append([float(value), float(aux)])
    np.testing.assert_allclose(values, [values[0]] * 4, rtol=1e-6)
    # One mask for all rows would give the same loss on each: the mean of 8 differs from it.
    one = loss(zero.full(params), same_rows[:1], jax.random.fold_in(jax.random.key(7), 0))[0]
    assert abs(float(one) - values[0][0]) > 1e-3


def test_two_models_with_two_optimizers_share_a_mesh():
    mesh = zero_jax.make_mesh()
    zeros = [zero_jax.Zero(mesh, stage=s) for s in (1, 3)]
    made = [lambda: {"w": jnp.ones((16, 8))}, lambda: {"v": jnp.ones((8, 8)), "b": jnp.zeros(8)}]
    txs = [optax.adam(1e-1), optax.lion(1e-2)]
    params = [z.init(m) for z, m in zip(zeros, made, strict=True)]
    states = [z.optimizer(t).init(p) for z, t, p in zip(zeros, txs, params, strict=True)]

    def first(p, x):
        return jnp.mean((x @ p["w"]) ** 2)

    def second(p, x):
        return jnp.mean((x[:, :8] @ p["v"] + p["b"]) ** 2)

    losses = []
    steps = [z.train_step(f, t) for z, f, t in zip(zeros, (first, second), txs, strict=True)]
    for _ in range(3):
        for i in (0, 1):
            params[i], states[i], metrics = steps[i](params[i], states[i], jnp.ones((8, 16)))
            losses.append(float(metrics.loss))
    assert losses[4] < losses[2] < losses[0]
    assert losses[5] < losses[3] < losses[1]
