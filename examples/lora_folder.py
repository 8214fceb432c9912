"""LoRA on a folder of text files: a base in 4 bits rests beside small matrices that are trained.

The script makes what a user brings: a model (of the next byte, trained for a moment on the text of
CPython's help pages) and a folder (sentences about trains). `whole` trains all of the model at ZeRO
stage 3, `adapters` matrices of rank 8 beside it; what is multiplied with is read from the loss.
Changed: +5 -3 lines from one to the other.

`train.py --init-from DIR --data FOLDER --lora-rank 16` does the same with a model and a tokenizer
of Hugging Face (docs/finetuning.md).

    python examples/lora_folder.py
"""

import pathlib
import tempfile
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

SEEN, ROWS = 16, 256


class NextByte(nn.Module):
    """The next byte of a text from those that were seen."""

    @nn.compact
    def __call__(self, seen):
        x = nn.Embed(256, 32)(seen).reshape(len(seen), -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(256)(x)


model = NextByte()


def make(key):
    return model.init(key, jnp.zeros((1, SEEN), jnp.int32))


def loss_fn(params, rows):
    logits = model.apply(params, rows[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]))


def write_folder(folder):
    """A text file for each town."""
    for town in ("Ulm", "Graz", "Brno", "Turku", "Vigo", "Bergen"):
        lines = [f"The train to {town} leaves at {h}:{m:02d}." for h in range(24) for m in (5, 35)]
        (folder / f"{town}.txt").write_text("\n".join(lines))


def read_folder(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))


def batches(text, steps):
    """Rows of SEEN + 1 bytes from anywhere in a text."""
    letters = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(letters) - SEEN, (ROWS, 1))
        yield letters[starts + np.arange(SEEN + 1)]


def whole(start, text, steps, rate):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.shard(start)
    tx = zero.optimizer(optax.adamw(rate))
    step = zero.train_step(loss_fn, tx)
    opt_state = tx.init(params)
    losses = []
    for rows in batches(text, steps):
        params, opt_state, metrics = step(params, opt_state, rows)
        losses.append(float(metrics.loss))
    return losses, params, opt_state, zero


def adapters(start, text, steps, rate):
    lora = zero_jax.Lora(rank=8, base="nf4")
    adapted = lora.adapt(loss_fn, start, next(batches(text, 1)))
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, frozen=adapted.frozen)
    params = zero.shard(jax.jit(adapted.init(lambda params: params))(start))
    tx = zero.optimizer(optax.adamw(rate))
    step = zero.train_step(adapted.loss, tx)
    opt_state = tx.init(params)
    losses = []
    for rows in batches(text, steps):
        params, opt_state, metrics = step(params, opt_state, rows)
        losses.append(float(metrics.loss))
    return losses, params, opt_state, zero


if __name__ == "__main__":
    english = "\n".join(topics.values())
    start = jax.jit(make)(jax.random.key(0))
    _, params, opt_state, zero = whole(start, english, steps=80, rate=1e-3)
    start = zero.unshard(params)
    print("whole model")
    most_whole = print_held(params=params, opt_state=opt_state)

    with tempfile.TemporaryDirectory() as folder:
        write_folder(pathlib.Path(folder))
        text = read_folder(pathlib.Path(folder))
    losses, params, opt_state, _ = adapters(start, text, steps=40, rate=1e-2)
    print("adapters beside a base in nf4")
    most = print_held(base=params["base"], adapters=params["lora"], opt_state=opt_state)
    print(f"loss on the folder {losses[0]:.3f} -> {losses[-1]:.3f}")

    assert losses[-1] < losses[0] - 1  # nat a byte
    assert most < most_whole / 6
