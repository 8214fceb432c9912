"""Models with an attention that they are given, and losses with labels as an array of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import ulps

from zero_jax.adapters.lora import Lora
from zero_jax.models import decoder, families, gpt, next_token
from zero_jax.models.attend import attend
from zero_jax.plan.text_model import TextModel, shifted

SIZES = {"layers": 2, "width": 16, "heads": 4, "vocab": 32, "seq": 16, "loss_chunk": 8}
GPT = gpt.GPTConfig(**SIZES)
DECODER = decoder.DecoderConfig(**SIZES, kv_heads=2, head_dim=4, hidden=24)
# Of its layers one has a window, and one none.
SLIDING = dataclasses.replace(DECODER, window=3, sliding=(True, False), query_scale=0.3)
MIXTURE = decoder.Mixture(4, 2, capacity=0.75, balance=0.02, z=0.001)
EXPERTS = dataclasses.replace(DECODER, mixture=MIXTURE)
CONFIGS = {"gpt": GPT, "decoder": DECODER, "sliding": SLIDING, "experts": EXPERTS}
TOKENS = jax.random.randint(jax.random.key(1), (3, 13), 0, 32)
MASK = jnp.float32(jnp.arange(12) % 5 > 0) * jnp.ones((3, 1))
SEGMENTS = jnp.int32(jnp.arange(12) > 6) * jnp.ones((3, 1), int)
POSITIONS = jnp.where(SEGMENTS == 1, jnp.arange(12) - 7, jnp.arange(12))
ROWS = TOKENS, MASK, SEGMENTS, POSITIONS


def plain_attention(query, key, value, *, segment_ids=None, window=None, scale=None):
    """The scores of all pairs at once."""
    T, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * (scale or query.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", shares, value)


def noisy(config):
    """Parameters none of which is zero or one."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(TextModel(config).own)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)


@pytest.mark.parametrize("name", ["gpt", "sliding"])
def test_a_model_with_another_attention_has_the_loss_and_gradients_of_its_own(name):
    params, config = noisy(CONFIGS[name]), CONFIGS[name]

    def results(attention_fn):
        model = TextModel(config, attention_fn=attention_fn)
        return jax.jit(jax.value_and_grad(lambda p: model.loss(p, ROWS)[0]))(params)

    with jax.default_matmul_precision("highest"):
        own, same, plain = map(results, (None, attend, plain_attention))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (own, same))))
    # Sums of at most 12 keys and 36 tokens in another order; a missing window or document is 1e6.
    assert 0 < ulps(plain, own) <= 256


@pytest.mark.parametrize("name", ["gpt", "sliding"])
def test_attention_is_called_with_documents_window_scale_and_a_chosen_kernel(name):
    calls = []

    def recorded(query, key, value, **how):
        calls.append(how)
        return plain_attention(query, key, value, segment_ids=how["segment_ids"])

    config = CONFIGS[name]
    want = [{}] if name == "gpt" else [{"window": 3, "scale": 0.3}, {"window": None, "scale": 0.3}]
    for kernel, more in (("auto", {}), ("xla", {"implementation": "xla"})):
        calls.clear()
        model = TextModel(dataclasses.replace(config, attention=kernel), attention_fn=recorded)
        jax.eval_shape(model.loss, jax.eval_shape(model.own), ROWS)
        assert {how.pop("segment_ids").shape for how in calls} == {(3, 12)}
        found = [how for n, how in enumerate(calls) if how not in calls[:n]]
        assert found == [{**how, **more} for how in want]


def test_models_with_one_attention_share_a_compiled_program():
    def graph(attention_fn):
        return nnx.graphdef(
            nnx.eval_shape(lambda: families.build(SLIDING, nnx.Rngs(0), attention_fn))
        )

    one, again, own = graph(plain_attention), graph(plain_attention), graph(None)
    assert one == again and hash(one) == hash(again)
    assert own == graph(None) == graph(attend) != one
    traces = []

    def loss(graphdef, params):
        traces.append(graphdef)
        return next_token.loss(nnx.merge(graphdef, params), TOKENS)[0]

    compiled, params = jax.jit(loss, static_argnums=0), noisy(SLIDING)
    results = [compiled(graphdef, params) for graphdef in (one, again, own)]
    assert traces == [one, own] and results[0] == results[1]
    assert TextModel(GPT, attention_fn=attend) == TextModel(GPT, attention_fn=attend)


@pytest.mark.parametrize("name", CONFIGS)
def test_inputs_and_labels_are_rows_of_one_token_more(name):
    model, params = TextModel(CONFIGS[name]), noisy(CONFIGS[name])
    loss = jax.jit(model.trained_loss)
    for rows in (ROWS[:1], ROWS[:2], ROWS):
        batch = shifted(rows)
        assert batch["inputs"].shape == batch["labels"].shape == (3, 12)
        assert list(batch)[2:] == ["mask", "segments", "positions"][: len(rows) - 1]
        pair = loss(params, rows), loss(params, batch)
        assert all(map(np.array_equal, *map(jax.tree.leaves, pair)))
    assert np.array_equal(loss(params, TOKENS)[0], loss(params, shifted([TOKENS]))[0])


def test_adapters_take_inputs_and_labels_too():
    model = TextModel(DECODER, Lora(rank=2, base="fp32"), attention_fn=plain_attention)
    params = jax.jit(model.make)(jax.random.key(0))
    assert np.array_equal(model.loss(params, ROWS), model.loss(params, shifted(ROWS)))


@pytest.mark.parametrize(
    ("name", "more"),
    [("labels", {"labels_BxT": TOKENS[:, 1:]}), ("mask", {"mask_BxT": MASK[:, 1:]}),
     ("mask", {"mask_BxT": MASK, "labels_BxT": TOKENS})],
)  # fmt: skip
def test_arrays_of_another_length_are_named(name, more):
    model = TextModel(GPT)
    with pytest.raises(ValueError, match=f"`{name}_BxT`"):
        jax.eval_shape(lambda p: next_token.loss(model.model(p), TOKENS, **more), noisy(GPT))
