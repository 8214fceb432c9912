"""Each error of the models has its type, and names the argument or repeats its value."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_decoder import PLAIN as DECODER

from zero_jax.models import decoder, families, gpt
from zero_jax.models.attention import causal_attention
from zero_jax.plan.text_model import TextModel

GPT = gpt.GPTConfig(layers=2, width=16, heads=2, vocab=61, seq=16)
Q, K, KEY = jnp.zeros((1, 9, 2, 4)), jnp.zeros((1, 9, 1, 4)), jax.random.key(0)


def changed(config, **fields):
    return lambda: dataclasses.replace(config, **fields)


def model(config):
    return families.build(config, nnx.Rngs(0))


def rows(*shapes):
    own = TextModel(DECODER)
    batch = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return lambda: jax.eval_shape(own.loss, jax.eval_shape(own.own), batch)


# fmt: off
REFUSALS = [
    ("heads=3", changed(GPT, heads=3)),
    ("dropout=1.0", changed(GPT, dropout=1.0)),
    ("attention='flash'", changed(GPT, attention="flash")),
    ("layers=0", changed(GPT, layers=0)),
    ("loss_chunk=0", changed(GPT, loss_chunk=0)),
    ("'13B'.*'13b'", lambda: gpt.preset("13B")),
    ("17 tokens.* 16 ", lambda: model(GPT).hidden(jnp.zeros((1, 17), int))),
    ("mask", lambda: gpt.loss(model(GPT), jnp.zeros((3, 12), int), jnp.ones((3, 12)))),
    ("prompt", lambda: gpt.generate(model(GPT), jnp.zeros(0, int), 1, KEY)),
    ("layers=0", changed(DECODER, layers=0)),
    ("kv_heads=3", changed(DECODER, kv_heads=3)),
    ("head_dim=7", changed(DECODER, head_dim=7)),
    ("window=0", changed(DECODER, window=0)),
    ("sliding", changed(DECODER, window=3, sliding=(True,))),
    ("window=None", changed(DECODER, window=None, sliding=(True, False))),
    ("activation='relu'", changed(DECODER, activation="relu")),
    ("mlp_bias=True", changed(DECODER, mlp_bias=True, mixture=decoder.Mixture(4, 2))),
    ("'llama-3-8b'.*'llama-3.1-8b'", lambda: decoder.preset("llama-3-8b")),
    ("chosen=5", lambda: decoder.Mixture(4, 5)),
    ("capacity=0.0", lambda: decoder.Mixture(4, 2, capacity=0.0)),
    ("capacity=1.5", lambda: families.with_capacity(GPT, 1.5)),
    ("experts", lambda: decoder.routed_loss(model(DECODER), jnp.zeros((1, 5), int))),
    ("33 tokens", rows((1, 34))),
    ("mask", rows((1, 9), (1, 9))),
    ("segments", rows((1, 9), (1, 8), (1, 3))),
    ("positions", rows((1, 9), (1, 8), (1, 8), (2, 8))),
    (r"\[1, 9, 2, 4\].*\[1, 7, 1, 4\]", lambda: causal_attention(Q, K[:, :7], K[:, :7])),
    ("bfloat16.*float32", lambda: causal_attention(Q.astype(jnp.bfloat16), K, K)),
    ("3 .*2 ", lambda: causal_attention(Q, *[jnp.tile(K, (1, 1, 3, 1))] * 2)),
    (r"segments.*\[1, 5\]", lambda: causal_attention(Q, K, K, jnp.ones((1, 5), int))),
    ("window=0", lambda: causal_attention(Q, K, K, window=0)),
]
# fmt: on


@pytest.mark.parametrize(("named", "call"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_it_is_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
