"""Tensor parallelism by annotation equals one device; shapes, words and traces.

Tolerance: 1024 fp32 ulps of a leaf's largest element after ten steps of Adam. A matmul sharded over
`model` sums its products in another order, in every layer and not only at the gradient, so the
differences are a few times those of data parallelism (256 in test_parity.py). A sum that is missing
or made twice is off by 10^5 ulps or more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from problems import ROWS, Problem, gpt_problem, train_plain, ulps

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.hlo import auditor
from zero_jax.models import gpt
from zero_jax.sharding import paths

STEPS = 10
ULPS = 1024
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
MESHES = [(1, 2), (2, 2), (4, 2), (2, 4)]
CONFIG = gpt.GPTConfig(layers=2, width=16, heads=4, vocab=24, seq=8, loss_chunk=16)


class Net(nn.Module):
    """A linen model without names of dims: `model_specs` give them."""

    @nn.compact
    def __call__(self, x):
        for width in (16, 7, 16, 7):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(1)(x)


def linen_problem() -> Problem:
    x, want = jax.random.normal(jax.random.key(1), (2, ROWS, 7))

    def loss(params, batch):
        return jnp.mean(jnp.square(Net().apply(params, batch[0])[:, 0] - batch[1][:, 0]))

    return Problem(lambda: Net().init(jax.random.key(0), x[:1]), loss, (x, want))


LINEN_SPECS = {
    "Dense_[02]/kernel": P(None, "model"),
    "Dense_[02]/bias": P("model"),
    "Dense_[13]/kernel": P("model"),
}
PROBLEMS = {"gpt": (lambda: gpt_problem(CONFIG), None), "linen": (linen_problem, LINEN_SPECS)}


@functools.cache
def problem(name):
    return PROBLEMS[name][0]()


@functools.cache
def plain(name):
    return train_plain(problem(name), ADAM, STEPS)


def mesh_of(n, mp, replica=1):
    return zero_jax.make_mesh(replica=replica, model=mp, devices=jax.devices()[: n * mp * replica])


def train(name, mesh, **settings):
    zero = zero_jax.Zero(mesh, model_specs=PROBLEMS[name][1], **settings)
    params = zero.shard(problem(name).start)
    step = zero.train_step(problem(name).loss, ADAM)
    state, losses = zero.optimizer(ADAM).init(params), []
    for _ in range(STEPS):
        params, state, metrics = step(params, state, problem(name).batch)
        losses.append(float(metrics.loss))
    return losses, zero.full(params)


def assert_parity(name, mesh, **settings):
    want = plain(name)
    losses, params = train(name, mesh, **settings)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS
    assert want[0][-1] < want[0][0], "a run that does not learn compares little"


SEQUENCE = {"sequence_parallel": True, "remat": "block"}


TRAINED = [
    ("linen", (4, 2), {"stage": 1}),
    ("gpt", (2, 2), {"stage": 2, **SEQUENCE}),
    ("gpt", (2, 4), {"stage": 3, **SEQUENCE}),
]
MORE = [
    ("linen", (2, 4), {"stage": 3}),
    ("gpt", (1, 2), {"stage": 0}),
    ("gpt", (4, 2), {"stage": 1}),
    ("gpt", (2, 4), {"stage": 2}),
    ("gpt", (4, 2), {"stage": 3}),
    ("gpt", (2, 2), {"stage": 0, **SEQUENCE}),
    ("gpt", (2, 4), {"stage": 1, **SEQUENCE}),
    ("gpt", (2, 2, 2), {"stage": 1, "micro_batches": 2}),
    ("gpt", (2, 2, 2), {"stage": 3, "micro_batches": 2}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "settings"),
    [*TRAINED, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
    ids=str,
)
def test_training_equals_one_device(name, sizes, settings):
    """On (data, model) or (data, model, replica). All of the product: tests/cross_product.py."""
    assert_parity(name, mesh_of(*sizes), **settings)


def gradient(n, mp, **settings):
    made, zero = problem("gpt"), zero_jax.Zero(mesh_of(n, mp), **settings)
    return zero.full(zero.value_and_grad(made.loss)(zero.shard(made.start), made.batch)[1])


def test_gradients_equal_one_device_and_a_planted_fault_is_found(monkeypatch):
    def first_piece_only(fn, x, dim, size):
        first = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) % 2 == 0
        return fn(x if dim is None else jnp.where(first, x, 0))

    want = gradient(1, 1, stage=0)
    assert ulps(gradient(2, 2, stage=3), want) < 64
    monkeypatch.setattr(gather_scatter, "on_pieces", first_piece_only)
    jax.clear_caches()
    try:
        assert ulps(gradient(2, 2, stage=3), want) > 1e5
    finally:
        jax.clear_caches()


def test_each_device_stores_its_shard_of_both_axes():
    zero = zero_jax.Zero(mesh_of(2, 4), stage=3)
    params = zero.init(problem("gpt").make)
    for a, b in zip(*map(jax.tree.leaves, (zero.full(params), problem("gpt").start)), strict=True):
        np.testing.assert_array_equal(a, b)  # initial values do not depend on the mesh
    state = zero.optimizer(optax.adam(1e-3)).init(params)
    D = CONFIG.width
    shapes = {
        "blocks/attn/qkv/kernel": (2, D // 2, 3 * D // 4),  # columns over model
        "blocks/attn/proj/kernel": (2, D // 4, D // 2),  # rows over model
        "blocks/mlp/up/bias": (2, 4 * D // 2),  # a bias has one dim: data takes it
        "wte/embedding": (24 // 4, D // 2),
        "wpe/embedding": (8 // 2, D),  # over data alone
    }
    moments = dict(paths.named_leaves(state.inner[0].mu))
    for name, leaf in paths.named_leaves(params):
        if name in shapes:
            assert leaf.addressable_shards[0].data.shape == shapes.pop(name)
            assert moments[name].sharding.spec == leaf.sharding.spec
    assert not shapes


def step_and_args(n, mp, **settings):
    zero = zero_jax.Zero(mesh_of(n, mp), **settings)
    tx = zero.optimizer(optax.adam(1e-3))
    params = zero.abstract(problem("gpt").make)
    batch = jax.ShapeDtypeStruct(problem("gpt").batch.shape, jnp.int32)
    return zero.train_step(problem("gpt").loss, tx), (params, tx.init(params), batch)


@functools.cache
def compiled(n, mp, **settings):
    step, args = step_and_args(n, mp, **settings)
    return auditor.audit(step.lower(*args).compile(), {"data": n, "model": mp})


# Loss and weight together, and the norm in two sums: all-reduces of four numbers.
SCALARS = 2 * 4


@pytest.mark.parametrize("stage", [0, 3])
def test_each_device_sends_its_part_of_the_elements_along_data(stage):
    D, L, mp = CONFIG.width, CONFIG.layers, 2
    # Sharded over `model`: matrices, and biases of `qkv` and `up` where `data` takes no dim.
    split = CONFIG.vocab * D + L * (12 * D * D + (stage == 0) * 7 * D)
    words = 2 * (split // mp + gpt.num_params(CONFIG) - split) + SCALARS
    if stage == 3:
        # Gathered again by the backward pass: matrices of the layers (scales, sharded along layers
        # here, are gathered before the loop). The tied embedding is reduced at both of its uses.
        words += L * 12 * D * D // mp + CONFIG.vocab * D // mp
    # Outside of loops XLA may merge the last norm's two gathers, or not (jax 0.12 on CPU).
    more = compiled(2, mp, stage=stage).words_along("data") - words
    assert more == 0 or (stage == 3 and more == D)


def test_elements_along_model_are_those_of_megatron():
    """Two all-reduces of b·s·h in the forward pass and two in the backward, in each layer."""
    tokens, D = ROWS // 2 * CONFIG.seq, CONFIG.width
    report = compiled(2, 2, stage=0)
    in_layers = [c for c in report.collectives if c.axis == "model" and c.runs == CONFIG.layers]
    assert {c.kind for c in in_layers} == {"all-reduce"}
    assert sum(c.words for c in in_layers) == CONFIG.layers * 4 * 2 * tokens * D


def test_axis_rules_do_not_leak_into_other_traces():
    def split_sequences(**settings):
        zero = zero_jax.Zero(mesh_of(2, 2), **settings)
        args = zero.abstract(problem("gpt").make), problem("gpt").batch
        traced = zero.value_and_grad(problem("gpt").loss).trace(*args)
        return str(traced.jaxpr).count("spec=P(None, 'model', None)")

    jax.clear_caches()
    fresh = split_sequences(sequence_parallel=True)
    jax.clear_caches()
    assert split_sequences() == 0
    assert split_sequences(sequence_parallel=True) == fresh > 2
