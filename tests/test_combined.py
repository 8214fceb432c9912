"""Tensor parallelism, remat places, buckets, host memory and replicas together equal one device.

Tolerances are those of test_model_axis.py, which has the problems: 1024 fp32 ulps after ten steps.
"""

import jax
import jax.numpy as jnp
import pytest
from problems import ulps
from test_model_axis import ADAM, ULPS, mesh_of, plain, problem, train

import zero_jax
from zero_jax.offload.tiers import Offload
from zero_jax.remat import policies

PIECES = Offload(optimizer=True, params=True, piece_bytes=4096)
COMBINATIONS = [
    ((1, 2), {"stage": 0, "remat": "block@partitioned"}),
    ((2, 2), {"stage": 1, "remat": "block@partitioned", "offload": "optimizer"}),
    ((2, 2), {"stage": 2, "remat": "block@partitioned+host", "offload": PIECES}),
    ((2, 4), {"stage": 3, "remat": "block_sqrt@partitioned", "bucket_bytes": 256}),
    ((2, 4), {"stage": 3, "remat": "block@partitioned+host", "offload": PIECES}),
    ((2, 2), {"stage": 3, "remat": "dots", "offload": "optimizer", "micro_batches": 2}),
    ((4, 2), {"stage": 3, "remat": "block", "offload": "activations"}),
    ((2, 2), {"stage": 3, "sequence_parallel": True, "remat": "block@host", "offload": PIECES}),
]


def assert_equal_to_one_device(name, mesh, **settings):
    losses, params = train(name, mesh, **settings)
    want = plain(name)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS


@pytest.mark.slow
@pytest.mark.parametrize(("n_mp", "settings"), COMBINATIONS, ids=str)
def test_everything_together_equals_one_device(n_mp, settings):
    assert_equal_to_one_device("gpt", mesh_of(*n_mp), **settings)


@pytest.mark.parametrize("remat", ["none", "dots", "block", "block_sqrt", "block@partitioned"])
@pytest.mark.parametrize("stage", [2, 3])
def test_remat_of_an_unrolled_linen_model_under_tensor_parallelism(stage, remat):
    assert_equal_to_one_device("linen", mesh_of(2, 2), stage=stage, remat=remat)


@pytest.mark.parametrize("name", zero_jax.CONFIGURATIONS)
def test_configurations_of_the_paper_train(name):
    assert_equal_to_one_device("gpt", mesh_of(2, 2), **zero_jax.configuration(name))


@pytest.mark.slow
def test_replicas_stream_their_states_too():
    mesh = mesh_of(2, 2, replica=2)
    assert_equal_to_one_device("gpt", mesh, stage=3, remat="block@partitioned", offload=PIECES)


def test_each_device_keeps_its_piece_of_both_axes_in_host_memory():
    zero = zero_jax.Zero(mesh_of(2, 4), stage=3, offload=PIECES)
    params = zero.shard(problem("gpt").start)
    state = zero.optimizer(ADAM).init(params)
    plainly = zero_jax.Zero(mesh_of(2, 4), stage=3)
    like = plainly.optimizer(ADAM).init(plainly.shard(problem("gpt").start))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert a.addressable_shards[0].data.shape == b.addressable_shards[0].data.shape


@pytest.mark.slow
@pytest.mark.parametrize("offload", [None, PIECES], ids=["on the device", "in pieces"])
def test_fifty_steps_hold_no_byte_more_than_two_and_donated_states_are_gone(offload):
    zero = zero_jax.Zero(mesh_of(2, 2), stage=3, remat="block", offload=offload)
    params = zero.shard(problem("gpt").start)
    tx = zero.optimizer(ADAM)
    state, step = tx.init(params), zero.train_step(problem("gpt").loss, ADAM)

    def live():
        jax.block_until_ready((params, state))
        return sum(x.nbytes for x in jax.live_arrays())

    sizes = []
    for _ in range(50):
        before = jax.tree.leaves((params, state))
        params, state, _ = step(params, state, problem("gpt").batch)
        sizes.append(live())
        assert all(x.is_deleted() for x in before)
    assert len(set(sizes[2:])) == 1


def test_what_can_not_be_together_is_refused():
    with pytest.raises(ValueError, match="what is kept is split already, leave out partitioned"):
        zero_jax.Zero(mesh_of(2, 2), sequence_parallel=True, remat="block@partitioned")
    with pytest.raises(ValueError, match=r'remat="block@host" says the same'):
        zero_jax.Zero(mesh_of(2, 2), stage="auto", remat="block", offload="activations")
    with pytest.raises(ValueError, match=r'use remat="block"'):
        zero_jax.Zero(mesh_of(2, 2), remat="dots", offload="activations")
    assert zero_jax.Zero(mesh_of(2, 2), remat="block", offload="activations").remat == "block@host"
    assert policies.on_host("block_sqrt@partitioned") == "block_sqrt@partitioned+host"
