"""Flax NNX with dropout, batch statistics and `nnx.Optimizer`.

`one_device` is NNX's own loop, `sharded` the same at ZeRO stage 3: the module still holds
everything and is changed in place, but gradients come from `zero.value_and_grad`, which takes the
module apart. Changed: +19 -6 lines, `import zero_jax` among them.

Statistics are those of the global batch, so without dropout the losses are those of one device.
Masks of dropout are others: their key is folded with the device.

    python examples/nnx_dropout_batchnorm.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used

x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(x[:, :8]))


class Net(nnx.Module):
    def __init__(self, rate, rngs, axis_name=None):
        self.up = nnx.Linear(32, 256, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(256, axis_name=axis_name, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.middle = nnx.Linear(256, 256, rngs=rngs)
        self.down = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.up(x))))
        return self.down(nnx.relu(self.middle(x)))


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def one_device(rate):
    model = Net(rate, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = []
    for _ in range(30):
        loss = step(model, optimizer, batch)
        losses.append(float(loss))
    return losses, model, optimizer


def sharded(rate):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)

    def make(rngs):
        return Net(rate, rngs, axis_name=zero.batch_axes)

    graphdef, _, stats, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)
    params = zero.init(lambda key: nnx.state(make(nnx.Rngs(key)), nnx.Param), jax.random.key(0))
    model = nnx.merge(graphdef, params, stats, rest)
    optimizer = nnx.Optimizer(model, zero.optimizer(optax.adamw(3e-3)), wrt=nnx.Param)

    def loss_of(params, batch, stats, key):
        model = nnx.merge(graphdef, params, stats, rest, copy=True)
        nnx.reseed(model, default=key)
        return loss_fn(model, batch), nnx.state(model, nnx.BatchStat)

    grad_fn = zero.value_and_grad(loss_of, has_aux=True)

    @nnx.jit
    def step(model, optimizer, batch, key):
        params, stats = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        (loss, stats), grads = grad_fn(params, batch, stats, key)
        optimizer.update(model, grads)
        nnx.update(model, stats)
        return loss

    losses = []
    for number in range(30):
        loss = step(model, optimizer, batch, jax.random.fold_in(jax.random.key(2), number))
        losses.append(float(loss))
    return losses, model, optimizer


if __name__ == "__main__":
    want, whole, _ = one_device(rate=0.0)
    losses, model, optimizer = sharded(rate=0.0)
    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    np.testing.assert_allclose(model.norm.mean[...], whole.norm.mean[...], atol=1e-4)

    losses, model, optimizer = sharded(rate=0.1)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    params = nnx.state(model, nnx.Param)
    most = print_held(
        params=params,
        opt_state=nnx.state(optimizer, nnx.optimizer.OptState),
        batch_stats=nnx.state(model, nnx.BatchStat),
    )
    assert losses[-1] < losses[0] / 2
    # Parameters and Adam's two moments are cut, the statistics of 256 channels are not.
    psi = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(whole, nnx.Param)))
    assert most <= 1.01 * 12 * psi / jax.device_count() + 2 * 256 * 4, most
