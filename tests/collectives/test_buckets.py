"""Constant-size communication buffers: pieces add up to the whole, and none is larger."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problems import gpt_problem, train_plain, train_zero, ulps
from test_parity import ADAM, ULPS

import zero_jax
from zero_jax.collectives import buckets
from zero_jax.hlo import auditor

N = 4
SHAPES = [((8, 6), 0), ((6, 8), 1), ((3, 4, 5), 1), ((4,), 0)]


def on_mesh(fn, x, spec_in, spec_out):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:N])
    return jax.shard_map(fn, mesh=mesh, in_specs=spec_in, out_specs=spec_out, check_vma=False)(x)


@pytest.mark.parametrize("bucket", [4 * N, 7 * 4 * N, 4 * N * 1000, None])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_pieces_make_the_same_whole(shape, dim, bucket):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    split = P(*[None] * dim, "data")
    gathered = on_mesh(lambda s: buckets.all_gather(s, "data", dim, bucket), x, split, P())
    np.testing.assert_array_equal(gathered, x)
    scattered = on_mesh(lambda g: buckets.psum_scatter(g, "data", dim, bucket), x, P(), split)
    np.testing.assert_array_equal(scattered, N * x)
    summed = on_mesh(lambda g: buckets.psum(g, "data", bucket), x, P(), P())
    np.testing.assert_array_equal(summed, N * x)


def collectives_of(bucket, stage, mp=1):
    problem = gpt_problem()
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=stage, bucket_bytes=bucket)
    tx = zero.optimizer(ADAM)
    params = zero.abstract(problem.make)
    batch = jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype)
    step = zero.train_step(problem.loss, tx)
    return auditor.audit(step.lower(params, tx.init(params), batch).compile()).collectives


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_no_buffer_is_larger_than_a_bucket_and_the_words_stay_the_same(stage):
    """On CPUs only gathers and scatters: that backend merges all-reduces as it likes."""

    def of(bucket):
        found = [c for c in collectives_of(bucket, stage) if c.kind != "all-reduce"]
        return max(c.bytes for c in found), sum(c.words for c in found)

    bucket = 8 * 4 * 20
    (large, words), (small, same) = of(2**27), of(bucket)
    assert small <= bucket < large / 2
    assert small > bucket - 8 * 4, "a piece takes what fits"
    assert words == same


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_in_pieces_equals_plain_optax(stage):
    problem = gpt_problem()
    want = train_plain(problem, ADAM, 5)
    losses, params, _ = train_zero(problem, ADAM, 5, 3, stage=stage, bucket_bytes=3 * 4 * 50)
    assert ulps(jnp.array(losses), jnp.array(want[0])) < ULPS
    assert ulps(params, want[1]) < ULPS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_layers_are_no_larger_program(stage):
    def instructions(layers):
        def loss(params, x):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            return jnp.mean(jax.lax.scan(layer, x, params)[0])

        zero = zero_jax.Zero(zero_jax.make_mesh(), stage=stage, bucket_bytes=8 * 4 * 20)
        params = zero.abstract(lambda: jnp.ones((layers, 24, 24)))
        tx = zero.optimizer(optax.sgd(0.1))
        batch = jax.ShapeDtypeStruct((8, 24), jnp.float32)
        lowered = zero.train_step(loss, tx).lower(params, tx.init(params), batch)
        return lowered.as_text().count("stablehlo.")

    assert instructions(3) == instructions(30)


@pytest.mark.parametrize("bucket", [4 * 8 - 1, 0, -1, float("nan"), float("inf"), True, "1", None])
def test_a_bucket_that_holds_no_number_of_every_device_is_refused(bucket):
    with pytest.raises(ValueError, match="one number of each of 8 devices takes 32 bytes"):
        zero_jax.Zero(zero_jax.make_mesh(), bucket_bytes=bucket)


@pytest.mark.parametrize("stage", [0, 3])
def test_on_one_device_nothing_is_cut_into_pieces(stage):
    problem = gpt_problem()

    def program(bucket):
        mesh = zero_jax.make_mesh(devices=jax.devices()[:1])
        zero = zero_jax.Zero(mesh, stage=stage, bucket_bytes=bucket)
        tx = zero.optimizer(ADAM)
        params = zero.abstract(problem.make)
        step = zero.train_step(problem.loss, tx)
        return step.lower(params, tx.init(params), problem.batch).as_text()

    assert program(8 * 4) == program(2**30)
