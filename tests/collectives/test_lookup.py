"""Rows of a sharded embedding: the same rows and gradients as of the full table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import Case, trained
from problems import Problem, train_plain, train_zero, ulps

import zero_jax
from zero_jax.collectives import lookup
from zero_jax.collectives.gather_scatter import Wire
from zero_jax.sharding.layout import Partition

ROWS, TOKENS = 24, 3
TX = optax.sgd(0.1, momentum=0.9)
FILL = jax.lax.GatherScatterMode.FILL_OR_DROP
CLIP = jax.lax.GatherScatterMode.CLIP


def looked_up(full, tokens, n, dim, take, wire):
    """Rows, and the gradient of the sum of their squares, of a table sharded along that dim."""
    cut = Partition(full.shape, dim, n)
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    padded = np.zeros(cut.stored_shape, full.dtype)
    padded[: full.shape[0], : full.shape[1]] = full

    def body(shard, tokens):
        def objective(shard):
            found = lookup.rows(shard, None, tokens[..., None], take, cut, wire)
            return jnp.sum(jnp.where(jnp.isnan(found), 0, found) ** 2), found

        grad, found = jax.grad(objective, has_aux=True)(shard)
        return found, grad

    specs = (cut.spec, jax.P("data"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[::-1], check_vma=False)
    return map(np.asarray, jax.jit(run)(padded, tokens))


TABLES = [(64, 8, 2, -2, FILL), (67, 8, 4, -1, CLIP), (61, 5, 3, -2, CLIP), (40, 3, 8, -1, FILL)]


@pytest.mark.parametrize(("words", "width", "n", "dim", "mode"), TABLES)
def test_rows_and_gradients_are_those_of_the_whole_table(words, width, n, dim, mode):
    full = np.asarray(jax.random.normal(jax.random.key(0), (words, width)))
    tokens = np.array(jax.random.randint(jax.random.key(1), (ROWS, TOKENS), 0, words))
    tokens[0], tokens[5, 0], tokens[-1, 1] = tokens[1], words + 3, -2  # twice, and out of bounds
    take = lookup.Take(mode, None)
    found, grad = looked_up(full, tokens, n, dim, take, Wire(jnp.float32))
    want = take(jnp.asarray(full), tokens.reshape(-1, 1)).reshape(ROWS, TOKENS, width)
    np.testing.assert_array_equal(found, want)
    assert np.isnan(found).any() == (mode is FILL)
    counted = np.zeros(full.shape)
    for token, row in zip(tokens.ravel(), np.asarray(want).reshape(-1, width), strict=True):
        if 0 <= token < words or mode is CLIP:
            counted[np.clip(token, 0, words - 1)] += 2 * row
    np.testing.assert_allclose(grad[:words, :width], counted, rtol=1e-6, atol=1e-6)
    assert not grad[words:].any() and not grad[:, width:].any(), "padding stays zero"


def test_gradients_of_bf16_rows_are_added_in_fp32():
    """A row that each of four devices reads 512 times: in bf16 the sum would stop at 256."""
    full = np.ones((64, 4), np.float32)
    tokens = np.zeros((4 * 512, 1), np.int32)
    wire = Wire(jnp.bfloat16, jnp.dtype("bfloat16"))
    for dim in (-1, -2):
        found, grad = looked_up(full, tokens, 4, dim, lookup.Take(CLIP, None), wire)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(grad[0, :4], 2.0 * len(tokens))


WORDS, WIDTH = 211, 12


def make(words=WORDS):
    key = functools.partial(jax.random.normal, jax.random.key(2))
    return {"embed": key((words, WIDTH)), "layers": 0.3 * key((3, WIDTH, WIDTH))}


def loss(params, tokens, table=lambda w: w):
    x = table(params["embed"])[tokens]
    layers = params["layers"]
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0] ** 2)


def taken(params, tokens, **fill):
    """The value for a missing row has the dtype after the cast."""
    return jnp.nanmean(jnp.take(params["embed"].astype("float32"), tokens + 1, axis=0, **fill))


OTHERS = {
    "cast": lambda p, t: loss(p, t, lambda w: w.astype("bfloat16").astype("float32")),
    "tied": lambda p, t: loss(p, t) + jnp.mean(p["embed"] ** 2),
    "flipped": lambda p, t: loss(p, t, lambda w: jnp.flip(w, 1)),
    "filled": functools.partial(taken, mode="fill", fill_value=0.1),
    "in a loop": lambda p, t: jax.lax.scan(lambda s, t: (s + loss(p, t), None), 0.0, t[None])[0],
    "one column": lambda p, t: loss(p, t * 0) + jnp.mean(p["embed"][t, 1]),
}
BF16 = zero_jax.Precision("bf16")
SPLIT = {"param_specs": {"layers": jax.P(None, None, "model")}}
TOKEN_ROWS = np.asarray(jax.random.randint(jax.random.key(3), (ROWS, TOKENS), 0, WORDS))

# Losses, devices, other settings than stage 3, and whether only the rows are sent.
READ = [
    (loss, 4, {"grad_accum_steps": 2, "remat": "block"}, True),
    (loss, 4, {"frozen": "embed"}, True), (OTHERS["cast"], 4, {}, True),
    (taken, 4, {"precision": BF16}, True), (loss, 4, {"stage": 2}, False),
    (loss, 4, {"precision": zero_jax.Precision("bf16", param_comm_dtype="int8")}, False),
    (loss, 4, {"mesh": zero_jax.abstract_mesh(4, model=2)} | SPLIT, False), (loss, 1, {}, False),
    (loss, 2, {}, False),  # 36 rows of 211 are not few
    (loss, 4, {"bucket_bytes": 2048}, False),  # all rows of three columns take more
    (OTHERS["filled"], 4, {"precision": BF16}, False),
    *((OTHERS[name], 4, {}, False) for name in ("tied", "flipped", "in a loop", "one column")),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "devices", "settings", "by_rows"), READ)
def test_a_leaf_is_looked_up_if_few_of_its_rows_are_read(fn, devices, settings, by_rows):
    zero = zero_jax.Zero(**{"mesh": zero_jax.abstract_mesh(devices), "stage": 3} | settings)
    params = zero.eval_shape(make)
    tx = zero.optimizer(TX)
    traced = zero.train_step(fn, tx).read(params, tx.init(params), TOKEN_ROWS)
    assert [leaf.path for leaf in traced.leaves if leaf.by_rows] == ["embed"] * by_rows


def test_it_trains_as_plain_optax():
    made, settings = Problem(make, loss, TOKEN_ROWS), {"remat": "block", "grad_accum_steps": 2}
    want = train_plain(made, TX, 3)
    losses, params, _ = train_zero(made, TX, 3, 3, replica=2, secondary_shards=True, **settings)
    np.testing.assert_allclose(losses, want[0], rtol=1e-6)
    assert ulps(params, want[1]) < 256


@pytest.mark.parametrize(("fill", "kind"), [(0.1, "float32"), (None, "float32"), (None, "int8")])
def test_a_row_that_is_not_there_is_filled_as_after_the_cast(fill, kind):
    """Not rounded to bf16, and not with the NaN of an integer, which is 0."""
    made = {"w": jnp.ones((WORDS, WIDTH)), "at": jnp.zeros((3, 1), jnp.uint32)}
    made["table"] = jnp.ones((WORDS, WIDTH), kind)

    def fn(params, tokens):
        taken = jnp.take(params["table"].astype("float32"), tokens, axis=0, fill_value=fill)
        one = jnp.mean(params["w"][params["at"][:, 0]])  # indices may be a leaf
        return jnp.mean(jnp.nan_to_num(taken, nan=9.0)) * one

    mesh = zero_jax.make_mesh(devices=jax.devices()[:2])
    rows = zero_jax.global_batch(mesh, np.full((8, 1), 300, np.int32))
    for stage in (1, 3):
        zero = zero_jax.Zero(mesh, stage, precision=BF16, frozen="table|at")
        value = zero.evaluate(fn)(zero.shard(made), rows)[0]
        np.testing.assert_allclose(value, fill or 9.0, rtol=1e-6)  # bf16 has 0.10009766


# 211 rows are sharded along columns; 212 are not, and shards are sent as columns.
@pytest.mark.parametrize(("words", "shard"), [(211, 0), (212, 212 * WIDTH // 4)])
def test_no_device_has_the_table_and_no_more_than_its_rows_travel(words, shard):
    _, _, audit = trained(Case(lambda: make(words), loss, TOKEN_ROWS), 4, TX, 1)
    assert all(c.elements < words * WIDTH / 2 for c in audit.collectives)
    sent = sum(c.sent_elements for c in audit.collectives if c.kind == "all-to-all")
    assert sent == 2 * (ROWS // 4 * TOKENS) * WIDTH + 2 * shard
