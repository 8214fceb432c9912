"""Tensor parallelism, remat, buckets, host memory and replicas together equal one device."""

import jax
import jax.numpy as jnp
import pytest
from problems import ulps
from test_model_axis import ADAM, ULPS, mesh_of, plain, problem, train

import zero_jax
from zero_jax.offload.tiers import Offload
from zero_jax.remat import policies

PIECES = Offload(optimizer=True, params=True, piece_bytes=4096)
RUNS = [("linen", (2, 2), {"stage": 2, "remat": "block@partitioned"})]  # unrolled
RUNS += [("linen", (2, 2), {"stage": 3, "remat": "block_sqrt"})]
SLOW = [("gpt", (2, 2), zero_jax.paper_config(name)) for name in ("c1", "c2", "c3", "c4", "c5")] + [
    ("gpt", (2, 2), {"stage": 1, "remat": "block@partitioned", "offload": "optimizer"}),
    ("gpt", (2, 4), {"stage": 3, "remat": "block_sqrt@partitioned", "bucket_bytes": 256}),
    ("gpt", (2, 4), {"stage": 3, "remat": "block@partitioned+host", "offload": PIECES}),
    ("gpt", (2, 2), {"stage": 3, "remat": "dots", "offload": "optimizer", "grad_accum_steps": 2}),
    ("gpt", (4, 2), {"stage": 3, "remat": "block", "offload": "activations"}),
    ("gpt", (2, 2), {"sequence_parallel": True, "remat": "block@host", "offload": PIECES}),
    ("gpt", (2, 2, 2), {"stage": 3, "remat": "block@partitioned", "offload": PIECES}),
]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in SLOW]


@pytest.mark.parametrize(("name", "mesh", "settings"), RUNS, ids=str)
def test_everything_together_equals_one_device(name, mesh, settings):
    losses, params = train(name, mesh_of(*mesh), **settings)
    want = plain(name)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS


def test_configurations_are_those_of_table_3_of_the_paper():
    remat = "block", "block@partitioned", "block@partitioned+host"
    rows = {"c1": (1, 0), "c2": (1, 1), "c3": (2, 0), "c4": (2, 1), "c5": (2, 2)}
    rows["zero-100b"] = (2, 1)
    want = {name: {"stage": stage, "remat": remat[pa]} for name, (stage, pa) in rows.items()}
    assert {name: dict(zero_jax.paper_config(name)) for name in want} == want


@pytest.mark.slow
def test_steps_hold_equal_bytes_and_delete_donated_states():
    zero = zero_jax.Zero(mesh_of(2, 2), stage=3, remat="block", offload=PIECES)
    params, tx = zero.shard(problem("gpt").start), zero.optimizer(ADAM)
    state, step = tx.init(params), zero.train_step(problem("gpt").loss, tx)
    sizes = []
    for _ in range(20):
        before = jax.tree.leaves((params, state))
        params, state, _ = jax.block_until_ready(step(params, state, problem("gpt").batch))
        sizes.append(sum(x.nbytes for x in jax.live_arrays()))
        assert all(x.is_deleted() for x in before)
    assert len(set(sizes[2:])) == 1


def test_host_memory_for_activations_is_a_remat_policy():
    sequence = {"sequence_parallel": True, "remat": "block@partitioned"}
    auto = {"stage": "auto", "remat": "block", "offload": "activations"}
    for settings in (sequence, auto, {"remat": "dots", "offload": "activations"}):
        with pytest.raises(ValueError, match="remat"):
            zero_jax.Zero(mesh_of(2, 2), **settings)
    zero = zero_jax.Zero(mesh_of(2, 2), remat="block", offload="activations")
    assert zero.config.remat == "block@host"
    assert policies.on_host("block_sqrt@partitioned") == "block_sqrt@partitioned+host"
