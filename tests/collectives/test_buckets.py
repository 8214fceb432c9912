"""Constant-size communication buffers: the same results in pieces, none larger than a bucket."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.collectives import buckets
from zero_jax.hlo import auditor

N = 4
SMALL = 8 * 4 * 20  # bytes: 20 elements of each of 8 devices
LAYER = 24


@pytest.mark.parametrize(
    ("shape", "dim", "bucket"),
    [
        ((8, 6), 0, 4 * N),
        ((6, 8), 1, 7 * 4 * N),
        ((3, 4, 5), 1, 4 * 4 * N),
        ((3, 4, 5), 1, None),
        ((4,), 0, 4 * N * 1000),
    ],
)
def test_pieces_make_the_full_array(shape, dim, bucket):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:N])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rows = np.arange(N * N * 7, dtype=np.float32).reshape(N, N, 7)  # of each sender, to each device
    split = P(*[None] * dim, "data")

    def all_of_them(shard, full, rows):
        gathered = buckets.all_gather(shard, "data", dim, bucket)
        scattered = buckets.psum_scatter(full, "data", dim, bucket)
        exchanged = buckets.all_to_all(rows[0], "data", bucket)[None]
        return gathered, scattered, buckets.psum(full, "data", bucket), exchanged

    specs = {"in_specs": (split, P(), P("data")), "out_specs": (P(), split, P(), P("data"))}
    run = jax.jit(jax.shard_map(all_of_them, mesh=mesh, check_vma=False, **specs))
    want = (x, N * x, N * x, rows.swapaxes(0, 1))
    for found, expected in zip(run(x, x, rows), want, strict=True):
        np.testing.assert_array_equal(found, expected)


def loss(params, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2)


def lowered(bucket, stage, *, layers=3, devices=8):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    zero = zero_jax.Zero(mesh, stage=stage, bucket_bytes=bucket)
    params = zero.abstract(lambda: jnp.ones((layers, LAYER, LAYER)))
    tx = zero.optimizer(optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((8, LAYER), jnp.float32)
    return zero.train_step(loss, tx).lower(params, tx.init(params), batch)


def test_no_buffer_is_larger_than_a_bucket_and_no_element_more_is_sent():
    """Gathers and reduce-scatters: XLA for CPUs merges all-reduces."""

    def of(bucket):
        found = auditor.audit(lowered(bucket, 3).compile()).collectives
        found = [c for c in found if c.kind != "all-reduce"]
        return max(c.bytes for c in found), sum(c.words for c in found)

    (large, words), (small, same) = of(2**27), of(SMALL)
    assert SMALL - 8 * 4 < small <= SMALL < large / 2
    assert words == same == 3 * 3 * LAYER**2  # two gathers and a reduce-scatter of three layers


@pytest.mark.parametrize("stage", [0, 3])
def test_program_size(stage):
    """It does not depend on the number of layers, nor on one device on the bucket."""

    def instructions(layers):
        return lowered(SMALL, stage, layers=layers).as_text().count("stablehlo.")

    assert instructions(3) == instructions(30)
    one, other = (lowered(bucket, stage, devices=1).as_text() for bucket in (SMALL, 2**30))
    assert one == other
