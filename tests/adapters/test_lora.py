"""Adapters by trace: the same losses for every N and stage, a base that no step changes, and no
opened matrix that is kept."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.adapters.lora import BASES, Lora
from zero_jax.adapters.matrix import Dims
from zero_jax.adapters.quantised import KINDS, Quantised
from zero_jax.models import decoder, gpt
from zero_jax.plan.text_model import TextModel

DECODER = decoder.DecoderConfig(
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=10,
    hidden=72,
    vocab=48,
    seq=16,
    qkv_bias=True,
    qk_norm=True,
)
GPT = gpt.GPTConfig(layers=2, width=32, heads=4, vocab=48, seq=16)
ROWS = jax.random.randint(jax.random.key(1), (24, 13), 0, 48)
KEY = jax.random.key(0)


def mesh_of(n):
    return zero_jax.make_mesh(devices=jax.devices()[:n])


def train(model, n, stage, steps=3, **settings):
    zero = zero_jax.Zero(mesh_of(n), stage=stage, frozen=model.frozen, **settings)
    params = zero.init(model.make, KEY)
    tx = zero.optimizer(optax.adamw(1e-2))
    opt_state, step = tx.init(params), zero.train_step(model.loss, tx)
    before = jax.tree.map(np.asarray, params["base"])
    losses = []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, zero_jax.global_batch(zero.mesh, ROWS))
        losses.append(float(metrics.loss))
    return losses, before, params, opt_state


# Each base with one other mesh, stage and policy; slow: all of them with each.
OTHERS = [(1, 3, "none"), (2, 1, "block"), (3, 3, "block"), (8, 3, "none")]


@pytest.mark.parametrize(
    ("base", "others"),
    [
        *((base, [other]) for base, other in zip(BASES, OTHERS, strict=True)),
        *(pytest.param(base, OTHERS, marks=pytest.mark.slow) for base in BASES),
    ],
)
def test_every_n_and_stage_has_the_same_losses_and_the_base_stays(base, others):
    model = TextModel(DECODER, Lora(rank=3, base=base))
    wanted, *_ = train(model, 1, 0)
    assert wanted[0] > wanted[-1], "it learns"
    for n, stage, remat in others:
        losses, before, params, _ = train(model, n, stage, remat=remat)
        np.testing.assert_allclose(losses, wanted, rtol=2e-6)
        jax.tree.map(np.testing.assert_array_equal, before, params["base"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "n"), [("nf4", 2), ("bf16", 4), ("nf4", 5), ("bf16", 6), ("nf4", 7)]
)
def test_every_other_n_and_stage_too(base, n):
    model = TextModel(DECODER, Lora(rank=3, base=base))
    rows = 24 // n * n
    wanted = None
    for stage in range(4):
        zero = zero_jax.Zero(mesh_of(n), stage=stage, frozen=model.frozen, remat="block")
        tx = zero.optimizer(optax.adamw(1e-2))
        params = zero.init(model.make, KEY)
        opt_state, step = tx.init(params), zero.train_step(model.loss, tx)
        batch = zero_jax.global_batch(zero.mesh, ROWS[:rows])
        losses = []
        for _ in range(3):
            params, opt_state, metrics = step(params, opt_state, batch)
            losses.append(float(metrics.loss))
        wanted = losses if wanted is None else wanted
        np.testing.assert_allclose(losses, wanted, rtol=2e-6)


@pytest.mark.parametrize("base", KINDS)
def test_the_bits_of_the_base_are_the_same_for_every_n(base):
    model = TextModel(DECODER, Lora(rank=3, base=base))
    wanted = jax.tree.leaves(jax.jit(lambda: model.make(KEY)["base"])())
    for n in (3, 8):
        zero = zero_jax.Zero(mesh_of(n), stage=3, frozen=model.frozen)
        found = jax.tree.leaves(zero.full(zero.init(model.make, KEY)["base"]))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_optimizer_knows_the_adapters_alone():
    model = TextModel(DECODER, Lora(rank=3, base="nf4"))
    *_, params, opt_state = train(model, 4, 3, steps=1)
    trained = sum(x.size for x in jax.tree.leaves(zero_jax.logical(params["lora"])))
    held = sum(x.size for x in jax.tree.leaves(zero_jax.logical(opt_state)) if x.ndim)
    assert held == 2 * trained


@pytest.mark.parametrize("config", [DECODER, GPT])
def test_the_loss_is_that_of_the_model_with_its_adapters_added(config):
    model = TextModel(config, Lora(rank=4, alpha=7.0, base="fp32"))
    params = model.make(KEY)
    params["lora"] = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 10, params["lora"]
    )
    total, weight = jax.jit(model.loss)(params, ROWS)
    merged = model.adapted.merged(params)
    wanted, count = jax.jit(TextModel(config).loss)(merged, ROWS)
    assert weight == count
    np.testing.assert_allclose(total, wanted, rtol=1e-6)


def test_all_linear_is_what_the_model_only_multiplies_with():
    names = set(TextModel(DECODER, Lora()).adapted.multiplied)
    mlp = {f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")}
    assert names == mlp | {f"blocks/attn/{name}/kernel" for name in ("q", "k", "v", "out")}
    # The embedding is looked up too, the head is in a function with a gradient of its own.
    assert set(TextModel(GPT, Lora()).adapted.targets) == {
        *("blocks/attn/qkv/kernel", "blocks/attn/proj/kernel"),
        *("blocks/mlp/up/kernel", "blocks/mlp/down/kernel"),
    }


def test_gradients_of_a_and_b_are_those_of_the_sum():
    """In models of plain functions, with matrices of any orientation and rank."""
    key = jax.random.split(KEY, 4)
    params = {
        "heads": jax.random.normal(key[0], (16, 3, 4)),  # (D, N, H), in einsum
        "back": jax.random.normal(key[1], (3, 4, 16)),  # two dims are summed
        "torch": jax.random.normal(key[2], (6, 16)),  # (out, in)
        "experts": jax.random.normal(key[3], (2, 6, 5)),  # batched
    }

    def loss(params, x):
        y = jnp.einsum("bd,dnh->bnh", x, params["heads"])
        y = jnp.einsum("bnh,nhd->bd", jnp.tanh(y), params["back"])
        z = jnp.tanh(params["torch"] @ y.T)
        e = jnp.einsum("ebi,eio->ebo", jnp.stack([z.T, -z.T]), params["experts"])
        return jnp.mean(e**2)

    x = jax.random.normal(KEY, (8, 16))
    adapted = Lora(rank=2, base="fp32").adapt(loss, params, x)
    assert adapted.multiplied == {
        "back": Dims((-3, -2), (-1,)),
        "experts": Dims((-2,), (-1,)),
        "heads": Dims((-3,), (-2, -1)),
        "torch": Dims((-1,), (-2,)),
    }
    given = {"base": params, "lora": adapted.new(params)}
    given["lora"] = jax.tree.map(lambda a: jax.random.normal(KEY, a.shape) / 5, given["lora"])

    def wanted(lora):
        return loss(adapted.merged({"base": params, "lora": lora}), x)

    def found(lora):
        return adapted.loss({"base": params, "lora": lora}, x)

    value, grads = jax.value_and_grad(found)(given["lora"])
    np.testing.assert_allclose(value, wanted(given["lora"]), rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6),
        grads,
        jax.grad(wanted)(given["lora"]),
    )


def test_vectors_that_are_multiplied_are_no_matrices_and_casts_keep_what_they_round():
    params = {"w": jnp.full((64, 4), 1.7), "v": jnp.ones(64), "s": jnp.ones(4)}

    def loss(params, x):
        y = jnp.einsum("bd,d->bd", x @ params["w"], params["s"])
        z = x @ params["w"].astype(jnp.int8).astype(jnp.float32)
        return jnp.sum(y) + jnp.sum(x @ params["v"]) + jnp.sum(z)

    x = jnp.ones((2, 64))
    with pytest.raises(ValueError, match="multiplies with none of the parameters"):
        Lora(rank=1, base="nf4").adapt(loss, params, x)
    params["m"] = jnp.ones((64, 4))
    adapted = Lora(rank=1, base="fp32").adapt(
        lambda p, x: loss(p, x) + jnp.sum(x @ p["m"]), params, x
    )
    assert adapted.targets == ["m"]
    given = {"base": params, "lora": adapted.new(params)}
    np.testing.assert_allclose(adapted.loss(given, x), adapted.loss_fn(params, x), rtol=1e-6)


def test_a_matrix_that_a_loop_carries_on_is_whole():
    params = {"w": jax.random.normal(KEY, (3, 4, 4))}

    def loss(params, x):
        def turn(carry, w):
            return (jnp.tanh(carry[0] @ w), w), None

        (x, last), _ = jax.lax.scan(turn, (x, jnp.zeros((4, 4))), params["w"])
        return jnp.sum(x) + jnp.sum(last)

    x = jnp.ones((2, 4))
    adapted = Lora(rank=1, base="fp32", targets="w")
    with pytest.raises(ValueError, match="no matrix that the model only multiplies with"):
        adapted.adapt(loss, params, x)


def test_few_rows_are_not_packed_into_blocks_of_padding():
    shapes = {"few": jnp.ones((8, 64, 16)), "many": jnp.ones((64, 8, 16))}

    def loss(params, x):
        parts = zip(x, params.values(), strict=True)
        return sum(jnp.sum(jnp.einsum("bnh,nhd->bd", y, w)) for y, w in parts)

    x = jnp.ones((2, 8, 64)), jnp.ones((2, 64, 8))
    base = Lora(rank=1, base="nf4").adapt(loss, shapes, x).rests(shapes)
    assert all(isinstance(leaf, Quantised) for leaf in base.values())
    assert sum(x.nbytes for x in jax.tree.leaves(base)) == 2 * 8 * 64 * 16 * 4.25 / 8
    tiny = {"w": jnp.ones((8, 16))}
    adapted = Lora(rank=1, base="nf4").adapt(
        lambda p, x: jnp.sum(x @ p["w"]), tiny, jnp.ones((2, 8))
    )
    assert adapted.rests(tiny)["w"].dtype == jnp.bfloat16


def test_a_stop_gradient_of_a_matrix_stops_that_of_its_adapter():
    params = {"w": jnp.ones((4, 4))}

    def loss(params, x):
        return jnp.sum(x @ jax.lax.stop_gradient(params["w"])) + jnp.sum(x @ params["w"])

    adapted = Lora(rank=1, base="fp32").adapt(loss, params, jnp.ones((2, 4)))
    lora = {"w": {"a": jnp.ones((4, 1)), "b": jnp.ones((1, 4))}}
    grads = jax.grad(lambda lora: adapted.loss({"base": params, "lora": lora}, jnp.ones((2, 4))))
    np.testing.assert_allclose(grads(lora)["w"]["b"], 2.0 * 8)  # s = 2; once, not twice


def of_boxes():
    """linen's own metadata around each leaf."""
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, None)))
    x = jax.random.normal(KEY, (8, 64))
    return lambda key: dense.init(key, x), lambda p, x: jnp.mean((dense.apply(p, x) - 1) ** 2), x


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_quantised_leaf_may_be_in_a_box_of_linens(base):
    make, loss, x = of_boxes()
    adapted = Lora(rank=2, base=base).adapt(loss, jax.eval_shape(make, KEY), x)
    zero = zero_jax.Zero(mesh_of(4), stage=3, frozen=adapted.frozen)
    params, tx = zero.init(adapted.init(make), KEY), zero.optimizer(optax.adam(0.1))
    step, opt_state, losses = zero.train_step(adapted.loss, tx), tx.init(params), []
    for _ in range(3):
        params, opt_state, metrics = step(params, opt_state, x)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0]


def other_models():
    x = jax.random.normal(KEY, (8, 6))
    linen = nn.Sequential([nn.Dense(7), nn.tanh, nn.Dense(5)])
    yield "linen", lambda key: linen.init(key, x), lambda p, x: jnp.mean(linen.apply(p, x) ** 2)
    mlp = eqx.nn.MLP(6, 5, 9, 2, key=KEY)
    arrays, static = eqx.partition(mlp, eqx.is_array)

    def of_equinox(params, x):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)

    yield "equinox", lambda key: arrays, of_equinox

    def unrolled(params, x):
        for at in range(3):
            x = jnp.tanh(x @ params["stack"][at])
        return jnp.mean((x @ params["last"]) ** 2)

    def made(key):
        return {"stack": jax.random.normal(key, (3, 6, 6)), "last": jnp.ones((6, 2))}

    yield "unrolled", made, unrolled


@pytest.mark.parametrize(
    ("name", "make", "loss"), other_models(), ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("base", ["nf4", pytest.param("fp32", marks=pytest.mark.slow)])
def test_models_of_others(name, make, loss, base):
    x = jax.random.normal(KEY, (8, 6))
    adapted = Lora(rank=2, base=base).adapt(loss, jax.eval_shape(make, KEY), x)
    assert adapted.targets
    results = []
    for n, stage in ((1, 0), (4, 3), (3, 2)):
        zero = zero_jax.Zero(mesh_of(n), stage=stage, frozen=adapted.frozen)
        params, tx = zero.init(adapted.init(make), KEY), zero.optimizer(optax.sgd(0.1))
        step, opt_state, losses = zero.train_step(adapted.loss, tx), tx.init(params), []
        for _ in range(3):
            rows = x[:6] if n == 3 else x
            params, opt_state, metrics = step(params, opt_state, rows)
            losses.append(float(metrics.loss))
        results.append(losses)
        assert losses[-1] < losses[0]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_layers_keep_no_opened_matrix():
    """What is kept of a layer's products are packed codes, in the body of its loop."""
    model = TextModel(DECODER, Lora(rank=2, base="nf4"))
    params = jax.eval_shape(model.make)
    rows = jax.ShapeDtypeStruct((2, 13), jnp.int32)

    def backward(params, rows):
        def own(lora):
            return model.loss(params | {"lora": lora}, rows)[0]

        return jax.vjp(own, params["lora"])

    _, kept = jax.eval_shape(backward, params, rows)
    floats = [x for x in jax.tree.leaves(kept) if jnp.issubdtype(x.dtype, jnp.floating)]
    shapes = {x.shape for x in floats}
    matrices = {(3, *dims) for dims in ((32, 40), (32, 20), (40, 32), (32, 72), (72, 32))}
    assert not shapes & matrices, shapes & matrices


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"base": "nf5"}, "'nf5'.*nf4"),
        ({"targets": []}, "an empty pattern"),
        ({"targets": ["attn/q", ""]}, "an empty pattern"),
    ],
)
def test_what_is_no_adapter_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Lora(**given)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("attn/qq", "matches none"),
        (["embed"], "'embed/embedding' is no matrix that the model only multiplies with"),
        ("(", "no regular expression"),
    ],
)
def test_targets_that_are_none_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        TextModel(DECODER, Lora(targets=targets)).adapted  # noqa: B018


def test_some_targets_leave_the_rest_quantised_without_adapters():
    model = TextModel(DECODER, Lora(rank=2, targets=["attn/q/", "attn/v/"], base="nf4"))
    params = jax.eval_shape(model.make)
    assert sorted(params["lora"]) == ["blocks/attn/q/kernel", "blocks/attn/v/kernel"]
    packed = jax.tree.leaves(params["base"], is_leaf=lambda x: isinstance(x, Quantised))
    assert sum(isinstance(x, Quantised) for x in packed) == 7
    wanted, *_ = train(model, 1, 0)
    np.testing.assert_allclose(train(model, 4, 3)[0], wanted, rtol=2e-6)
