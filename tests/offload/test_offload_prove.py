"""What an H100's program holds when model states rest in host memory; needs no GPU."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import zero_jax
from zero_jax.hlo import prove, targets
from zero_jax.models import gpt
from zero_jax.offload.tiers import Offload
from zero_jax.plan.case import Case
from zero_jax.sharding.mesh import abstract_of

pytestmark = pytest.mark.compile

N, MIB = 8, 2**20
PIECE = 4 * MIB
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SETTINGS = {
    "none": None,
    "optimizer": Offload(optimizer=True, piece_bytes=PIECE),
    "optimizer,params": Offload(optimizer=True, params=True, piece_bytes=PIECE),
}
# Scalars, tables of the runtime, pieces that are rounded up to XLA's 128 bytes.
SLACK = MIB // 8


@functools.cache
def update(setting, layers):
    """The audit of the update alone: stacked matrices, a table cut along its rows, a vector."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage=3, offload=SETTINGS[setting])
    shapes = {"w": (layers, 512, 1024), "table": (8192, 64 * layers), "scale": (4096,)}
    make = functools.partial(jax.tree.map, jnp.zeros, shapes, is_leaf=lambda x: type(x) is tuple)
    params, tx = zero.abstract(make), zero.optimizer(ADAMW)
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(zero.mesh, x.sharding.spec)
        ),
        params,
    )

    def step(params, state, grads):
        return tx.apply(grads, state, params)

    args = (params, tx.init(params), grads)
    count = sum(x.size for x in jax.tree.leaves(params))
    return prove.compile_for(targets.target("h100"), step, args, abstract_of(zero.mesh)), count


@pytest.mark.parametrize("layers", [8, 32])
@pytest.mark.parametrize(("setting", "words"), [("optimizer", 2), ("optimizer,params", 3)])
def test_the_update_holds_two_pieces_whatever_the_models_size(setting, words, layers):
    audit, count = update(setting, layers)
    assert audit.host_bytes == words * 4 * count // N, "arguments alone: no temporaries"
    assert audit.argument_bytes < (4 - words) * 4 * count // N + SLACK  # what is left, gradients
    assert audit.temp_bytes <= 2 * PIECE + SLACK
    assert audit.alias_bytes >= (3 - words) * 4 * count // N, "the rest is updated in place too"


def test_two_pieces_are_far_less_than_what_streams():
    _, count = update("optimizer", 32)
    assert 2 * 4 * count // N > 4 * 2 * PIECE


@functools.cache
def plan_of(setting, layers, stage=3):
    config = gpt.GPTConfig(layers=layers, width=512, heads=8, vocab=2048, seq=128)
    zero = zero_jax.Zero(
        zero_jax.abstract_mesh(N),
        stage=stage,
        precision="bf16",
        remat="block",
        offload=SETTINGS[setting],
    )
    return Case(config, zero, "adamw", N).plan(stage, target="h100")


def at_rest(layers):
    """Parameters of one device, padding and whole leaves included."""
    predicted = plan_of("none", layers).predicted
    return predicted.parameters // 4


@pytest.mark.parametrize("layers", [8, 32])
def test_8_or_12_bytes_a_parameter_move_from_the_device_to_the_host(layers):
    whole = plan_of("none", layers).compiled
    for setting, words in (("optimizer", 2), ("optimizer,params", 3)):
        found = plan_of(setting, layers)
        audit = found.compiled
        assert audit.host_bytes == words * 4 * at_rest(layers) == found.predicted.host
        assert audit.argument_bytes == whole.argument_bytes - audit.host_bytes
        assert audit.argument_bytes == found.predicted.argument_bytes
        assert audit.alias_bytes == whole.alias_bytes - audit.host_bytes
    assert whole.host_bytes == 0


@pytest.mark.parametrize("layers", [8, 32])
def test_temporaries_of_a_step_grow_by_two_pieces_at_most(layers):
    whole, audit = (plan_of(s, layers).compiled for s in ("none", "optimizer"))
    assert audit.temp_bytes <= whole.temp_bytes + 2 * PIECE + SLACK
    # Masters come to the device while the model uses them, which at stage 3 is the whole step.
    masters = plan_of("optimizer,params", layers).compiled
    assert masters.temp_bytes <= whole.temp_bytes + 4 * at_rest(layers) + 2 * PIECE + SLACK


@pytest.mark.parametrize("setting", ["optimizer", "optimizer,params"])
@pytest.mark.parametrize("layers", [8, 32])
def test_the_predicted_total_is_within_a_tenth(setting, layers):
    assert abs(plan_of(setting, layers).error) < 0.15
