"""Training steps with products in fp8, on one and several devices, at every stage."""

import dataclasses
import functools

import conftest  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.adapters.lora import Lora
from zero_jax.fp8.formats import E4M3
from zero_jax.models import decoder, gpt
from zero_jax.plan.fp8_check import traced_flops
from zero_jax.plan.operations import device_part
from zero_jax.plan.text_model import TextModel, shifted

ROWS = 24
FP8 = zero_jax.Precision("fp32", matmul_dtype="fp8", fp8_params="kernel")


def mesh_of(**axes):
    count = int(np.prod([*axes.values()]))
    return zero_jax.make_mesh(**axes, devices=jax.devices()[:count])


# Every sum in this problem is exact in fp32: small multiples of powers of two.


def exact_params(layers=2, width=32):
    rng, shape = np.random.default_rng(0), (layers, width, width)
    numbers = rng.choice([-1, 1], shape) * rng.integers(8, 16, shape) / 32
    bias = rng.integers(-4, 5, (layers, width)) / 4
    return {"kernel": jnp.float32(numbers), "bias": jnp.float32(bias)}


def exact_batch(width=32):
    rng = np.random.default_rng(1)
    x, t = rng.integers(-2, 3, (2, ROWS, width)) / 2
    return x.astype(np.float32), t.astype(np.float32)


def exact_loss(params, batch):
    x, t = batch

    def layer(x, own):
        return x @ own["kernel"] + own["bias"], None

    x, _ = jax.lax.scan(layer, x, params)
    return zero_jax.Weighted(jnp.sum(x * t), jnp.float32(x.shape[0]))


def sliced_loss(params, batch):
    """The same with layers in Python, which take slices of the stacks."""
    x, t = batch
    for i in range(len(params["kernel"])):
        x = x @ params["kernel"][i] + params["bias"][i]
    return zero_jax.Weighted(jnp.sum(x * t), jnp.float32(x.shape[0]))


def listed_loss(params, batch):
    """The same with parameters of their own for each layer, the last one transposed."""
    x, t = batch
    for own in params[:-1]:
        x = x @ own["kernel"] + own["bias"]
    x = (params[-1]["kernel"] @ x.T).T + params[-1]["bias"]
    return zero_jax.Weighted(jnp.sum(x * t), jnp.float32(x.shape[0]))


def listed(params):
    layers = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(len(params["bias"]))]
    layers[-1]["kernel"] = layers[-1]["kernel"].T
    return layers


def stacked(layers):
    layers[-1]["kernel"] = layers[-1]["kernel"].T
    return jax.tree.map(lambda *own: np.stack(own), *layers)


def exact_step(devices, stage, form="scanned", **settings):
    mesh = mesh_of(data=devices)
    settings = {"precision": FP8, "remat": "block", **settings}
    zero = zero_jax.Zero(mesh, stage, **settings)
    params = zero.shard(listed(exact_params()) if form == "listed" else exact_params())
    tx = zero.optimizer(optax.sgd(0.25))
    losses = {"scanned": exact_loss, "sliced": sliced_loss, "listed": listed_loss}
    step = zero.train_step(losses[form], tx)
    params, _, _ = step(params, tx.init(params), zero_jax.global_batch(mesh, exact_batch()))
    found = jax.tree.map(np.asarray, zero.unshard(params))
    return stacked(found) if form == "listed" else found


def by_hand():
    """Returns the parameters after the step, in NumPy."""

    def rounded(x, largest, dtype):
        scale = np.exp2(np.ceil(np.log2(np.abs(x).max() / largest)))
        return (np.asarray(jnp.asarray(x / scale, dtype), np.float64)) * scale

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), exact_params())
    x, t = (np.asarray(x, np.float64) for x in exact_batch())
    kept = []
    for w, b in zip(params["kernel"], params["bias"], strict=True):
        w8, x8 = rounded(w, 448, E4M3), rounded(x, 448, E4M3)
        kept.append((w8, x8))
        x = x8 @ w8 + b
    g, grads = t, {"kernel": [], "bias": []}
    for w8, x8 in reversed(kept):
        g8 = rounded(g, 57344, jnp.float8_e5m2)
        grads["kernel"].insert(0, x8.T @ g8)
        grads["bias"].insert(0, g.sum(0))
        g = g8 @ w8.T
    return {name: params[name] - 0.25 / ROWS * np.stack(grads[name]) for name in params}


@pytest.fixture(scope="module")
def one_device():
    return exact_step(1, 0)


def test_step_on_one_device_is_the_one_by_hand(one_device):
    for name, expected in by_hand().items():
        np.testing.assert_allclose(one_device[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("devices", "stage", "settings"),
    [
        *((n, 3, {}) for n in (1, 2, 3, 4, 8)),
        *((4, stage, {}) for stage in (0, 1, 2)),
        (3, 1, {"grad_accum_steps": 2}),
        (2, 2, {"remat": "none"}),
        (2, 3, {"remat": "none", "grad_accum_steps": 3}),
        (8, 3, {"remat": "dots"}),
        (3, 3, {"form": "sliced"}),
        (4, 3, {"form": "listed"}),
        (2, 2, {"form": "listed", "remat": "none"}),
    ],
)
def test_parameters_are_the_same_bits_for_every_number_of_devices_and_stage(
    devices, stage, settings, one_device
):
    found = exact_step(devices, stage, **settings)
    for name, expected in one_device.items():
        np.testing.assert_array_equal(found[name], expected)


# Models.

T, V = 24, 64
LLAMA = dataclasses.replace(
    decoder.preset("llama-3.1-8b"), layers=3, width=32, heads=4, kv_heads=2, head_dim=8,
    hidden=48, vocab=V, seq=T, loss_chunk=12,
)  # fmt: skip
MODELS = {
    "gpt": gpt.GPTConfig(layers=3, width=32, heads=4, vocab=V, seq=T),
    "llama": LLAMA,
    "experts": dataclasses.replace(
        decoder.preset("nano-experts"), layers=2, width=32, heads=4, vocab=V, seq=T
    ),
}
KERNELS = r"blocks/(attn|mlp)/(q|k|v|out|qkv|proj|up|gate|down)/kernel$"


def case(name, lora=False, stage=3, kind="fp8", axes=None, **settings):
    """Returns a step with its arguments."""
    model = TextModel(MODELS[name], Lora(rank=2, alpha=4.0) if lora else None, zero_jax.attention)
    mesh = mesh_of(**(axes or {"data": 1}))
    pattern = KERNELS if kind else None
    precision = zero_jax.Precision("fp32", matmul_dtype=kind, fp8_params=pattern)
    zero = zero_jax.Zero(mesh, stage, precision=precision, frozen=model.frozen, **settings)
    params, tx = zero.init(model.make, jax.random.key(0)), zero.optimizer(optax.sgd(0.5))
    step = zero.train_step(model.trained_loss, tx, has_aux=model.routes)
    tokens = np.random.default_rng(0).integers(0, V, (ROWS, T + 1), np.int32)
    batch = shifted([tokens]) if (axes or {}).get("context") else (tokens,)
    return step, params, tx.init(params), zero_jax.global_batch(mesh, batch)


def losses(*args, steps=3, **settings):
    """Returns the losses of a few steps, and the traced step."""
    step, params, state, batch = case(*args, **settings)
    read, found = step.read(params, state, batch), []
    for _ in range(steps):
        params, state, metrics = step(params, state, batch)
        found.append(float(metrics.loss))
    return np.array(found), read


CASES = [
    ("gpt", {"axes": {"data": 3}, "grad_accum_steps": 2}, "fp8"),
    ("gpt", {"axes": {"data": 2}, "stage": 1, "remat": "dots"}, "fp8_rowwise"),
    ("gpt", {"axes": {"data": 2, "model": 2}, "remat": "block"}, "fp8"),
    ("gpt", {"axes": {"replica": 2, "data": 2}, "secondary_shards": True}, "fp8"),
    ("gpt", {"axes": {"replica": 2, "data": 3}, "secondary_shards": True}, "fp8_rowwise"),
    ("llama", {"axes": {"data": 2}, "stage": 2, "remat": "block_sqrt"}, "fp8"),
    ("llama", {"axes": {"data": 2, "context": 2}, "remat": "block"}, "fp8"),
    ("llama", {"axes": {"data": 3}, "remat": "block"}, "fp8_rowwise"),
    ("llama", {"axes": {"data": 4}, "lora": True, "remat": "block"}, "fp8"),
    ("experts", {"axes": {"data": 2}}, "fp8"),
    ("experts", {"axes": {"data": 2, "experts": 2}}, "fp8"),
]


@pytest.fixture(scope="module")
def on_one_device():
    return functools.cache(losses)


@pytest.mark.parametrize(("name", "settings", "kind"), CASES)
def test_models_on_several_devices_train_as_on_one(name, settings, kind, on_one_device):
    lora = settings.get("lora", False)
    found, read = losses(name, kind=kind, **settings)
    np.testing.assert_allclose(found, on_one_device(name, lora, kind=kind)[0], rtol=2e-5)
    plain = on_one_device(name, lora, kind=None)[0]
    assert 0 < np.abs(plain - found).max() < 0.01 * plain[0]
    assert len(read.fp8) == (4 if name == "gpt" else 7)
    if name == "experts":
        assert read.not_fp8 == ["blocks/mlp/router/kernel"]


def test_products_are_computed_as_often_as_the_remat_policy_says():
    """In units of one forward pass. The last product of a block is not needed again."""
    D, tokens = MODELS["gpt"].width, ROWS * T
    forward = 2 * 12 * D**2 * tokens * MODELS["gpt"].layers

    def units(remat):
        step, *args = case("gpt", remat=remat)
        return traced_flops(device_part(step.trace(*args).jaxpr)) / forward

    assert units("none") == units("dots") == 3
    assert units("block") == pytest.approx(3 + 8 / 12)


def test_codes_are_sent_and_not_parameters():
    """Codes have one byte. The first of two layers is gathered twice, the last one once."""
    zero = zero_jax.Zero(mesh_of(data=4), 3, precision=FP8, remat="block")
    params, tx = zero.eval_shape(exact_params), zero.optimizer(optax.sgd(0.1))
    plan = zero.plan(exact_loss, tx, params, exact_batch(), compile=True)
    layer, biases = 32 * 32, 2 * 32
    gathered, reduced = plan.sent["all-gather"], plan.sent["reduce-scatter"]
    assert gathered == (3 * layer + biases, 3 * layer + 4 * biases)
    assert reduced == (2 * layer + biases, 4 * (2 * layer + biases))
    # A scale for each layer, the loss with its weight, the norm of the gradient.
    assert plan.sent["all-reduce"].elements <= 2 * (2 + 2 + 3)
    assert plan.fp8_params == ("kernel",) and plan.not_fp8 == ()
    # XLA for CPUs multiplies in a wider dtype, and widens what is sent.
    assert "emulated" in str(plan) and "multiplied in fp8: kernel" in str(plan)


def test_step_with_a_number_that_is_not_finite_is_skipped():
    for stage in (0, 3):
        zero = zero_jax.Zero(mesh_of(data=2), stage, precision=FP8, remat="block")
        params, tx = zero.shard(exact_params()), zero.optimizer(optax.sgd(0.25))
        step, (x, t) = zero.train_step(exact_loss, tx), exact_batch()
        before = jax.tree.map(np.asarray, params)
        x[5, 3] = np.inf
        batch = zero_jax.global_batch(zero.mesh, (x, t))
        params, _, metrics = step(params, tx.init(params), batch)
        assert metrics.skipped == 1
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, params))


def test_loss_is_differentiated_from_outside_and_gradients_are_not():
    zero = zero_jax.Zero(mesh_of(data=2), 3, precision=FP8, remat="block")
    params, (x, t) = zero.shard(exact_params()), exact_batch()
    of_loss = zero.value_and_grad(exact_loss)
    # The gradient of a mean over rows, each row alone.
    found = jax.grad(lambda x: of_loss(params, (x, t))[0])(x)
    own = zero.evaluate(exact_loss)
    expected = jax.grad(lambda x: own(params, (x, t))[0])(x)
    # An evaluation rounds nothing to fp8.
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.1
    assert np.abs(found).max() > 0
    with pytest.raises(ValueError, match="matmul_dtype"):
        jax.grad(lambda x: jnp.sum(of_loss(params, (x, t))[1]["kernel"]))(x)


def test_matrices_that_stay_as_they_are_are_listed():
    """A matrix that all iterations of a loop read is in no layer, but in products."""

    def loss(params, batch):
        x, t = batch
        x, _ = jax.lax.scan(lambda x, _: (x @ params["shared"], None), x, None, length=2)
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["kernel"])
        return jnp.mean((x - t) ** 2)

    params = {"kernel": exact_params(width=128)["kernel"], "shared": jnp.eye(128)}
    precision = zero_jax.Precision("fp32", matmul_dtype="fp8")
    zero = zero_jax.Zero(mesh_of(data=2), 3, precision=precision)
    tx, shapes = zero.optimizer(optax.sgd(0.1)), zero.eval_shape(lambda: params)
    plan = zero.plan(loss, tx, shapes, exact_batch(128))
    assert plan.fp8_params == ("kernel",) and plan.not_fp8 == ("shared",)
    assert "not in fp8: shared" in str(plan)


def test_settings_that_fit_no_product_are_errors():
    zero = zero_jax.Zero(mesh_of(data=2), 3, precision=dataclasses.replace(FP8, fp8_params="bias"))
    params, tx = zero.eval_shape(exact_params), zero.optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="`fp8_params`='bias'.*kernel"):
        zero.plan(exact_loss, tx, params, exact_batch())
    default = zero.replace(precision=zero_jax.Precision("fp32", matmul_dtype="fp8"))
    tx = default.optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="`matmul_dtype`.*128"):
        default.plan(exact_loss, tx, params, exact_batch())
    wide = default.eval_shape(lambda: exact_params(width=128))
    assert default.plan(exact_loss, tx, wide, exact_batch(128)).fp8_params == ("kernel",)
    abstract = default.replace(mesh=zero_jax.abstract_mesh(2))
    tx = abstract.optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="`matmul_dtype`.*a100"):
        abstract.plan(exact_loss, tx, wide, exact_batch(128), target="a100")
    for wrong in ({"param_comm_dtype": "fp8"}, {"fp8_params": "kernel"}, {"matmul_dtype": "fp4"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            zero_jax.Precision(**wrong)
