"""Equinox: the arrays of a module are the parameters, what is left of it stays with the loss.

`one_device` is the loop of Equinox's own examples, `sharded` the same at ZeRO stage 3. A module
holds functions beside arrays; `eqx.partition` takes it apart, `eqx.combine` puts it together in
the loss. Changed: +9 -5 lines, `import zero_jax` among them.

    python examples/equinox_mlp.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(x[:, :8]))


def make(key):
    return eqx.nn.MLP(in_size=32, out_size=8, width_size=256, depth=2, key=key)


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def one_device():
    model = make(jax.random.key(0))
    tx = optax.adamw(3e-3)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(20):
        model, opt_state, loss = step(model, opt_state, batch)
        losses.append(float(loss))
    return losses, eqx.filter(model, eqx.is_array), opt_state


def sharded():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    # Shapes in place of arrays: the model whole is nowhere.
    _, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), is_shape)
    model = zero.init(lambda key: eqx.filter(make(key), eqx.is_array), jax.random.key(0))
    tx = zero.optimizer(optax.adamw(3e-3))
    opt_state = tx.init(model)
    grad_fn = zero.value_and_grad(lambda p, batch: loss_fn(eqx.combine(p, static), batch))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        loss, grads = grad_fn(model, batch)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(20):
        model, opt_state, loss = step(model, opt_state, batch)
        losses.append(float(loss))
    return losses, model, opt_state


def is_shape(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


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
