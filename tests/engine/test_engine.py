"""Compiled steps: when weights are gathered, states over replicas, XLA options, donation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from one_device import ADAM, MERGES, Case, audited, begun, check_parity, sent, trained, zero_on

import zero_jax
from zero_jax import releases, zero
from zero_jax.engine import compiler, step
from zero_jax.offload.host import Offload
from zero_jax.plan import plans
from zero_jax.sharding.layout import partition

LAYERS, WIDTH, WORDS, ROWS, FOUR = 3, 12, 40, 24, {"data": 4}
X, ONES = jax.random.normal(jax.random.key(1), (ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
TX, BATCH = optax.sgd(0.1, momentum=0.9), jax.ShapeDtypeStruct(X.shape, X.dtype)


def arguments(make, stage=3, batch=BATCH, n=4, model=1, **settings):
    """Returns a Zero on an abstract mesh, and abstract arguments of its step."""
    zero = zero_jax.Zero(zero_jax.abstract_mesh(n, model=model), stage, **settings)
    params = zero.eval_shape(make)
    return zero, (params, zero.optimizer(TX).init(params), batch)


@pytest.mark.parametrize(("form", "remat"), [("scan", "none"), ("scan", "block"), ("cond", "none")])
def test_weights_that_iterations_share_are_sent_once_forward_and_once_backward(form, remat):
    """In the traced step: XLA for CPUs removes the barrier and merges the two gathers."""

    def loss(p, x):
        one, other = lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["w"]
        if form == "scan":
            return jnp.mean(jax.lax.scan(lambda x, _: (one(x), None), x, None, length=5)[0])
        return jnp.mean(jax.lax.cond(x.sum() > 0, one, other, x))

    zero = zero_on(4, remat=remat)
    grad_fn = zero.value_and_grad(loss)
    text = str(grad_fn.trace(zero.eval_shape(lambda: {"w": ONES}), X).jaxpr)
    assert (text.count("all_gather["), text.count("reduce_scatter[")) == (2, 1)


def test_stacks_of_layers_and_leaves_that_are_none():
    """A collective per leaf, not per row: kernels of attention are (width, heads, depth).
    Leaves of 2 x 2 over 8 devices are sharded along 64 layers, and gathered before the loop."""
    model, x = nn.MultiHeadDotProductAttention(num_heads=4), jnp.ones((ROWS, 3, 128))
    make = functools.partial(model.init, jax.random.key(0), x[:1])
    audit = audited(lambda p, x: jnp.mean(model.apply(p, x) ** 2), make, x, FOUR, stage=2)
    assert all(0 < sent(audit, kind)[1] <= 8 for kind in ("all-gather", "reduce-scatter"))
    loss = lambda p, x: jnp.mean(jax.lax.scan(layer, x[:, :2], p["w"])[0])  # noqa: E731
    audit = audited(loss, lambda: {"w": jnp.ones((64, 2, 2))}, X, {"data": 8}, remat="block")
    elements, messages = sent(audit, "all-gather")
    assert partition((64, 2, 2), 8).dim == -3 and messages <= 2 and elements <= 2 * 64 * 4


def test_a_plan_names_the_layers_it_found_and_their_policy():
    def loss(p, x):
        x = jax.lax.scan(layer, x, p["loop"])[0]
        for w in p["list"]:
            x = x + jnp.sin(x @ w)
        for pairs in p["towers"]:
            for first, second in pairs:
                x = x + jnp.tanh(jnp.tanh(x @ first) @ second)
            x = jnp.sqrt(1.0 + x * p["vectors"][0] * p["vectors"][1] * p["vectors"][2])
        dots = jax.checkpoint_policies.dots_saveable
        return jnp.mean(jax.checkpoint(lambda x, w: jnp.cos(x @ w), policy=dots)(x, p["last"]))

    def make():
        own = {"loop": jnp.stack([ONES] * 6), "list": [ONES] * 4, "last": ONES}
        return own | {"towers": [[(ONES, ONES)] * 3] * 2, "vectors": [jnp.ones(WIDTH)] * 3}

    zero, (params, *_) = arguments(make, remat="block")
    plan = zero.plan(loss, zero.optimizer(TX), params, X)
    found = {(x.count, x.elements, x.scanned, x.policy) for x in plan.layers}
    layers = {(6, 144, True, "block"), (4, 144, False, "block"), (3, 288, False, "block")}
    assert layers == {x for x in found if x[0] > 1}
    assert any(count == 1 and "dots" in policy.lower() for count, _, _, policy in found)
    text = plans.format_layers(plan)
    assert all(words in text for words in ("6 scanned", "4 unrolled", "144", "block"))


# Matrices that are read after the layers are gathered during the last one, tied heads too.


def make():
    shapes = {"head": (WIDTH, WORDS), "in": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH)}
    draw, shapes = np.random.default_rng(0).normal, shapes | {"pair": (2, WIDTH, WORDS)}
    params = {name: jnp.float32(draw(0, 0.4, shape)) for name, shape in shapes.items()}
    return params | {"norm": jnp.ones(4 * WIDTH + 1)}


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def scanned(params, x):
    return jax.lax.scan(layer, x @ params["in"], params["layers"])[0]


def with_head(params, x):
    return jnp.mean((scanned(params, x) @ params["head"]) ** 2) * jnp.mean(params["norm"])


def transposed_before(params, x):
    turned = params["head"].T
    return jnp.mean((scanned(params, x) @ turned.T) ** 2)


def two_loops(params, x):
    return with_head(params, jax.lax.scan(layer, x, params["layers"])[0])


def after_a_loss_in_chunks(params, x):
    x = scanned(params, x).reshape(2, -1, WIDTH)
    return jax.lax.scan(lambda s, x: (s + jnp.mean((x @ params["head"]) ** 2), None), 0.0, x)[0]


def taken_apart(params, x):
    """A stack of two heads is sliced before the loop: its slices have shards of their own."""
    first, second = jnp.unstack(params["pair"])
    x = scanned(params, x)
    return jnp.mean((x @ first) ** 2) + jnp.mean(x @ second)


CARRIED = [
    (with_head, {}, {"head": 0}),
    (with_head, {"remat": "block", "grad_accum_steps": 2}, {"head": 0}),
    (transposed_before, {}, {"head": 0}), (two_loops, {}, {"head": 1, "in": 0}),
    (after_a_loss_in_chunks, {}, {"head": 0}),
    # A loop over weights without a product can hide no communication.
    (lambda p, x: 0 * jax.lax.map(jnp.sum, p["layers"])[0] + with_head(p, x), {}, {"head": 1}),
    (taken_apart, {}, {}),
    (lambda p, x: with_head(p, x @ p["head"] @ p["head"].T), {}, {"head": 0}),
    (with_head, {"stage": 2}, {}), (with_head, {"frozen": "head"}, {}),
    (with_head, {"bucket_bytes": 4 * WIDTH * WORDS}, {"head": 0}),
    (with_head, {"bucket_bytes": 4 * WIDTH * WORDS - 1}, {}),
    (lambda p, x: jnp.mean(x @ p["in"] @ p["head"]), {}, {})]  # fmt: skip


@pytest.mark.parametrize(("loss", "settings", "want"), CARRIED)
def test_heads_and_the_layers_during_which_they_are_gathered(loss, settings, want):
    """No vector, and nothing frozen, gathered for the whole step or larger than a bucket."""
    zero, args = arguments(make, **settings)
    traced = zero.train_step(loss, zero.optimizer(TX)).read(*args)
    eqns = traced.closed.jaxpr.eqns
    scans = [at for at, eqn in enumerate(eqns) if eqn.primitive.name == "scan"]
    heads = traced.positions.heads
    assert {traced.leaves[i].path: scans.index(at) for at in heads for i in heads[at]} == want


# States sharded over replicas too (ZeRO++'s hpZ): the same training in the bytes of all.

LOSSES = [with_head, transposed_before, two_loops, after_a_loss_in_chunks, taken_apart]
in_all = lambda params, x: sum(loss(p, x) for loss, p in zip(LOSSES, params, strict=True))  # noqa: E731
ALL = Case(lambda: [make() for _ in LOSSES], in_all, np.asarray(X))
OWN = Case(make, lambda p, x: with_head(p, x) + taken_apart(p, x), np.asarray(X))
TWO_BY_THREE, REPLICAS = {"replica": 2, "data": 3}, {"replica": 2, "data": 2}
PIECES = Offload(optimizer=True, params=True, piece_bytes=4096)
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=4)
SPECS = {"layers": P(None, None, "model"), "head": P("model", None)}
TRAINED = [
    (ALL, {"data": 3}, TX, {"remat": "block_sqrt"}),
    (ALL, {"data": 2}, TX, {"remat": "block", "grad_accum_steps": 2}),
    (ALL, REPLICAS, TX, {"remat": "dots", "secondary_shards": True}),
    (OWN, {"replica": 3, "data": 1}, optax.contrib.muon(1e-2), {"secondary_shards": True}),
    (OWN, REPLICAS, ADAM, {"secondary_shards": True, "offload": PIECES, "remat": "dots"}),
    (OWN, REPLICAS | {"model": 2}, FACTORED, {"secondary_shards": True, "param_specs": SPECS}),
]


@pytest.mark.parametrize(("own", "sizes", "tx", "settings"), TRAINED)
def test_steps_equal_plain_optax(own, sizes, tx, settings):
    check_parity(own, sizes, tx, 3, **settings)


def test_shards_are_joined_once_a_step_and_layers_gathered_in_each_micro_batch():
    settings = {"secondary_shards": True, "remat": "block"}
    twice = check_parity(OWN, TWO_BY_THREE, grad_accum_steps=2, **settings)
    # Each device joins two halves of its third of each leaf that is sharded.
    cuts = zero_on(TWO_BY_THREE, secondary_shards=True).splits(OWN.start)
    joined = sum(math.prod(c.shard_shape) for c in cuts if c.dim is not None)
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    assert [sent(twice, kind, "replica")[0] for kind in kinds] == [joined, joined, 0]
    bf16 = zero_jax.Precision("bf16", "bf16")
    once = trained(OWN, TWO_BY_THREE, precision=bf16, **settings)
    # Outside of a loop over micro-batches XLA for CPUs merges gathers, up to jax 0.11.
    times = 1.9 if MERGES else 1.6
    assert sent(twice, "all-gather")[0] > times * sent(once[2], "all-gather")[0]


def test_states_take_the_bytes_of_all_devices():
    def held(sizes, **settings):
        leaves = jax.tree.leaves(begun(OWN, sizes, **settings)[2][:2])
        return sum(x.addressable_data(0).nbytes for x in leaves)

    estimate = functools.partial(zero_jax.memory.estimate, OWN.start, tx=ADAM)
    settings = {"secondary_shards": True}, {}
    config, alone = (zero_on(TWO_BY_THREE, **each).config for each in settings)
    ours = held(TWO_BY_THREE, secondary_shards=True)
    parted, apart = estimate(config), estimate(alone)
    assert ours == held({"data": 6}) == parted.at_rest
    assert held(TWO_BY_THREE) == apart.at_rest > 1.8 * ours
    joined = sum(x.size for x in OWN.start.values() if x.ndim > 1) / 3
    assert parted.copy - apart.copy == pytest.approx(4 * joined, rel=0.1)
    assert estimate(config.at_stage(2)) == estimate(alone.at_stage(2)), "only stage 3 has parts"


# XLA options of a step for GPUs, and checks of donated arrays.

KINDS = "all_gather", "reduce_scatter", "all_reduce"
GATHER, SCATTER, REDUCE = (f"xla_gpu_{kind}_combine_threshold_bytes" for kind in KINDS)


def _options(width, scanned=True, **settings):
    """Layers in a loop, unrolled layers, and a convolution that looks like a stack."""

    def layer(x, own):
        return jnp.tanh(x @ own["up"] + own["bias"])[:, : x.shape[1]]

    def loss(params, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), x, params["blocks"])
        else:
            x = functools.reduce(layer, params["blocks"], x)
        return jnp.mean(x) + jnp.mean(params["conv"])

    def make():
        one = {"up": jnp.zeros((width, 4 * width)), "bias": jnp.zeros(4 * width)}
        blocks = jax.tree.map(lambda x: jnp.stack([x] * 3), one) if scanned else [one] * 3
        return {"conv": jnp.zeros((3, 3, 3 * width, 9 * width)), "blocks": blocks}

    ours, args = arguments(make, batch=jax.ShapeDtypeStruct((16, width), "f4"), n=8, **settings)
    return ours.train_step(loss, ours.optimizer(TX)).compiler_options(*args)


def test_xla_merges_no_more_than_a_bucket(monkeypatch):
    assert _options(64, stage=2) == {}
    assert compiler.options(2**20, 64) == {GATHER: 2**20, REDUCE: 2**20, SCATTER: 2**14}
    # Where XLA's own limit is the lower one, it stays.
    assert list(compiler.options(2**27, 64)) == [SCATTER]
    assert compiler.options(2**30, 2) == {}
    # Leaves of one layer are sent together; gradients are summed in fp32.
    count, known = 4 * 4096**2 + 4 * 4096, _options(4096, scanned=False, precision="bf16")
    assert 2 * count <= known[GATHER] < 1.1 * 2 * count
    assert 4 * count <= 8 * known[SCATTER] < 1.1 * 4 * count
    # A device has a quarter of the layer.
    known = _options(4096, model=4, param_specs={"up": jax.P(None, None, "model")})
    assert 4 <= known[GATHER] / (4096**2 + 4 * 4096) < 1.1 * 4
    # Before jax 0.12 the sums of a large layer are several.
    assert (releases.SUMMED_AT_ONCE < 800 * 2**20) == (jax.__version_info__ < (0, 12))
    for most, summed in ((2**28, 2**28), (float("inf"), 800 * 2**20)):
        monkeypatch.setattr(releases, "SUMMED_AT_ONCE", most)
        known = compiler.options(2**30, 64, (400 * 2**20, 800 * 2**20))
        assert known[GATHER] > 400 * 2**20 and 64 * known[SCATTER] == 17 * summed // 16


AHEAD = [
    (True, {"width": 64, "grad_accum_steps": 2}), (True, {"width": 64, "scanned": False}),
    # Two layers are held, so not where one is many buckets.
    (True, {"width": 4096, "bucket_bytes": 2**26, "precision": "bf16"}),
    (False, {"width": 4096, "bucket_bytes": 2**25, "precision": "bf16"})]  # fmt: skip


@pytest.mark.parametrize(("ahead", "settings"), AHEAD)
def test_several_collectives_run_at_once_where_layers_are_gathered_ahead(ahead, settings):
    known = _options(**settings)
    assert any("overlap_limit" in name for name in known) == ahead
    # Merging small layers is left to XLA.
    assert known.get(GATHER) == settings.get("bucket_bytes")
    jax.jit(lambda: 0).lower().compile(compiler_options=known)  # XLA accepts them


def test_an_option_that_xla_does_not_know_is_named_and_left_out():
    assert compiler.if_known(GATHER, 1) == {GATHER: 1}
    with pytest.warns(UserWarning, match="xla_gpu_none"):
        assert compiler.if_known("xla_gpu_none", 1) == {}


ROW = jnp.ones((8, 64))


def affine(params, x, *_):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def begun_affine(**settings):
    own = Case(lambda: {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}, affine, ROW)
    return begun(own, {"data": 8}, optax.adam(0.1), **settings)


@pytest.mark.parametrize("stage", [0, 3])
def test_options_are_given_where_jax_allows_them(monkeypatch, stage):
    """JAX refuses them in a jit within a jit, as in the user's own step around `grad_fn`; arrays of
    other shapes have options of their own. The loss is traced once for each shape."""
    seen, traces, jit = [], [], jax.jit
    loss = lambda *args: (traces.append(args), affine(*args))[1]  # noqa: E731

    def spy(fn, **how):
        seen.extend(value for name, value in how.items() if name == "compiler_options")
        return jit(fn, **how)

    for module in (zero, step):
        monkeypatch.setattr(module, "on_gpu", lambda mesh: True)
    monkeypatch.setattr(compiler.jax, "jit", spy)
    ours, train_step, (params, state, _) = begun_affine(stage=stage, bucket_bytes=2**20)
    known, grad_fn = train_step.compiler_options(params, None, ROW), ours.value_and_grad(loss)
    assert known[REDUCE] == 2**20
    for x in (ROW, jnp.ones((16, 64)), ROW):
        assert grad_fn(params, x)[0] == 64**2
    assert jit(grad_fn)(params, ROW)[0] == jit(lambda: grad_fn(params, ROW))()[0] == 64**2
    assert train_step(params, state, ROW)[2].loss == 64**2
    assert seen == [known] * 3, "two of the gradient and one of the step"
    assert len(traces) == 2 and ours.plan(loss, train_step.transformation, params, ROW)
    assert len(traces) == 3, "one for the plan"


def test_arrays_that_were_donated_or_are_donated_twice(tmp_path):
    ours, train_step, (*old, _) = begun_affine()
    new = train_step(*old, ROW)[:2]
    stale, twice = new[0] | {"w": old[0]["w"]}, optax.tree.set(new[1], mu=new[0])
    for message, call, args in (
        ("'b' of `params`", train_step, (*old, ROW)),
        ("'b' of `params`", train_step.first_bad_leaf, (*old, ROW)),
        ("'inner/0/count' of `opt_state`", train_step, (new[0], old[1], ROW)),
        ("'w' of `params`", train_step, (stale, new[1], ROW)),
        ("'0/b' of `extras`", train_step, (*new, ROW, old[0])),
        ("'b' of `params`", ours.value_and_grad(affine), (old[0], ROW)),
        ("`batch`", ours.evaluate(affine), (new[0], old[0]["w"])),
        # JAX 0.10 ends with a segmentation fault where one array is donated twice.
        ("'b' of `params` and '0/b' of `extras`", train_step, (*new, ROW, new[0])),
        ("'b' of `params` and 'inner/0/mu/b' of `opt_state`", train_step, (new[0], twice, ROW)),
    ):
        with pytest.raises(ValueError, match=message):
            call(*args)
    # A copy may be donated.
    train_step(*jax.tree.map(jnp.copy, new), ROW, new[0], ROW)
    # With states in files too.
    _, train_step, (*before, _) = begun_affine(offload=f"optimizer:nvme={tmp_path}")
    _, state, _ = train_step(*before, ROW)
    with pytest.raises(ValueError, match="'b' of `params`"):
        train_step(before[0], state, ROW)
