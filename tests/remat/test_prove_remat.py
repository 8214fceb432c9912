"""Memory, host memory, collectives and FLOPs of remat policies, in programs compiled for H100."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.collectives import barriers
from zero_jax.engine import repeats

pytestmark = pytest.mark.compile
BF16 = jnp.bfloat16
D, B, T, N = 512, 8, 256, 8
LAYERS = 6
CARRY = B * T * D * 2  # bytes of a layer's input, bf16
FORWARD = 2 * B * T * D * 4 * D  # FLOPs of one of the two products of a layer


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            h = nn.LayerNorm(dtype=x.dtype)(x)
            h = nn.gelu(nn.Dense(4 * D, dtype=x.dtype)(h))
            x = x + nn.Dense(D, dtype=x.dtype)(h)
        return nn.Dense(16, dtype=x.dtype)(x)


@functools.cache
def unrolled(policy, stage=3, rows=B):
    model = Unrolled()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, precision="bf16", remat=policy)
    params = zero.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, T, D))))

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((N * rows, T, D), BF16)
    return zero.plan(loss, zero.optimizer(optax.sgd(0.1)), params, batch, target="h100")


def test_unrolled_layers_keep_their_inputs_and_run_forward_again():
    none, block, sqrt, host = (
        unrolled(policy).compiled for policy in ("none", "block", "block_sqrt", "block@host")
    )
    # Without the second product of each, which nothing in the layer reads.
    assert block.flops - none.flops == LAYERS * FORWARD
    # Groups of two: as groups all but each one's last layer, then as layers.
    assert sqrt.flops - none.flops == LAYERS // 2 * 2 * FORWARD + LAYERS * FORWARD
    # `none` keeps of each layer its input, the norm, both sides of the GELU: 10 inputs or more.
    assert none.temp_bytes - block.temp_bytes > LAYERS * 8 * CARRY
    # The first layer's input is the batch: an argument, and on the device.
    predicted = unrolled("block@host").predicted.host
    assert host.host_bytes == predicted == (LAYERS - 1) * CARRY
    assert host.uncounted == (), "room in host memory is no library call"


@pytest.mark.parametrize(("stage", "policy"), [(2, "none"), (3, "block")])
def test_full_gradients_of_unrolled_layers_do_not_stay_alive(stage, policy, monkeypatch):
    """With one row a device weights are larger than activations: two layers' worth is held."""
    plan = unrolled(policy, stage, rows=1)
    layer = 4 * 8 * D * D  # a layer's gradient, fp32
    copy = 2 * LAYERS * 8 * D * D if stage == 2 else 0
    held = plan.compiled.temp_bytes - copy
    assert held < LAYERS * layer
    monkeypatch.setattr(repeats, "runs_of", lambda jaxpr, forms: [])
    # Leaves outside of layers are summed at once, too.
    monkeypatch.setattr(barriers, "tied", lambda arrays: arrays)
    unknown = unrolled.__wrapped__(policy, stage, rows=1)
    assert unknown.compiled.temp_bytes - copy > held + layer // 4, "or this shows little"
