"""The decoder family: sizes as published, documents that share a row, every stage, split layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import ulps

import zero_jax
from zero_jax.models import decoder, decoder_config

TINY = decoder.DecoderConfig(
    layers=3, width=24, heads=4, kv_heads=2, head_dim=6, hidden=40, vocab=53, seq=32, loss_chunk=16
)
# The odd features together: two kinds of layers, each with positions of its own.
GEMMA = dataclasses.replace(
    TINY,
    window=4,
    sliding=(True, False, True),
    rope=decoder.Rope(1000.0, 4.0),
    local_rope=decoder.Rope(50.0),
    qk_norm=True,
    post_norms=True,
    norm_from_one=True,
    activation="gelu",
    embed_scale=24**0.5,
    query_scale=0.3,
    tied=True,
)
BIASED = dataclasses.replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True, window=5)
CONFIGS = {"llama": TINY, "gemma": GEMMA, "biased": BIASED}
# By their makers, on the models' own pages.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "nano-experts": 7_277_120,  # ours
    "gemma-3-1b": 999_885_952,
    # Without what reads images.
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
}


def graph(config):
    return nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, nnx.Rngs(0))))


def make(config):
    """Parameters none of which is zero or one."""
    params = nnx.state(decoder.Decoder(config, nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def loss_of(config):
    graphdef = graph(config)

    def loss(params, batch):
        return zero_jax.Weighted(*decoder.loss(nnx.merge(graphdef, params), *batch))

    return loss


def rows_of(config, rows=6, length=17):
    return jax.random.randint(jax.random.key(2), (rows, length), 0, config.vocab)


def test_every_preset_has_its_published_size():
    assert {name: decoder.num_params(decoder.preset(name)) for name in decoder.PRESETS} == PUBLISHED


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_in_closed_form_are_those_of_the_model(name):
    params = jax.eval_shape(functools.partial(make, CONFIGS[name]))
    shapes = {"/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(params)}
    assert decoder_config.shapes(CONFIGS[name]) == shapes


def test_flops_are_six_a_parameter_that_multiplies_and_what_scores_take():
    config = decoder.preset("gemma-3-1b")
    matrices = decoder.num_params(config) - config.layers * (4 * 1152 + 2 * 256) - 1152
    seen = 22 * 512 + 4 * 4096
    assert decoder.flops_per_token(config, 4096) == 6 * matrices + 12 * 4 * 256 * seen


def packed(config):
    """Three documents in two rows, and the same one by one: (tokens, mask, segments, positions)."""
    lengths = [5, 9, 11]
    texts = [
        np.asarray(jax.random.randint(jax.random.key(n), (n + 1,), 0, config.vocab))
        for n in lengths
    ]
    alone = []
    for text in texts:
        row = np.pad(text, (0, 17 - len(text)))[None]
        weights = (np.arange(16) < len(text) - 1).astype(np.float32)[None]
        alone.append((jnp.asarray(row), jnp.asarray(weights)))
    tokens, mask = np.zeros((2, 17), int), np.zeros((2, 16), np.float32)
    segments, positions = np.zeros((2, 16), int), np.zeros((2, 16), int)
    for number, (text, row, at) in enumerate(
        [(texts[0], 0, 0), (texts[1], 0, 6), (texts[2], 1, 0)], start=1
    ):
        read = len(text)  # its last token is read by nobody's loss
        tokens[row, at : at + read] = text
        mask[row, at : at + read - 1] = 1
        segments[row, at : at + read] = number
        positions[row, at : at + read] = np.arange(read)
    return tuple(map(jnp.asarray, (tokens, mask, segments, positions))), alone


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_that_share_rows_have_the_gradients_of_their_own_rows(name):
    config = CONFIGS[name]
    together, alone = packed(config)
    params = jax.jit(functools.partial(make, config))()

    @functools.partial(jax.jit, static_argnums=2)
    def grads(params, batch, count):
        def total(params):
            return sum(decoder.loss(nnx.merge(graph(config), params), *b)[0] for b in batch)

        return jax.value_and_grad(total)(params)

    with jax.default_matmul_precision("highest"):
        loss, got = grads(params, [together], 1)
        wanted, want = grads(params, alone, 3)
    assert float(together[1].sum()) == sum(float(b[1].sum()) for b in alone)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert ulps(got, want) <= 256


@pytest.mark.parametrize("name", CONFIGS)
def test_no_bit_of_a_document_depends_on_the_one_before_it(name):
    config = CONFIGS[name]
    (tokens, _, segments, positions), _ = packed(config)
    model = nnx.merge(graph(config), jax.jit(functools.partial(make, config))())
    other = tokens.at[0, :6].set((tokens[0, :6] + 1) % config.vocab)
    first, second = (model(t[:, :-1], segments, positions) for t in (tokens, other))
    assert not jnp.array_equal(first[0, :6], second[0, :6])
    assert jnp.array_equal(first[0, 6:], second[0, 6:])
    assert jnp.array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("stage", "n", "name"),
    [
        (3, 3, "llama"),
        (3, 2, "biased"),
        (1, 2, "gemma"),
        *(pytest.param(stage, 3, "llama", marks=pytest.mark.slow) for stage in range(3)),
        pytest.param(3, 2, "gemma", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_on_one_device(stage, n, name):
    config, tx = CONFIGS[name], optax.adamw(1e-2)
    batch, start = (rows_of(config),), jax.jit(functools.partial(make, config))()
    loss = loss_of(config)

    @jax.jit
    def plain(params, state):
        def mean(params):
            total, weight = loss(params, batch)
            return total / weight

        value, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    want, state = start, tx.init(start)
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, stage, remat="block")
    params = zero.shard(start)
    step, own = zero.train_step(loss, tx), zero.optimizer(tx).init(params)
    rows = jax.tree.map(lambda x: zero_jax.global_batch(mesh, np.asarray(x)), batch)
    for _ in range(3):
        want, state, value = plain(want, state)
        params, own, metrics = step(params, own, rows)
        np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, (zero.full(params), want)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma", "biased"])
def test_its_names_of_dims_split_it_over_a_model_axis(name):
    config = dataclasses.replace(CONFIGS[name], vocab=54)
    start, rows = jax.jit(functools.partial(make, config))(), np.asarray(rows_of(config))
    found = []
    for model in (1, 2):
        mesh = zero_jax.make_mesh(model=model, devices=jax.devices()[: 2 * model])
        zero = zero_jax.Zero(mesh, 3, remat="block")
        params = zero.shard(start)
        if model == 2:
            split = [x.model for x in zero.splits(jax.eval_shape(lambda: start))]
            assert sum(x is not None for x in split) >= 8
        loss, grads = jax.jit(zero.value_and_grad(loss_of(config)))(
            params, (zero_jax.global_batch(mesh, rows),)
        )
        found.append((loss, zero.full(grads)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for one, two in zip(*(jax.tree.leaves(grads) for _, grads in found), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers=0"),
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"head_dim": 7}, "head_dim=7.*even"),
        ({"window": 0}, "window=0"),
        ({"window": 3, "sliding": (True,)}, "1 layers of 3"),
        ({"sliding": (True, True, False)}, "window=None"),
        ({"activation": "relu"}, "'relu'"),
    ],
)
def test_a_config_of_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **change)


def test_a_preset_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'llama-3-8b'; the nearest is 'llama-3.1-8b'"):
        decoder.preset("llama-3-8b")


def test_rows_that_do_not_fit_are_refused():
    model = decoder.Decoder(TINY, nnx.Rngs(0))
    with pytest.raises(ValueError, match="33 tokens were given, but the model is made for 32"):
        model(jnp.zeros((1, 33), int))
    with pytest.raises(ValueError, match=r"segments has shape \(1, 3\)"):
        decoder.loss(model, jnp.zeros((1, 9), int), segments_BxT=jnp.zeros((1, 3), int))
