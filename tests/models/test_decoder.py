"""The decoder family: published sizes, rotary positions, documents in one row, experts, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import Problem, train_plain, ulps, zero_on

import zero_jax
from zero_jax.models import decoder, decoder_config, families, gpt, rotary
from zero_jax.models.experts import Experts
from zero_jax.plan.text_model import TextModel

SIZES = {"width": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "hidden": 40, "seq": 32}
PLAIN = decoder.DecoderConfig(layers=2, vocab=54, window=5, qkv_bias=True, out_bias=True,
                              mlp_bias=True, loss_chunk=16, **SIZES)  # fmt: skip
# Two kinds of layers, each with positions of its own, norms everywhere, a tied head.
GEMMA = decoder.DecoderConfig(
    layers=3, vocab=54, window=4, sliding=(True, False, True), rope=decoder.Rope(1000.0, 4.0),
    local_rope=decoder.Rope(50.0), qk_norm=True, post_norms=True, norm_from_one=True, tied=True,
    activation="gelu", embed_scale=24**0.5, query_scale=0.3, loss_chunk=16, **SIZES)  # fmt: skip
MIXTURE = decoder.Mixture(5, 2, balance=0.02, z=0.001)
EXPERTS = decoder.DecoderConfig(layers=2, vocab=53, mixture=MIXTURE, loss_chunk=16, **SIZES)
CONFIGS = {"plain": PLAIN, "gemma": GEMMA, "experts": EXPERTS}
KEY = jax.random.key(2)
# Published by the makers of the models; nano-experts is ours, Gemma without its image encoder.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "mistral-7b": 7_248_023_552, "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "nano-experts": 7_277_120,
    "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168, "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304}  # fmt: skip


@functools.cache
def noisy(config):
    """Parameters none of which is zero or one."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(TextModel(config).own)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)


def test_shapes_in_closed_form_are_those_of_the_model_and_of_published_ones():
    for config in CONFIGS.values():
        params = jax.eval_shape(TextModel(config).own)
        shapes = {"/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(params)}
        assert decoder_config.shapes(config) == shapes
    assert {name: decoder.num_params(decoder.preset(name)) for name in decoder.PRESETS} == PUBLISHED
    # Flops: six a parameter that multiplies, and those of the scores.
    config = decoder.preset("gemma-3-1b")
    matrices = decoder.num_params(config) - config.layers * (4 * 1152 + 2 * 256) - 1152
    seen = 22 * 512 + 4 * 4096
    assert decoder.flops_per_token(config, 4096) == 6 * matrices + 12 * 4 * 256 * seen
    sizes = [sum(min(t, size) for t in range(1, 4097)) / 4096 for size in (512, 4096)]
    masked = 6 * matrices + 12 * 4 * 256 * (22 * sizes[0] + 4 * sizes[1])
    assert families.flops_per_token(config, 4096, masked=True) == pytest.approx(masked, rel=1e-12)


ROPES = {
    rotary.Rope(100.0): (1.0, 0.1), rotary.Rope(2500.0, 4.0): (0.25, 0.005),
    # Llama 3: 128 positions make 20.4 and 0.41 turns; those below 1 are stretched, over 4 kept.
    rotary.Rope(2500.0, 8.0, (128, 1.0, 4.0)): (1.0, 0.0025)}  # fmt: skip


@pytest.mark.parametrize(("rope", "angles"), ROPES.items())
def test_rotary_positions_are_a_product_of_complex_numbers(rope, angles):
    np.testing.assert_allclose(rotary.frequencies(rope, 4), angles, rtol=1e-6)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 7, 3, 4)))
    positions = np.arange(14).reshape(2, 7)
    turned = rotary.rotate(jnp.asarray(x), rotary.tables(rope, 4, jnp.asarray(positions)))
    phases = np.exp(1j * positions[..., None, None] * np.asarray(angles))
    want = (x[..., :2] + 1j * x[..., 2:]) * phases
    np.testing.assert_allclose(turned, np.concatenate([want.real, want.imag], -1), atol=5e-6)


def test_documents_that_share_rows_have_the_gradients_of_rows_of_their_own():
    model, params = TextModel(GEMMA), noisy(GEMMA)
    # Two documents packed in a row, and one a row: tokens, mask, segments, positions.
    tokens, at = np.array(jax.random.randint(KEY, (17,), 0, 54)), np.arange(16)
    packed = tokens, np.float32((at != 5) & (at < 15)), 1 + (at >= 6), np.where(at < 6, at, at - 6)
    together = tuple(jnp.asarray(x[None]) for x in packed)
    alone = jnp.stack([tokens, np.roll(tokens, -6)]), jnp.float32([at < 5, at < 9])
    grads = jax.jit(jax.value_and_grad(lambda params, batch: model.loss(params, batch)[0]))
    with jax.default_matmul_precision("highest"):
        loss, got = grads(params, together)
        wanted, want = grads(params, alone)
    assert together[1].sum() == alone[1].sum()
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert ulps(got, want) <= 256
    # No bit of a document depends on the one before it.
    tokens, _, segments, positions = together
    logits = jax.jit(lambda t: model.model(params)(t[:, :-1], segments, positions))
    first, second = logits(tokens), logits(tokens.at[0, :6].set((tokens[0, :6] + 1) % 54))
    assert not jnp.array_equal(first[0, :6], second[0, :6])
    assert jnp.array_equal(first[0, 6:], second[0, 6:])


PARITY = [(1, 3, 1, "gemma", None)]
SLOW = [(3, 2, 2, "plain", None), (3, 3, 1, "experts", 0.75)]
PARITY += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("stage", "n", "split", "name", "capacity"), PARITY)
def test_it_trains_as_on_one_device(stage, n, split, name, capacity):
    """On `n` devices, times `split` of a model axis, by the names of its dims."""
    model, tx = TextModel(families.with_capacity(CONFIGS[name], capacity)), optax.adamw(1e-3)
    start, batch = noisy(model.config), np.asarray(jax.random.randint(KEY, (24, 17), 0, 53))
    extras = (jax.jit(model.trained_loss)(start, batch)[1],) if model.routes else ()
    plain = Problem(lambda: start, lambda p, rows, *_: model.trained_loss(p, rows), batch, extras)
    losses, want = train_plain(plain, tx, 3)
    zero = zero_on({"data": n, "model": split}, stage, remat="block")
    if split > 1:
        assert sum(x.model is not None for x in zero.splits(jax.eval_shape(model.own))) >= 8
    params, tx = zero.shard(start), zero.optimizer(tx)
    step = zero.train_step(model.trained_loss, tx, has_aux=model.routes)
    state = tx.init(params)
    for number, loss in enumerate(losses):
        params, state, metrics = step(params, state, zero_jax.global_batch(zero.mesh, batch))
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
        if model.routes and number == 0:
            assert np.array_equal(metrics.aux.dropped_B, extras[0].dropped_B)
            assert (int(metrics.aux.dropped_B.sum()) > 0) == (capacity is not None)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, zero.unshard(params), want)


X = jax.random.normal(jax.random.key(7), (3, 16, EXPERTS.width))


def layer(**changes):
    mixture, rng = dataclasses.replace(MIXTURE, **changes), np.random.default_rng(0)
    config = dataclasses.replace(EXPERTS, mixture=mixture)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, 0.02, nnx.Rngs(0))))
    return graph, jax.tree.map(lambda x: jnp.float32(0.3 * rng.normal(size=x.shape)), state)


def by_a_loop(experts, x, kept=None):
    """Every expert on every token; `kept` (B, T, K) are the choices that count, None all."""
    mixture = experts.mixture
    probs = jax.nn.softmax(x @ experts.router.kernel[...])
    weights, chosen = jax.lax.top_k(probs, mixture.chosen)
    if mixture.normalised:
        weights /= weights.sum(-1, keepdims=True)
    if kept is not None:
        weights *= kept
    out = jnp.zeros_like(x)
    for e in range(mixture.experts):
        gate, up, down = (k.kernel[...][e] for k in (experts.gate, experts.up, experts.down))
        made = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        out += jnp.sum(weights * (chosen == e), -1, keepdims=True) * made
    return out, chosen


def kept_by_hand(chosen, room, experts):
    """Choices that find room: in each row first choices first, then in the order of tokens."""
    kept = np.zeros(chosen.shape, bool)
    for b, row in enumerate(np.asarray(chosen)):
        left = [room] * experts
        for k in range(row.shape[1]):
            for t in range(row.shape[0]):
                kept[b, t, k] = left[row[t, k]] > 0
                left[row[t, k]] -= kept[b, t, k]
    return kept


# 16 tokens with 2 choices of 5 experts: by default up to 16 for each expert.
@pytest.mark.parametrize(
    ("capacity", "normalised", "room"), [(None, True, 16), (0.5, False, 4), (1.0, True, 7)]
)
def test_experts_are_a_loop_and_choices_without_room_are_dropped(capacity, normalised, room):
    graph, state = layer(capacity=capacity, normalised=normalised)
    _, chosen = jax.jit(lambda state: by_a_loop(nnx.merge(graph, state), X))(state)
    kept = kept_by_hand(chosen, room, 5)

    def loss(state, x, run):
        out = run(nnx.merge(graph, state), x)
        return jnp.mean((out[0] - X[::-1]) ** 2), out

    compute = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    with jax.default_matmul_precision("highest"):
        (_, (want, _)), want_grads = compute(state, X, functools.partial(by_a_loop, kept=kept))
        (_, (got, routed)), got_grads = compute(state, X, lambda experts, x: experts(x))
    np.testing.assert_allclose(got, want, atol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_grads))
    close = functools.partial(np.testing.assert_allclose, atol=1e-6 * scale)
    jax.tree.map(close, got_grads, want_grads)
    assert np.array_equal(routed.dropped_B, (~kept).sum((1, 2)))
    assert (routed.dropped_B.sum() > 0) == (capacity is not None)


def test_the_losses_of_a_router_are_their_formulas_and_a_row_is_routed_by_itself():
    graph, state = layer(capacity=0.5)
    run = jax.jit(lambda x: nnx.merge(graph, state)(x))
    out, routed = run(X)
    logits = np.asarray(X @ nnx.merge(graph, state).router.kernel[...], np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probs, -1)[..., :2]
    parts = np.stack([(chosen == e).mean((1, 2)) for e in range(5)], -1)
    np.testing.assert_allclose(routed.balance_B, 5 * (parts * probs.mean(1)).sum(-1), rtol=1e-5)
    z = (np.log(np.exp(logits).sum(-1)) ** 2).mean(1)
    np.testing.assert_allclose(routed.z_B, z, rtol=1e-5)
    _, even = run(jnp.zeros_like(X))  # no expert is preferred
    np.testing.assert_allclose(even.z_B, np.log(5) ** 2, rtol=1e-6)
    np.testing.assert_allclose(even.balance_B, 1.0, rtol=1e-6)
    assert dataclasses.replace(MIXTURE, capacity=100.0).room(16) == 16  # a row has no more
    alone, own = run(X[1:2])
    np.testing.assert_allclose(alone[0], out[1], atol=1e-5)
    assert own.dropped_B[0] == routed.dropped_B[1]


GPT = gpt.GPTConfig(layers=2, width=16, heads=2, vocab=61, seq=16)
changed = lambda config, **fields: lambda: dataclasses.replace(config, **fields)  # noqa: E731
model = lambda config: families.build(config, nnx.Rngs(0))  # noqa: E731


def rows(*shapes):
    own = TextModel(PLAIN)
    batch = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return lambda: jax.eval_shape(own.loss, jax.eval_shape(own.own), batch)


FIELDS = [(GPT, "heads", 3), (GPT, "dropout", 1.0), (GPT, "attention", "flash"), (GPT, "layers", 0),
          (GPT, "loss_chunk", 0), (PLAIN, "layers", 0), (PLAIN, "kv_heads", 3),
          (PLAIN, "head_dim", 7), (PLAIN, "window", 0), (PLAIN, "activation", "relu")]  # fmt: skip
REFUSALS = [
    *((f"{k}`={v!r}", changed(config, **{k: v})) for config, k, v in FIELDS),
    ("'13B'.*'13b'", lambda: gpt.preset("13B")),
    ("17 tokens.* 16 ", lambda: model(GPT).hidden(jnp.zeros((1, 17), int))),
    ("mask", lambda: gpt.loss(model(GPT), jnp.zeros((3, 12), int), jnp.ones((3, 12)))),
    ("prompt", lambda: gpt.generate(model(GPT), jnp.zeros(0, int), 1, jax.random.key(0))),
    ("sliding", changed(PLAIN, window=3, sliding=(True,))),
    ("window`=None", changed(PLAIN, window=None, sliding=(True, False))),
    ("mlp_bias`=True", changed(PLAIN, mlp_bias=True, mixture=decoder.Mixture(4, 2))),
    ("'llama-3-8b'.*'llama-3.1-8b'", lambda: decoder.preset("llama-3-8b")),
    ("chosen`=5", lambda: decoder.Mixture(4, 5)),
    ("capacity`=0.0", lambda: decoder.Mixture(4, 2, capacity=0.0)),
    ("capacity`=1.5", lambda: families.with_capacity(GPT, 1.5)),
    ("experts", lambda: decoder.routed_loss(model(PLAIN), jnp.zeros((1, 5), int))),
    ("33 tokens", rows((1, 34))), ("mask", rows((1, 9), (1, 9))),
    ("segments", rows((1, 9), (1, 8), (1, 3))), ("positions", rows((1, 9), (1, 8), (1, 8), (2, 8))),
]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_it_is_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
