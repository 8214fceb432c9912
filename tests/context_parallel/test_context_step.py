"""Training steps with a context axis equal those of one device; wrong losses are errors."""

import dataclasses

import conftest  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.adapters.lora import Lora
from zero_jax.models import decoder, gpt
from zero_jax.plan.text_model import TextModel, shifted

B, T, V = 4, 48, 64
MODELS = {
    "gpt": gpt.GPTConfig(layers=3, width=32, heads=4, vocab=V, seq=T),
    "llama": dataclasses.replace(
        decoder.preset("llama-3.1-8b"), layers=3, width=32, heads=4, kv_heads=2, head_dim=8,
        hidden=48, vocab=V, seq=T, window=5, loss_chunk=12,
    ),
}  # fmt: skip
MODELS["chunks"] = dataclasses.replace(MODELS["llama"], mlp_chunk=3, window=None)


def rows(packed):
    """Returns rows of tokens, and with `packed` weights, documents and positions in them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T + 1), np.int32)
    if not packed:
        return shifted([tokens])
    segments = np.cumsum(rng.random((B, T)) < 0.15, axis=1).astype(np.int32)
    first = [[list(row).index(n) for n in row] for row in segments]
    positions = np.arange(T, dtype=np.int32) - np.array(first, np.int32)
    return shifted([tokens, rng.random((B, T)).astype(np.float32), segments, positions])


def model_of(name, lora=False):
    adapters = Lora(rank=2, alpha=4.0) if lora else None
    return TextModel(MODELS[name], adapters, zero_jax.attention)


def on_one_device(model, batch):
    def loss(params):
        pair = model.loss(params, batch)
        return pair.sum / pair.weight

    return jax.jit(jax.value_and_grad(loss))(model.make(jax.random.key(0)))


# Model, packed, LoRA, data, context, stage, settings.
CASES = [
    ("gpt", False, False, 1, 2, 3, {}),
    ("gpt", True, False, 2, 2, 1, {"context_exchange": "all_to_all"}),
    ("llama", True, False, 2, 4, 3, {"context_exchange": "all_gather"}),
    ("llama", False, False, 1, 4, 0, {"remat": "dots"}),
    ("llama", True, False, 1, 8, 2, {"grad_accum_steps": 2}),
    ("llama", True, False, 2, 3, 3, {}),
    ("chunks", True, False, 1, 2, 3, {"remat": "none"}),
    ("chunks", False, False, 2, 4, 2, {"precision": "fp32"}),
    ("llama", True, True, 1, 4, 3, {}),
]


@pytest.mark.parametrize(("name", "packed", "lora", "data", "context", "stage", "settings"), CASES)
def test_losses_and_gradients_equal_those_of_one_device(
    name, packed, lora, data, context, stage, settings
):
    check_gradients(model_of(name, lora), rows(packed), data, context, stage, settings)


def check_gradients(model, batch, data, context, stage, settings):
    want, exact = on_one_device(model, batch)
    mesh = zero_jax.make_mesh(data, context=context, devices=jax.devices()[: data * context])
    settings = {"remat": "block", "frozen": model.frozen} | settings
    zero = zero_jax.Zero(mesh, stage=stage, **settings)
    params = zero.init(model.make, jax.random.key(0))
    loss, grads = zero.value_and_grad(model.loss)(params, batch)
    # fp32 sums of up to 128 tokens in another order.
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    for got, good in zip(*map(jax.tree.leaves, (zero.unshard(grads), exact)), strict=True):
        if got.shape == good.shape:  # the gradient of a frozen leaf is a scalar
            assert np.abs(got - good).max() <= 1e-5 * max(np.abs(good).max(), 1e-3)
    value, weight = zero.evaluate(model.loss)(params, batch)
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    assert float(weight) == pytest.approx(float(np.sum(batch.get("mask", np.ones((B, T))))))


def ten_losses(model, batch, data, context, **settings):
    mesh = zero_jax.make_mesh(data, context=context, devices=jax.devices()[: data * context])
    zero = zero_jax.Zero(mesh, remat="block", frozen=model.frozen, **settings)
    params, tx = zero.init(model.make, jax.random.key(0)), zero.optimizer(optax.adamw(1e-2))
    state, step, losses = tx.init(params), zero.train_step(model.loss, tx), []
    for _ in range(10):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics.loss))
    return losses


def test_ten_steps_equal_those_of_one_device():
    model, batch = model_of("llama"), rows(packed=True)
    one, *others = (ten_losses(model, batch, 1, context, stage=3) for context in (1, 2, 4))
    assert one[-1] < one[0] - 0.5
    for losses in others:
        # Adam divides by the root of small second moments, so rounding grows over the steps.
        np.testing.assert_allclose(losses, one, rtol=1e-4)


def test_a_token_changes_no_bit_of_other_documents():
    model, batch = model_of("llama"), rows(packed=True)
    mesh = zero_jax.make_mesh(1, context=4, devices=jax.devices()[:4])
    zero = zero_jax.Zero(mesh, stage=3)
    params = zero.init(model.make, jax.random.key(0))
    evaluate = zero.evaluate(model.loss)
    row, document = 1, batch["segments"][1, T // 2]
    inside = batch["segments"] == document
    inside[np.arange(B) != row] = False
    changed = {**batch, "inputs": np.where(inside, (batch["inputs"] + 1) % V, batch["inputs"])}
    others = {"mask": np.where(inside, 0, batch["mask"]).astype(np.float32)}
    assert evaluate(params, batch | others)[0] == evaluate(params, changed | others)[0]
    assert evaluate(params, batch)[0] != evaluate(params, changed)[0]


def test_dropout_differs_between_the_parts_of_a_row():
    def loss(params, batch, key):
        x, _ = batch
        return jnp.mean(x * jax.random.bernoulli(key, 0.5, x.shape) * params["w"])

    mesh = zero_jax.make_mesh(1, context=8)
    zero = zero_jax.Zero(mesh, stage=3)
    ones = np.ones((1, 4096), np.float32)
    value = zero.evaluate(loss)(
        zero.init(lambda: {"w": jnp.ones(())}), (ones, ones), jax.random.key(0)
    )
    # Equal masks on 8 devices would have a mean with a standard deviation of 0.022.
    assert float(value[0]) == pytest.approx(0.5, abs=0.03) and float(value[0]) * 4096 % 8


def test_a_device_may_have_two_tokens():
    def loss(p, x):
        return jnp.mean(zero_jax.attention(x * p, x, x) ** 2)

    x = np.random.default_rng(0).normal(size=(2, 4, 2, 4)).astype(np.float32)
    zero = zero_jax.Zero(zero_jax.make_mesh(1, context=2, devices=jax.devices()[:2]), stage=3)
    value, _ = zero.evaluate(loss)(zero.init(lambda: jnp.ones(())), x)
    assert float(value) == pytest.approx(float(loss(1.0, x)), rel=1e-5)


def test_random_numbers_of_rows_are_equal_on_all_their_devices():
    """A mask of tokens at a random rate of each row, as in masked diffusion."""

    def loss(params, x, key):
        of_rows, of_tokens = jax.random.split(key)
        rate = jax.random.uniform(of_rows, (len(x), 1), minval=0.1)
        mask = jax.random.uniform(of_tokens, x.shape) < rate
        return zero_jax.Weighted(jnp.sum(x * mask * params), jnp.sum(mask)), {
            "rate": rate[:, 0],
            "masked": jnp.mean(x * mask, 1),
        }

    rates = {}
    for context in (1, 4):
        mesh = zero_jax.make_mesh(2, context=context, devices=jax.devices()[: 2 * context])
        zero = zero_jax.Zero(mesh, stage=3)
        run = zero.value_and_grad(loss, has_aux=True)
        params = zero.init(lambda: jnp.ones(()))
        (_, aux), _ = run(params, np.ones((4, 4096), np.float32), jax.random.key(0))
        rates[context] = np.asarray(aux["rate"])
        # Equal masks on 4 devices would have standard deviations of up to 0.016.
        np.testing.assert_allclose(aux["masked"], aux["rate"], atol=0.03)
    np.testing.assert_array_equal(rates[1], rates[4])


def test_rows_of_the_aux_are_means_over_all_tokens():
    def loss(params, x):
        return jnp.mean(x * params), {"rows": jnp.mean(x * params, axis=1)}

    zero = zero_jax.Zero(zero_jax.make_mesh(2, context=4), stage=3)
    x = np.arange(4 * 16, dtype=np.float32).reshape(4, 16) ** 2
    run = zero.value_and_grad(loss, has_aux=True)
    (_, aux), _ = run(zero.init(lambda: jnp.ones(())), x)
    np.testing.assert_allclose(aux["rows"], x.mean(1), rtol=1e-6)


def test_most_arrays_of_the_batch_have_the_length_of_a_row():
    loss = lambda p, b: zero_jax.Weighted(jnp.sum(b["x"] * b["y"]) * p, jnp.sum(b["y"]))  # noqa: E731
    zero = zero_jax.Zero(zero_jax.make_mesh(1, context=2, devices=jax.devices()[:2]), stage=3)
    shapes = {"lengths": (1, 1), "image": (1, 4, 3), "x": (1, 8), "y": (1, 8)}
    batch = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    assert float(zero.evaluate(loss)(zero.init(lambda: jnp.ones(())), batch)[1]) == 8


WRONG = {
    "sum": (lambda p, x: jnp.sum(x * p), "mean over all tokens"),
    "weight of rows": (lambda p, x: zero_jax.Weighted(jnp.sum(x * p), len(x)), "mean over all"),
    "shift": (lambda p, x: jnp.mean(x[:, 1:] * p), "slice along the tokens"),
    "chunks in order": (
        lambda p, x: jnp.mean(
            jax.lax.scan(lambda h, c: (jnp.tanh(h + c), h), jnp.zeros(4), x.reshape(-1, 4) * p)[1]
        ),
        "loop over the tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_are_wrong_for_a_part_of_a_row_are_errors(name):
    loss, message = WRONG[name]
    zero = zero_jax.Zero(zero_jax.make_mesh(1, context=2, devices=jax.devices()[:2]), stage=3)
    params = zero.init(lambda: jnp.ones(()))
    with pytest.raises(ValueError, match=message):
        zero.value_and_grad(loss)(params, np.ones((1, 8), np.float32))


def test_a_loss_may_not_depend_on_the_length_of_a_row():
    zero = zero_jax.Zero(zero_jax.make_mesh(1, context=8), stage=3)
    params, x = zero.init(lambda: jnp.ones(())), np.ones((1, 64), np.float32)

    def scaled(p, x):  # as positions are, for rows that are longer than those of pretraining
        return jnp.mean(jnp.sin(x * (2.0 if x.shape[1] > 32 else 1.0)) * p)

    def counted(p, x):
        return jnp.mean(x * p), {"tokens": jnp.int32(x.size)}

    with pytest.raises(ValueError, match="depends on the length of a row"):
        zero.value_and_grad(scaled)(params, x)
    with pytest.raises(ValueError, match="'tokens'.*their number"):
        zero.value_and_grad(counted, has_aux=True)(params, x)


def test_rows_and_meshes_that_do_not_fit_are_errors():
    zero = zero_jax.Zero(zero_jax.make_mesh(1, context=4, devices=jax.devices()[:4]), stage=3)
    params = zero.init(lambda: jnp.ones(()))
    run = zero.value_and_grad(lambda p, batch: jnp.mean(batch[0] * p))
    for shapes, message in (
        ([(2, 12)], "rows have 12 tokens.*use 8 or 16"),
        ([(2, 17), (2, 16)], "inputs, labels = tokens"),
        ([(2,)], "no array of the batch has tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            run(params, [np.ones(shape, np.float32) for shape in shapes])
    for sizes in ({"experts": 2}, {"model": 2}):
        with pytest.raises(ValueError, match="`context`=2"):
            zero_jax.abstract_mesh(1, context=2, **sizes)
    with pytest.raises(ValueError, match="`context_exchange`='ring'"):
        zero_jax.Zero(zero_jax.make_mesh(), context_exchange="ring")
    with pytest.raises(ValueError, match="`context_exchange`='all_gather'.*no tokens"):
        zero_jax.Zero(zero_jax.make_mesh(), context_exchange="all_gather")
