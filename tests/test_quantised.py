"""Weights that travel as int8: how far they are off, what is sent, and that training works."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import ODD_GPT, gpt_problem

import zero_jax
from zero_jax import layout, plan, quantised

INT8 = zero_jax.Precision("fp32", gather="int8")


@pytest.mark.parametrize("shape", [(3, 512), (5, 192), (2, 509), (2, 3, 131), (4, 1)])
def test_a_weight_is_off_by_at_most_half_a_step(shape):
    x = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-6, 3, shape[0]).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    steps, scales = quantised.quantise(x)
    assert (steps.dtype, steps.shape) == (jnp.int8, x.shape)
    found = quantised.dequantise(steps, scales, jnp.float32)
    block = x.shape[-1] // scales.shape[-1]
    largest = jnp.max(jnp.abs(x.reshape(*shape[:-1], -1, block)), axis=-1, keepdims=True)
    off = jnp.abs(found - x).reshape(*shape[:-1], -1, block) / largest
    assert 0 < jnp.max(off) <= 1.0001 / 254 or shape[-1] == 1
    assert jnp.max(jnp.abs(found)) <= jnp.max(jnp.abs(x)) * 1.0001


def test_zeros_stay_zeros():
    steps, scales = quantised.quantise(jnp.zeros((2, 64)))
    assert not jnp.any(quantised.dequantise(steps, scales, jnp.bfloat16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad):
    x = jnp.ones((2, 64)).at[1, 3].set(bad)
    found = quantised.dequantise(*quantised.quantise(x), jnp.float32)
    assert jnp.array_equal(found[0], x[0]) and not jnp.isfinite(found[1, 3])


def as_gathered(zero, params):
    """What the devices of `data` gather: every matrix rounded shard by shard, in numpy."""
    cuts = zero.splits(params)

    def one(x, cut):
        if cut.dim is None or cut.layer_rank < 2:
            return x
        dim = cut.dim % x.ndim
        pad = [
            (0, cut.shard_size * cut.shards - x.shape[d] if d == dim else 0) for d in range(x.ndim)
        ]
        shards = np.split(np.pad(x, pad), cut.shards, axis=dim)
        rounded = [quantised.dequantise(*quantised.quantise(s), jnp.float32) for s in shards]
        return np.take(np.concatenate(rounded, axis=dim), range(x.shape[dim]), axis=dim)

    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, [one(x, c) for x, c in zip(leaves, cuts, strict=True)])


@pytest.mark.parametrize(
    "stage, sizes, hierarchical",
    [
        *[(stage, sizes, False) for stage in (1, 2, 3) for sizes in ((8,), (3,), (4, 2))],
        *[(3, sizes, True) for sizes in ((4, 2), (2, 3))],
    ],
)
def test_loss_and_gradients_are_those_of_the_rounded_weights(stage, sizes, hierarchical):
    """(data,) or (data, replica); 3 devices do not divide a dim of this model."""
    problem = gpt_problem()
    count = int(np.prod(sizes))
    names = dict(zip(("data", "replica"), sizes, strict=False))
    mesh = zero_jax.make_mesh(replica=names.get("replica", 1), devices=jax.devices()[:count])
    zero = zero_jax.Zero(mesh, stage, precision=INT8, hierarchical=hierarchical)
    rounded = as_gathered(zero, problem.start)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (rounded, problem.start)), strict=True)
    ]
    assert sum(changed) > 4

    def mean(params):
        total, weight = problem.loss(params, problem.batch)
        return total / weight

    wanted, wanted_grads = jax.jit(jax.value_and_grad(mean))(rounded)
    batch = zero_jax.global_batch(mesh, np.asarray(problem.batch))
    found, grads = zero.value_and_grad(problem.loss)(zero.shard(problem.start), batch)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    grads = jax.tree.map(np.asarray, layout.logical(grads))
    for mine, theirs in zip(*map(jax.tree.leaves, (grads, wanted_grads)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-6)


def test_weights_are_sent_in_one_byte_and_gradients_are_not():
    config = dataclasses.replace(ODD_GPT, width=64, vocab=256, seq=64)
    problem = gpt_problem(config)
    zero = zero_jax.Zero(zero_jax.make_mesh(), 3, precision=INT8, remat="block")
    plan = zero.plan(
        *(problem.loss, optax.adamw(1e-3), zero.abstract(problem.make)),
        *(jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype),),
        compile=True,
    )
    gathers = [c for c in plan.compiled.collectives if c.kind == "all-gather"]
    matrices = [x for x in jax.tree.leaves(problem.start) if x.ndim - (x.shape[0] == 2) > 1]
    words = sum(x.size for x in matrices)
    sent = sum(c.elements * c.runs for c in gathers if c.dtype == "s8")
    # The tied embedding is gathered once, every layer twice.
    assert words <= sent <= 2 * words
    rest = sum(c.bytes * c.runs for c in gathers if c.dtype != "s8")
    assert rest < 0.15 * 4 * words, "scales and vectors"
    scattered = {c.dtype for c in plan.compiled.collectives if c.kind == "reduce-scatter"}
    assert scattered == {"f32"}


def test_training_ends_where_it_ends_without():
    problem, losses = gpt_problem(), {}
    for precision in (zero_jax.Precision(), INT8):
        zero = zero_jax.Zero(zero_jax.make_mesh(), 3, precision=precision)
        params = zero.shard(problem.start)
        tx = zero.optimizer(optax.adamw(1e-2))
        state, step = tx.init(params), zero.train_step(problem.loss, tx)
        batch = zero_jax.global_batch(zero.mesh, np.asarray(problem.batch))
        for _ in range(30):
            params, state, metrics = step(params, state, batch)
        losses[precision.gather] = float(metrics.loss)
    start = float(np.log(ODD_GPT.vocab))
    assert losses[None] < start - 0.1
    # A loss of its own, but as far down.
    assert losses["int8"] != losses[None]
    assert abs(losses["int8"] - losses[None]) < 0.02 * (start - losses[None])


@pytest.mark.parametrize("stage, devices", [(0, 8), (3, 1)])
def test_where_nothing_is_gathered_it_is_refused(stage, devices):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    with pytest.raises(ValueError, match="nothing is gathered there"):
        zero_jax.Zero(mesh, stage, precision=INT8)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match='use "int8", or None'):
        zero_jax.Precision("bf16", gather="int4")


def test_a_plan_shows_it_beside_a_stage_that_gathers_nothing(capsys, tmp_path):
    options = ["--model", "124m", "--devices", "8", "--seq", "64", "--gather", "int8", "--json"]
    assert plan.main([*options, str(tmp_path / "plan.json")]) == 0
    known = json.loads((tmp_path / "plan.json").read_text())
    assert known["gather"] == "int8" and set(known["stages"]) == set("0123")
