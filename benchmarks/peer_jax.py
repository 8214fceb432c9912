"""One process of peers.py in zero_jax: stage 0 to 3."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import numpy as np
import optax
import peer
from flax import nnx

import zero_jax
from zero_jax.models import gpt


def main() -> None:
    parsed = peer.arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    zero_jax.initialize(parsed.address, parsed.world, parsed.rank)
    names = ("layers", "width", "heads", "vocab", "seq")
    config = gpt.GPTConfig(**{name: getattr(parsed, name) for name in names})
    graphdef = nnx.graphdef(
        nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0), zero_jax.attention))
    )

    def loss(params, rows):
        return zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, params), rows))

    zero = zero_jax.Zero(zero_jax.make_mesh(), int(parsed.name.rpartition("-")[2]))
    tx = zero.optimizer(optax.adamw(peer.LEARNING_RATE, weight_decay=peer.WEIGHT_DECAY))
    params = zero.init(lambda: nnx.state(gpt.GPT(config, nnx.Rngs(0)), nnx.Param))
    states, step = (params, tx.init(params)), zero.train_step(loss, tx)
    del params

    def train(rows: np.ndarray) -> float:
        nonlocal states
        *states, metrics = step(*states, zero_jax.global_batch(zero.mesh, rows.astype(np.int32)))
        jax.block_until_ready(states)
        return float(metrics.loss)

    peer.measure(parsed, train)


if __name__ == "__main__":
    main()
