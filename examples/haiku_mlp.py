"""Haiku: a transformed function's parameters are a tree like any other.

`one_device` is the loop of Haiku's own examples, `sharded` the same at ZeRO stage 3.
Changed: +5 -3 lines, `import zero_jax` among them.

    python examples/haiku_mlp.py
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([256, 256, 8])(x)))
x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(x[:, :8]))


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((model.apply(params, x) - y) ** 2)


def one_device():
    params = model.init(jax.random.key(0), x[:1])
    tx = optax.adamw(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


def sharded():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(model.init, jax.random.key(0), x[:1])
    tx = zero.optimizer(optax.adamw(3e-3))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = zero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state


if __name__ == "__main__":
    want, whole, _ = one_device()
    losses, params, opt_state = sharded()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=params, opt_state=opt_state)

    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments, in fp32: 12 bytes of Ψ / N.
    psi = sum(leaf.size for leaf in jax.tree.leaves(whole))
    assert most <= 1.01 * 12 * psi / jax.device_count(), most
