"""A small ResNet on images, with batch statistics of the global batch.

`one_device` is the loop as Flax's own examples have it, `sharded` the same at ZeRO stage 3. The
model takes the axes that its norms sum over, as for `pmap`. Statistics come back beside the loss.
Changed: +7 -5 lines, `import zero_jax` among them.

    python examples/resnet.py
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from held import print_held

import zero_jax

jax.config.update("jax_num_cpu_devices", 4)  # simulated CPU devices; GPUs are all used


class ResNet(nn.Module):
    """Two stages of one residual block each.

    With `silu`, as losses are compared: at zero `relu` makes another gradient of rounding.
    """

    axis_name: Any = None

    @nn.compact
    def __call__(self, x):
        norm = partial(nn.BatchNorm, use_running_average=False, axis_name=self.axis_name)
        x = nn.silu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        for width, stride in ((16, 1), (64, 2)):
            y = nn.silu(norm()(nn.Conv(width, (3, 3), stride, use_bias=False)(x)))
            y = norm()(nn.Conv(width, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = nn.Conv(width, (1, 1), stride, use_bias=False)(x)
            x = nn.silu(x + y)
        return nn.Dense(4)(jnp.mean(x, axis=(1, 2)))


def images_of_stripes():
    """Stripes in four directions with noise, and which direction."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 32)
    down, right = np.mgrid[:8, :8]
    waves = np.stack([down, right, down + right, down - right])[labels]
    images = np.sin(waves)[..., None] + 0.3 * random.normal(size=(32, 8, 8, 3))
    return images.astype(np.float32), labels.astype(np.int32)


batch = images_of_stripes()


def loss_of(model, params, batch, stats):
    images, labels = batch
    variables = {"params": params, "batch_stats": stats}
    logits, new = model.apply(variables, images, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses), new["batch_stats"]


def one_device():
    model = ResNet()
    loss_fn = partial(loss_of, model)
    variables = jax.jit(model.init)(jax.random.key(0), batch[0][:1])
    params, stats = variables["params"], variables["batch_stats"]
    tx = optax.sgd(0.1, momentum=0.9)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, stats, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(params, batch, stats)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    losses = []
    for _ in range(15):
        params, opt_state, stats, loss = step(params, opt_state, stats, batch)
        losses.append(float(loss))
    return losses, params, opt_state, stats


def sharded():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    model = ResNet(axis_name=zero.batch_axes)
    loss_fn = partial(loss_of, model)
    variables = zero.init(model.init, jax.random.key(0), batch[0][:1])
    params, stats = variables["params"], zero.unshard(variables["batch_stats"])
    tx = zero.optimizer(optax.sgd(0.1, momentum=0.9))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, stats, batch):
        grad_fn = zero.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(params, batch, stats)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    losses = []
    for _ in range(15):
        params, opt_state, stats, loss = step(params, opt_state, stats, batch)
        losses.append(float(loss))
    return losses, params, opt_state, stats


if __name__ == "__main__":
    want, whole, _, whole_stats = one_device()
    losses, params, opt_state, stats = sharded()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    most = print_held(params=params, opt_state=opt_state, batch_stats=stats)

    # Sums are made in another order, which shows in the last digits.
    np.testing.assert_allclose(losses, want, rtol=1e-4)
    assert losses[-1] < losses[0] / 2
    # Parameters and momentum in fp32 are 8 bytes of Ψ / N; statistics are whole on every device.
    psi, own = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (whole, whole_stats))
    assert most <= 1.02 * 8 * psi / jax.device_count() + 4 * own, most
