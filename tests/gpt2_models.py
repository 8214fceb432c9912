"""What the tests of interchange share: models in both worlds, and fixtures with checkpoints."""

import functools
import os

# No test may look for anything on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from test_checkpoints import zero_on

from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.commands.checkpoint import main
from zero_jax.models import gpt

# Logits of fp32 models, whose sums come in another order.
ATOL = 1e-4

CONFIGS = {
    "odd": gpt.GPTConfig(layers=2, width=12, heads=2, vocab=17, seq=8),
    "even": gpt.GPTConfig(layers=3, width=16, heads=4, vocab=20, seq=6),
    "one head": gpt.GPTConfig(layers=1, width=10, heads=1, vocab=31, seq=5),
    "as many heads as columns": gpt.GPTConfig(layers=4, width=6, heads=6, vocab=9, seq=12),
}


@functools.partial(jax.jit, static_argnums=0)
def make(config):
    """Parameters none of which is zero or one, so that every bias and scale counts."""
    params = nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def tokens_of(config):
    return np.random.default_rng(0).integers(0, config.vocab, (3, config.seq))


def our_logits(config, params):
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    with jax.default_matmul_precision("highest"):
        apply = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
        return np.asarray(apply(params, tokens_of(config)))


def their_logits(model, config):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_of(config))).logits.float().numpy()


def their_config(config, **others):
    return transformers.GPT2Config(
        vocab_size=config.vocab,
        n_positions=config.seq,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        bos_token_id=None,
        eos_token_id=None,
        **others,
    )


def their_model(config, **others):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(their_config(config, **others))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    return model


def loaded(folder):
    """The model by transformers, which must find every tensor and no other."""
    model, found = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def run(*args):
    return main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By name of the config: a training checkpoint, its parameters, their logits."""
    made = {}
    for name, config in CONFIGS.items():
        folder, zero = tmp_path_factory.mktemp("checkpoint"), zero_on(4)
        params = zero.shard(make(config))
        moments = jax.tree.map(jnp.zeros_like, params)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(3, (params, {"mu": moments}), config={"heads": config.heads})
        made[name] = folder, params, our_logits(config, make(config))
    return made


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    """The same, exported: one folder with several files for each config."""
    made = {}
    for name in CONFIGS:
        made[name] = tmp_path_factory.mktemp("exported") / "out"
        assert run("export", saved[name][0], made[name], "--max-file-bytes", "3e3") == 0
    return made
