"""Weights and gradients communicated as integers: rounding error and bytes sent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import audited

import zero_jax
from zero_jax.collectives import quantised
from zero_jax.sharding import layout

ODD = {"a": (17, 63), "b": (63, 48), "layers": (2, 63, 63)}
EVEN = {"a": (16, 256), "b": (256, 64), "layers": (2, 256, 256)}
SHORT = {"short": (64, 4)}  # four bytes and a scale of four, for eight bytes of bf16


def drawn(shapes):
    keys = iter(jax.random.split(jax.random.key(0), len(shapes)))
    return {n: s[-2] ** -0.5 * jax.random.normal(next(keys), s) for n, s in shapes.items()}


def sum_of_squares(params, rows):
    """Rows are inputs and outputs side by side."""
    a, b, layers = params["a"], params["b"], params["layers"]
    x, y = rows[:, : len(a)], rows[:, len(a) :]
    h = jnp.tanh(x @ a)
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]
    total = jnp.sum(jnp.square(h @ b - y)) + jnp.sum(params.get("short", jnp.zeros(0)) ** 2)
    return zero_jax.Weighted(total, jnp.float32(len(rows)))


def by_shard(fn, x, cut):
    """Applies a function to what each device stores of a full array, with padding."""
    if cut.model is not None:
        halves = np.split(x, cut.model_shards, axis=cut.model)
        cut = dataclasses.replace(cut, model=None)
        return np.concatenate([by_shard(fn, half, cut) for half in halves], axis=-1)
    dim = cut.dim % x.ndim
    pad = [(0, cut.shard_size * cut.shards - x.shape[d] if d == dim else 0) for d in range(x.ndim)]
    shards = np.split(np.pad(x, pad), cut.shards, axis=dim)
    joined = np.concatenate([fn(shard) for shard in shards], axis=dim)
    return np.take(joined, range(x.shape[dim]), axis=dim)


def steps_of(x, bits):
    """The size of a step at each element: its block's largest magnitude / (2^(bits-1) - 1)."""
    block = x.shape[-1] // jax.eval_shape(quantised.quantise, x)[1].shape[-1]
    largest = np.abs(x.reshape(*x.shape[:-1], -1, block)).max(-1, keepdims=True)
    return (largest / (2 ** (bits - 1) - 1) * np.ones(block)).reshape(x.shape)


@pytest.mark.parametrize(("shape", "bits"), [((3, 512), 8), ((2, 509), 4), ((4, 1), 4)])
def test_rounding_error_is_at_most_half_a_step(shape, bits):
    sizes = jnp.logspace(-6, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    x = jax.random.normal(jax.random.key(0), shape) * sizes
    steps, scales = quantised.quantise(x, bits)
    assert (steps.dtype, steps.shape) == (jnp.int8, x.shape)
    if bits == 4:
        packed = quantised.pack(steps)
        assert packed.nbytes == steps[..., ::2].nbytes
        assert jnp.array_equal(quantised.unpack(packed, shape[-1]), steps)
    found = quantised.dequantise(steps, scales, jnp.float32)
    off = jnp.max(jnp.abs(found - x) / steps_of(np.asarray(x), bits))
    assert off <= 0.5001 and (off > 0.1 or shape[-1] == 1)

    # Zeros, and numbers that are not finite.
    x = jnp.ones((5, 64)).at[0].set(0.0)
    x = x.at[1, 3].set(np.nan).at[2, 3].set(np.inf).at[3, 3].set(-np.inf)
    found = quantised.dequantise(*quantised.quantise(x, bits), jnp.float32)
    assert jnp.array_equal(found[jnp.array([0, 4])], x[jnp.array([0, 4])])
    assert not jnp.isfinite(found[1:4, 3]).any()


def rounded(x):
    steps = np.maximum(steps_of(x, 8), 1e-30)
    return (np.round(x / steps) * steps).astype(np.float32)


CASES = [(1, (3, 1, 2), {"param_comm_dtype": "int8"}, {}),
         (3, (2, 3, 1), {"param_comm_dtype": "int8"}, {"secondary_shards": True}),
         (1, (2, 2, 2), {"grad_comm_dtype": "int8"}, {}),
         (3, (3, 1, 2), {"grad_comm_dtype": "int4"}, {"bucket_bytes": 2**10})]  # fmt: skip


@pytest.mark.parametrize(("stage", "sizes", "kinds", "settings"), CASES)
def test_gradients_are_off_by_half_a_step_of_each_device(stage, sizes, kinds, settings):
    """On a mesh of (data, replica, model)."""
    start, (data, replica, model) = jax.tree.map(np.asarray, drawn(ODD)), sizes
    count, devices = data * replica, jax.devices()[: data * replica * model]
    mesh = zero_jax.make_mesh(data, replica=replica, model=model, devices=devices)
    settings = settings | {"param_specs": {"b": jax.P(None, "model")} if model > 1 else None}
    zero = zero_jax.Zero(mesh, stage, precision=zero_jax.Precision(**kinds), **settings)
    cuts = dict(zip(start, zero.splits(start), strict=True))
    coded = "param_comm_dtype" in kinds
    fn = rounded if coded else np.copy
    weights = {name: by_shard(fn, x, cuts[name]) for name, x in start.items()}
    assert all((weights[name] != start[name]).any() == coded for name in start)
    rows = np.asarray(jax.random.normal(jax.random.key(1), (2 * count, 17 + 48)))
    compute = jax.jit(jax.value_and_grad(lambda p, r: sum_of_squares(p, r)[0]))
    wanted, own = jax.vmap(compute, (None, 0))(weights, rows.reshape(count, 2, -1))
    batch = zero_jax.global_batch(mesh, rows)
    found, grads = zero.value_and_grad(sum_of_squares)(zero.shard(start), batch)
    np.testing.assert_allclose(found, wanted.sum() / len(rows), rtol=1e-5)
    steps = functools.partial(steps_of, bits={"int4": 4}.get(kinds.get("grad_comm_dtype"), 8))
    for name, mine in layout.unpad(grads).items():
        want = own[name].sum(0) / len(rows)
        off, most = np.abs(mine - want), 1e-4 + 1e-4 * np.abs(want)
        if "grad_comm_dtype" in kinds:
            each = [by_shard(steps, np.asarray(x), cuts[name]) for x in own[name]]
            most = sum(each) / 2 / len(rows)
            assert np.max(off / most) > 0.1, "something is rounded"
        assert np.all(off <= 1.001 * most + 1e-6)  # sums over devices in another order


@pytest.mark.parametrize(("stage", "scatter"), [(2, "int8"), (3, "int4")])
def test_bytes_sent(stage, scatter):
    bits = {"int8": 8, "int4": 4}[scatter]
    precision = zero_jax.Precision("bf16", param_comm_dtype="int8", grad_comm_dtype=scatter)
    make, rows = lambda: drawn(EVEN | SHORT), jax.ShapeDtypeStruct((16, 16 + 64), jnp.float32)
    report = audited(sum_of_squares, make, rows, {"data": 8}, stage=stage, precision=precision)
    found = report.collectives
    elements = sum(np.prod(shape) for shape in EVEN.values())
    each = [(c.kind, c.dtype, c.bytes * c.runs) for c in found]
    sent = lambda *kind: sum(size for *own, size in each if tuple(own) == kind)  # noqa: E731
    # At stage 3 the backward pass gathers again, what XLA does not merge.
    assert elements <= sent("all-gather", "s8") <= (2 if stage == 3 else 1) * elements
    assert 0 < sent("all-gather", "f32") < 0.1 * sent("all-gather", "s8")
    assert sent("all-to-all", "s8") == elements * bits // 8
    assert 0 < sent("all-to-all", "f32") < 0.1 * elements
    kinds = {"all-gather", "all-to-all", "all-reduce"}
    assert {c.kind for c in found} == kinds | {"reduce-scatter"}, "rows of four elements"
