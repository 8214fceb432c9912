"""Keras 3 on the JAX backend: layers of Keras, trained by `stateless_call` and optax.

`one_device` is the loop that Keras's guide to JAX writes, with optax for the optimizer, `sharded`
the same at ZeRO stage 3. Keras makes its variables at once, whole: `zero.shard` cuts them, so the
model has to fit in the memory of the host. Changed: +5 -3 lines, `import zero_jax` among them.

`model.fit` and the optimizers of Keras are not used. Layers with random numbers (`Dropout`) keep a
seed in plain integers, which is the same on all devices, and so are their masks.

    pip install keras
    python examples/keras_model.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(x[:, :8]))


def make():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, "relu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(256, "relu"), keras.layers.Dense(8)])
    model.build((None, 32))
    return model


model = make()


def loss_fn(params, batch, rest):
    x, y = batch
    answers, rest = model.stateless_call(params, rest, x, training=True)
    return jnp.mean(keras.losses.mean_squared_error(y, answers)), rest


def one_device():
    params = [variable.value for variable in model.trainable_variables]
    rest = [variable.value for variable in model.non_trainable_variables]
    tx = optax.adamw(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, rest, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), grads = grad_fn(params, batch, rest)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rest, loss

    losses = []
    for _ in range(20):
        params, opt_state, rest, loss = step(params, opt_state, rest, batch)
        losses.append(float(loss))
    return losses, params, opt_state


def sharded():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.shard([variable.value for variable in model.trainable_variables])
    rest = [variable.value for variable in model.non_trainable_variables]
    tx = zero.optimizer(optax.adamw(3e-3))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, rest, batch):
        grad_fn = zero.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), grads = grad_fn(params, batch, rest)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rest, loss

    losses = []
    for _ in range(20):
        params, opt_state, rest, loss = step(params, opt_state, rest, batch)
        losses.append(float(loss))
    return losses, params, opt_state


if __name__ == "__main__":
    want, whole, _ = one_device()
    losses, params, opt_state = sharded()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=params, opt_state=opt_state)

    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments, in fp32: 12 bytes of Ψ / N.
    psi = sum(leaf.size for leaf in whole)
    assert most <= 1.01 * 12 * psi / jax.device_count(), most
