"""Full fine-tuning beside PyTorch: the same folder, the same batches, AdamW, ten steps."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import families as tiny
import jax
import numpy as np
import optax
import pytest
import torch
import transformers

import zero_jax
from training.packing import row_of
from zero_jax import interchange
from zero_jax.plan.text_model import TextModel

pytestmark = pytest.mark.interchange
STEPS, ROWS, SEQ, RATE, DECAY = 10, 4, 20, 1e-3, 0.1


def documents(step):
    """Two documents for each row, of which the second half is learned."""
    rng = np.random.default_rng(step)
    return [
        [
            (rng.integers(0, 97, size).astype(np.int32), np.arange(size) >= size // 2)
            for size in (rng.integers(4, 10), rng.integers(4, 11))
        ]
        for _ in range(ROWS)
    ]


def theirs(folder):
    """Losses of PyTorch, a document at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    settings = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": DECAY}
    optimizer, losses = torch.optim.AdamW(model.parameters(), **settings), []
    for step in range(STEPS):
        total, count = 0.0, 0
        for ids, mask in (document for row in documents(step) for document in row):
            tokens = torch.tensor(ids, dtype=torch.long)[None]
            logits = model(tokens).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            learned = torch.tensor(mask[1:])
            total, count = total + each[learned].sum(), count + int(learned.sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral"])
def test_losses_are_those_of_pytorch(family, tmp_path):
    """Ours has the documents side by side in rows, cut over 4 devices at stage 3."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny.FAMILIES[family]())
    model.save_pretrained(tmp_path)
    wanted = theirs(tmp_path)
    text = TextModel(interchange.config(tmp_path))
    mesh = zero_jax.make_mesh(devices=jax.devices()[:4])
    zero = zero_jax.Zero(mesh, stage=3)
    params = interchange.load(tmp_path, zero.abstract(text.make))
    tx = zero.optimizer(optax.adamw(RATE, weight_decay=DECAY))
    opt_state, step, losses = tx.init(params), zero.train_step(text.loss, tx), []
    for number in range(STEPS):
        rows = [row_of(row, SEQ) for row in documents(number)]
        batch = tuple(np.stack(part) for part in zip(*rows, strict=True))
        batch = zero_jax.global_batch(mesh, batch)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, wanted, atol=1e-4)
    assert losses[-1] != losses[0]
