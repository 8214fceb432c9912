"""Experts that stay on their part of the devices: as on one device, and never gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from flax import nnx
from one_device import ADAM, Case, alone, audited, check_gradients, check_parity, zero_on

import zero_jax
from zero_jax.engine import expert_exchange
from zero_jax.models import decoder
from zero_jax.models.experts import Experts

LAYERS, WIDTH, HIDDEN, ROWS, TOKENS, CHOSEN = 2, 6, 10, 24, 8, 2
BOTH, FOUR = {"experts": 2, "data": 2}, {"experts": 4, "data": 1}
DOTS = jax.checkpoint_policies.dots_saveable
sent = functools.partial(one_device.sent, axis="experts", dtypes=("f32",))


@functools.cache
def problem(experts, capacity, layers=LAYERS):
    """Layers of experts between two matrices; the loss returns a row's choices without room too."""
    mixture = decoder.Mixture(experts, CHOSEN, capacity=capacity, balance=0.02, z=0.001)
    sizes = {"layers": layers, "width": WIDTH, "hidden": HIDDEN, "vocab": 11, "seq": TOKENS}
    config = decoder.DecoderConfig(**sizes, heads=1, kv_heads=1, head_dim=6, mixture=mixture)
    draw = np.random.default_rng(0).standard_normal
    create = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Experts(config, 0.02, rngs)))
    graph = nnx.graphdef(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
    rows, ends = (draw(s, np.float32) for s in ((ROWS, TOKENS, WIDTH), (2, WIDTH, WIDTH)))

    def make():
        state = nnx.state(create(nnx.Rngs(0)), nnx.Param)
        # Large enough that experts differ.
        layers = jax.tree.map(lambda x: 15 * x if x.ndim > 3 else x, state)
        return {"layers": layers, "embed": ends[0] / 2, "head": ends[1] / 2}

    def layer(x_BxTxD, experts):
        out, routed = experts(x_BxTxD)
        return x_BxTxD + out, routed

    def loss(params, x_BxTxD):
        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x_BxTxD, routed = scan(x_BxTxD @ params["embed"], nnx.merge(graph, params["layers"]))
        made = jnp.tanh(x_BxTxD @ params["head"])
        return zero_jax.Weighted(jnp.sum(made**2), made.size), routed.dropped_B.sum(0)

    return Case(make, loss, rows)


# With 24 experts there are fewer tokens than rows of experts, and tokens are gathered.
@pytest.mark.parametrize(
    ("experts", "capacity", "sizes", "settings"),
    [
        pytest.param(4, 0.75, {"experts": 4, "data": 2}, {"stage": 0}, marks=pytest.mark.slow),
        (4, 0.75, {"experts": 2, "data": 1}, {"stage": 1, "grad_accum_steps": 2}),
        (4, 0.75, BOTH | {"replica": 2}, {"secondary_shards": True, "remat": "block_sqrt"}),
        (4, 0.75, BOTH | {"model": 2}, {"remat": "dots"}),
        (4, 0.75, BOTH, {"offload": "optimizer,params", "remat": "block@host"}),
        (24, 2.0, BOTH, {"stage": 2, "grad_accum_steps": 2}),
        # As many groups as experts.
        pytest.param(3, None, {"experts": 3, "data": 1}, {}, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_one_device(experts, capacity, sizes, settings):
    own = problem(experts, capacity)
    audit = check_parity(own, sizes, **settings)
    dropped = alone(own, settings.get("tx", ADAM), 2)[0][0, 2]
    assert (dropped > 0) == (capacity is not None)
    assert (sent(audit, "all-to-all")[0] > 0) == (experts < 24)


def test_a_checkpoint_is_restored_on_other_axes(tmp_path):
    own, want = problem(4, 0.75), alone(problem(4, 0.75), ADAM, 2)[0][1, 0]
    _, step, (*states, batch) = one_device.begun(own, {"experts": 4, "data": 2})
    with zero_jax.Checkpoints(tmp_path) as store:
        store.save(1, tuple(step(*states, batch)[:2]))
    for sizes in ({"data": 8}, BOTH | {"replica": 2}):
        _, step, (*like, batch) = one_device.begun(own, sizes)
        with zero_jax.Checkpoints(tmp_path, read_only=True) as store:
            restored = store.restore(tuple(like), say=lambda _: None).tree
        np.testing.assert_allclose(step(*restored, batch)[2].loss, want, rtol=1e-5)


def test_rows_are_sent_and_experts_are_not(monkeypatch):
    """Six all-to-alls a layer, whatever the size of experts; in parts as much in more messages."""
    own, share = problem(4, 0.75, 4), 4 * 4 * 3 * WIDTH * HIDDEN // 2
    rows = 4 * (ROWS // 4) * 4 * 3  # room for 0.75 x 8 tokens x 2 choices / 4 experts
    for parts in (1, 3):
        audit = check_parity(own, BOTH, remat="block")
        assert sent(audit, "all-to-all") == (6 * rows * WIDTH, 6 * 4 * parts)
        assert (
            sent(audit, "all-gather", axis="data")[0] == 2 * share - share // 4
        )  # the last layer once
        assert sent(audit, "reduce-scatter", axis="data")[0] == share
        monkeypatch.setattr(expert_exchange, "PART_BYTES", 1)


@pytest.mark.parametrize(("groups", "remat", "gathered"), [(4, "block", 3), (2, "none", 2)])
def test_elements_sent_are_those_of_tokens(groups, remat, gathered):
    """Tokens forward, again where they are recomputed, and what backward has of the sums; beside
    them weights of K choices each, and none of experts. XLA for CPUs may merge the recomputed
    gathers of the first and the last layer, which are not in the loop."""
    own, sizes, layers = problem(24, None, 4), {"experts": groups, "data": 2}, 4
    audit, once = check_parity(own, sizes, remat=remat), layers * ROWS // 2 * TOKENS
    merged = 2 * once // layers * WIDTH * (remat == "block" and one_device.MERGES)
    want = once * (gathered * WIDTH + (gathered - 1) * CHOSEN) - merged
    assert sent(audit, "all-gather")[0] == want
    assert sent(audit, "reduce-scatter")[0] == once * (2 * WIDTH + CHOSEN)
    assert sent(audit, "all-to-all")[0] == 0
    # A plan counts the same, and indices.
    kinds, zero = ("all-gather", "reduce-scatter", "all-to-all"), zero_on(sizes, remat=remat)
    args = zero.optimizer(ADAM), zero.eval_shape(own.make), own.batch
    plan = zero.plan(own.loss, *args, has_aux=True)
    of_all = sum(c.sent_elements for c in audit.collectives if c.kind in kinds)
    counted = sum(plan.sent[kind].elements for kind in kinds if kind in plan.sent)
    assert counted == pytest.approx(of_all + merged, rel=0.02)


NAMES = ("experts", None, None)
X = jax.random.normal(jax.random.key(1), (8, 8))


def experts_param(shape=(4, 8, 8), names=NAMES):
    values = 0.3 * np.random.default_rng(3).standard_normal(shape, np.float32)
    return nnx.Param(jnp.asarray(values), sharding_names=names, eager_sharding=False)


def test_optimizer_state_of_expert_leaves_alone_is_sharded_as_they_are():
    zero = zero_jax.Zero(zero_jax.abstract_mesh(2, experts=2), 3)
    params = zero.eval_shape(lambda: {"w": experts_param()})
    state = zero.optimizer(ADAM).init(params)
    (moments,) = {x.sharding for x in jax.tree.leaves(state) if x.ndim == 3}
    assert moments == params["w"].get_value().sharding and "experts" in moments.spec


PRODUCTS = {
    "weights first": lambda w, x: jnp.einsum("edf,ebd->ebf", w, x),
    "transposed": lambda w, x: jnp.einsum("ebd,edf->bfe", x, w),
    "twice": lambda w, x: jax.nn.relu(x @ w) @ w,
    "stored the other way": lambda w, x: jnp.einsum("ebd,efd->ebf", x, w),
    "vmap": lambda w, x: jax.vmap(lambda w, x: jnp.tanh(x @ w + 1.0) * 2.0)(w, x),
    "both ways": lambda w, x: (x @ w) * jnp.swapaxes(jnp.einsum("ebd,edf->efb", x, w), 1, 2),
    "mixed in between": lambda w, x: (x @ w) @ w - (x @ w).sum(0, keepdims=True),
}


def test_products_of_any_form():
    def loss(params, x_BxD):
        x_ExBxD = x_BxD * jnp.arange(1.0, 5.0)[:, None, None]
        return sum(jnp.mean(form(params[n][...], x_ExBxD) ** 2) for n, form in PRODUCTS.items())

    check_gradients(loss, {name: experts_param() for name in PRODUCTS}, X, BOTH)


def in_chunks(w, x):
    chunks = jnp.stack(jnp.split(x, 2, axis=1))
    made = jax.lax.scan(lambda _, chunk: (None, jnp.tanh(chunk @ w) @ w), None, chunks)[1]
    return jnp.concatenate(list(made), 1)


def layer(w, x):
    return jnp.tanh(x @ w) @ w


@pytest.mark.parametrize("remat", ["block", DOTS])
def test_products_in_loops_and_checkpoints_of_the_model(remat):
    forms = [in_chunks, jax.checkpoint(layer), jax.checkpoint(layer, policy=DOTS)]

    def loss(params, x_BxD):
        def one(x_BxD, weights):
            rows = jnp.broadcast_to(x_BxD, (4, *x_BxD.shape))
            made = [form(w, rows).mean(0) for form, w in zip(forms, weights, strict=True)]
            return x_BxD + sum(made), None

        return jnp.mean(jax.lax.scan(one, x_BxD, [w[...] for w in params])[0] ** 2)

    params = [experts_param((3, 4, 8, 8), (None, *NAMES)) for _ in forms]
    check_gradients(loss, params, X, BOTH, remat=remat)


def test_layers_that_are_not_scanned_send_as_often():
    """Three products of a layer in one stretch, and no two layers in one."""

    def loss(params, x_BxD):
        for w in params.values():
            rows = jnp.broadcast_to(x_BxD, (4, *x_BxD.shape))
            x_BxD = x_BxD + (jnp.tanh(rows @ w[...]) * (rows @ w[...]) @ w[...]).mean(0)
        return jnp.mean(x_BxD**2)

    audit = audited(loss, lambda: {str(n): experts_param() for n in range(3)}, X, FOUR)
    # There and back, and both ways for gradients, but for the rows of the first layer.
    assert sent(audit, "all-to-all")[1] == 3 * 4 - 1


# Rows that are picked from T tokens in another form: E experts, C rows each, K choices.
T, D, E, C, K = 8, 6, 8, 4, 3
DRAW = functools.partial(np.random.default_rng(0).integers, 0)
SOURCE, PICKED, PLACES = DRAW(T + 1, size=(E, C)), DRAW(E + 1, size=(T, K)), DRAW(C, size=(T, K))
BATCH = np.random.default_rng(4).standard_normal((8, T, D), np.float32)


def rows_of(x_TxD):
    return x_TxD.at[SOURCE].get(mode="fill", fill_value=0)


def times(params, rows_ExCxD):
    return jnp.einsum("ecd,edf->ecf", rows_ExCxD, params["w"][...])


def run(params, x_TxD):
    return times(params, rows_of(x_TxD))


def summed(made_ExCxD, mode="fill", value=0, kind=np.int32):
    at = made_ExCxD.at[PICKED.astype(kind), PLACES.astype(kind)]
    return at.get(mode=mode, fill_value=value).sum(1)


def one_expert_of_all(params, x_TxD):
    """Its index does not name the expert."""
    dims = jax.lax.GatherDimensionNumbers((1,), (0, 1), (1,))
    made = run(params, x_TxD)
    return jax.lax.gather(made, PLACES[:, :1], dims, (1, 1, D), mode="fill", fill_value=0)


PICKS = {
    "usual": lambda p, x: summed(run(p, x)) * x,
    "a pad": lambda p, x: summed(times(p, jnp.concatenate([x, jnp.zeros((1, D))])[SOURCE])),
    "rows read twice": lambda p, x: summed(run(p, x)) + rows_of(x).sum((0, 1)),
    "clipped": lambda p, x: summed(run(p, x), "clip", None) * x,
    "filled with ones": lambda p, x: summed(run(p, x), "fill", 1) * x,
    "one expert of all": one_expert_of_all,
    "to experts again": lambda p, x: times(p, (summed(run(p, x)) * x)[None] + jnp.zeros((E, 1, 1))),
    "summed, and to experts": lambda p, x: times(p, summed(run(p, x))[None, :E].swapaxes(0, 1)),
    "one number": lambda p, x: ((summed(run(p, x)) * 2).sum() / 8).astype(jnp.bfloat16),
    "a matrix behind": lambda p, x: summed(run(p, x)) @ p["o"],
    "a scale behind": lambda p, x: summed(run(p, x)) * p["o"][0, 0],
    "small indices": lambda p, x: summed(run(p, x), kind=np.int8),
}


@pytest.mark.parametrize("name", PICKS)
def test_rows_picked_in_any_form(name):
    def loss(params, x_BxTxD):
        made = jax.vmap(functools.partial(PICKS[name], params))(x_BxTxD)
        return jnp.mean(jnp.tanh(made.astype(jnp.float32)))

    params = {"w": experts_param((E, D, D)), "o": jnp.asarray(BATCH[0, :D, :2])}
    check_gradients(loss, params, BATCH, BOTH, 1e-2 if name == "one number" else 1e-5)


@pytest.mark.parametrize(
    ("message", "names", "sizes", "read"),
    [
        ("experts=2 or 4", NAMES, {"experts": 3}, None),
        ("8", NAMES, {"experts": 8}, None),
        ("w", NAMES[:1], {"experts": 2}, None),
        ("w", NAMES, {"experts": 2, "model": 2}, None),  # one dim for both axes
        ("'experts'", (None, None, None), {"experts": 2}, None),
        ("w.*'slice'", NAMES, {"experts": 2}, lambda w, x: x @ w[0]),
        ("w.*'dot_general'", NAMES, {"experts": 2}, lambda w, x: jnp.tensordot(x[:, :4], w, 1)),
        ("w.*'sin'", NAMES, {"experts": 2}, lambda w, x: jnp.sin(w)),
    ],
)
def test_refused(message, names, sizes, read):
    mesh = zero_jax.abstract_mesh(1, **sizes)
    zero = zero_jax.Zero(mesh, 3, logical_axis_rules=(("experts", "model"),))
    with pytest.raises(ValueError, match=message):
        params = zero.eval_shape(lambda: {"w": experts_param(names=names)})
        grad_fn = zero.value_and_grad(lambda p, x: jnp.mean(read(p["w"][...], x)))
        grad_fn.trace(params, jnp.ones((4, 8)))
