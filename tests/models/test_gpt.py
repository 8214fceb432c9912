"""The GPT is right on one device, and its logits exist a chunk at a time."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zero_jax.models import gpt

TINY = gpt.GPTConfig(layers=2, width=16, heads=2, vocab=61, seq=16, loss_chunk=8)


def tokens_of(config: gpt.GPTConfig, rows: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (rows, length), 0, config.vocab)


def build(config: gpt.GPTConfig, seed: int = 0) -> gpt.GPT:
    return nnx.jit(lambda: gpt.GPT(config, nnx.Rngs(seed)))()


def abstract(config: gpt.GPTConfig) -> gpt.GPT:
    return nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0)))


def avals(jaxpr):
    """Every array type in a jaxpr and in all that it calls."""
    for eqn in jaxpr.eqns:
        yield from (var.aval for var in eqn.outvars)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from avals(inner)


# --- shapes and counts ---


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_num_params_counts_the_real_tree(name):
    config = gpt.preset(name)
    model = abstract(config)
    leaves = jax.tree.leaves(nnx.state(model))
    assert gpt.num_params(config) == sum(leaf.size for leaf in leaves)
    assert all(leaf.shape[0] == config.layers for leaf in jax.tree.leaves(nnx.state(model.blocks)))


@pytest.mark.parametrize("name, params", [("7.5b", 7.5e9), ("128b", 128e9), ("1t", 1e12)])
def test_preset_is_within_one_percent_of_its_name(name, params):
    assert gpt.num_params(gpt.preset(name)) == pytest.approx(params, rel=0.01)


def test_124m_has_the_published_number_of_parameters():
    # GPT-2 small, 124.4M: 12 layers of 768 with the 50257 tokens of its own vocabulary.
    config = gpt.preset("124m", vocab=50257)
    assert round(gpt.num_params(config) / 1e6, 1) == 124.4


def test_flops_per_token_counts_matmul_parameters_six_times():
    # Everything that is not a bias, a norm or a lookup multiplies; scores and mixing add
    # 2 passes x 2 flops x D x T a layer, three times over.
    config = gpt.preset("7.5b")
    d, layers, t = config.width, config.layers, config.seq
    idle = t * d + layers * 13 * d + 2 * d
    expected = 6 * (gpt.num_params(config) - idle) + 3 * layers * 2 * 2 * d * t
    assert gpt.flops_per_token(config, t) == expected


def test_unknown_preset_names_the_nearest_and_lists_all():
    with pytest.raises(ValueError, match=r"'13B'; the nearest is '13b'") as error:
        gpt.preset("13B")
    assert all(name in str(error.value) for name in gpt.PRESETS)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"heads": 3}, "heads=3 must divide width=16"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"layers": 0}, "layers=0"),
        ({"loss_chunk": 0}, "loss_chunk=0"),
    ],
)
def test_impossible_config_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **fields)


# --- the function it computes ---


@pytest.fixture(scope="module")
def tiny():
    return build(TINY)


def test_a_model_is_parameters_and_nothing_else(tiny):
    graphdef, params, rest = nnx.split(tiny, nnx.Param, ...)
    assert jax.tree.leaves(params)
    assert not jax.tree.leaves(rest)
    assert graphdef == nnx.graphdef(abstract(TINY))  # so that jit's cache hits


def test_initial_deviations_are_those_of_gpt2(tiny):
    # 512 samples or more, so a measured deviation is off by 3 percent or less (one sigma);
    # a missing 1 / sqrt(2 * layers) would be off by 100.
    block = tiny.blocks
    for kernel, expected in [
        (block.attn.qkv.kernel, 0.02),
        (block.mlp.up.kernel, 0.02),
        (block.attn.proj.kernel, 0.02 / (2 * TINY.layers) ** 0.5),
        (block.mlp.down.kernel, 0.02 / (2 * TINY.layers) ** 0.5),
    ]:
        assert float(jnp.std(kernel[...])) == pytest.approx(expected, rel=0.15)
        assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_compute_follows_the_dtype_of_the_parameters(tiny, dtype):
    graphdef, params = nnx.split(tiny)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    tokens = jnp.zeros((2, 8), int)

    def run(params):
        model = nnx.merge(graphdef, params)
        return model.hidden(tokens), model(tokens), gpt.loss(model, tokens)

    hidden, logits, (total, weight) = jax.eval_shape(run, params)
    assert hidden.dtype == dtype
    assert logits.dtype == total.dtype == weight.dtype == jnp.float32

    # Inside, too: every matrix product of the blocks takes and gives what was handed in, and
    # only scores, head and statistics are fp32.
    jaxpr = jax.make_jaxpr(lambda params: nnx.merge(graphdef, params).hidden(tokens))(params)
    wide = {aval.shape for aval in avals(jaxpr.jaxpr) if aval.dtype == dtype}
    assert {(2, 8, 3 * TINY.width), (2, 8, 4 * TINY.width), (2, 8, TINY.width)} <= wide


def test_layer_norm_statistics_are_fp32_for_bf16_parameters():
    # Values 256 + {0, 1, 2, ...}: their mean is no bf16, so bf16 statistics would be far off.
    x = (256.0 + 2.0 * jnp.arange(16)).astype(jnp.bfloat16)[None]
    norm = gpt.layer_norm(16, nnx.Rngs(0))
    graphdef, params = nnx.split(norm)
    half = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    got = np.asarray(half(x), np.float64)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-5)
    np.testing.assert_allclose(got, exact, rtol=2**-8)  # the rounding of the result, no more


def test_later_tokens_do_not_change_earlier_logits(tiny):
    tokens = tokens_of(TINY, 2, 12)
    changed = tokens.at[:, 8].add(1) % TINY.vocab
    run = jax.jit(lambda tokens: tiny(tokens))
    before, after = run(tokens), run(changed)
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert np.all(np.any(before[:, 8:] != after[:, 8:], axis=-1))  # and each later one sees it


def test_stacked_layers_equal_a_loop_over_blocks(tiny):
    tokens = tokens_of(TINY, 2, 12)
    graphdef, stacked = nnx.split(tiny.blocks)
    block = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    x = tiny.wte(tokens) + tiny.wpe(jnp.arange(12))
    for layer in range(TINY.layers):
        x = block(jax.tree.map(operator.itemgetter(layer), stacked), x)
    # fp32 sums of 16 to 64 terms in another order, through two layers.
    np.testing.assert_allclose(tiny.hidden(tokens), tiny.ln_f(x), rtol=0, atol=1e-5)


def test_row_longer_than_the_positions_is_refused(tiny):
    with pytest.raises(ValueError, match="Rows of 17 tokens .* 16 positions"):
        tiny.hidden(jnp.zeros((1, 17), int))


@pytest.fixture(scope="module")
def masks_shown():
    """Hidden states of a model whose branches add constants, as a function of the dropout key.

    They are 1, 4, 16 or 64, so the residual stream is a number in base 4 whose digits say which
    of the four branches (two layers of two) were dropped, or kept at twice the size.
    """
    model = build(dataclasses.replace(TINY, dropout=0.5, width=128))
    for embed in (model.wte, model.wpe):
        embed.embedding[...] = jnp.zeros_like(embed.embedding[...])
    for linear, sizes in [(model.blocks.attn.proj, (1, 16)), (model.blocks.mlp.down, (4, 64))]:
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
        linear.bias[...] = jnp.ones_like(linear.bias[...]) * jnp.array(sizes)[:, None]
    return jax.jit(lambda key: model.hidden(jnp.zeros((1, 16), int), dropout_key=key)[0])


def test_dropout_differs_by_layer_and_by_branch(masks_shown):
    # 16 numbers if the four masks are independent, 4 if layers or branches share theirs, 2 if
    # all do. The last norm stretches a row, but keeps apart what differs by 2 of about 100.
    hidden = np.asarray(masks_shown(jax.random.key(0)))
    assert all(len(np.unique(np.round(row, 3))) == 16 for row in hidden)


def test_dropout_differs_by_key_repeats_with_it_and_is_off_without(masks_shown):
    one, again, other = (masks_shown(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
    assert len(np.unique(masks_shown(None))) == 1  # 1 + 4 + 16 + 64 everywhere


def test_greedy_text_takes_the_likeliest_token_past_the_window(tiny):
    prompt, steps = jnp.array([3, 1, 4, 1, 5]), TINY.seq
    text = gpt.generate(tiny, prompt, steps, jax.random.key(0), temperature=0.0)
    assert text.shape == (5 + TINY.seq,)
    expected = list(map(int, prompt))
    full = jax.jit(lambda window: tiny(window)[0])
    for _ in range(steps):
        seen = expected[-TINY.seq :]
        padded = jnp.array(seen + [0] * (TINY.seq - len(seen)))
        expected.append(int(jnp.argmax(full(padded[None])[len(seen) - 1])))
    assert list(map(int, text)) == expected


def test_sampled_text_differs_by_key(tiny):
    texts = [
        gpt.generate(tiny, jnp.array([3]), 12, jax.random.key(seed), temperature=1.0)
        for seed in (0, 1)
    ]
    assert not np.array_equal(*texts)
    assert all(0 <= int(text.min()) and int(text.max()) < TINY.vocab for text in texts)
    with pytest.raises(ValueError, match="at least one token"):
        gpt.generate(tiny, jnp.zeros(0, int), 1, jax.random.key(0))


# --- the training loss ---


def widest_logits(config, tokens):
    """The most tokens whose logits are one array anywhere in the training loss."""
    graphdef, params = nnx.split(abstract(config))

    def total(params):
        return gpt.loss(nnx.merge(graphdef, params), tokens)[0]

    jaxpr = jax.make_jaxpr(jax.value_and_grad(total))(params).jaxpr
    shapes = {aval.shape for aval in avals(jaxpr) if aval.shape[-1:] == (config.vocab,)}
    return max(int(np.prod(shape[:-1])) for shape in shapes)


def test_logits_exist_one_chunk_at_a_time():
    tokens = jnp.zeros((8, 17), int)
    assert widest_logits(TINY, tokens) == TINY.loss_chunk
    # Not vacuous: one chunk for the whole batch is seen.
    assert widest_logits(dataclasses.replace(TINY, loss_chunk=128), tokens) == 128


def test_loss_is_the_mean_of_plain_log_probabilities(tiny):
    tokens = tokens_of(TINY, 3, 12)
    mask = jnp.arange(11)[None] < jnp.array([11, 5, 0])[:, None]
    total, weight = jax.jit(lambda tokens, mask: gpt.loss(tiny, tokens, mask))(tokens, mask)
    logp = jax.nn.log_softmax(jax.jit(lambda tokens: tiny(tokens))(tokens[:, :-1]))
    losses = -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
    assert weight == 16
    np.testing.assert_allclose(total, jnp.sum(losses * mask), rtol=9e-7)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 12\).*\(3, 11\)"):
        gpt.loss(tiny, tokens, jnp.ones((3, 12)))


def test_gelu_keeps_its_input_alone_for_the_backward_pass():
    mlp, x = gpt.MLP(TINY, 0.02, nnx.Rngs(0)), jnp.ones((2, 8, TINY.width))
    kept = jax.tree.leaves(jax.vjp(lambda x: mlp(x), x)[1])
    wide = {id(k) for k in kept if getattr(k, "shape", None) == (2, 8, 4 * TINY.width)}
    assert len(wide) == 1  # of x; nothing is kept for the weights, which are not differentiated
    points = jnp.linspace(-4, 4, 9)
    ours, plain = (jax.grad(lambda x, f=f: jnp.sum(f(x)))(points) for f in (gpt.gelu, nnx.gelu))
    np.testing.assert_array_equal(ours, plain)
