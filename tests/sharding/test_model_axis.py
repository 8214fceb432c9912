"""Tensor parallelism by annotation: every mesh and stage equals one device, in pieces of 1/(N·MP).

Tolerance: 1024 fp32 ulps of a leaf's largest element after ten steps of Adam. A matmul that is
split over `model` sums its products in another order, in every layer and not only at the gradient,
so the differences are a few times those of data parallelism (256 in test_parity.py); a sum that is
missing, or taken twice, is off by 10^5 ulps or more: see the guards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from problems import ROWS, Problem, gpt_problem, train_plain, ulps

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.hlo import auditor
from zero_jax.models import gpt
from zero_jax.sharding import paths
from zero_jax.sharding.cuts import split

STEPS = 10
ULPS = 1024
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
MESHES = [(1, 2), (2, 2), (4, 2), (2, 4)]
CONFIG = gpt.GPTConfig(layers=2, width=16, heads=4, vocab=24, seq=8, loss_chunk=16)


class Net(nn.Module):
    """An ordinary linen model: it names no dims, `model_specs` do."""

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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n_mp", MESHES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_mesh_and_stage_equals_one_device(name, n_mp, stage):
    assert_parity(name, mesh_of(*n_mp), stage=stage)


@pytest.mark.parametrize("stage", [SLOW(0), SLOW(1), 2, 3])
@pytest.mark.parametrize("n_mp", [(2, 2), (2, 4)], ids=str)
def test_sequence_parallelism_equals_one_device(n_mp, stage):
    assert_parity("gpt", mesh_of(*n_mp), stage=stage, sequence_parallel=True, remat="block")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_of_a_partitioned_and_split_model_equal_one_device(stage):
    assert_parity("gpt", mesh_of(2, 2, replica=2), stage=stage, micro_batches=2)


def gradient(name, n, mp, **settings):
    zero = zero_jax.Zero(mesh_of(n, mp), model_specs=PROBLEMS[name][1], **settings)
    params = zero.shard(problem(name).start)
    return zero.full(zero.value_and_grad(problem(name).loss)(params, problem(name).batch)[1])


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_equal_those_of_one_device(name):
    # A key's bias has a gradient of zero but for rounding; it is a third of qkv's bias.
    want = gradient(name, 1, 1, stage=0)
    for n_mp in MESHES:
        assert ulps(gradient(name, *n_mp, stage=3), want) < 64


def test_each_device_rests_on_its_piece_of_both_axes():
    zero = zero_jax.Zero(mesh_of(2, 4), stage=3)
    params = zero.shard(problem("gpt").start)
    state = zero.optimizer(optax.adam(1e-3)).init(params)
    D = CONFIG.width
    pieces = {
        "blocks/attn/qkv/kernel": (2, D // 2, 3 * D // 4),  # columns over model
        "blocks/attn/proj/kernel": (2, D // 4, D // 2),  # rows over model
        "blocks/mlp/up/bias": (2, 4 * D // 2),  # a bias has one dim: data takes it
        "wte/embedding": (24 // 4, D // 2),
        "wpe/embedding": (8 // 2, D),  # over data alone
    }
    moments = dict(paths.named_leaves(state.inner[0].mu))
    for name, leaf in paths.named_leaves(params):
        if name in pieces:
            assert leaf.addressable_shards[0].data.shape == pieces.pop(name)
            assert moments[name].sharding.spec == leaf.sharding.spec
    assert not pieces


def test_without_a_data_axis_a_bias_is_split_over_model():
    cut = split((2, 64), 1, model=-1, model_shards=4)
    assert (cut.dim, cut.model, cut.device_shape) == (None, -1, (2, 16))


def step_and_args(n, mp, **settings):
    zero = zero_jax.Zero(mesh_of(n, mp), **settings)
    tx = zero.optimizer(optax.adam(1e-3))
    params = zero.abstract(problem("gpt").make)
    batch = jax.ShapeDtypeStruct(problem("gpt").batch.shape, jnp.int32)
    return zero.train_step(problem("gpt").loss, tx), (params, tx.init(params), batch)


def compiled(n, mp, **settings):
    step, args = step_and_args(n, mp, **settings)
    return auditor.audit(step.lower(*args).compile(), {"data": n, "model": mp})


# Loss and weight together, and the norm in two sums: all-reduces of four numbers.
SCALARS = 2 * 4


def split_and_whole(*, biases: bool) -> tuple[int, int]:
    """Parameters that are split over `model`, those of `qkv` and `up` too or not, and others."""
    D, L = CONFIG.width, CONFIG.layers
    split = CONFIG.vocab * D + L * (12 * D * D + biases * 7 * D)
    return split, gpt.num_params(CONFIG) - split


@pytest.mark.parametrize("mp", [2, SLOW(4)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_device_sends_its_part_of_the_words_along_data(stage, mp):
    D, L = CONFIG.width, CONFIG.layers
    split, whole = split_and_whole(biases=stage == 0)
    words = 2 * (split // mp + whole) + SCALARS
    if stage == 3:
        # Gathered again by the backward pass: matrices of the layers (scales, here cut over layers,
        # were gathered before the loop). The tied embedding is reduced at both of its uses.
        words += L * 12 * D * D // mp + CONFIG.vocab * D // mp
    # Outside of loops XLA may merge the last norm's two gathers, or not (jax 0.12 on CPU).
    more = compiled(2, mp, stage=stage).words_along("data") - words
    assert more == 0 or (stage == 3 and more == D)


@pytest.fixture
def fresh_traces():
    """For a test that replaces what is traced: no trace from before it, none of its own after."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_collectives_of_whole_leaves_are_caught(monkeypatch, fresh_traces):
    split, whole = split_and_whole(biases=False)
    monkeypatch.setattr(gather_scatter, "on_pieces", lambda fn, x, dim, size: fn(x))
    assert compiled(2, 4, stage=3).words_along("data") > 2 * 3 * (split // 4 + whole)


def test_a_gradient_that_is_not_whole_over_model_is_caught(monkeypatch, fresh_traces):
    def first_piece_only(fn, x, dim, size):
        first = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) % 2 == 0
        return fn(x if dim is None else jnp.where(first, x, 0))

    want = gradient("gpt", 1, 1, stage=0)
    monkeypatch.setattr(gather_scatter, "on_pieces", first_piece_only)
    assert ulps(gradient("gpt", 2, 2, stage=3), want) > 1e5


def test_words_along_model_are_megatrons():
    # Two all-reduces of b·s·h forward and two backward in each layer.
    tokens, D = ROWS // 2 * CONFIG.seq, CONFIG.width
    report = compiled(2, 2, stage=0)
    in_layers = [c for c in report.collectives if c.axis == "model" and c.runs == CONFIG.layers]
    assert {c.kind for c in in_layers} == {"all-reduce"}
    assert sum(c.words for c in in_layers) == CONFIG.layers * 4 * 2 * tokens * D


def test_rules_of_one_run_do_not_leak_into_the_traces_of_another(fresh_traces):
    def split_sequences(**settings):
        step, args = step_and_args(2, 2, stage=3, **settings)
        return str(step.trace(*args).jaxpr).count("spec=P(None, 'model', None)")

    fresh = split_sequences(sequence_parallel=True)
    jax.clear_caches()
    assert split_sequences() == 0
    assert split_sequences(sequence_parallel=True) == fresh > 2


def test_an_nnx_model_that_names_its_dims_as_flax_says_needs_nothing_else():
    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            self.up = nnx.Linear(
                8, 16, kernel_init=nnx.with_partitioning(init, (None, "mlp")), rngs=rngs
            )

    zero = zero_jax.Zero(mesh_of(2, 2))
    params = zero.init(lambda: nnx.state(Named(nnx.Rngs(0)), nnx.Param))
    specs = {n: x.sharding.spec for n, x in paths.named_leaves(params)}
    assert specs["up/kernel"] == P("data", "model")


def test_values_are_the_same_at_birth_on_every_mesh():
    want = jax.tree.leaves(problem("gpt").start)
    for n_mp in MESHES:
        zero = zero_jax.Zero(mesh_of(*n_mp))
        got = jax.tree.leaves(zero.full(zero.init(problem("gpt").make)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
