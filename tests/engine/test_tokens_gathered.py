"""Experts that stay, where gathering tokens sends less than sending rows: as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zero_jax
from zero_jax.models import decoder
from zero_jax.plan import expert_words

TX = optax.adamw(1e-3, eps=1e-4)
ROWS, TOKENS = 24, 16


class Trial:
    """A decoder with experts, and a step of it on any mesh."""

    def __init__(self, experts: int, capacity: float | None):
        self.config = decoder.DecoderConfig(
            layers=2,
            width=24,
            heads=4,
            kv_heads=2,
            head_dim=6,
            hidden=40,
            vocab=54,
            seq=TOKENS,
            loss_chunk=16,
            mixture=decoder.Mixture(experts, 2, capacity=capacity, balance=0.02, z=0.001),
        )
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(self.config, nnx.Rngs(0))))

    def make(self):
        params = nnx.state(decoder.Decoder(self.config, nnx.Rngs(0)), nnx.Param)
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noise = [0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(treedef, [x + y for x, y in zip(leaves, noise, strict=True)])

    def loss(self, params, batch):
        pair, routed = decoder.routed_loss(nnx.merge(self.graph, params), batch)
        return zero_jax.Weighted(*pair), routed

    def gradients(self, sizes, stage=3, **settings):
        """Loss, gradients and dropped choices."""
        zero = zero_jax.Zero(mesh_of(**sizes), stage, **settings)
        params = zero.shard(jax.jit(self.make)())
        tokens = jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54)
        grad = zero.value_and_grad(self.loss, has_aux=True)
        (value, routed), grads = jax.jit(grad)(params, tokens)
        return float(value), jax.device_get(zero.full(grads)), int(routed.dropped_B.sum())

    def audit(self, sizes, remat="block"):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, remat=remat)
        params = zero.abstract(self.make)
        rows = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
        step = zero.train_step(self.loss, TX, has_aux=True)
        lowered = step.lower(params, zero.optimizer(TX).init(params), rows)
        return zero_jax.audit(lowered.compile(), zero.mesh.shape)

    def plan(self, sizes, remat="block"):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, remat=remat)
        rows = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
        return zero.plan(self.loss, TX, zero.abstract(self.make), rows, has_aux=True, compile=True)


def mesh_of(**sizes):
    return zero_jax.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])


def check_alike(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got[2] == want[2]
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


@functools.cache
def alone(experts, capacity):
    trial = Trial(experts, capacity)
    return trial, trial.gradients({"data": 1})


# No dropping: room for every token at each of 24 experts, so tokens are the smaller thing.
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        pytest.param({"experts": 2, "data": 1}, {}, marks=pytest.mark.slow),
        ({"experts": 3, "data": 1}, {"remat": "dots"}),
        pytest.param({"experts": 4, "data": 1}, {"remat": "block"}, marks=pytest.mark.slow),
        pytest.param({"experts": 8, "data": 1}, {"remat": "block"}, marks=pytest.mark.slow),
        pytest.param({"experts": 2, "data": 4}, {"remat": "block"}, marks=pytest.mark.slow),
        pytest.param({"experts": 4, "data": 2}, {"stage": 1}, marks=pytest.mark.slow),
        ({"experts": 2, "data": 2}, {"stage": 2, "micro_batches": 2}),
        pytest.param(
            {"replica": 2, "experts": 2, "data": 2}, {"remat": "block"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"experts": 2, "data": 2, "model": 2}, {"remat": "block"}, marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_one_device(sizes, settings):
    trial, want = alone(24, None)
    assert not messages(trial.audit(sizes), "f32", "all-to-all")
    check_alike(trial.gradients(sizes, **settings), want)


@pytest.mark.parametrize(
    "experts", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))]
)
def test_rows_that_travel_without_dropping(experts):
    """As many groups as experts: forward both ways send as much, and rows go by all-to-all."""
    trial, want = alone(experts, None)
    sizes = {"experts": experts, "data": 1}
    assert messages(trial.audit(sizes), "f32", "all-to-all")
    check_alike(trial.gradients(sizes), want)


def test_what_is_dropped_is_the_same():
    trial, want = alone(24, 1.25)
    assert want[2] > 0
    assert not messages(trial.audit({"experts": 2, "data": 2}), "f32", "all-to-all")
    check_alike(trial.gradients({"experts": 2, "data": 2}), want)


def messages(report, dtype, kind, axis="experts"):
    found = (report.collectives, dtype, kind, axis)
    return [c for c in found[0] if (c.dtype, c.kind, c.axis) == (dtype, kind, axis)]


@pytest.mark.parametrize(("remat", "gathered"), [("block", 3), ("none", 2)])
@pytest.mark.parametrize("sizes", [{"experts": 4, "data": 2}, {"experts": 2, "data": 2}])
def test_words_are_those_of_tokens(sizes, remat, gathered):
    """Tokens forward, again where they are recomputed, and what backward has of the sums; beside
    them indices and weights of K choices each, and none of experts."""
    trial = Trial(24, None)
    report, config = trial.audit(sizes, remat), trial.config
    groups, rows = sizes["experts"], ROWS // (sizes["experts"] * sizes["data"])
    once = config.layers * groups * rows * TOKENS
    words = {
        kind: sum(c.elements * c.runs for c in messages(report, "f32", kind))
        for kind in ("all-gather", "reduce-scatter", "all-to-all")
    }
    weights = 2 * once
    assert words["all-gather"] == gathered * once * config.width + (gathered - 1) * weights
    assert words["reduce-scatter"] == 2 * once * config.width + weights
    assert words["all-to-all"] == 0


@pytest.mark.parametrize("remat", ["block", "none"])
def test_a_plan_knows_them(remat):
    trial, sizes = Trial(24, None), {"experts": 2, "data": 2}
    plan = trial.plan(sizes, remat)
    kinds = ("all-gather", "reduce-scatter", "all-to-all")
    sent = sum(
        c.elements * c.runs
        for kind in kinds
        for dtype in ("f32", "s32")
        for c in messages(plan.compiled, dtype, kind)
    )
    assert plan.token_words == pytest.approx(sent, rel=0.02)
    config = trial.config
    even = expert_words.even(config, 2, 4, remat)
    experts = config.layers * 24 * 3 * config.width * config.hidden
    runs = 5 if remat == "block" else 4
    tokens = runs * config.layers * even * 2 * config.width / 2  # half of it leaves a device
    assert 3 * experts * 3 / 4 == pytest.approx(3 * experts / 2 / 2 + tokens)


T, D, E, C, K = 8, 6, 8, 4, 3
DRAW = functools.partial(np.random.default_rng(0).integers, 0)
SOURCE, CHOSEN, PLACES = DRAW(T + 1, size=(E, C)), DRAW(E + 1, size=(T, K)), DRAW(C, size=(T, K))


def sent(x_TxD):
    return x_TxD.at[SOURCE].get(mode="fill", fill_value=0)


def multiplied(params, rows_ExCxD):
    return jnp.einsum("ecd,edf->ecf", rows_ExCxD, params["w"][...])


def returned(made_ExCxD, mode="fill", value=0):
    return made_ExCxD.at[CHOSEN, PLACES].get(mode=mode, fill_value=value)


def usual(params, x_TxD):
    return returned(multiplied(params, sent(x_TxD))).sum(1) * x_TxD


def one_expert_of_all(params, x_TxD):
    """Its index does not say which."""
    dims = jax.lax.GatherDimensionNumbers((1,), (0, 1), (1,))
    made = multiplied(params, sent(x_TxD))
    return jax.lax.gather(made, PLACES[:, :1], dims, (1, 1, D), mode="fill", fill_value=0)


WRITTEN = {
    "a pad": lambda p, x: returned(
        multiplied(p, jnp.concatenate([x, jnp.zeros((1, D))])[SOURCE])
    ).sum(1),
    "rows read twice": lambda p, x: (
        returned(multiplied(p, sent(x))).sum(1) + sent(x).sum((0, 1)) + (sent(x) + 1).sum()
    ),
    "clipped": lambda p, x: returned(multiplied(p, sent(x)), "clip", None).sum(1) * x,
    "filled with ones": lambda p, x: returned(multiplied(p, sent(x)), "fill", 1).sum(1) * x,
    "one expert of all": one_expert_of_all,
    "through experts again": lambda p, x: multiplied(p, usual(p, x)[None] + jnp.zeros((E, 1, 1))),
    "summed up, and then to experts": lambda p, x: multiplied(
        p, returned(multiplied(p, sent(x))).sum(1)[None, :E].swapaxes(0, 1)
    ),
    "one number": lambda p, x: ((returned(multiplied(p, sent(x))) * 2).sum() / 8).astype(
        jnp.bfloat16
    ),
    "a matrix behind": lambda p, x: returned(multiplied(p, sent(x))).sum(1) @ p["o"],
    "a scale behind": lambda p, x: returned(multiplied(p, sent(x))).sum(1) * p["o"][0, 0],
    "small indices": lambda p, x: (
        (multiplied(p, sent(x)).at[CHOSEN.astype(np.int8), PLACES.astype(np.int8)])
        .get(mode="fill", fill_value=0)
        .sum(1)
    ),
}


@pytest.mark.parametrize("name", ["usual", *WRITTEN])
def test_however_rows_are_picked(name):
    write = WRITTEN.get(name, usual)

    def loss(params, x_BxTxD):
        made = jax.vmap(lambda x_TxD: write(params, x_TxD))(x_BxTxD)
        return jnp.mean(jnp.tanh(made.astype(jnp.float32)))

    def make():
        keys = jax.random.split(jax.random.key(0))
        w = 0.3 * jax.random.normal(keys[0], (E, D, D))
        named = nnx.Param(w, sharding_names=("experts", None, None), eager_sharding=False)
        return {"w": named, "o": 0.3 * jax.random.normal(keys[1], (D, 2))}

    x, found = jax.random.normal(jax.random.key(4), (8, T, D)), []
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3)
        value, grads = jax.jit(zero.value_and_grad(loss))(zero.init(make), x)
        found.append((value, zero.full(grads)))
    rounding = 1e-2 if name == "one number" else 1e-5
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=rounding)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * rounding, atol=1e-6)


def test_a_matrix_behind_multiplies_own_tokens_alone():
    """FLOPs of a device are those of rows that travel: a sum is sent before it is multiplied."""
    flops = []
    for write in (usual, WRITTEN["a matrix behind"]):
        zero = zero_jax.Zero(mesh_of(experts=4, data=1), 3)

        def loss(params, x_BxTxD, write=write):
            return jnp.mean(jax.vmap(lambda x_TxD: write(params, x_TxD))(x_BxTxD))

        def make():
            w = nnx.Param(
                jnp.ones((E, D, D)), sharding_names=("experts", None, None), eager_sharding=False
            )
            return {"w": w, "o": jnp.ones((D, 2))}

        x = jax.ShapeDtypeStruct((8, T, D), jnp.float32)
        lowered = jax.jit(zero.value_and_grad(loss)).lower(zero.abstract(make), x)
        flops.append(zero_jax.audit(lowered.compile(), zero.mesh.shape).flops)
    own = 2 * T  # rows of a device, of 8 on 4
    assert flops[1] - flops[0] == 3 * 2 * own * D * 2


def test_an_optimizer_steps_as_on_one_device():
    found = []
    trial = Trial(24, 1.25)
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54))
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, remat="block")
        params, own = zero.init(trial.make), zero.optimizer(TX)
        step, state = zero.train_step(trial.loss, TX, has_aux=True), own.init(params)
        losses = []
        for _ in range(3):
            params, state, metrics = step(params, state, zero_jax.global_batch(zero.mesh, tokens))
            losses.append(float(metrics.loss))
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-5)
