"""States cut over replicas too (ZeRO++'s hpZ): the same training, in the bytes of all devices."""

import json
import math
import pathlib

import jax
import numpy as np
import optax
import pytest
import test_checkpoints
from problems import train_zero, ulps
from test_model_axis import mesh_of as mesh_with_model
from test_model_axis import problem as problem_with_model
from test_parity import ADAM, OPTIMIZERS, STEPS, TX, assert_parity, plain, problem

import zero_jax
from zero_jax.commands import plan as command
from zero_jax.offload.tiers import Offload

BF16 = zero_jax.Precision("bf16", "bf16")
MESHES = [(2, 4), (2, 3), (4, 2), (3, 1)]  # replica, data


@pytest.mark.slow
@pytest.mark.parametrize(("replica", "n"), MESHES)
@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_ten_steps_equal_plain_optax(name, replica, n):
    assert_parity(name, TX[name], n, plain(name), replica=replica, hierarchical=True)


@pytest.mark.parametrize("optimizer", ["adafactor", "lamb", "muon"])
def test_optimizers_that_need_whole_leaves_are_exact(optimizer):
    name = "zoo without empty"
    want = plain(name, optimizer)
    assert_parity(name, OPTIMIZERS[optimizer](), 2, want, replica=3, hierarchical=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batches": 2, "remat": "block"},
        {"bucket_bytes": 256},
        {"offload": Offload(optimizer=True, params=True, piece_bytes=4096), "remat": "dots"},
    ],
    ids=str,
)
def test_with_everything_else_they_equal_plain_optax(settings):
    assert_parity("gpt", TX["gpt"], 2, plain("gpt"), replica=2, hierarchical=True, **settings)


@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_in_bf16_they_train_as_replicas_that_hold_all(name):
    runs = [
        train_zero(problem(name), ADAM, STEPS, 2, replica=2, hierarchical=h, precision=BF16)
        for h in (False, True)
    ]
    np.testing.assert_allclose(runs[1][0], runs[0][0], rtol=2**-7)
    assert ulps(runs[1][1], runs[0][1]) * np.finfo(np.float32).eps < 0.05


def step_and_args(mesh, made=None, **settings):
    made, zero = made or problem("gpt"), zero_jax.Zero(mesh, 3, **settings)
    params = zero.shard(made.start)
    state = zero.optimizer(optax.adam(1e-3)).init(params)
    batch = zero_jax.global_batch(mesh, made.batch)
    return zero.train_step(made.loss, optax.adam(1e-3)), (params, state, batch)


def mesh_of(replica, n):
    return zero_jax.make_mesh(replica=replica, devices=jax.devices()[: replica * n])


def compiled(mesh, **settings):
    step, args = step_and_args(mesh, precision=BF16, **settings)
    return zero_jax.audit(step.lower(*args).compile(), dict(mesh.shape))


def sent(audit, axis):
    """Elements by kind, but for the loss, its weight and the norm."""
    found: dict[str, int] = {}
    for c in audit.collectives:
        if c.axis == axis and (c.kind != "all-reduce" or c.elements > 8):
            found[c.kind] = found.get(c.kind, 0) + c.elements * c.runs
    return found


@pytest.mark.slow
def test_states_take_the_bytes_of_all_devices():
    ours = compiled(mesh_of(2, 4), hierarchical=True)
    assert ours.argument_bytes == compiled(mesh_of(1, 8)).argument_bytes
    batch = problem("gpt").batch.nbytes // 8
    assert compiled(mesh_of(2, 4)).argument_bytes - batch > 1.8 * (ours.argument_bytes - batch)


@pytest.mark.slow
def test_layers_are_gathered_inside_a_replica_and_shards_joined_once_a_step():
    ours = compiled(mesh_of(2, 3), hierarchical=True, micro_batches=2, remat="block")
    once, held = (compiled(mesh_of(2, 3), hierarchical=h, remat="block") for h in (True, False))
    # All that is cut: two parts of each shard of a third.
    cuts = zero_jax.Zero(mesh_of(2, 3), 3, hierarchical=True).splits(problem("gpt").start)
    joined = sum(math.prod(c.shard_shape) for c in cuts if c.dim is not None)
    assert sent(ours, "replica") == {"all-gather": joined, "reduce-scatter": joined}
    assert sent(ours, "data")["all-gather"] > 1.9 * sent(once, "data")["all-gather"]
    assert set(sent(held, "replica")) == {"all-reduce"}


@pytest.mark.slow
def test_with_a_model_axis_it_trains_as_replicas_that_hold_all():
    made, found = problem_with_model("gpt"), []
    for hierarchical in (False, True):
        mesh = mesh_with_model(2, 2, replica=2)
        step, (*states, batch) = step_and_args(mesh, made, hierarchical=hierarchical)
        for _ in range(3):
            *states, metrics = step(*states, batch)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "zoo"])
def test_checkpoints_of_one_mesh_come_back_bitwise(tmp_path, name):
    made = test_checkpoints.problem(name)
    ours = zero_jax.Zero(mesh_of(2, 3), 3, hierarchical=True)
    tree = test_checkpoints.trained(ours, made)[:2]
    flat = zero_jax.Zero(mesh_of(1, 4), 2)
    with zero_jax.Checkpoints(tmp_path / "a") as a, zero_jax.Checkpoints(tmp_path / "b") as b:
        a.save(1, tree)
        there = a.restore(test_checkpoints.like(flat, made), say=lambda _: None).tree
        test_checkpoints.assert_bitwise(there, tree)
        b.save(1, there)
        back = b.restore(test_checkpoints.like(ours, made), say=lambda _: None).tree
    test_checkpoints.assert_bitwise(back, tree)


def test_the_closed_form_counts_what_is_joined():
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    tx, words = optax.adam(1e-3), 1024 * 1024

    def held(stage, parts):
        known = {"shards": 4, "parts": parts, "stage": stage, "tx": tx, "precision": "bf16"}
        return zero_jax.memory.estimate(shapes, **known)

    assert held(2, 2) == held(2, 1), "only stage 3 has parts"
    flat, ours = held(3, 1), held(3, 2)
    assert flat.at_rest - ours.at_rest == 12 * words // 8
    assert ours.copy - flat.copy == 2 * words // 4 and ours.gradients == flat.gradients


@pytest.mark.compile
def test_a_plan_foretells_the_program_for_gpus(tmp_path):
    options = "--model 1.5b --devices 64 --replica 8 --hierarchical --batch-per-device 4"
    out = str(tmp_path / "plan.json")
    assert command.main([*options.split(), "--reduce", "bf16", "--compile", "--json", out]) == 0
    found = json.loads(pathlib.Path(out).read_text())
    predicted, program = found["predicted"], found["compiled"]
    assert predicted["argument_bytes"] == program["argument_bytes"]
    assert abs(found["error"]) < 0.06
    # 12 bytes of every parameter over 64 devices, and 2 over 8 while the step runs.
    words = found["num_params"]
    assert program["argument_bytes"] == pytest.approx(12 * words / 64, rel=0.01)
    assert predicted["terms"]["copy"] > 2 * words / 8


@pytest.mark.parametrize(("replica", "stage"), [(1, 3), (2, 2), (2, "auto")])
def test_without_replicas_or_at_another_stage_it_is_refused(replica, stage):
    mesh = zero_jax.make_mesh(replica=replica, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"hierarchical=True.*use stage=3 and"):
        zero_jax.Zero(mesh, stage=stage, hierarchical=True)
