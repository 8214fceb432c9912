"""The models are right on one device, and their loss is as small in memory as it says."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gpt, resnet

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


# --- GPT: shapes and counts ---


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
    assert gpt.flops_per_token(config) == expected


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


# --- GPT: the function it computes ---


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
    norm = gpt._layer_norm(16, nnx.Rngs(0))
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
    return jax.jit(lambda key: model.hidden(jnp.zeros((1, 16), int), key)[0])


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


# --- the chunked loss ---

M, D, V = 26, 16, 61


def plain_cross_entropy(x, embed, labels, weights):
    logits = jnp.einsum("md,vd->mv", x, embed, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
    return jnp.sum(losses * weights)


def chunked_sum(x, embed, labels, weights, chunk):
    return gpt.chunked_cross_entropy(x, embed, labels, weights, chunk)[0]


ARGNUMS = (0, 1, 3)  # hidden states, embedding and weights
plain_value_and_grad = jax.jit(jax.value_and_grad(plain_cross_entropy, ARGNUMS))
chunked_value_and_grad = jax.jit(jax.value_and_grad(chunked_sum, ARGNUMS), static_argnums=4)
chunked_value = jax.jit(chunked_sum, static_argnums=4)


def batch(dtype=jnp.float32, mask="ones"):
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (M, D)).astype(dtype)
    embed = jax.random.normal(keys[1], (V, D)).astype(dtype)
    labels = jax.random.randint(keys[2], (M,), 0, V)
    weights = {
        "ones": jnp.ones(M),
        "mask": (jnp.arange(M) % 3 > 0).astype(jnp.float32),
        "fractions": jax.random.uniform(keys[3], (M,)),
        "zeros": jnp.zeros(M),
    }[mask]
    return x, embed, labels, weights


def ulps(got, expected):
    """Largest difference in fp32 ulps of the largest expected value."""
    scale = np.finfo(np.float32).eps * np.abs(expected).max()
    return np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max() / scale


@pytest.mark.parametrize("mask", ["ones", "mask", "fractions"])
@pytest.mark.parametrize("chunk", [7, 13, 1000])  # 26 = 4 * 7 - 2 = 2 * 13
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk, mask):
    # Both round every product, exponential and sum in fp32, in another order: sums of D = 16
    # and M = 26 terms, so 8 ulps of the largest value is generous and a wrong term is millions.
    arrays = batch(mask=mask)
    got, got_grads = chunked_value_and_grad(*arrays, chunk)
    expected, grads = plain_value_and_grad(*arrays)
    assert ulps(got, expected) <= 8
    assert ulps(chunked_value(*arrays, chunk), expected) <= 8  # not differentiated
    for got_grad, grad in zip(got_grads, grads, strict=True):
        assert got_grad.dtype == jnp.float32
        assert ulps(got_grad, grad) <= 8


def test_a_batch_without_weight_has_no_gradient_and_no_nan():
    x, embed, labels, weights = batch(mask="zeros")
    value, grads = chunked_value_and_grad(x, embed, labels, weights, 7)
    assert value == 0.0
    assert not np.any(grads[0])  # NaN would count as true
    assert not np.any(grads[1])
    assert gpt.chunked_cross_entropy(x, embed, labels, weights, 7)[1] == 0.0


def test_boolean_mask_counts_its_tokens():
    x, embed, labels, weights = batch(mask="mask")
    total, weight = gpt.chunked_cross_entropy(x, embed, labels, weights > 0, 7)
    assert weight == M * 2 // 3
    assert ulps(total, plain_cross_entropy(x, embed, labels, weights)) <= 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_round_once_from_fp32(dtype):
    x, embed, labels, weights = batch(dtype, mask="fractions")
    _, grads = chunked_value_and_grad(x, embed, labels, weights, 7)
    _, exact = plain_value_and_grad(
        x.astype(jnp.float32), embed.astype(jnp.float32), labels, weights
    )
    # softmax - onehot and the result are rounded to the dtype, half an ulp each, of the largest.
    for grad, right in zip(grads[:2], exact[:2], strict=True):
        assert grad.dtype == dtype
        error = np.abs(np.asarray(grad, np.float64) - right).max()
        assert error <= jnp.finfo(dtype).eps * np.abs(right).max()


def test_fp16_gradients_neither_underflow_nor_overflow():
    # Near-uniform probabilities of 1 / 61 under a weight of 2**-20 are 1.6e-8, nothing in fp16
    # (its smallest number is 6e-8); under a loss scale of 2**20 the gradients are ordinary.
    x, embed, labels, _ = batch(jnp.float16)
    embed = embed * jnp.float16(0.01)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(power):
        def scaled(x, embed):
            weights = jnp.full(M, 2.0**-power)
            return chunked_sum(x, embed, labels, weights, 7) * 2.0**power

        return jax.grad(scaled, argnums=(0, 1))(x, embed)

    for small, right, large in zip(grads(20), grads(0), grads(-20), strict=True):
        assert np.all(np.any(right, axis=1))
        np.testing.assert_array_equal(small, right)  # powers of two change no digit
        np.testing.assert_array_equal(large, right)


def test_backward_only_scales_and_does_not_keep_the_embedding():
    x, embed, labels, weights = batch(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x, embed: chunked_sum(x, embed, labels, weights, 7), x, embed)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0)]
    assert (V, D) in {leaf.shape for leaf in kept}  # the fp32 gradient, made in the forward pass
    assert not any(leaf.shape == (V, D) and leaf.dtype == jnp.bfloat16 for leaf in kept)
    jaxpr = str(jax.make_jaxpr(vjp)(jnp.float32(1)))
    assert "mul" in jaxpr
    assert "dot_general" not in jaxpr


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


def test_compiled_loss_needs_no_room_for_the_logits_of_the_batch():
    tokens, width, vocab = 1024, 16, 8192
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((tokens, width), jnp.bfloat16),
            ((vocab, width), jnp.bfloat16),
            ((tokens,), jnp.int32),
            ((tokens,), jnp.float32),
        ]
    ]

    def temp(chunk):
        compiled = chunked_value_and_grad.lower(*arrays, chunk).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # In fp32: a few copies of a chunk's logits, and the gradients and the embedding once or
    # twice each. All of that is a quarter of the logits of the batch.
    logits = 4 * tokens * vocab
    assert temp(16) < 4 * (4 * 16 * vocab + 4 * (tokens + vocab) * width) < logits / 4
    assert temp(tokens) >= logits  # not vacuous


def test_loss_is_the_mean_of_plain_log_probabilities(tiny):
    tokens = tokens_of(TINY, 3, 12)
    mask = jnp.arange(11)[None] < jnp.array([11, 5, 0])[:, None]
    total, weight = jax.jit(lambda tokens, mask: gpt.loss(tiny, tokens, mask))(tokens, mask)
    logp = jax.nn.log_softmax(jax.jit(lambda tokens: tiny(tokens))(tokens[:, :-1]))
    losses = -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
    assert weight == 16
    assert ulps(total, jnp.sum(losses * mask)) <= 8
    with pytest.raises(ValueError, match=r"mask has shape \(3, 12\).*\(3, 11\)"):
        gpt.loss(tiny, tokens, jnp.ones((3, 12)))


def test_chunked_loss_under_shard_map_equals_one_device():
    # With a replicated embedding jax itself sums its gradient over the axis, which a custom
    # gradient must not lose; check_vma, the default, types every array inside.
    P = jax.sharding.PartitionSpec
    devices = jax.devices()[: 2 if len(jax.devices()) > 1 else 1]

    def local(x, embed, labels, weights):
        value, grads = jax.value_and_grad(chunked_sum, ARGNUMS)(x, embed, labels, weights, 7)
        return jax.lax.psum(value, "data"), grads

    sharded = jax.shard_map(
        local,
        mesh=jax.sharding.Mesh(devices, ("data",)),
        in_specs=(P("data"), P(), P("data"), P("data")),
        out_specs=(P(), (P("data"), P(), P("data"))),
    )
    arrays = batch(mask="fractions")
    value, grads = jax.jit(sharded)(*arrays)
    expected, right = plain_value_and_grad(*arrays)
    assert ulps(value, expected) <= 8
    assert max(map(ulps, grads, right)) <= 8


# --- ResNet ---


@pytest.fixture(scope="module")
def small_resnet():
    model = resnet.ResNet(stages=(1, 1), width=4)
    random = np.random.default_rng(0)
    images = jnp.asarray(random.normal(size=(8, 8, 8, 3)), jnp.float32)
    tree = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), tree["params"]
    )
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree["batch_stats"])
    return model, params, stats, images, jnp.arange(8)


def test_resnet_loss_updates_batch_statistics(small_resnet):
    model, params, stats, images, labels = small_resnet
    (total, weight), updated = jax.jit(functools.partial(resnet.loss, model))(
        params, stats, images, labels
    )
    assert weight == 8
    assert np.isfinite(total)
    assert jax.tree.structure(updated) == jax.tree.structure(stats)
    for old, new in zip(jax.tree.leaves(stats), jax.tree.leaves(updated), strict=True):
        assert old.shape == new.shape
        assert not np.array_equal(old, new)
    # The stem's running mean after one step is a tenth of the batch's own mean, momentum 0.9.
    stem = jax.lax.conv_general_dilated(
        images,
        params["stem"]["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(
        updated["stem_norm"]["mean"], 0.1 * jnp.mean(stem, axis=(0, 1, 2)), atol=1e-6
    )


def test_resnet_synchronizes_statistics_over_an_axis(small_resnet):
    # Two halves of a batch under one named axis have the statistics of the whole.
    model, params, stats, images, labels = small_resnet
    synced = model.clone(axis_name="data")
    local = functools.partial(resnet.loss, synced, params, stats)
    halves = jax.jit(jax.vmap(local, axis_name="data"))
    (totals, _), updated = halves(images.reshape(2, 4, 8, 8, 3), labels.reshape(2, 4))
    whole = jax.jit(functools.partial(resnet.loss, model, params, stats))
    (total, _), expected = whole(images, labels)
    assert float(totals.sum()) == pytest.approx(float(total), rel=1e-5)
    for got, right in zip(jax.tree.leaves(updated), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got[0], got[1])
        np.testing.assert_allclose(got[0], right, rtol=1e-4, atol=1e-5)


def test_resnet_computes_in_the_dtype_of_its_parameters(small_resnet):
    model, params, stats, images, _ = small_resnet
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    run = functools.partial(model.apply, train=False, capture_intermediates=True)
    logits, state = jax.eval_shape(run, {"params": half, "batch_stats": stats}, images)
    blocks = {k: v for k, v in state["intermediates"].items() if k.startswith("stage")}
    assert {leaf.dtype for leaf in jax.tree.leaves(blocks)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize(
    "make, weight_layers, params",
    [
        # He et al.: the name counts convolutions on the path and the classifier. ResNet-18 with
        # a CIFAR stem and 10 classes has 11,173,962 parameters, ResNet-50 23,520,842.
        (resnet.resnet8, 8, None),
        (resnet.resnet18, 18, 11_173_962),
        (resnet.resnet50, 50, 23_520_842),
    ],
)
def test_resnet_preset_has_its_depth_and_size(make, weight_layers, params):
    init = functools.partial(make().init, train=False)
    tree = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    layers = [path for path in paths if "kernel" in path and "shortcut" not in path]
    assert len(layers) == weight_layers
    if params is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == params


@pytest.mark.parametrize("label", [5, 100, -1, -100])
def test_a_label_that_is_no_token_makes_the_loss_and_its_gradient_nan(label):
    """Not zero: the run would go on, and learn nothing from such rows."""
    x, embed = jax.random.normal(jax.random.key(0), (2, 5, 4))
    labels, weights = jnp.array([0, 1, 2, 3, label]), jnp.ones(5)

    def loss(x):
        return gpt.chunked_cross_entropy(x, embed, labels, weights, 2)[0]

    value, grad = jax.value_and_grad(loss)(x)
    assert jnp.isnan(value) and jnp.isnan(loss(x)) and jnp.isnan(grad[4]).all()
    assert jnp.isfinite(grad[:4]).all()
