"""Memory, host memory, collectives and FLOPs of remat policies, in programs compiled for H100."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import zero_jax
from zero_jax.collectives import barriers
from zero_jax.engine import repeats, rewrite
from zero_jax.hlo import prove, targets

pytestmark = pytest.mark.compile
P = PartitionSpec
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
    params = zero.abstract(lambda: model.init(jax.random.key(0), jnp.zeros((1, T, D))))

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((N * rows, T, D), BF16)
    return zero.plan(loss, optax.sgd(0.1), params, batch, target="h100")


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


MP = 4


@functools.cache
def split_over_model(policy):
    """P_a: a scanned layer split as Megatron does, over an automatic axis `model`."""
    mesh = AbstractMesh((2, MP), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrain(x, *spec):
        here = NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec))
        return jax.lax.with_sharding_constraint(x, here)

    def loss(params, x):
        def layer(x, w):
            up, down = w
            h = jnp.tanh(constrain(x @ up, None, None, "model"))
            return x + jnp.tanh(constrain(h @ down)), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)))

    def step(params, x):
        loss_and_grads = jax.value_and_grad(rewrite.apply(loss, policy))(params, x)
        return jax.tree.map(lambda g: jax.lax.psum(g, "data"), loss_and_grads)

    def abstract(shape, *spec):
        return jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, P(*spec)))

    up = abstract((12, D, 4 * D), None, None, "model")
    args = ((up, abstract((12, 4 * D, D), None, "model")), abstract((2 * B, T, D), "data"))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    return prove.compile_for(targets.target("h100"), mapped, args, mesh, donated=0)


def test_partitioned_inputs_are_one_part_of_mp_and_gathered_once():
    full, parts = split_over_model("block"), split_over_model("block@partitioned")
    saved = 12 * CARRY * (MP - 1) // MP
    assert full.temp_bytes - parts.temp_bytes >= 0.9 * saved
    gathers = [c for c in parts.collectives if (c.kind, c.axis) == ("all-gather", "model")]
    assert [(c.elements, c.runs) for c in gathers] == [(B * T * D, 12)]
    assert not [c for c in full.collectives if c.kind == "all-gather"]
    # On the host they are there to the byte.
    assert split_over_model("block@partitioned+host").host_bytes == 12 * CARRY // MP
    assert split_over_model("block@host").host_bytes == 12 * CARRY
