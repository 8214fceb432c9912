"""Weights and gradients that travel as integers: how far they are off, what is sent, and that
training works."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import ODD_GPT, gpt_problem

import zero_jax
from zero_jax.collectives import quantised
from zero_jax.commands import plan as command
from zero_jax.sharding import layout

INT8 = zero_jax.Precision("fp32", gather="int8")
# Rows that are long enough for a scale, also where eight devices cut them.
WIDER_GPT = dataclasses.replace(ODD_GPT, width=40)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 512), (5, 192), (2, 509), (2, 3, 131), (4, 1)])
def test_a_number_is_off_by_at_most_half_a_step(shape, bits):
    x = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-6, 3, shape[0]).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    steps, scales = quantised.quantise(x, bits)
    assert (steps.dtype, steps.shape) == (jnp.int8, x.shape)
    if bits == 4:
        packed = quantised.pack(steps)
        assert packed.nbytes == steps[..., ::2].nbytes
        assert jnp.array_equal(quantised.unpack(packed, shape[-1]), steps)
    found = quantised.dequantise(steps, scales, jnp.float32)
    block = x.shape[-1] // scales.shape[-1]
    largest = jnp.max(jnp.abs(x.reshape(*shape[:-1], -1, block)), axis=-1, keepdims=True)
    off = jnp.abs(found - x).reshape(*shape[:-1], -1, block) / largest
    assert 0 < jnp.max(off) <= 1.0001 / (2**bits - 2) or shape[-1] == 1
    assert jnp.max(jnp.abs(found)) <= jnp.max(jnp.abs(x)) * 1.0001


def test_zeros_stay_zeros():
    steps, scales = quantised.quantise(jnp.zeros((2, 64)))
    assert not jnp.any(quantised.dequantise(steps, scales, jnp.bfloat16))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad, bits):
    x = jnp.ones((2, 64)).at[1, 3].set(bad)
    found = quantised.dequantise(*quantised.quantise(x, bits), jnp.float32)
    assert jnp.array_equal(found[0], x[0]) and not jnp.isfinite(found[1, 3])


def as_gathered(zero, params):
    """What the devices of `data` gather: every matrix rounded shard by shard, in numpy."""
    cuts = zero.splits(params)

    def one(x, cut):
        if cut.dim is None or cut.layer_rank < 2 or cut.device_shape[-1] < 5:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, sizes, hierarchical",
    [
        *[(stage, sizes, False) for stage in (1, 2, 3) for sizes in ((8,), (3,), (4, 2))],
        *[(3, sizes, True) for sizes in ((4, 2), (2, 3))],
    ],
)
def test_loss_and_gradients_are_those_of_the_rounded_weights(stage, sizes, hierarchical):
    """(data,) or (data, replica); 3 devices do not divide a dim of this model."""
    problem = gpt_problem(WIDER_GPT)
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


def two_products(params, rows):
    """A sum over rows; both leaves are touched once, and neither dim of `a` is divided by 8."""
    x, y = rows[:, :17], rows[:, 17:]
    a, b = zero_jax.gather((params["a"], params["b"]))
    total = jnp.sum(jnp.square(jnp.tanh(x @ a) @ b - y))
    return zero_jax.Weighted(total, jnp.float32(len(rows)))


@pytest.mark.parametrize("scatter", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [(8,), (3,), (4, 2)])
@pytest.mark.parametrize(("stage", "bucket"), [(1, 2**30), (2, 2**30), (3, 2**30), (3, 2**7)])
def test_a_gradient_is_off_by_at_most_half_a_step_of_each_device(stage, bucket, sizes, scatter):
    """(data,) or (data, replica)."""
    count, bits = int(np.prod(sizes)), quantised.BITS[scatter]
    names = dict(zip(("data", "replica"), sizes, strict=False))
    mesh = zero_jax.make_mesh(replica=names.get("replica", 1), devices=jax.devices()[:count])
    keys = jax.random.split(jax.random.key(0), 3)
    start = {"a": jax.random.normal(keys[0], (17, 63)), "b": jax.random.normal(keys[1], (63, 48))}
    rows = np.asarray(jax.random.normal(keys[2], (2 * count, 17 + 48)))
    precision = zero_jax.Precision(scatter=scatter)
    zero = zero_jax.Zero(mesh, stage, precision=precision, bucket_bytes=bucket)
    own = jax.vmap(jax.grad(lambda p, r: two_products(p, r)[0]), (None, 0))(
        start, rows.reshape(count, 2, -1)
    )
    batch = zero_jax.global_batch(mesh, rows)
    _, found = zero.value_and_grad(two_products)(zero.shard(start), batch)
    leaves = zip(*map(jax.tree.leaves, (layout.logical(found), own)), strict=True)
    for (mine, each), cut in zip(leaves, zero.splits(start), strict=True):
        off = jnp.abs(mine - each.sum(0) / len(rows))
        most = sum(half_steps(x, cut, bits) for x in np.asarray(each)) / len(rows)
        assert jnp.all(off <= 1.001 * most + 1e-6)  # sums over devices in another order
        assert jnp.max(off / most) > 0.1, "something is rounded"


@pytest.mark.parametrize("option", [{"gather": "int8"}, {"scatter": "int8"}, {"scatter": "int4"}])
def test_where_scales_would_be_more_than_integers_save_a_matrix_travels_as_it_is(option):
    """Rows of four numbers: four bytes and a scale of four, for eight bytes of bf16."""
    start = {
        "a": jax.random.normal(jax.random.key(0), (17, 4)),
        "b": jax.random.normal(jax.random.key(1), (4, 3, 3, 24)),
    }

    def loss(params, rows):
        kernel = params["b"].sum((1, 2)).T[:, :4]
        x = rows[:, :17] @ params["a"]
        return jnp.mean(jnp.square(jnp.tanh(x) @ kernel.T - rows[:, 17:]))

    rows = np.asarray(jax.random.normal(jax.random.key(2), (16, 17 + 24)))
    found = []
    for precision in (zero_jax.Precision(), zero_jax.Precision(**option)):
        zero = zero_jax.Zero(zero_jax.make_mesh(), 3, precision=precision)
        assert [c.device_shape[-1] for c in zero.splits(start)] == [4, 3]
        batch = zero_jax.global_batch(zero.mesh, rows)
        found.append(zero.value_and_grad(loss)(zero.shard(start), batch))
    for exact, mine in zip(*map(jax.tree.leaves, found), strict=True):
        assert jnp.array_equal(exact, mine)


STACKED = dataclasses.replace(ODD_GPT, width=64, vocab=256, seq=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scatter", "near", "stage", "compute", "bucket", "model"),
    [
        ("int4", 0.3, 1, "fp32", 2**30, 2),
        ("int4", 0.3, 1, "fp32", 2**12, 1),
        ("int8", 0.02, 1, "fp32", 2**12, 2),
        ("int8", 0.02, 2, "fp16", 2**30, 1),
        ("int4", 0.3, 3, "fp16", 2**12, 2),
    ],
)
def test_gradients_of_a_gpt_are_near(scatter, near, stage, compute, bucket, model):
    """Stacks of layers at once and in pieces, a loss scale, and matrices split over `model`."""
    problem = gpt_problem(STACKED)
    mesh = zero_jax.make_mesh(model=model)
    batch = zero_jax.global_batch(mesh, np.asarray(problem.batch))
    found, scale = [], 2.0**10 if compute == "fp16" else 1.0
    for option in (None, scatter):
        precision = zero_jax.Precision(compute, scatter=option)
        zero = zero_jax.Zero(mesh, stage, precision=precision, bucket_bytes=bucket)
        differentiated = zero.value_and_grad(problem.loss)
        _, grads = differentiated(zero.shard(problem.start), batch, loss_scale=scale)
        found.append(jax.tree.map(np.asarray, layout.logical(grads)))
    for exact, mine in zip(*map(jax.tree.leaves, found), strict=True):
        off = np.linalg.norm(mine - exact) / np.linalg.norm(exact)
        assert off < near
        assert off > 1e-4 or exact.ndim - (exact.shape[0] == 2) < 2, "matrices are rounded"


def half_steps(x, cut, bits):
    """Of one device's gradient, by how much each number may be off."""
    dim = cut.dim % x.ndim
    pad = [(0, cut.shard_size * cut.shards - x.shape[d] if d == dim else 0) for d in range(x.ndim)]
    pieces = np.split(np.pad(x, pad), cut.shards, axis=dim)
    halves = [
        np.repeat(scales / 2, piece.shape[-1] // scales.shape[-1], axis=-1)
        for piece in pieces
        for scales in [np.asarray(quantised.quantise(piece, bits)[1])]
    ]
    return np.take(np.concatenate(halves, axis=dim), range(x.shape[dim]), axis=dim)


@pytest.mark.parametrize("scatter", ["int8", "int4"])
def test_gradients_are_sent_in_one_byte_or_half_of_one(scatter):
    config = dataclasses.replace(ODD_GPT, width=64, vocab=256, seq=64)
    problem = gpt_problem(config)
    precision = zero_jax.Precision(scatter=scatter)
    zero = zero_jax.Zero(zero_jax.make_mesh(), 2, precision=precision, remat="block")
    plan = zero.plan(
        *(problem.loss, optax.adamw(1e-3), zero.abstract(problem.make)),
        *(jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype),),
        compile=True,
    )
    matrices = [x for x in jax.tree.leaves(problem.start) if x.ndim - (x.shape[0] == 2) > 1]
    exchanged = [c for c in plan.compiled.collectives if c.kind == "all-to-all"]
    sent = sum(c.bytes * c.runs for c in exchanged if c.dtype == "s8")
    assert sent == sum(x.size for x in matrices) * quantised.BITS[scatter] // 8
    scales = sum(c.bytes * c.runs for c in exchanged if c.dtype == "f32")
    assert scales < 0.15 * sent * 8 / quantised.BITS[scatter]
    summed = [c for c in plan.compiled.collectives if c.kind == "reduce-scatter"]
    assert sum(c.elements * c.runs for c in summed) < 0.1 * sum(x.size for x in matrices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "near"),
    [({"gather": "int8"}, 0.02), ({"scatter": "int8"}, 0.02), ({"scatter": "int4"}, 0.1)],
)
def test_training_ends_where_it_ends_without(option, near):
    problem, losses = gpt_problem(WIDER_GPT), []
    for precision in (zero_jax.Precision(), zero_jax.Precision(**option)):
        zero = zero_jax.Zero(zero_jax.make_mesh(), 3, precision=precision)
        params = zero.shard(problem.start)
        tx = zero.optimizer(optax.adamw(1e-3))
        state, step = tx.init(params), zero.train_step(problem.loss, tx)
        batch = zero_jax.global_batch(zero.mesh, np.asarray(problem.batch))
        for _ in range(30):
            params, state, metrics = step(params, state, batch)
        losses.append(float(metrics.loss))
    start = float(np.log(ODD_GPT.vocab))
    exact, rounded = losses
    assert exact < start - 0.1
    # A loss of its own, but as far down.
    assert rounded != exact
    assert abs(rounded - exact) < near * (start - exact)


@pytest.mark.parametrize("option", [{"gather": "int8"}, {"scatter": "int4"}])
@pytest.mark.parametrize("stage, devices", [(0, 8), (3, 1)])
def test_where_nothing_is_sent_it_is_refused(stage, devices, option):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    with pytest.raises(ValueError, match="nothing is gathered or scattered there"):
        zero_jax.Zero(mesh, stage, precision=zero_jax.Precision(**option))


@pytest.mark.parametrize(
    ("option", "said"),
    [({"gather": "int4"}, 'use "int8", or None'), ({"scatter": "fp8"}, 'use "int8" or "int4"')],
)
def test_other_dtypes_are_refused(option, said):
    with pytest.raises(ValueError, match=said):
        zero_jax.Precision("bf16", **option)


def test_a_plan_shows_it_beside_a_stage_that_gathers_nothing(capsys, tmp_path):
    options = ["--model", "124m", "--devices", "8", "--seq", "64", "--gather", "int8", "--json"]
    assert command.main([*options, str(tmp_path / "plan.json")]) == 0
    known = json.loads((tmp_path / "plan.json").read_text())
    assert known["gather"] == "int8" and set(known["stages"]) == set("0123")
