"""Models written for one device train as on one device: linen, NNX, plain functions, own remat."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from one_device import Case, check_gradients, check_parity, zero_on

X = jax.random.normal(jax.random.key(1), (24, 10))
KEY = jax.random.key(0)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(10)(nn.LayerNorm()(x))), None


class Stack(nn.Module):
    """Four scanned layers, with or without the model's own remat."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.Dense(3)(nn.scan(layer, **kinds, length=4)()(x, None)[0])


def linen(model):
    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return lambda: model.init(KEY, X[:1]), loss


def boxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    return linen(nn.Dense(6, kernel_init=init))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(10, rngs=rngs)
        self.dense = nnx.Linear(10, 10, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(self.norm(x)))


class NnxStack(nnx.Module):
    def __init__(self, remat):
        self.remat = remat
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(NnxLayer))(nnx.Rngs(0))
        self.head = nnx.Linear(10, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        body = nnx.remat(lambda x, block: block(x)) if self.remat else lambda x, block: block(x)
        return self.head(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


def stack_of_nnx(remat):
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: NnxStack(remat)))

    def loss(params, x):
        return jnp.mean(nnx.merge(graphdef, params)(x) ** 2)

    return lambda: nnx.state(NnxStack(remat), nnx.Param), loss


def make():
    w = jax.random.normal(KEY, (5, 10, 10))
    layers = {"w": w[1:], "b": jnp.ones((4, 10))}
    return {"w": w[0, :, :7], "layers": layers, "gain": jnp.arange(4.0)[:, None]}


def scans(params, x):
    """Layers, and one gain a layer, which looks like a plain matrix."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    def gained(x, gain):
        return x + gain * jnp.tanh(x), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jax.lax.scan(gained, x[:, :4], params["gain"])[0] ** 2)


def uses(params, x):
    """Tied weights, rows, slices, operands on both sides, a jitted function, a derivative."""
    w, rows = params["w"], list(params["w"])
    flat = jax.jit(lambda p: jax.tree.map(jnp.ravel, p))(params)
    penalty = sum(jnp.sum(q**2) / q.size for q in jax.tree.leaves(flat))
    slope = jax.grad(lambda p: jnp.mean(x @ p["w"] ** 2))(params)["w"]
    tied = jnp.mean((jnp.tanh(jnp.dot(x, w)) @ w.T - x) ** 2)
    return tied + penalty + jnp.vdot(slope, w) + jnp.mean(2 * w[1:3] + 1) + rows[3][0]


@pytest.mark.parametrize(
    ("model", "n", "settings"),
    [
        (linen(Stack(False)), 3, {"remat": "block"}),
        (linen(Stack(True)), 4, {"stage": 2}),
        (boxed(), 3, {}),
        (stack_of_nnx(False), 4, {"stage": 1, "remat": "dots"}),
        (stack_of_nnx(True), 3, {"remat": "dots"}),
        ((make, scans), 3, {"remat": "block"}),
        ((make, scans), 4, {"stage": 1}),
        ((make, uses), 3, {}),
        ((make, uses), 4, {"stage": 2}),
    ],
)
def test_steps_equal_one_device(model, n, settings):
    check_parity(Case(*model, X), {"data": n}, optax.sgd(1e-2), 3, **settings)


def test_a_loss_sees_full_leaves_in_the_compute_dtype_and_may_cast_and_return_them():
    seen = {}

    def loss(params, x):
        w, ids = params["w"], params["ids"]
        seen.update(shape=w.shape, size=w.size, dtypes=(w.dtype, ids.dtype), same=w is not None)
        return jnp.mean(x @ w.astype(jnp.bfloat16)) + jnp.sum(ids), w.T

    w = np.ones((10, 16), np.float32) * np.arange(10, dtype=np.float32)[:, None]
    zero = zero_on({"data": 8}, precision="bf16")
    params = zero.shard({"w": w, "ids": jnp.arange(16)})
    (value, aux), _ = zero.value_and_grad(loss, has_aux=True)(params, jnp.ones((8, 10)))
    assert float(value) == 45 + 120
    np.testing.assert_array_equal(aux, w.T)
    dtypes = (jnp.bfloat16, jnp.int32)
    assert seen == {"shape": (10, 16), "size": 160, "dtypes": dtypes, "same": True}


def test_dropout_keys_differ_between_devices_and_micro_batches():
    """With the key folded per part, N x k parts give the same masks on any number of devices."""
    same_rows, w = jnp.ones((8, 10)), {"w": jax.random.normal(KEY, (10, 4))}

    def loss(params, x, key):
        kept = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})
        return jnp.mean((kept @ params["w"]) ** 2)

    values = []
    for n, k in ((8, 1), (2, 4), (1, 8)):
        zero = zero_on({"data": n}, micro_batches=k)
        run = functools.partial(zero.value_and_grad(loss), zero.shard(w), same_rows)
        values.append(float(run(jax.random.key(7))[0]))
        assert values[-1] != float(run(jax.random.key(8))[0])
    np.testing.assert_allclose(values, values[0], rtol=1e-6)
    # One mask for all rows would give the same loss on each: the mean of 8 differs from it.
    one = loss(w, same_rows[:1], jax.random.fold_in(jax.random.key(7), 0))
    assert abs(float(one) - values[0]) > 1e-3


# Operations of libraries on a leaf of (4, 8) over three devices: sharded along 8, with padding.


def in_loop(w):
    return jax.lax.map(lambda x: jnp.abs(jnp.fft.rfft(x * w)).sum(), jnp.ones((2, 1)))


def in_branch(w):
    return jax.lax.cond(w[0, 0] > 9, jnp.sum, lambda w: jnp.abs(jnp.fft.fft(w)).sum(), w)


OPERATIONS = {
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "rfft of the transpose": lambda w: jnp.abs(jnp.fft.rfft(w.T)),
    "fft2": lambda w: jnp.abs(jnp.fft.fft2(w)),
    "convolution": lambda w: jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(jnp.tanh(w))),
    "vmap": lambda w: jnp.abs(jax.vmap(jnp.fft.fft)(w)),
    "remat": jax.checkpoint(lambda w: jnp.abs(jnp.fft.fft(w))),
    "scan": in_loop,
    "cond": in_branch,
    "qr": lambda w: jnp.abs(jnp.linalg.qr(w.T)[1]),
    "svd": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(w.T @ w + jnp.diag(jnp.arange(8.0)))[0],
    "cholesky": lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(4)),
    "solve": lambda w: jnp.linalg.solve(w @ w.T + jnp.eye(4), w),
    "sort": lambda w: jnp.sort(w, axis=0) * jnp.arange(4.0)[:, None],
    "top_k": lambda w: jax.lax.top_k(w, 3)[0],
    "conv": lambda w: jnp.convolve(w[0], w[1]),
}


def test_gradients_of_operations_of_libraries_are_those_of_one_device():
    def loss(params, x):
        return sum(jnp.mean(OPERATIONS[name](w) ** 2) for name, w in params.items()) * x.mean()

    w = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
    check_gradients(loss, dict.fromkeys(OPERATIONS, w), jnp.ones((12, 4)), {"data": 3})
