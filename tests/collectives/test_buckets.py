"""Collectives in pieces of constant size, and `gather` and `shard` in a `shard_map` of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.hlo import auditor

N = 4
PIECES = [((8, 6), 0, 4 * N), ((6, 8), 1, 7 * 4 * N), ((3, 4, 5), 1, 4 * 4 * N),
          ((3, 4, 5), 1, None), ((4,), 0, 4 * N * 1000)]  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "bucket"), PIECES)
def test_pieces_make_the_full_array(shape, dim, bucket):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:N])
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rows = np.arange(N * N * 7, dtype=np.float32).reshape(N, N, 7)  # of each sender, to each device
    split = P(*[None] * dim, "data")

    def all_of_them(shard, full, rows):
        gathered = gather_scatter.all_gather(shard, "data", dim, bucket)
        scattered = gather_scatter.psum_scatter(full, "data", dim, bucket)
        exchanged = gather_scatter.all_to_all(rows[0], "data", bucket)[None]
        return gathered, scattered, gather_scatter.psum(full, "data", dim, bucket), exchanged

    specs = {"in_specs": (split, P(), P("data")), "out_specs": (P(), split, P(), P("data"))}
    run = jax.jit(jax.shard_map(all_of_them, mesh=mesh, check_vma=False, **specs))
    want = (x, N * x, N * x, rows.swapaxes(0, 1))
    for found, expected in zip(run(x, x, rows), want, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_buffer_is_larger_than_a_bucket_and_no_element_more_is_sent():
    """Gathers and reduce-scatters: XLA for CPUs merges all-reduces."""
    small, width = 8 * 4 * 20, 24  # bytes: 20 elements of each of 8 devices
    layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    loss = lambda params, x: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)  # noqa: E731

    def lowered(bucket, layers=6):
        zero = zero_jax.Zero(zero_jax.make_mesh(), 3, bucket_bytes=bucket)
        params = zero.eval_shape(lambda: jnp.ones((layers, width, width)))
        return zero.value_and_grad(loss).lower(params, jnp.ones((8, width)))

    def sent(bucket):
        found = auditor.audit(lowered(bucket).compile()).collectives
        found = [c for c in found if c.kind != "all-reduce"]
        return max(c.bytes for c in found), sum(c.sent_elements for c in found)

    (large, words), (most, same) = sent(2**27), sent(small)
    assert small - 8 * 4 < most <= small < large / 2
    # Two gathers and a reduce-scatter of six layers; the last one is gathered once if it fits.
    assert (words, same) == ((3 * 6 - 1) * width**2, 3 * 6 * width**2)
    sizes = [lowered(small, layers).as_text().count("stablehlo.") for layers in (6, 30)]
    assert sizes[0] == sizes[1], "a program does not grow with its layers"


@pytest.mark.parametrize("n", [3, 8])
def test_gather_and_shard_inside_a_shard_map_of_the_user(n):
    start = {"w": jax.random.normal(jax.random.key(0), (7, 5)), "scale": jnp.float32(1.5)}
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2) + p["scale"] * jnp.sum(x)  # noqa: E731

    def f(params, x):
        shards, gather = zero_jax.manual.shard(params), zero_jax.manual.gather
        grads = jax.grad(lambda s: loss(gather(s, params), x))(shards)
        assert grads["w"].shape == shards["w"].shape and shards["w"].size * n < 2 * 35
        grads["scale"] = jax.lax.psum(grads["scale"], "data")  # too small to split: stays local
        rounded = gather(shards, params, compute_dtype="bfloat16")
        return gather(shards, params), gather(grads, params), rounded

    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    run = jax.shard_map(f, mesh=mesh, check_vma=False, **specs)
    x = jax.random.normal(jax.random.key(1), (24, 7))
    full, grads, rounded = jax.jit(run)(start, x)
    want = jax.grad(loss)(start, x)
    for name in start:
        np.testing.assert_array_equal(full[name], start[name])
        np.testing.assert_allclose(grads[name], want[name], rtol=1e-5, atol=1e-5)
        assert rounded[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded[name], start[name].astype(jnp.bfloat16))
