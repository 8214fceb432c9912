"""Full fine-tuning beside PyTorch: the same folder, the same batches, AdamW, ten steps."""

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from exchange import loaded
from families import FAMILIES

import zero_jax
from training.packing import row_of
from zero_jax.plan.text_model import TextModel

pytestmark = pytest.mark.interchange
STEPS, ROWS, SEQ, RATE, DECAY = 10, 4, 20, 1e-3, 0.1


def documents(step):
    """Two documents for each row, of which the second half is learned."""
    rng = np.random.default_rng(step)

    def one(longest):
        size = rng.integers(4, longest)
        return rng.integers(0, 97, size).astype(np.int32), np.arange(size) >= size // 2

    return [[one(10), one(11)] for _ in range(ROWS)]


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
    """Ours has the documents side by side in rows, sharded over 4 devices at stage 3."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:4]), stage=3)
    config, params = loaded(tmp_path, 4)
    tx, loss = zero.optimizer(optax.adamw(RATE, weight_decay=DECAY)), TextModel(config).loss
    opt_state, step, losses = tx.init(params), zero.train_step(loss, tx), []
    for number in range(STEPS):
        rows = [row_of(row, SEQ) for row in documents(number)]
        batch = tuple(np.stack(part) for part in zip(*rows, strict=True))
        batch = zero_jax.global_batch(zero.mesh, batch)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, theirs(tmp_path), atol=1e-4)
    assert losses[-1] != losses[0]
