"""Unchanged models train as on one device: Equinox, Haiku, linen, NNX, plain functions."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from one_device import Case, check_gradients, check_parity, zero_on
from problems import ulps

X, KEY, WIDTH = jax.random.normal(jax.random.key(1), (24, 10)), jax.random.key(0), 10


def fours(x):
    """A sequence of four vectors for each row."""
    return jnp.stack([x, jnp.sin(x), x * x, jnp.cos(3 * x)], 1)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


class Linen(nn.Module):
    """Scanned layers, perhaps with remat; attention with named dims, a norm of weights, a
    convolution, computed parameters. (Biases of keys have a true gradient of zero.)"""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        def doubled(variables):
            return jax.tree.map(lambda w: w + jnp.flip(w, 0), variables)

        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x = fours(nn.scan(layer, **kinds, length=4)()(x, None)[0])
        dense = nn.map_variables(nn.Dense, "params", doubled, init=True)
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None, None))
        x = x + nn.MultiHeadDotProductAttention(2, kernel_init=boxed, use_bias=False)(x)
        x = nn.tanh(nn.WeightNorm(nn.Dense(WIDTH))(x))
        return dense(5)(nn.tanh(dense(WIDTH)(nn.Conv(3, (3,))(x))))


def haiku_forward(x):
    for _ in range(2):
        x = x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))
    return hk.Linear(3)(x)


def of_equinox():
    def layers():
        attention, mlp = eqx.nn.MultiheadAttention, eqx.nn.MLP
        keys, norm = jax.random.split(KEY, 2), eqx.nn.LayerNorm(WIDTH)
        return [(attention(2, 10, key=key), norm, mlp(10, 10, 12, 1, key=key)) for key in keys]

    static = eqx.filter(layers(), eqx.is_array, inverse=True)

    def apply(params, x):
        def one(x):
            for attention, norm, mlp in eqx.combine(params, static):
                h = jax.vmap(norm)(x)
                x = x + jax.vmap(mlp)(attention(h, h, h))
            return x

        return jax.vmap(one)(fours(x))

    return lambda: eqx.filter(layers(), eqx.is_array), apply


def leaves():
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
    return jax.lax.scan(gained, x[:, :4], params["gain"])[0]


def uses(params, x):
    """Tied weights, rows, slices, operands on both sides, a jitted function, a derivative."""
    w, rows = params["w"], list(params["w"])
    flat = jax.jit(lambda p: jax.tree.map(jnp.ravel, p))(params)
    penalty = sum(jnp.sum(q**2) / q.size for q in jax.tree.leaves(flat))
    slope = jax.grad(lambda p: jnp.mean(x @ p["w"] ** 2))(params)["w"]
    tied = jnp.mean((jnp.tanh(jnp.dot(x, w)) @ w.T - x) ** 2)
    return tied + penalty + jnp.vdot(slope, w) + jnp.mean(2 * w[1:3] + 1) + rows[3][0]


@functools.cache
def together(remat):
    """All models in one loss, each with its own parameters."""
    haiku = hk.without_apply_rng(hk.transform(haiku_forward))
    modules = [(lambda m=m: m.init(KEY, X[:1]), m.apply) for m in (Linen(remat), haiku)]
    models = [*modules, of_equinox(), (leaves, scans)]

    def loss(params, x):
        pairs = zip(models, params, strict=False)
        return sum(jnp.mean(apply(p, x) ** 2) for (_, apply), p in pairs) + uses(params[-1], x)

    return Case(lambda: [*(make() for make, _ in models), leaves()], loss, X)


@pytest.mark.parametrize(
    ("own", "n", "settings"), [(False, 3, {"remat": "block"}), (True, 4, {"stage": 1})]
)
def test_models_train_as_on_one_device(own, n, settings):
    """With remat of the models or not. Not Adam: it makes steps of the rounding of a bias."""
    check_parity(together(own), {"data": n}, optax.sgd(1e-2), 3, **settings)


SEEN = []


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(10, 33, rngs=rngs), nnx.Linear(33, 1, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(5), on_get_value=self.seen)

    @staticmethod
    def seen(variable, value):
        SEEN.append(value.shape)
        return value

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x))) * self.scale[...].mean()


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize(("stage", "jit"), [(2, nnx.jit), (3, lambda step: step)])
def test_an_optimizer_of_nnx_updates_a_module_in_place(stage, jit):
    zero, plain, tx = zero_on(4, stage), Net(nnx.Rngs(0)), optax.sgd(0.05, momentum=0.9)
    graphdef, start = nnx.split(plain)
    model = nnx.merge(graphdef, zero.shard(start))

    def loss(params, x):
        return jnp.mean((nnx.merge(graphdef, params)(x) - 1) ** 2)

    def trained(model, tx, grad_fn, jit):
        def step(model, optimizer):
            value, grads = grad_fn(nnx.state(model, nnx.Param), X)
            optimizer.update(model, grads)
            return value

        optimizer, step = nnx.Optimizer(model, tx, wrt=nnx.Param), jit(step)
        return [step(model, optimizer) for _ in range(3)], nnx.state(optimizer)

    wanted, _ = trained(plain, tx, jax.value_and_grad(loss), nnx.jit)
    SEEN.clear()
    losses, state = trained(model, zero.optimizer(tx), zero.value_and_grad(loss), jit)
    assert set(SEEN) == {(5,)}, "hooks of a variable see the full array"
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert ulps(zero.full(nnx.state(model)), nnx.state(plain)) < 256
    moments = [x for x in jax.tree.leaves(state) if x.size > 5]
    assert moments and all(x.sharding.shard_shape(x.shape) != x.shape for x in moments)


def test_a_loss_sees_full_leaves_in_the_compute_dtype_and_may_cast_and_return_them():
    def loss(params, x):
        w, ids = params["w"], params["ids"]
        assert (w.shape, w.size, w.dtype, ids.dtype) == ((10, 16), 160, jnp.bfloat16, jnp.int32)
        return jnp.mean(x @ w.astype(jnp.bfloat16)) + jnp.sum(ids), w.T

    w = np.ones((10, 16), np.float32) * np.arange(10, dtype=np.float32)[:, None]
    zero = zero_on(8, precision="bf16")
    params = zero.shard({"w": w, "ids": jnp.arange(16)})
    (value, aux), _ = zero.value_and_grad(loss, has_aux=True)(params, jnp.ones((8, 10)))
    assert float(value) == 45 + 120
    np.testing.assert_array_equal(aux, w.T)


def test_dropout_keys_differ_between_devices_and_micro_batches():
    """With the key folded per part, N x k parts give the same masks on any number of devices."""
    same_rows, w = jnp.ones((8, 10)), {"w": jax.random.normal(KEY, (10, 4))}

    def loss(params, x, key):
        kept = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})
        return jnp.mean((kept @ params["w"]) ** 2)

    values = []
    for n, k in ((8, 1), (2, 4), (1, 8)):
        zero = zero_on(n, micro_batches=k)
        run = functools.partial(zero.value_and_grad(loss), zero.shard(w), same_rows)
        values.append(float(run(jax.random.key(7))[0]))
        assert values[-1] != float(run(jax.random.key(8))[0])
    np.testing.assert_allclose(values, values[0], rtol=1e-6)
    # One mask for all rows would give the same loss on each: the mean of 8 differs from it.
    one = loss(w, same_rows[:1], jax.random.fold_in(jax.random.key(7), 0))
    assert abs(float(one) - values[0]) > 1e-3


# fmt: off
# Operations of libraries on a leaf of (4, 8) over three devices: sharded along 8, with padding.
OPERATIONS = {
    "rfft": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "rfft of the transpose": lambda w: jnp.abs(jnp.fft.rfft(w.T)),
    "fft2": lambda w: jnp.abs(jnp.fft.fft2(w)),
    "convolution": lambda w: jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(jnp.tanh(w))),
    "vmap": lambda w: jnp.abs(jax.vmap(jnp.fft.fft)(w)),
    "remat": jax.checkpoint(lambda w: jnp.abs(jnp.fft.fft(w))),
    "scan": lambda w: jax.lax.map(lambda x: jnp.abs(jnp.fft.rfft(x * w)).sum(), jnp.ones((2, 1))),
    "cond": lambda w: jax.lax.cond(
        w[0, 0] > 9, jnp.sum, lambda w: jnp.abs(jnp.fft.fft(w)).sum(), w),
    "qr": lambda w: jnp.abs(jnp.linalg.qr(w.T)[1]),
    "svd": lambda w: jnp.linalg.svd(w, compute_uv=False),
    "eigh": lambda w: jnp.linalg.eigh(w.T @ w + jnp.diag(jnp.arange(8.0)))[0],
    "cholesky": lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(4)),
    "solve": lambda w: jnp.linalg.solve(w @ w.T + jnp.eye(4), w),
    "sort": lambda w: jnp.sort(w, axis=0) * jnp.arange(4.0)[:, None],
    "top_k": lambda w: jax.lax.top_k(w, 3)[0],
    "conv": lambda w: jnp.convolve(w[0], w[1]),
}
# fmt: on


def test_gradients_of_operations_of_libraries_are_those_of_one_device():
    def loss(params, x):
        return sum(jnp.mean(OPERATIONS[name](w) ** 2) for name, w in params.items()) * x.mean()

    w = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
    check_gradients(loss, dict.fromkeys(OPERATIONS, w), jnp.ones((12, 4)), {"data": 3})
