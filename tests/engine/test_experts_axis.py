"""Experts that stay with a part of the devices: as on one device, and never gathered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zero_jax
from zero_jax.engine import at_home
from zero_jax.models import decoder

CONFIG = decoder.DecoderConfig(
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    hidden=40,
    vocab=54,
    seq=32,
    loss_chunk=16,
    mixture=decoder.Mixture(4, 2, capacity=0.75, balance=0.02, z=0.001),
)
ROWS, TOKENS = 16, 16
# eps: Adam turns the rounding of a gradient that is next to nothing into a step.
TX = optax.adamw(1e-3, eps=1e-4)


@functools.cache
def graph():
    return nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(CONFIG, nnx.Rngs(0))))


def make():
    params = nnx.state(decoder.Decoder(CONFIG, nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def loss(params, batch):
    pair, routed = decoder.routed_loss(nnx.merge(graph(), params), batch)
    return zero_jax.Weighted(*pair), routed


def mesh_of(**sizes):
    return zero_jax.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])


def trained(mesh, stage, **settings):
    """Losses, norms and dropped choices of two steps, and the parameters after them."""
    zero = zero_jax.Zero(mesh, stage, **settings)
    params, own = zero.shard(jax.jit(make)()), zero.optimizer(TX)
    step, state = zero.train_step(loss, TX, has_aux=True), own.init(params)
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54))
    seen = []
    for _ in range(2):
        params, state, metrics = step(params, state, zero_jax.global_batch(mesh, tokens))
        seen.append((metrics.loss, metrics.grad_norm, metrics.aux.dropped_B.sum()))
    return np.asarray(seen, np.float64), jax.device_get(zero.full(params))


@functools.cache
def alone():
    return trained(mesh_of(data=1), 3, remat="block")


@pytest.mark.parametrize(
    ("sizes", "stage", "settings"),
    [
        ({"experts": 2, "data": 1}, 3, {"remat": "block"}),
        pytest.param({"experts": 4, "data": 2}, 3, {"remat": "block"}, marks=pytest.mark.slow),
        pytest.param({"experts": 2, "data": 2}, 3, {"remat": "none"}, marks=pytest.mark.slow),
        ({"experts": 2, "data": 2}, 3, {"remat": "dots", "micro_batches": 2}),
        ({"experts": 2, "data": 2}, 1, {}),
        ({"experts": 2, "data": 1}, 2, {"micro_batches": 2}),
        pytest.param(
            {"replica": 2, "experts": 2, "data": 2}, 3, {"remat": "block"}, marks=pytest.mark.slow
        ),
        ({"experts": 4, "data": 2}, 0, {}),
        ({"replica": 2, "experts": 2, "data": 2}, 3, {"hierarchical": True}),
        ({"experts": 2, "data": 2, "model": 2}, 3, {"remat": "block"}),
        ({"experts": 2, "data": 2}, 3, {"offload": "optimizer,params", "remat": "block@host"}),
    ],
)
def test_it_trains_as_on_one_device(sizes, stage, settings):
    want, got = alone(), trained(mesh_of(**sizes), stage, **settings)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert want[0][0, 2] > 0, "or nothing is dropped"
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.fixture
def in_parts(monkeypatch):
    """Rows travel in parts, however few they are."""
    monkeypatch.setattr(at_home, "PART_BYTES", 1)


def test_rows_travel_in_parts(in_parts):
    want, got = alone(), trained(mesh_of(experts=2, data=2), 3, remat="block")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_parts_send_as_much_in_more_messages(monkeypatch):
    whole = sent_of(4, 1)
    monkeypatch.setattr(at_home, "PART_BYTES", 1)
    parts = sent_of(4, 1)
    assert parts.words["all-to-all"] == whole.words["all-to-all"]
    assert messages(parts) == 4 * messages(whole)


def test_layers_in_no_loop_send_as_often():
    """Three products of a layer in one stretch, and no two layers in one."""

    def loss(params, x_BxD):
        for w in params.values():
            rows = jnp.broadcast_to(x_BxD, (4, *x_BxD.shape))
            x_BxD = x_BxD + (jnp.tanh(rows @ w[...]) * (rows @ w[...]) @ w[...]).mean(0)
        return jnp.mean(x_BxD**2)

    def make():
        own = {"sharding_names": ("experts", None, None), "eager_sharding": False}
        return {f"layer{n}": nnx.Param(jnp.full((4, 8, 8), 0.1), **own) for n in range(3)}

    mesh = mesh_of(experts=4, data=1)
    zero = zero_jax.Zero(mesh, 3)
    params = zero.abstract(make)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    lowered = zero.train_step(loss, TX).lower(params, zero.optimizer(TX).init(params), x)
    # There and back, and both ways for gradients, of which the first layer's rows need none.
    assert messages(zero_jax.audit(lowered.compile(), mesh.shape)) == 3 * 4 - 1


def messages(report):
    return sum(c.runs for c in report.collectives if c.kind == "all-to-all")


def sent_of(experts, data):
    """The audit of a step."""
    mesh = mesh_of(experts=experts, data=data)
    zero = zero_jax.Zero(mesh, 3, remat="block")
    params = zero.abstract(make)
    step = zero.train_step(loss, TX, has_aux=True)
    rows = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
    lowered = step.lower(params, zero.optimizer(TX).init(params), rows)
    return zero_jax.audit(lowered.compile(), mesh.shape)


@pytest.mark.parametrize(("experts", "data"), [(4, 1), (2, 2)])
def test_tokens_travel_and_experts_do_not(experts, data):
    """Words of the compiled program: six all-to-alls a layer, whatever the experts' size."""
    report = sent_of(experts, data)
    params = zero_jax.Zero(mesh_of(data=1), 3).abstract(make)
    room = CONFIG.mixture.room(TOKENS)
    sent = CONFIG.layers * (ROWS // 4) * 4 * room * CONFIG.width
    assert report.words["all-to-all"] == 6 * sent
    held = sum(x.size for x in jax.tree.leaves(params) if x.ndim == 4)
    over_data = [c for c in report.collectives if c.axis == "data"]
    gathered = sum(c.words for c in over_data if c.kind == "all-gather")
    scattered = sum(c.words for c in over_data if c.kind == "reduce-scatter")
    share = held // experts if data > 1 else 0
    assert (gathered, scattered) == (2 * share, share)


def test_what_rests_is_cut_over_both_axes():
    zero = zero_jax.Zero(mesh_of(experts=2, data=2), 3)
    params = zero.shard(jax.jit(make)())
    for x in jax.tree.leaves(params):
        assert x.addressable_data(0).size * 4 == x.size or x.size < 100


@pytest.mark.parametrize(
    ("experts", "words"), [(3, r"4 experts.*axis of 3.*experts=2 or 4"), (8, r"axis of 8")]
)
def test_groups_that_do_not_divide_the_experts_are_refused(experts, words):
    zero = zero_jax.Zero(zero_jax.abstract_mesh(1, experts=experts), 3)
    with pytest.raises(ValueError, match=words):
        zero.abstract(make)


def test_a_model_without_experts_is_refused():
    zero = zero_jax.Zero(zero_jax.abstract_mesh(2, experts=2), 3)
    plain = dataclasses.replace(CONFIG, mixture=None)
    with pytest.raises(ValueError, match=r"no parameter has a dim that is named 'experts'"):
        zero.abstract(lambda: nnx.state(decoder.Decoder(plain, nnx.Rngs(0)), nnx.Param))


def test_what_reads_experts_otherwise_is_named():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(
                nnx.initializers.normal(), ("experts", None), eager_sharding=False
            )
            self.kernel = nnx.Param(init(rngs.params(), (4, 8), jnp.float32))

    layer = nnx.graphdef(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))
    zero = zero_jax.Zero(mesh_of(experts=2, data=1), 3)
    params = zero.init(lambda key: nnx.state(Layer(nnx.Rngs(key)), nnx.Param), jax.random.key(0))
    step = zero.train_step(lambda p, x: jnp.mean(x @ nnx.merge(layer, p).kernel[...]), TX)
    with pytest.raises(ValueError, match=r"kernel has experts.*'dot_general'.*jnp.einsum"):
        step(params, zero.optimizer(TX).init(params), jnp.ones((4, 4)))


def own_loss(write):
    """A loss of experts (E, D, D) that the model writes in its own way."""

    def loss(params, x_BxD):
        x_ExBxD = jnp.broadcast_to(x_BxD, (4, *x_BxD.shape)) * jnp.arange(1.0, 5.0)[:, None, None]
        return jnp.mean(write(params["w"][...], x_ExBxD) ** 2)

    return loss


WRITTEN = {
    "einsum": lambda w, x: jnp.einsum("ebd,edf->ebf", x, w),
    "weights first": lambda w, x: jnp.einsum("edf,ebd->ebf", w, x),
    "turned": lambda w, x: jnp.einsum("ebd,edf->bfe", x, w),
    "twice": lambda w, x: jax.nn.relu(x @ w) @ w,
    "stored the other way": lambda w, x: jnp.einsum("ebd,efd->ebf", x, w),
    "vmap": lambda w, x: jax.vmap(lambda w, x: jnp.tanh(x @ w + 1.0) * 2.0)(w, x),
    "both ways": lambda w, x: (x @ w) * jnp.swapaxes(jnp.einsum("ebd,edf->efb", x, w), 1, 2),
    "mixed in between": lambda w, x: (x @ w) @ w - (x @ w).sum(0, keepdims=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_however_it_is_written(name):
    def make():
        w = 0.2 * jax.random.normal(jax.random.key(0), (4, 8, 8))
        return {"w": nnx.Param(w, sharding_names=("experts", None, None), eager_sharding=False)}

    x = jax.random.normal(jax.random.key(1), (8, 8))
    losses = []
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3)
        params, tx = zero.init(make), optax.sgd(1e-3)
        step, state = zero.train_step(own_loss(WRITTEN[name]), tx), zero.optimizer(tx).init(params)
        losses.append([])
        for _ in range(3):
            params, state, metrics = step(params, state, x)
            losses[-1].append(float(metrics.loss))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][0] > losses[0][-1]


def inner_scan(w, x):
    """Rows in chunks."""
    chunks = jnp.stack(jnp.split(x, 2, axis=1))
    made = jax.lax.scan(lambda _, chunk: (None, jnp.tanh(chunk @ w) @ w), None, chunks)[1]
    return jnp.concatenate(list(made), 1)


OWN_LAYERS = {
    "a loop over rows": inner_scan,
    "its own checkpoint": jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w),
    "a policy": jax.checkpoint(
        lambda w, x: jnp.tanh(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    ),
}


@pytest.mark.parametrize("remat", ["none", "dots", "block", jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_within_loops_and_checkpoints_of_the_models_own(name, remat):
    def make():
        w = 0.2 * jax.random.normal(jax.random.key(0), (3, 4, 8, 8))
        names = (None, "experts", None, None)
        return {"w": nnx.Param(w, sharding_names=names, eager_sharding=False)}

    def loss(params, x_BxD):
        def layer(x_BxD, w):
            rows = jnp.broadcast_to(x_BxD, (4, *x_BxD.shape))
            return x_BxD + OWN_LAYERS[name](w, rows).mean(0), None

        return jnp.mean(jax.lax.scan(layer, x_BxD, params["w"][...])[0] ** 2)

    x, found = jax.random.normal(jax.random.key(1), (8, 8)), []
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, remat=remat)
        params = zero.init(make)
        value, grads = jax.jit(zero.value_and_grad(loss))(params, x)
        found.append((value, zero.full(grads)["w"][...]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_adapters_beside_experts_that_stay():
    lora = zero_jax.Lora(rank=2)
    plain = lambda params, batch: loss(params, batch)[0]  # noqa: E731
    rows = jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54)
    adapted = lora.adapt(plain, jax.eval_shape(make), rows)
    losses = []
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, frozen=adapted.frozen)
        params, own = zero.init(adapted.init(make)), zero.optimizer(TX)
        step, state = zero.train_step(adapted.loss, TX), own.init(params)
        losses.append([])
        for _ in range(2):
            params, state, metrics = step(params, state, rows)
            losses[-1].append(float(metrics.loss))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("names", "shape", "sizes", "words"),
    [
        (("experts",), (4, 8, 8), {"experts": 2}, "names for 1 dims"),
        (("experts", None, None), (4, 8, 8), {"experts": 2, "model": 2}, "one dim for both"),
    ],
)
def test_names_that_say_too_little_or_too_much_are_refused(names, shape, sizes, words):
    zero = zero_jax.Zero(zero_jax.abstract_mesh(1, **sizes), 3, axis_rules=(("experts", "model"),))
    leaf = nnx.Param(jnp.ones(shape), sharding_names=names, eager_sharding=False)
    with pytest.raises(ValueError, match=words):
        zero.abstract(lambda: {"w": leaf})


def test_experts_can_not_be_taken_one_by_one():
    def make():
        own = {"sharding_names": ("experts", None, None), "eager_sharding": False}
        return {"w": nnx.Param(jnp.ones((4, 8, 8)), **own)}

    zero = zero_jax.Zero(mesh_of(experts=2, data=1), 3)
    params = zero.init(make)
    step = zero.train_step(lambda p, x: jnp.mean(x @ p["w"][...][0]), TX)
    with pytest.raises(ValueError, match=r"w has experts that stay with their devices, and 'slice"):
        step(params, zero.optimizer(TX).init(params), jnp.ones((4, 8)))


@pytest.mark.parametrize(
    ("tx", "settings"),
    [
        pytest.param(optax.adamw(1e-3, eps=1e-4), {"states": "8bit"}, marks=pytest.mark.slow),
        pytest.param(optax.lamb(1e-3), {}, marks=pytest.mark.slow),
        pytest.param(optax.contrib.muon(1e-3), {}, marks=pytest.mark.slow),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), {"remat": "block_sqrt"}),
    ],
    ids=["8bit", "lamb", "muon", "clip"],
)
def test_other_optimizers_and_states(tx, settings):
    rows = jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54)
    losses = []
    for sizes in ({"data": 1}, {"experts": 2, "data": 2}):
        zero = zero_jax.Zero(mesh_of(**sizes), 3, **settings)
        params, own = zero.shard(jax.jit(make)()), zero.optimizer(tx)
        step, state = zero.train_step(loss, tx, has_aux=True), own.init(params)
        losses.append([])
        for _ in range(3):
            params, state, metrics = step(params, state, rows)
            losses[-1].append(float(metrics.loss))
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
def test_checkpoints_move_between_axes(tmp_path):
    rows = jax.random.randint(jax.random.key(2), (ROWS, TOKENS + 1), 0, 54)

    def at_rest(**sizes):
        zero = zero_jax.Zero(mesh_of(**sizes), 3)
        params = zero.shard(jax.jit(make)())
        return zero.train_step(loss, TX, has_aux=True), (params, zero.optimizer(TX).init(params))

    step, states = at_rest(experts=4, data=2)
    *states, _ = step(*states, rows)
    with zero_jax.Checkpoints(tmp_path) as store:
        store.save(1, tuple(states))
    want = float(step(*states, rows)[2].loss)
    for sizes in ({"data": 8}, {"experts": 2, "data": 1}, {"replica": 2, "experts": 2, "data": 2}):
        other, like = at_rest(**sizes)
        with zero_jax.Checkpoints(tmp_path, read_only=True) as store:
            restored = store.restore(like, say=lambda _: None).tree
        np.testing.assert_allclose(float(other(*restored, rows)[2].loss), want, rtol=1e-5)
