"""The GPT that peers are measured with, in PyTorch, is ours."""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from zero_jax.models import gpt
from zero_jax.sharding.paths import named_leaves

pytestmark = pytest.mark.interchange
SIZES = {"layers": 3, "width": 24, "heads": 4, "vocab": 50, "seq": 12}


def test_the_model_of_the_peers_is_ours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["peer_torch.py", "ddp"])
    import peer_torch

    model = gpt.GPT(gpt.GPTConfig(**SIZES), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), state)
    np.savez(tmp_path / "weights.npz", **{n: np.asarray(x) for n, x in named_leaves(state)})
    theirs = peer_torch.GPT(argparse.Namespace(**SIZES))
    peer_torch.load(theirs, str(tmp_path / "weights.npz"))
    rows = rng.integers(0, SIZES["vocab"], (2, SIZES["seq"] + 1))
    mean = jax.value_and_grad(lambda state: jnp.divide(*gpt.loss(nnx.merge(graphdef, state), rows)))
    (want, grads), loss = mean(state), theirs(torch.from_numpy(rows))
    np.testing.assert_allclose(loss.item(), want, rtol=1e-6)
    loss.backward()
    ours = dict(named_leaves(grads))
    np.testing.assert_allclose(theirs.wte.weight.grad, ours["wte/embedding"], rtol=1e-4, atol=1e-6)
    qkv = np.stack([block.qkv.weight.grad.mT for block in theirs.blocks])
    np.testing.assert_allclose(qkv, ours["blocks/attn/qkv/kernel"], rtol=1e-4, atol=1e-6)
