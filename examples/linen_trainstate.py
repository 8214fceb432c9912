"""Flax linen with `TrainState`: parameters and optimizer state in shards, the loop as it was.

`one_device` is the loop as Flax's own examples have it, `sharded` the same at ZeRO stage 3.
Changed: +5 -3 lines, `import zero_jax` among them.

    python examples/linen_trainstate.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(8)])
x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(x[:, :8]))


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((model.apply(params, x) - y) ** 2)


def one_device():
    params = model.init(jax.random.key(0), x[:1])
    tx = optax.adamw(3e-3)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


def sharded():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(model.init, jax.random.key(0), x[:1])
    tx = zero.optimizer(optax.adamw(3e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, batch):
        loss, grads = zero.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


if __name__ == "__main__":
    want, whole = one_device()
    losses, state = sharded()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=state.params, opt_state=state.opt_state)

    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments, in fp32: 12 bytes of Ψ / N.
    psi = sum(leaf.size for leaf in jax.tree.leaves(whole.params))
    assert most <= 1.01 * 12 * psi / jax.device_count(), most
