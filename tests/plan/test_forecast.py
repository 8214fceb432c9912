"""Forecasts of a step's temporaries, for networks known in closed form, and of its update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import networks
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from networks import LONG, WIDE, N
from one_device import MERGES

import zero_jax
from zero_jax.hlo import auditor
from zero_jax.models import optimizers
from zero_jax.plan.operations import device_part, linear_step
from zero_jax.plan.peak_memory import temporaries
from zero_jax.plan.planning import Update, assigned, predict_update


@functools.cache
def forecast(net, stage, remat="block", k=1, on_gpu=False):
    return net.temporaries(stage, remat, k, on_gpu)


def terms(*args, **settings):
    return forecast(*args, **settings).terms


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_terms_of_a_step_with_remat(stage, dtype):
    net = dataclasses.replace(LONG, dtype=dtype)
    found, layer, parts = terms(net, stage), net.width * net.layer, N if stage else 1
    # The inputs of the layers in the loop, all but the first and the last, and perhaps of these.
    assert found["saved"] in [(net.L - 2) * net.carry, (net.L - 1) * net.carry]
    # A layer, gathered or sliced; at stage 3 slices of shards too.
    whole = 0 if (stage, dtype) == (0, "fp32") else net.width * net.psi
    assert found["copy"] == layer + (4 * net.layer // N if stage == 3 else whole)
    # Reduced gradients of two layers are not in their stack yet. Full ones are at the start of a
    # layer, where fewer activations exist.
    extra = found["gradients"] - 4 * net.psi // parts - 4
    assert 4 * net.layer // parts <= extra <= 2 * 4 * net.layer // parts
    assert found["loss"] == 0


def test_policies_save_products_or_all_that_the_backward_pass_reads():
    for stage in (0, 3):
        # Those of the loop, and the input of the last layer; those of all layers from jax 0.12 on.
        layers = LONG.L - (2 if MERGES else 1)
        assert terms(LONG, stage, "dots")["saved"] == (2 * layers + 1) * LONG.carry
    # Of tanh(h @ w): h, and its value or its derivative, or (jax 0.10) both.
    saved = terms(LONG, 3, "none")["saved"]
    assert saved in (2 * (LONG.L - 1) * LONG.carry, 3 * (LONG.L - 1) * LONG.carry)
    held = [forecast(LONG, 3, policy).bytes for policy in ("block", "dots", "none")]
    assert held == sorted(held) and held[0] < held[-1]


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_save_half_and_add_up_in_a_second_set_of_gradients(stage):
    halves = terms(LONG, stage, k=2)
    assert halves["saved"] == LONG.L * LONG.carry // 2  # and the input, which is no argument
    if stage == 1:  # whole gradients, beside those of one micro-batch, and shards of the sum
        sharded = terms(LONG, 2, k=2)["gradients"]
        assert abs(halves["gradients"] - sharded - 4 * 2 * (LONG.psi - LONG.psi // N)) < 2 * 4 * (
            LONG.layer
        )
    elif stage:  # a second set of shards
        one, two = (terms(WIDE, stage, k=k)["gradients"] for k in (1, 2))
        assert two - one - 4 * WIDE.psi // N in range(17), "scalars"


def test_terms_are_all_that_is_held_and_near_the_compiled_program():
    """Within 10 % where activations dominate and no layer runs again: XLA for CPUs drops barriers,
    and merges the two runs of a layer; from jax 0.12 on it holds up to 20 % more. Programs for GPUs
    are compared in test_prove_plan.py."""
    for stage in (0, 3):
        found = forecast(LONG, stage, "none")
        assert sum(found.terms.values()) == found.bytes
        step, args = LONG.step(stage, "none")
        temp = auditor.audit(step.lower(*args).compile()).temp_bytes
        assert found.bytes == pytest.approx(temp, rel=0.1 if MERGES else 0.2)
    # Stage 2 holds the gathered copy beside what stage 3 holds, but of one layer that it gathers.
    more = forecast(WIDE, 2, k=2).bytes - forecast(WIDE, 3, k=2).bytes
    assert more == 4 * WIDE.psi - 4 * WIDE.layer // N


# XLA for GPUs.
@pytest.mark.parametrize(("L", "V"), [(6, 5000), (64, 5000)])
def test_gradients_at_the_cast_of_the_embeddings_are_shards_of_the_layers_and_its_own(L, V):
    net = networks.Embedded(L=L, D=64, B=2, T=2, V=V, dtype="bf16")
    found = terms(net, 3, on_gpu=True)
    shards, loss = 4 * L * net.layer // N, 4
    assert found["gradients"] == (2 + 4) * V * 64 + shards + loss


def test_logits_are_the_loss_whole_or_a_chunk_of_them():
    """At the worst instant they, or their gradients, are beside the head and its gradient."""
    whole = networks.Network(L=6, D=64, B=4, T=16, V=1000)
    chunked = networks.Chunked(L=3, D=64, B=2, T=4, V=5000)
    for net, stage, rows in [(whole, 1, 64), (whole, 3, 64), (chunked, 3, 2)]:
        found, head = terms(net, stage, on_gpu=True), 4 * net.D * net.V
        assert 0 <= found["loss"] + found["work"] - 4 * rows * net.V <= 3 * net.carry
        assert found["copy"] > head and found["gradients"] >= head


def test_a_layer_and_the_next_are_gathered_at_once_unless_they_are_large():
    """In fp32, with the slices of shards of a third one."""
    layer, shards = 4 * WIDE.layer, 4 * WIDE.layer // N
    full = 4 * WIDE.psi // N + layer + 2 * shards + 4  # gradients of one layer
    found = terms(WIDE, 3, on_gpu=True)
    assert layer < found["copy"] <= 2 * layer + shards
    assert 4 * WIDE.psi // N + layer < found["gradients"] <= full + layer
    large = dataclasses.replace(WIDE, bucket_bytes=layer // 5)
    assert terms(large, 3, on_gpu=True)["copy"] <= layer + shards, "more than four buckets"
    nested = networks.Nested(L=4, D=32, B=16, T=64)
    copy = terms(nested, 3, on_gpu=True)["copy"]
    assert copy <= 4 * nested.layer + 4 * nested.layer // N, "a loop within a layer"


def test_the_part_of_one_device_is_found_under_calls():
    spec = PartitionSpec("data")
    mapped = jax.shard_map(jnp.sin, mesh=zero_jax.make_mesh(), in_specs=spec, out_specs=spec)
    flat = linear_step(device_part(jax.make_jaxpr(jax.jit(jax.jit(mapped)))(jnp.ones((16, 3)))))
    assert [operation.name for operation in flat.operations] == ["sin"]
    assert [value.shape for value in flat.inputs] == [(2, 3)]
    with pytest.raises(ValueError, match="shard_map"):
        temporaries(jax.make_jaxpr(jax.jit(jnp.sin))(jnp.ones(3)), 1)


# A split over a model axis of 4: of x before, of the result after.
M, SHAPE, ONES = 4, (2, 8, 12, 16), jnp.ones
RULES = [
    (lambda x: jnp.tanh(x) + ONES((2, 8, 1, 16)), 2, 2), (lambda x: x.transpose(2, 0, 3, 1), 2, 0),
    (lambda x: x.reshape(2, 8, 4, 3, 16), 2, 2), (lambda x: x.reshape(16, 12, 16), 2, 1),
    (lambda x: x.reshape(16, 12, 16), 1, None),  # the split dim is no longer in one piece
    (lambda x: x.sum((0, 3)), 2, 1), (lambda x: x.max(2), 2, None), (lambda x: x[:, :5], 2, 2),
    (lambda x: x[:, :, :5], 2, None), (lambda x: jnp.unstack(x, axis=1)[0], 2, 1),
    (lambda x: jnp.concatenate([x, x], axis=0), 2, 2), (lambda x: x @ ONES((16, 5)), 2, 2),
    (lambda x: x @ ONES((16, 5)), 3, None),  # summed over, then summed over devices
    (lambda x: ONES((5, 2)) @ x.reshape(2, -1), 1, 1),
    (lambda x: jnp.einsum("bhqk,bhkd->bhqd", x, ONES((2, 8, 16, 5))), 1, 1),
    (lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], 2, 2),
    # A loop that starts whole and becomes split.
    (lambda x: jax.lax.scan(lambda c, row: (c + row, None), ONES(SHAPE[1:]), x)[0], 2, 1),
    (lambda x: jax.lax.map(jax.jit(lambda row: row + 1), x), 2, 2),
    (lambda x: x[jnp.array([0, 1, 0])], 0, None),  # rows of an embedding, summed over devices
]  # fmt: skip


@pytest.mark.parametrize(("fn", "dim", "want"), RULES)
def test_a_split_spreads(fn, dim, want):
    (value,) = linear_step(jax.make_jaxpr(fn)(ONES(SHAPE)), [dim], M).results
    assert value.split == want
    assert value.bytes * (1 if want is None else M) == value.full_bytes


def test_parts_that_are_manual_over_model_see_pieces_and_constraints_split():
    mesh, spec = zero_jax.abstract_mesh(2, model=M), PartitionSpec(None, "model")
    options = {"axis_names": {"model"}, "check_vma": False}
    product = lambda piece: jnp.sin(piece @ ONES((2, 2)))  # noqa: E731
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(product, in_specs=spec, out_specs=spec, **options)
        flat = linear_step(jax.make_jaxpr(lambda x: mapped(x))(ONES((6, 8))), [None], M)
    (dot,) = [o for o in flat.operations if o.name == "dot_general"]
    assert dot.outputs[0].shape == (6, 2)
    assert (flat.inputs[0].split, flat.results[0].split) == (1, 1), "what is handed in pieces too"
    constrained = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
    assert linear_step(jax.make_jaxpr(constrained)(ONES((6, 8))), [0], M).results[0].split == 1


# Updates that multiply partitioned matrices: memory and communication, from their trace.
L, A, B = 3, 64, 128


def make():
    return {"up": jnp.zeros((L, A, B)), "down": jnp.zeros((L, B, A)), "bias": jnp.zeros((L, B))}


def update(tx, stage=3):
    tx = optimizers.make(tx, optax.constant_schedule(1e-3)) if isinstance(tx, str) else tx
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage)
    return zero, tx, predict_update(zero.config, tx, jax.eval_shape(make))


def test_updates_that_exchange_no_matrices():
    for name in set(optimizers.RATES) - {"muon"}:
        assert update(name)[2] == Update(), name
    assert update("muon", 0)[2] == Update(), "nothing is partitioned"
    with_loss = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    assert update(with_loss)[2] == Update()
    # Products of vectors are sums over devices: two elements for each of three numbers.
    scale = lambda g: g / jnp.sqrt(jnp.tensordot(g, g, g.ndim))  # noqa: E731
    normalised = optax.stateless(lambda grads, _: jax.tree.map(scale, grads))
    assert update(normalised)[2] == Update(elements=2 * 3)


def test_muon_sends_rows_as_long_as_the_busiest_devices_there_and_back():
    """Six matrices for eight devices: one each at most, for which every device has a row."""
    zero, tx, found = update("muon")
    assert found.elements == 2 * A * B
    rows = matrix = 4 * A * B
    assert 2 * rows + matrix < found.bytes < 2 * rows + 6 * matrix
    (one,) = assigned(zero.config, tx, jax.eval_shape(make)).exchanges
    assert [sum(kind.counts) for kind in one.kinds] == [L, L]

    def loss(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    # XLA for CPUs would merge gathers of layers that are in no loop.
    deep = lambda: jax.tree.map(lambda x: jnp.concatenate([x, x]), make())  # noqa: E731
    shape = jax.ShapeDtypeStruct((8, 4, A), jnp.float32)
    plan = zero.plan(loss, zero.optimizer(tx), zero.eval_shape(deep), shape, compile=True)
    # Twelve matrices for eight devices: two each at most.
    assert plan.sent["update"] == (4 * A * B, 4 * 4 * A * B)
    predicted = dataclasses.replace(plan, compiled=None).elements_per_param
    assert plan.elements_per_param == pytest.approx(predicted, rel=0.02)
