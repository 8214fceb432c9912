"""Tensor parallelism by annotation equals one device; shapes, elements sent, specs and errors.

Tolerance: 1024 fp32 ulps of a leaf's largest element after ten steps of Adam, a few times that of
data parallelism: each layer sums its products in another order. A wrong sum is off by 10^5 ulps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from one_device import trained, zero_on
from problems import ROWS, Problem, compare, gpt_problem, train_plain, train_zero

import zero_jax
from zero_jax.models import gpt
from zero_jax.offload.host import Offload
from zero_jax.remat import policies
from zero_jax.sharding import checks, paths
from zero_jax.sharding.layout import Partitioner
from zero_jax.sharding.named_dims import ModelAxis

STEPS = 10
ULPS = 1024
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
SQUARE = {"data": 2, "model": 2}
CONFIG = gpt.GPTConfig(layers=2, width=16, heads=4, vocab=24, seq=8, loss_chunk=16)


def linen_problem() -> Problem:
    """Without names of dims: `param_specs` give them."""
    x, want = jax.random.normal(jax.random.key(1), (2, ROWS, 7))
    layers = [layer for width in (16, 7, 16, 7) for layer in (nn.Dense(width), nn.tanh)]
    net = nn.Sequential([*layers, nn.Dense(1)])
    error = lambda p, batch: net.apply(p, batch[0])[:, 0] - batch[1][:, 0]  # noqa: E731
    loss = lambda p, batch: jnp.mean(jnp.square(error(p, batch)))  # noqa: E731
    return Problem(lambda: net.init(jax.random.key(0), x[:1]), loss, (x, want))


LINEN_SPECS = {"layers_[04]/bias": P("model"), "layers_[26]/kernel": P("model")}
LINEN_SPECS |= {"layers_[04]/kernel": P(None, "model")}
SIX = dataclasses.replace(CONFIG, layers=6)  # four of them in the loop
PROBLEMS = {"gpt": (lambda: gpt_problem(CONFIG), None), "linen": (linen_problem, LINEN_SPECS)}
PROBLEMS["six"] = lambda: gpt_problem(SIX), None
problem = functools.cache(lambda name: PROBLEMS[name][0]())
plain = functools.cache(lambda name: train_plain(problem(name), ADAM, STEPS))


def train(name, n, mp, replica=1, **settings):
    settings |= {"param_specs": PROBLEMS[name][1]}
    return train_zero(problem(name), ADAM, STEPS, n, replica, mp, **settings)


BLOCK, PARTS = {"remat": "block"}, {"remat": "block@partitioned"}
SEQUENCE, ON_HOST = {"sequence_parallel": True}, {"offload": "optimizer"}
PIECES = {"offload": Offload(optimizer=True, params=True, piece_bytes=4096)}
TRAINED = [  # problem, (data, model) or with replicas, and settings
    ("linen", (4, 2), {"stage": 1}), ("gpt", (2, 4), {"stage": 3} | SEQUENCE | BLOCK),
    ("linen", (2, 2), {"stage": 2} | PARTS),  # unrolled
    ("linen", (2, 2), {"stage": 3, "remat": "block_sqrt"}),
    *(pytest.param(*run, marks=pytest.mark.slow) for run in (
        *(("gpt", (2, 2), zero_jax.paper_config(name)) for name in ("c1", "c2", "c3", "c4", "c5")),
        ("gpt", (2, 2), {"stage": 2} | SEQUENCE | BLOCK),
        ("gpt", (2, 2), {"stage": 1} | PARTS | ON_HOST),
        ("gpt", (2, 4), {"remat": "block_sqrt@partitioned", "bucket_bytes": 256}),
        ("gpt", (2, 4), {"remat": "block@partitioned+host"} | PIECES),
        ("gpt", (2, 2), {"remat": "dots", "grad_accum_steps": 2} | ON_HOST),
        ("gpt", (4, 2), {"offload": "activations"} | BLOCK),
        ("gpt", (2, 2), {"remat": "block@host"} | SEQUENCE | PIECES),
        ("gpt", (2, 2, 2), PARTS | PIECES)))]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "settings"), TRAINED, ids=str)
def test_training_equals_one_device(name, sizes, settings):
    """With remat, buckets, host memory and replicas. All stages and meshes: cross_product.py."""
    compare(train(name, *sizes, **{"stage": 3} | settings), plain(name), ULPS)


@pytest.mark.slow
def test_steps_hold_equal_bytes_and_delete_donated_states():
    zero = zero_on(SQUARE, stage=3, remat="block", **PIECES)
    params, tx = zero.shard(problem("gpt").start), zero.optimizer(ADAM)
    state, step = tx.init(params), zero.train_step(problem("gpt").loss, tx)
    sizes = []
    for _ in range(20):
        before = jax.tree.leaves((params, state))
        params, state, _ = jax.block_until_ready(step(params, state, problem("gpt").batch))
        sizes.append(sum(x.nbytes for x in jax.live_arrays()))
        assert all(x.is_deleted() for x in before)
    assert len(set(sizes[2:])) == 1


def test_configurations_are_those_of_table_3_of_the_paper():
    remat = "block", "block@partitioned", "block@partitioned+host"
    rows = {"c1": (1, 0), "c2": (1, 1), "c3": (2, 0), "c4": (2, 1), "c5": (2, 2)}
    rows["zero-100b"] = (2, 1)
    want = {name: {"stage": stage, "remat": remat[pa]} for name, (stage, pa) in rows.items()}
    assert {name: dict(zero_jax.paper_config(name)) for name in want} == want


def test_host_memory_for_activations_is_a_remat_policy():
    sequence = {"sequence_parallel": True, "remat": "block@partitioned"}
    auto = {"stage": "auto", "remat": "block", "offload": "activations"}
    for settings in (sequence, auto, {"remat": "dots", "offload": "activations"}):
        with pytest.raises(ValueError, match="remat"):
            zero_on(SQUARE, **settings)
    zero = zero_on(SQUARE, remat="block", offload="activations")
    assert zero.config.remat == "block@host"
    assert policies.on_host("block_sqrt@partitioned") == "block_sqrt@partitioned+host"


def test_each_device_stores_its_shard_of_both_axes():
    zero = zero_on({"data": 2, "model": 4})
    params = zero.init(problem("gpt").make)
    # Initial values do not depend on the mesh.
    both = map(jax.tree.leaves, (zero.unshard(params), problem("gpt").start))
    jax.tree.map(np.testing.assert_array_equal, *both)
    state = zero.optimizer(optax.adam(1e-3)).init(params)
    D = CONFIG.width
    shapes = {
        "blocks/attn/qkv/kernel": (2, D // 2, 3 * D // 4),  # columns over model
        "blocks/attn/proj/kernel": (2, D // 4, D // 2),  # rows over model
        "blocks/mlp/up/bias": (2, 4 * D // 2),  # a bias has one dim: data takes it
        "wte/embedding": (24 // 4, D // 2),
        "wpe/embedding": (8 // 2, D),  # over data alone
    }
    leaves, moments = (dict(paths.named_leaves(x)) for x in (params, state.inner[0].mu))
    for name, shape in shapes.items():
        assert leaves[name].addressable_shards[0].data.shape == shape
        assert moments[name].sharding.spec == leaves[name].sharding.spec


@pytest.mark.parametrize("stage", [0, 3])
def test_each_device_sends_its_part_along_data_and_that_of_megatron_along_model(stage):
    D, L, mp = SIX.width, SIX.layers, 2
    sizes, tx = {"data": 2, "model": mp}, optax.adam(1e-3)
    _, _, report = trained(problem("six"), sizes, tx, 1, stage=stage)
    # Loss and weight together, and the norm in two sums: all-reduces of four numbers.
    # Sharded over `model`: matrices, and biases of `qkv` and `up` where `data` takes no dim.
    split = SIX.vocab * D + L * (12 * D * D + (stage == 0) * 7 * D)
    words = 2 * (split // mp + gpt.num_params(SIX) - split) + 2 * 4
    if stage == 3:
        # Gathered again by the backward pass: matrices of all layers but the last. Scales, sharded
        # along layers here, are gathered before. The tied embedding is reduced at both its uses.
        words += (L - 1) * 12 * D * D // mp + SIX.vocab * D // mp
    # Outside of loops XLA may merge the two gathers of the last norm, of the first layer's vectors
    # and of the stacks of scales, or not (jax 0.12 on CPU).
    more = report.elements_along("data") - words
    assert more == 0 or (stage == 3 and more in (D, 13 * D, 14 * D, 25 * D))
    if stage == 0:
        # Megatron: two all-reduces of b·s·h in the forward pass and two in the backward, a layer.
        # Of the four layers in the loop, whose two iterations run two each.
        in_layers = [c for c in report.collectives if c.axis == "model" and c.runs == 2]
        assert {c.kind for c in in_layers} == {"all-reduce"}
        assert sum(c.sent_elements for c in in_layers) == 4 * 4 * 2 * (ROWS // mp * SIX.seq) * D


def test_axis_rules_do_not_leak_into_other_traces():
    counts = []
    for settings in ({"sequence_parallel": True}, {}, {"sequence_parallel": True}):
        zero = zero_on(SQUARE, **settings)
        args = zero.eval_shape(problem("gpt").make), problem("gpt").batch
        traced = zero.value_and_grad(problem("gpt").loss).trace(*args)
        counts.append(str(traced.jaxpr).count("spec=P(None, 'model', None)"))
    assert counts[1] == 0 and counts[0] == counts[2] > 2


def specs_of(make, **settings):
    """The specs of parameters by name, on 2 x 2 devices."""
    params = zero_on(SQUARE, **settings).eval_shape(make)
    return {name: x.sharding.spec for name, x in paths.named_leaves(params)}


def test_linen_metadata_names_the_dims():
    each = (None, "model"), ("rows", None)
    inits = [nn.with_partitioning(nn.initializers.ones, x) for x in each]
    net = nn.Sequential([nn.Dense(8, kernel_init=init) for init in inits])
    make = lambda: net.init(jax.random.key(0), jnp.ones((1, 4)))  # noqa: E731
    rules = ("rows", "model"), ("rows", None)  # the first counts
    specs = specs_of(make, logical_axis_rules=rules)
    assert specs["params/layers_0/kernel"] == P("data", "model")
    assert specs["params/layers_1/kernel"] == P("model", "data")
    with nn.logical_axis_rules((("rows", None),)):
        assert specs_of(make)["params/layers_1/kernel"] == P("data")


def test_rules_for_axes_that_are_manual_within_the_step_have_no_effect():
    rules, specs = (("batch", "data"), ("hidden", ("model",))), {"up": P(None, "model")}
    zero = zero_on(SQUARE, param_specs=specs, logical_axis_rules=rules)
    params = zero.init(lambda: {"up": jnp.ones((8, 16))})
    named = lambda h: nn.with_logical_constraint(h, ("batch", "hidden"))  # noqa: E731
    loss = lambda p, x: jnp.mean(named(jnp.tanh(x @ p["up"])))  # noqa: E731
    value, _ = zero.value_and_grad(loss)(params, jnp.ones((8, 8)))
    np.testing.assert_allclose(value, np.tanh(8), rtol=1e-6)


def two(make=lambda: {}, model=2, **settings):
    return lambda: zero_on({"data": 2, "model": model}, **settings).eval_shape(make)


def of_gpt(model, **settings):
    return two(lambda: problem("gpt").make(), model, **settings)


FIVE = ModelAxis(4, (("w", P(None, None, "model")),))
SMALL = lambda: {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}  # noqa: E731
REFUSALS = [
    ("wte/embedding.*'tensor'", of_gpt(4, param_specs={"wte": P("tensor")})),
    ("wte/embedding.*'data'", of_gpt(4, param_specs={"wte": P("data")})),
    (r"up/kernel.*\[1, 2\]", of_gpt(4, param_specs={"up/kernel": P("model")})),
    ("wte/embedding", of_gpt(4, param_specs={"wte": P("model", "model")})),
    ("wte/embedding", of_gpt(4, param_specs={"wte": P(None, None, "model")})),
    ("param_specs`='nothing'", of_gpt(4, param_specs={"nothing": P("model")})),
    # Also without a model axis.
    ("'modle'", of_gpt(1, param_specs={"wte": P("modle")})),
    (r"w \(6, 8, 5\).*\[1\]", lambda: Partitioner(1, FIVE)({"w": jnp.zeros((6, 8, 5))})),
    ("param_specs", two(SMALL)),
    ("param_specs", two(SMALL, stage=2, param_specs={"^b$": P("model")})),
    ("sequence_parallel|model", lambda: zero_on({"data": 2}, sequence_parallel=True)),
    ("logical_axis_rules.*'ab'", two(logical_axis_rules=("ab",))),
    ("param_specs.*None", two(param_specs={"w": None})),
    ("param_specs.*'model'", two(param_specs={"w": "model"})),
    ("seq", two(sequence_parallel=True, logical_axis_rules={"seq": None})),
    ("partitioned|seq", two(logical_axis_rules={"seq": "model"}, remat="block@partitioned")),
    (r"b .*\(8,\).*\(1,\)", lambda: checks.check_bytes(SMALL(), Partitioner(8)(SMALL()))),
]


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()
