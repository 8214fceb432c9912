"""Whether it matters that gradients travel as int8 or int4: losses beside exact sums.

    python benchmarks/rounding.py              # 8 runs of 200 steps
    python benchmarks/rounding.py --tables     # prints the table of what is there

A small GPT learns a Markov chain from gradients of 8 devices, each rounded by its sender and summed
in fp32, as of `Precision(grad_comm_dtype=...)` (biases and norms of stacks stay as they are). With
*error feedback* a sender adds what it rounded off to its next gradient, which zero_jax does not do:
it would be a full gradient on every device. All devices are simulated on one. Writes
docs/rounding.json.
"""

import argparse
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from zero_jax.collectives import quantised
from zero_jax.models import gpt

FILE = pathlib.Path(__file__).parent.parent / "docs" / "rounding.json"
DEVICES, ROWS, STEPS, LAST, SEEDS = 8, 4, 200, 50, (1, 2)
CONFIG = gpt.GPTConfig(layers=4, width=64, heads=4, vocab=64, seq=64)
WAYS = (("exact", None, False), ("int8", 8, False), ("int4", 4, False), ("int4", 4, True))


def rows_of(rng: np.random.Generator, chain: np.ndarray) -> np.ndarray:
    """(devices, rows, T + 1) tokens of a Markov chain whose transitions are the chain's rows."""
    tokens = np.zeros((DEVICES, ROWS, CONFIG.seq + 1), np.int32)
    tokens[..., 0] = rng.integers(0, CONFIG.vocab, tokens.shape[:2])
    for t in range(CONFIG.seq):
        below = chain.cumsum(1)[tokens[..., t]] < rng.random((*tokens.shape[:2], 1))
        tokens[..., t + 1] = np.minimum(below.sum(-1), CONFIG.vocab - 1)
    return tokens


def final_loss(bits: int | None, feedback: bool, seed: int) -> float:
    """The mean loss of the last steps."""
    graphdef, start = nnx.split(gpt.GPT(CONFIG, rngs=nnx.Rngs(seed)))
    tx = optax.adamw(3e-3)

    def loss(params, rows):
        total, weight = gpt.loss(nnx.merge(graphdef, params), rows)
        return total / weight

    def sent(grad):
        if bits is None or grad.ndim < 2:
            return grad
        return quantised.dequantise(*quantised.quantise(grad, bits), jnp.float32)

    @jax.jit
    def step(params, state, rest, rows):
        losses, own = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, rows)
        own = jax.tree.map(jnp.add, own, rest) if feedback else own
        rounded = jax.tree.map(jax.vmap(sent), own)
        rest = jax.tree.map(jnp.subtract, own, rounded) if feedback else rest
        mean = jax.tree.map(lambda g: g.mean(0), rounded)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state, rest, losses.mean()

    rest = jax.tree.map(lambda x: jnp.zeros((DEVICES, *x.shape)), start) if feedback else None
    rng, params, state, losses = np.random.default_rng(seed), start, tx.init(start), []
    chain = rng.dirichlet(np.full(CONFIG.vocab, 0.05), CONFIG.vocab)
    for _ in range(STEPS):
        params, state, rest, mean = step(params, state, rest, rows_of(rng, chain))
        losses.append(float(mean))
    return float(np.mean(losses[-LAST:]))


def table(known: dict) -> str:
    seeds = [f"seed {seed}" for seed in known["seeds"]]
    lines = [f"| gradients | {' | '.join(seeds)} |", "|---" * (1 + len(seeds)) + "|"]
    for row in known["rows"]:
        name = row["sent"] + (" with error feedback" if row["feedback"] else "")
        lines.append(f"| {name} | {' | '.join(f'{x:.4f}' for x in row['losses'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    if parser.parse_args().tables:
        known = json.loads(FILE.read_text())
    else:
        rows = [
            {
                "sent": name,
                "feedback": feedback,
                "losses": [final_loss(bits, feedback, seed) for seed in SEEDS],
            }
            for name, bits, feedback in WAYS
        ]
        known = {"jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "seeds": SEEDS}
        known |= {"steps": STEPS, "devices": DEVICES, "rows": rows}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table(known))


if __name__ == "__main__":
    main()
