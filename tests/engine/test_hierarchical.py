"""States sharded over replicas too (ZeRO++'s hpZ): the same training in the bytes of all."""

import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from one_device import ADAM, Case, begun, check_parity, mesh_of, sent, trained, zero_on
from problems import ulps

import zero_jax
from zero_jax.offload.tiers import Offload

SHAPES = {"up": (3, 6, 10), "down": (3, 10, 6), "bias": (3, 6), "head": (6, 13), "scale": ()}
TWO_BY_THREE = {"replica": 2, "data": 3}
PIECES = {"offload": Offload(optimizer=True, params=True, piece_bytes=4096), "remat": "dots"}
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=4)
SPECS = {"up": P(None, None, "model"), "down": P(None, "model", None)}


def make():
    draw = np.random.default_rng(0).normal
    return {name: np.float32(draw(0, 0.4, shape)) for name, shape in SHAPES.items()}


def loss(params, x):
    def layer(x, own):
        up, down, bias = own
        return x + jax.numpy.tanh(x @ up) @ down + bias, None

    x = jax.lax.scan(layer, x, [params[name] for name in ("up", "down", "bias")])[0]
    return ((params["scale"] * (x @ params["head"]) - 1) ** 2).mean()


OWN = Case(make, loss, np.asarray(jax.random.normal(jax.random.key(1), (24, 6))))


@pytest.mark.parametrize(
    ("sizes", "tx", "settings"),
    [
        ({"replica": 3, "data": 1}, optax.contrib.muon(1e-2), {"bucket_bytes": 64}),
        ({"replica": 2, "data": 2}, ADAM, PIECES),
        ({"replica": 2, "data": 2, "model": 2}, FACTORED, {"model_specs": SPECS}),
    ],
)
def test_steps_equal_plain_optax(sizes, tx, settings):
    check_parity(OWN, sizes, tx, 4, hierarchical=True, **settings)


def test_shards_are_joined_once_a_step_and_layers_gathered_in_each_micro_batch():
    settings = {"hierarchical": True, "remat": "block"}
    twice = check_parity(OWN, TWO_BY_THREE, micro_batches=2, **settings)
    # Each device joins two halves of its third of each leaf that is sharded.
    cuts = zero_on(TWO_BY_THREE, hierarchical=True).splits(OWN.start)
    joined = sum(math.prod(c.shard_shape) for c in cuts if c.dim is not None)
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    assert [sent(twice, kind, "replica")[0] for kind in kinds] == [joined, joined, 0]
    bf16 = zero_jax.Precision("bf16", "bf16")
    once = trained(OWN, TWO_BY_THREE, precision=bf16, **settings)
    assert sent(twice, "all-gather")[0] > 1.9 * sent(once[2], "all-gather")[0]
    # In bf16 they train as replicas that hold all.
    held = trained(OWN, TWO_BY_THREE, precision=bf16, remat="block")
    np.testing.assert_allclose(once[0][:, 0], held[0][:, 0], rtol=2**-7)
    assert ulps(once[1], held[1]) * np.finfo(np.float32).eps < 0.05


def test_states_take_the_bytes_of_all_devices():
    def held(sizes, **settings):
        leaves = jax.tree.leaves(begun(OWN, sizes, **settings)[2][:2])
        return sum(x.addressable_data(0).nbytes for x in leaves)

    def estimate(stage, parts):
        return zero_jax.memory.estimate(OWN.start, shards=3, parts=parts, stage=stage, tx=ADAM)

    ours = held(TWO_BY_THREE, hierarchical=True)
    assert ours == held({"data": 6}) == estimate(3, 2).at_rest
    assert held(TWO_BY_THREE) == estimate(3, 1).at_rest > 1.8 * ours
    joined = sum(x.size for x in OWN.start.values() if x.ndim > 1) / 3
    assert estimate(3, 2).copy - estimate(3, 1).copy == pytest.approx(4 * joined, rel=0.1)
    assert estimate(2, 2) == estimate(2, 1), "only stage 3 has parts"


@pytest.mark.parametrize(("replica", "stage"), [(1, 3), (2, "auto")])
def test_refused_without_replicas_and_at_other_stages(replica, stage):
    with pytest.raises(ValueError, match="hierarchical"):
        zero_jax.Zero(mesh_of(replica=replica, data=2), stage=stage, hierarchical=True)
