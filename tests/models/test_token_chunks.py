"""MLPs on chunks of tokens: the numbers of all at once, in less memory, gathered as often."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import ulps, zero_on

import zero_jax
from zero_jax.adapters.lora import Lora
from zero_jax.models import decoder, gpt, token_chunks
from zero_jax.models.decoder_block import MLP, Norm
from zero_jax.plan.text_model import TextModel

GPT = gpt.GPTConfig(layers=2, width=16, heads=2, vocab=61, seq=16)
# All norms and biases, so that each has a gradient through the chunks.
DECODER = decoder.DecoderConfig(
    layers=2, width=24, heads=4, kv_heads=2, head_dim=6, hidden=40, vocab=54, seq=16,
    post_norms=True, mlp_bias=True, activation="gelu")  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(7), (4, 13), 0, 54)


def noisy(shapes):
    """Parameters none of which is zero or one."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)


@functools.cache
def params_of(config):
    return noisy(jax.eval_shape(TextModel(config).own))


def grads_of(config, params=None):
    params = params_of(dataclasses.replace(config, mlp_chunk=None)) if params is None else params

    def loss(params):
        total, weight = TextModel(config).loss(params, TOKENS)
        return total / weight

    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def at_once(config):
    return grads_of(config)


@pytest.mark.parametrize("config", [GPT, DECODER], ids=["gpt", "decoder"])
@pytest.mark.parametrize("chunk", [12, 13, 47, 1000])  # of 48 tokens: 4 · 12, 4 · 12, 2 · 24, 1
def test_loss_and_gradients_equal_those_of_all_tokens_at_once(config, chunk):
    # Sums of 48 terms in another order, through two layers; a wrong term is millions of ulps.
    found = grads_of(dataclasses.replace(config, mlp_chunk=chunk))
    assert ulps(found, at_once(config)) <= 64


def test_tokens_that_the_chunk_does_not_divide_are_padded_by_zeros():
    assert token_chunks.split(jnp.ones((48, 2)), 13).shape == (4, 12, 2)
    found = grads_of(dataclasses.replace(DECODER, mlp_chunk=5))  # 10 chunks of 5
    assert ulps(found, at_once(DECODER)) <= 64


TILE = dataclasses.replace(DECODER, width=8, hidden=16)
MODULES = [Norm(8, TILE, nnx.Rngs(0)), MLP(TILE, 0.1, nnx.Rngs(1))]
GRAPHS, WEIGHTS = zip(*map(nnx.split, MODULES), strict=True)


def tile(x, weights, dout, chunk, graphs=GRAPHS):
    """The gradients of an MLP with its norm."""

    def out(x, weights):
        return token_chunks.in_chunks([*map(nnx.merge, graphs, weights)], x, chunk)

    return jax.vjp(out, x, weights)[1](dout)


def test_bf16_gradients_of_512_chunks_round_like_those_of_one():
    """Summed in bf16, as JAX does in a loop, they would stop to grow at 256 equal terms."""
    x = jax.random.normal(jax.random.key(0), (1, 4096, 8), jnp.bfloat16)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), WEIGHTS)
    dout = jnp.ones_like(x)
    run = jax.jit(tile, static_argnums=3)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights, dout))
    exact = jax.tree.leaves(run(*wide, None))
    chunked, one = (jax.tree.leaves(run(x, weights, dout, chunk)) for chunk in (8, None))
    for got, other, truth in zip(chunked, one, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        error, usual = (jnp.linalg.norm(a.astype(jnp.float32) - truth) for a in (got, other))
        # Each term is rounded too, which averages out.
        assert error <= 1.5 * usual + 2.0**-8 * jnp.linalg.norm(truth)


def test_the_compiled_gradient_holds_activations_of_one_chunk():
    config, tokens = dataclasses.replace(TILE, hidden=256), 4096
    modules = [Norm(8, config, nnx.Rngs(0)), MLP(config, 0.1, nnx.Rngs(1))]
    graphs, weights = zip(*map(nnx.split, modules), strict=True)
    x = jax.ShapeDtypeStruct((1, tokens, 8), jnp.float32)

    def temporaries(chunk):
        grad = jax.jit(lambda x, weights, dout: tile(x, weights, dout, chunk, graphs))
        return grad.lower(x, weights, x).compile().memory_analysis().temp_size_in_bytes

    found = [temporaries(chunk) for chunk in (256, 1024, None)]
    # At least the gate and `up` of a chunk are held for its backward pass, in fp32.
    wide = 2 * 4 * 256
    assert found[1] - found[0] >= wide * (1024 - 256)
    assert found[2] - found[1] >= wide * (tokens - 1024)
    # The rest is as large as x (a few copies) or as the weights, whose gradients are carried.
    assert found[0] <= 8 * wide * 256 + 4 * x.size * 4


@pytest.mark.parametrize(("remat", "layers"), [("block", 4), ("none", 2)])
def test_chunks_gather_each_layer_as_often_and_step_alike(remat, layers):
    # Without biases: under "none" they are gathered again for the chunks, which run again.
    config = dataclasses.replace(DECODER, layers=layers, mlp_bias=False)
    runs = []
    for chunk in (None, 5):
        zero = zero_on(2, remat=remat)
        model = TextModel(dataclasses.replace(config, mlp_chunk=chunk))
        params, tx = zero.init(model.make), zero.optimizer(optax.sgd(0.1))
        step = zero.train_step(model.trained_loss, tx)
        rows = zero_jax.global_batch(zero.mesh, np.asarray(TOKENS))
        compiled = step.lower(params, tx.init(params), rows).compile()
        sent = zero_jax.audit(compiled, dict(zero.mesh.shape)).sent_elements
        params, _, metrics = compiled(params, tx.init(params), rows)
        runs.append((sent, zero.unshard(params), metrics.loss))
    assert runs[0][0] == runs[1][0] and runs[0][0]["all-gather"] > 0
    assert ulps(runs[1][1:], runs[0][1:]) <= 64


def test_chunks_under_shard_map_equal_one_device():
    # JAX sums the gradient of replicated weights itself (check_vma), also of a custom gradient.
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    sharded = jax.shard_map(
        lambda *args: tile(*args, 4), mesh=mesh, in_specs=(P("data"), P(), P("data")),
        out_specs=(P("data"), P()))  # fmt: skip
    dout = jnp.cos(x)
    assert ulps(jax.jit(sharded)(x, WEIGHTS, dout), tile(x, WEIGHTS, dout, None)) <= 16


def test_chunks_of_an_mlp_that_is_split_over_the_model_axis():
    zero = zero_on({"data": 2, "model": 2}, remat="block", sequence_parallel=True)
    model = TextModel(dataclasses.replace(DECODER, seq=12, mlp_chunk=5))
    rows = zero_jax.global_batch(zero.mesh, np.asarray(TOKENS))
    grads = zero.value_and_grad(model.trained_loss)(zero.shard(params_of(DECODER)), rows)
    assert ulps(zero.unshard(grads), at_once(DECODER)) <= 64


def test_adapters_of_chunked_mlps_are_those_of_the_others():
    found = []
    for chunk in (None, 12):
        model = TextModel(dataclasses.replace(DECODER, mlp_chunk=chunk), Lora(rank=2, base="fp32"))
        params = noisy(jax.eval_shape(model.make))
        grads = jax.jit(jax.grad(lambda p, model=model: model.loss(p, TOKENS)[0]))(params)
        found.append(grads["lora"])
    assert sum("mlp" in name for name in found[0]) == 3
    # W + s·A·B is rounded in the chunks alone.
    assert ulps(found[1], found[0]) <= 256


def test_chunks_without_tokens_and_of_experts_raise():
    for config in (GPT, DECODER):
        with pytest.raises(ValueError, match="mlp_chunk`=0"):
            dataclasses.replace(config, mlp_chunk=0)
    with pytest.raises(ValueError, match="mlp_chunk`=8"):
        dataclasses.replace(DECODER, mlp_bias=False, mixture=decoder.Mixture(4, 2), mlp_chunk=8)
