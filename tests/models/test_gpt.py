"""The GPT is right on one device, and its logits exist a chunk at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import equations_of

from zero_jax.models import gpt

TINY = gpt.GPTConfig(layers=2, width=16, heads=2, vocab=61, seq=16, loss_chunk=8)
TOKENS = jax.random.randint(jax.random.key(7), (3, 12), 0, TINY.vocab)
abstract = lambda config: nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0)))  # noqa: E731


@pytest.fixture(scope="module")
def tiny():
    return gpt.GPT(TINY, nnx.Rngs(0))


def test_sizes_are_those_of_the_tree_and_of_the_names_and_matmuls_count_six_times():
    for name in gpt.PRESETS:
        config = gpt.preset(name)
        model = abstract(config)
        leaves = jax.tree.leaves(nnx.state(model))
        assert gpt.num_params(config) == sum(leaf.size for leaf in leaves), name
        blocks = jax.tree.leaves(nnx.state(model.blocks))
        assert {leaf.shape[0] for leaf in blocks} == {config.layers}
    for name, size in (("7.5b", 7.5e9), ("128b", 128e9), ("1t", 1e12)):
        assert gpt.num_params(gpt.preset(name)) == pytest.approx(size, rel=0.01)
    assert round(gpt.num_params(gpt.preset("124m", vocab=50257)) / 1e6, 1) == 124.4
    # 6 FLOPs per token and matrix weight; scores and mixing add 3 x 2 x 2 x D x T per layer.
    config = gpt.preset("7.5b")
    d, layers, t = config.width, config.layers, config.seq
    idle = t * d + layers * 13 * d + 2 * d
    expected = 6 * (gpt.num_params(config) - idle) + 3 * layers * 2 * 2 * d * t
    assert gpt.flops_per_token(config, t) == expected
    # Of T² pairs of tokens the causal mask leaves T (T + 1) / 2.
    expected -= 3 * layers * 2 * 2 * d * (t - 1) / 2
    assert gpt.flops_per_token(config, t, masked=True) == expected


def test_a_new_model_is_parameters_alone_with_the_deviations_of_gpt2(tiny):
    graphdef, params, rest = nnx.split(tiny, nnx.Param, ...)
    assert jax.tree.leaves(params) and not jax.tree.leaves(rest)
    assert graphdef == nnx.graphdef(abstract(TINY))  # so that jit's cache hits
    # 512 samples or more: one sigma is 3 %; a missing 1 / sqrt(2 * layers) is 100 %.
    attn, mlp, out = tiny.blocks.attn, tiny.blocks.mlp, 0.02 / (2 * TINY.layers) ** 0.5
    for layer, deviation in [(attn.qkv, 0.02), (mlp.up, 0.02), (attn.proj, out), (mlp.down, out)]:
        assert float(jnp.std(layer.kernel[...])) == pytest.approx(deviation, rel=0.15)
        assert not np.array_equal(layer.kernel[0], layer.kernel[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compute_follows_the_dtype_of_the_parameters(dtype):
    graphdef, params = nnx.split(abstract(TINY))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    tokens = jnp.zeros((2, 8), int)

    def run(params):
        model = nnx.merge(graphdef, params)
        return model.hidden(tokens), model(tokens), gpt.loss(model, tokens)

    jaxpr, (hidden, *fp32) = jax.make_jaxpr(run, return_shape=True)(params)
    assert hidden.dtype == dtype and {x.dtype for x in jax.tree.leaves(fp32)} == {jnp.float32.dtype}
    avals = [(e.primitive.name, v.aval) for e in equations_of(jaxpr.jaxpr) for v in e.outvars]
    shapes = {(2, 8, factor * TINY.width) for factor in (1, 3, 4)}
    assert shapes <= {x.shape for name, x in avals if name == "dot_general" and x.dtype == dtype}
    assert {x.dtype for name, x in avals if name == "rsqrt"} == {jnp.float32.dtype}


def test_dropout_differs_by_layer_branch_and_key_and_is_off_without_a_key():
    # Branches add 1, 4, 16 or 64: digits of the residual stream in base 4 show the dropped ones.
    model = gpt.GPT(dataclasses.replace(TINY, dropout=0.5, width=128), nnx.Rngs(0))
    for embed in (model.wte, model.wpe):
        embed.embedding[...] = jnp.zeros_like(embed.embedding[...])
    for linear, sizes in [(model.blocks.attn.proj, (1, 16)), (model.blocks.mlp.down, (4, 64))]:
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
        linear.bias[...] = jnp.ones_like(linear.bias[...]) * jnp.array(sizes)[:, None]
    run = jax.jit(lambda key: model.hidden(jnp.zeros((1, 16), int), dropout_key=key)[0])
    hidden = np.asarray(run(jax.random.key(0)))
    # 16 numbers if the four masks are independent, 4 if layers or branches share theirs.
    assert all(len(np.unique(np.round(row, 3))) == 16 for row in hidden)
    np.testing.assert_array_equal(hidden, run(jax.random.key(0)))
    assert not np.allclose(hidden, run(jax.random.key(1)))
    assert len(np.unique(run(None))) == 1  # 1 + 4 + 16 + 64 everywhere


def test_greedy_text_takes_the_likeliest_token_and_samples_differ_by_key(tiny):
    logits = jax.jit(lambda tokens: tiny(tokens))
    prompt, steps = [3, 1, 4, 1, 5], TINY.seq
    text = gpt.generate(tiny, jnp.array(prompt), steps, jax.random.key(0), temperature=0.0)
    expected = list(prompt)
    for _ in range(steps):
        seen = expected[-TINY.seq :]
        padded = jnp.array([seen + [0] * (TINY.seq - len(seen))])
        expected.append(int(jnp.argmax(logits(padded)[0, len(seen) - 1])))
    assert text.tolist() == expected
    keys = map(jax.random.key, (0, 1))
    texts = [gpt.generate(tiny, jnp.array(prompt), steps, key) for key in keys]
    assert not np.array_equal(*texts) and all(text.max() < TINY.vocab for text in texts)


def test_logits_of_the_loss_exist_one_chunk_at_a_time():
    graphdef, params = nnx.split(abstract(TINY))
    loss = lambda p: gpt.loss(nnx.merge(graphdef, p), jnp.zeros((8, 17), int))[0]  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    shapes = {v.aval.shape for eqn in equations_of(jaxpr) for v in eqn.outvars}
    assert max(np.prod(s[:-1]) for s in shapes if s[-1:] == (TINY.vocab,)) == TINY.loss_chunk


def test_logits_are_causal_and_the_loss_is_the_mean_of_log_probabilities(tiny):
    logits = jax.jit(lambda tokens: tiny(tokens))
    before, after = logits(TOKENS), logits(TOKENS.at[:, 8].add(1) % TINY.vocab)
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert np.all(np.any(before[:, 8:] != after[:, 8:], axis=-1))  # each later one sees it
    mask = jnp.arange(11)[None] < jnp.array([11, 5, 0])[:, None]
    total, weight = jax.jit(lambda tokens, mask: gpt.loss(tiny, tokens, mask))(TOKENS, mask)
    logp = jax.nn.log_softmax(logits(TOKENS))[:, :-1]
    losses = -jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=2)[..., 0]
    assert weight == 16
    np.testing.assert_allclose(total, jnp.sum(losses * mask), rtol=9e-7)


def test_gelu_keeps_its_input_alone_for_the_backward_pass():
    mlp = gpt.MLP(TINY, 0.02, nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((2, 8, TINY.width), jnp.float32)
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(mlp, x)[1], x))
    assert [k.shape for k in kept].count((2, 8, 4 * TINY.width)) == 1
    points = jnp.linspace(-4, 4, 9)
    ours, plain = (jax.grad(lambda x, f=f: jnp.sum(f(x)))(points) for f in (gpt.gelu, nnx.gelu))
    np.testing.assert_array_equal(ours, plain)
