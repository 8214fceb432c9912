"""`Zero` and losses against one device, and errors for unsupported arguments."""

import functools
import types
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from one_device import Case, alone, zero_on
from optax import contrib
from problems import assert_bitwise, gpt_problem, zoo_params
from test_outside import straight_through
from test_partitioned import LOOKAHEAD, SAM

import zero_jax
from zero_jax.releases import CRASHES_ON_EMPTY
from zero_jax.sharding.mesh import check_global


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def make():
    key = jax.random.key(3)
    return {"w": jax.random.normal(key, (10, 7)), "b": jnp.full((7,), -0.0)}


X = jax.random.normal(jax.random.key(1), (24, 10))
START, ZOO = make(), functools.partial(zoo_params, 5)


@pytest.mark.parametrize(
    ("make", "n", "stage"), [(gpt_problem().make, 3, 3), (ZOO, 8, 0), (ZOO, 3, 1)]
)
def test_initial_values_do_not_depend_on_n_and_stage(make, n, stage):
    zero, wanted = zero_on(n, stage=stage), jax.jit(make)()
    params = zero.init(make)
    full = zero.unshard(params)
    assert_bitwise(full, wanted)
    placed = zero.shard(jax.tree.map(np.asarray, full))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    assert_bitwise(zero.unshard(placed), wanted)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, params)
    largest = max(jax.tree.leaves(wanted), key=lambda x: x.size)
    assert len(np.unique(largest)) > largest.size // 2, "random values"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_leaves_have_no_state_and_keep_their_bits(stage):
    """`base/w` is padded; weight decay and the norm of the clip leave frozen leaves out. Alone,
    optax.adamw raises under strict promotion of dtypes."""
    base = {"w": np.full((10, 7), -0.0, np.float32), "ids": np.arange(6, dtype=np.int32)}
    base["w"][:3] = 1.0
    start = {"base": base, "head": {"w": np.ones((7, 3), np.float32)}}

    def objective(params, x):
        base = params["base"]
        # A loop over trained leaves has no derivative.
        loop = jax.lax.while_loop(lambda c: c < 9, lambda c: c + base["w"][0, 0], 0.0)
        return loop * jnp.mean((x[:, base["ids"]] @ base["w"][:6] @ params["head"]["w"]) ** 2)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-1))
    alike = lambda head, x: objective({"base": base, "head": head}, x)  # noqa: E731
    wanted = alone(Case(lambda: start["head"], alike, X), tx, 2)[1]
    with jax.numpy_dtype_promotion("strict"):
        zero = zero_on(stage=stage, frozen="base/")
        params, tx = zero.shard(start), zero.optimizer(tx)
        step, state = zero.train_step(objective, tx), tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, X)
    found = zero.unshard(params)
    assert_bitwise(found["base"], base)
    np.testing.assert_allclose(found["head"]["w"], wanted["w"], rtol=1e-5)
    moments = jax.tree.leaves(zero_jax.unpad(state.inner))
    assert [x.shape for x in moments if x.ndim] == [(7, 3), (7, 3)]
    grads = jax.eval_shape(zero.value_and_grad(objective), params, X)[1]
    assert [x.shape for x in jax.tree.leaves(grads["base"])] == [(), ()]


def test_evaluate_returns_loss_and_weight():
    """In one micro-batch; parameters may have fewer bits."""
    zero = zero_on(3, grad_accum_steps=4)
    params, evaluate = zero.shard(START), zero.evaluate(loss)
    value, weight = evaluate(params, X[:21])
    np.testing.assert_allclose(value, loss(START, X[:21]), rtol=1e-6)
    assert float(weight) == 3
    narrow = evaluate(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), X[:21])[0]
    np.testing.assert_allclose(narrow, value, rtol=2**-7)
    one, total = zero_on(1), lambda p, x: jnp.sum((x @ p["w"]) ** 2)  # a sum over all rows
    found = one.evaluate(total)(one.shard(START), X)[0]
    np.testing.assert_allclose(found, total(START, X), rtol=1e-5)
    # Statistics of padded leaves leave out the padding.
    moved = jax.tree.map(lambda x: x + 1, zero_on().shard({"w": np.ones((7, 5), np.float32)}))
    statistics = jax.jit(lambda x: (optax.global_norm(x), x["w"].mean()))
    assert statistics(zero_jax.unpad(moved)) == (pytest.approx(2 * 35**0.5), 2)


def test_steps_donate_and_compile_once():
    zero = zero_on(3)
    tx = zero.optimizer(optax.adam(1e-2))
    step, params = zero.train_step(loss, tx), zero.shard(START)
    params, state, _ = step(params, tx.init(params), X)
    with pytest.raises(ValueError, match="22"):
        step(params, state, X[:22])
    events = []
    heard = lambda name, *_, **__: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(heard)
    jax.jit(lambda: 0)()
    compiled = [name for name in events if "compile" in name]
    assert compiled, "the listener works"
    for _ in range(20):
        old = jax.tree.leaves((params, state))
        params, state, _ = step(params, state, X)
        assert all(x.is_deleted() for x in old)
    jax.monitoring.unregister_event_duration_listener(heard)
    assert [name for name in events if "compile" in name] == compiled


SMALL, W = X[:16, :4], {"w": jax.random.normal(jax.random.key(0), (4, 8))}


@pytest.mark.parametrize("use", [jax.lax.stop_gradient, jnp.floor, lambda y: y > 0.5])
def test_a_loop_of_unknown_length_may_have_no_gradient(use):
    def loss(params, x):
        root = jax.lax.while_loop(lambda y: y > 2, lambda y: y / 2, jnp.sum(params["w"] ** 2))
        return jnp.mean((x @ params["w"]) ** 2) * use(root)

    params = zero_on().shard(W)
    value, grads = zero_on().value_and_grad(loss)(params, SMALL)
    want, want_grads = jax.value_and_grad(loss)(W, SMALL)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(zero_on().unshard(grads)["w"], want_grads["w"], rtol=1e-5)


def total_over_time(row):
    return jax.lax.scan(lambda count, x: (count + 1, x), 0, row)[1].sum()


@pytest.mark.parametrize(
    ("replica", "k", "stage", "axis"),
    [(1, 1, 3, "batch"), (1, 2, 0, "data"), (2, 1, 1, "data"), (2, 2, 3, "data")],
)
def test_aux_means_rows_sums_counters_and_keys(replica, k, stage, axis):
    """Rows return in order, floats as means; counters, keys and sums are equal on all devices."""
    devices = jax.devices()[: 4 * replica]
    mesh = zero_jax.make_mesh(4, replica=replica, devices=devices, data_axis=axis)
    zero = zero_jax.Zero(mesh, stage, grad_accum_steps=k)
    assert zero.batch_axes == (("replica", "data") if replica > 1 else (axis,))

    def loss(params, x, count, mean=lambda x: x, total=lambda x: x):
        centre = mean(x.mean(0)) if k == 1 else 0.0  # else of a micro-batch
        logits = jnp.tanh((x - centre) @ (params["w"] * params["w/2"]))  # paths that look alike
        aux = {
            "logits": logits, "mean": jnp.mean(logits), "spread": logits.mean(0),
            "channels": x.mean(0),  # as long as the rows of a device where k is 1, and no rows
            "rows": x.mean(1), "each": jax.lax.map(total_over_time, x), "n": count + 1,
            "right": total((x[:, 0] > 0).sum()) if k == 1 else 0,
            "key": jax.random.key(5)}  # fmt: skip
        return jnp.mean(logits**2), aux

    def sharded(params, x, count):
        over = [lambda x, f=f: f(x, zero.batch_axes) for f in (jax.lax.pmean, jax.lax.psum)]
        return loss(params, x, count, *over)

    start = {"w": W["w"], "w/2": jnp.cos(W["w"])}
    params = zero.shard(start)
    (_, aux), grads = zero.value_and_grad(sharded, has_aux=True)(params, SMALL, jnp.int32(6))
    (_, want), want_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start, SMALL, 6)
    assert aux.pop("key") == jax.random.key(5)
    for name in aux:
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, found in zero.unshard(grads).items():
        np.testing.assert_allclose(found, want_grads[name], rtol=1e-4, atol=1e-7)
    evaluated = zero.evaluate(sharded, has_aux=True)(params, SMALL, jnp.int32(6))[0][1]
    np.testing.assert_allclose(evaluated["logits"], want["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (lambda p, x: jnp.sum((x @ p["w"])[:, :4] * x), r"zero_jax\.Weighted"),
        (lambda p, x: jnp.mean(jnp.tanh((x - x.mean(0)) @ p["w"])), r"zero\.batch_axes"),
    ],
)
def test_a_likely_sum_and_a_statistic_of_one_device_warn_once(loss, word):
    evaluate, params = zero_on().evaluate(loss), zero_on().eval_shape(lambda: W)
    with pytest.warns(UserWarning, match=word):
        jax.eval_shape(evaluate, params, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jax.eval_shape(evaluate, params, jnp.concatenate([SMALL, SMALL]))


def stepped(zero, loss, tx, *batches):
    """Full parameters and metrics after each step."""
    tx, params = zero.optimizer(tx), zero.shard(W)
    step, state, found = zero.train_step(loss, tx), tx.init(params), []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        found.append((np.asarray(zero.unshard(params)["w"]), metrics))
    return found


def test_finite_gradients_whose_squares_overflow_are_applied():
    loss = lambda p, x: 1e20 * jnp.mean(x @ p["w"])  # noqa: E731
    ((found, metrics),) = stepped(zero_on(), loss, optax.sgd(1e-20), SMALL)
    want = 1e20 * np.asarray(SMALL, np.float64).sum(0)[:, None] / (16 * 8) * np.ones((4, 8))
    assert metrics.skipped == 0
    np.testing.assert_allclose(float(metrics.grad_norm), np.linalg.norm(want), rtol=1e-5)
    np.testing.assert_allclose(found, W["w"] - 1e-20 * want, rtol=1e-5)


@pytest.mark.parametrize(("stage", "guard"), [(3, True), (3, False), (0, False)])
def test_without_the_guard_a_transformation_sees_nan(stage, guard):
    def loss(params, x):
        return jnp.mean(x @ params["w"]) + jnp.sqrt(params["w"][0, 0] - params["w"][0, 0])

    tx = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    ((found, metrics),) = stepped(zero_on(stage=stage, skip_nonfinite=guard), loss, tx, SMALL)
    assert metrics.skipped == guard
    assert np.isfinite(found).all() and (found == np.asarray(W["w"])).all() == guard


@pytest.mark.parametrize(("stage", "k"), [(0, 2), (3, 1)])
def test_a_negative_weight_on_a_device_skips_the_step(stage, k):
    """Weights count rows or tokens. A negative one is an error, also if their sum is positive."""

    def loss(params, batch):
        weight = jnp.sum(batch[1])
        return zero_jax.Weighted(weight * jnp.mean((batch[0] @ params["w"]) ** 2), weight)

    zero, good = zero_on(stage=stage, grad_accum_steps=k), jnp.ones(16)
    batches = (SMALL, good), (SMALL, good.at[0].set(-9.0))
    (before, metrics), (after, bad) = stepped(zero, loss, optax.sgd(0.1), *batches)
    assert (int(metrics.skipped), float(metrics.weight)) == (0, 16)
    assert int(bad.skipped) == 1 and np.isnan(bad.loss)
    np.testing.assert_array_equal(after, before)


# Errors for unsupported arguments: their type, and the argument or value that they name.

AUTO = {"axis_types": (jax.sharding.AxisType.Auto,) * 2}
SGD = optax.sgd(1.0)
PRIVATE = contrib.differentially_private_aggregate(1.0, 1.0, 0)


class WithNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def under(context, fn, *args):
    with context:
        return fn(*args)


def mesh_of(*axes, **options):
    sizes, devices = (4, 2)[: len(axes)], jax.devices()[: 4 * len(axes)]
    return jax.make_mesh(sizes, axes, devices=devices, **options)


def initialised(value, **settings):
    return zero_on(**settings).init(lambda: value)


def differentiated(fn=loss, batch=X, params=None, has_aux=False, zero=None, **settings):
    zero = zero or zero_on(**settings)
    params = zero.eval_shape(make) if params is None else params
    return zero.value_and_grad(fn, has_aux=has_aux)(params, batch)


def differentiated_under(axis):
    params = zero_on().init(lambda: {"w": jnp.ones((10, 8))})
    with jax.set_mesh(mesh_of(axis)):
        differentiated(lambda p, x: jnp.mean(x @ p["w"]), params=params)


def in_dtype(dtype, **settings):
    cast = jax.tree.map(lambda x: x.update(dtype=dtype), zero_on().eval_shape(make))
    return differentiated(params=cast, **settings)


def with_aux(aux, **options):
    return differentiated(lambda p, x: (loss(p, x), aux(x)), has_aux=True, **options)


def step_of(**options):
    zero = zero_on()
    return zero.train_step(loss, zero.optimizer(SGD), **options)


def state_of(tx, **settings):
    zero = zero_on(**settings)
    return zero.optimizer(tx).init(zero.eval_shape(make))


def traced(tx, state=None, **named):
    zero = zero_on()
    params, own = zero.eval_shape(make), zero.optimizer(tx)
    state = own.init(params) if state is None else state
    return zero.train_step(loss, own).trace(params, state, X, **named)


def updated(tx, state=None):
    zero, own = zero_on(), zero_on().optimizer(tx)
    params = zero.shard({"w": jnp.ones((4, 8))})
    state = own.init(params) if state is None else state
    return own.update(params, state, params, value=jnp.float32(1))


def by_update(update):
    return optax.GradientTransformationExtraArgs(lambda _: {}, update)


GROWING = by_update(lambda grads, old, *_, **__: (grads, {**old, str(len(old)): jnp.zeros(3)}))
CURVED = by_update(lambda grads, *_, curvature, **__: (grads, {"curvature": curvature}))
# Words of the message, and the call.
ROWS = [
    ("mesh 4", lambda: zero_jax.Zero(4)),
    ("mesh 2", lambda: zero_jax.Zero(zero_jax.make_mesh(devices=[jax.devices()[0]] * 2))),
    ("mesh x y", lambda: zero_jax.Zero(mesh_of("x", "y", **AUTO))),
    ("mesh 'more' 2", lambda: zero_jax.Zero(mesh_of("data", "more", **AUTO))),
    ("mesh Auto", lambda: zero_jax.Zero(mesh_of("data"))),
    ("replica 3 8", lambda: zero_jax.make_mesh(replica=3)),
    ("replica 0", lambda: zero_jax.abstract_mesh(8, replica=0)),
    ("AbstractMesh 8", lambda: zero_jax.Zero(zero_jax.abstract_mesh(8)).init(make)),
    ("mesh set_mesh fsdp", lambda: differentiated_under("fsdp")),
    ("mesh set_mesh Explicit", lambda: differentiated_under("data")),
    ("stage 4", lambda: zero_on(stage=4)),
    ("secondary_shards", lambda: zero_on({"replica": 1, "data": 2}, secondary_shards=True)),
    ("secondary_shards", lambda: zero_on({"replica": 2, "data": 2}, "auto", secondary_shards=True)),
    ("stage '3'", lambda: zero_on(stage="3")), ("stage True", lambda: zero_on(stage=True)),
    ("stage auto", lambda: zero_on(stage="auto").value_and_grad(loss)),
    ("stage auto", lambda: zero_on(stage="auto").plan(loss, SGD)),
    ("grad_accum_steps 0", lambda: zero_on(grad_accum_steps=0)),
    ("remat blok block", lambda: zero_on(remat="blok")),
    ("bf17 bf16", lambda: zero_on(precision="bf17")),
    ("skip_nonfinite fp16", lambda: zero_on(skip_nonfinite=False, precision="fp16")),
    ("frozen bsae b w", lambda: zero_on(frozen="bsae").eval_shape(make)),
    ("frozen (b", lambda: zero_on(frozen="(b").eval_shape(make)),
    ("paper_config c9", lambda: zero_jax.paper_config("c9")),
    *((f"memory_limit {given!r}", lambda given=given: zero_on(memory_limit=given))
      for given in ("80XB", "GB", "", "-1GB", "1e3GiBs", 0, 0.5, -1, True, float("nan"), 1e30)),
    ("max_skips 0", lambda: step_of(max_skips=0)),
    ("jax_threefry_partitionable",
     lambda: under(jax.threefry_partitionable(False), zero_on().init, make)),
    ("jax_disable_jit", lambda: under(jax.disable_jit(), zero_on().init, make)),
    ("parameter 'w' str", lambda: initialised({"w": "text"})),
    ("parameter 'w' float", lambda: zero_on().shard({"w": 1.0})),
    # A Keras variable has a dtype.
    ("parameter 'w'", lambda: zero_on().shard({"w": types.SimpleNamespace(dtype="float32")})),
    ("parameters", lambda: initialised({})),
    ("parameter 'key'", lambda: initialised({"key": jax.random.key(0)})),
    ("parameters WithNorm nnx.split", lambda: zero_on().init(WithNorm)),
    ("'norm/mean' BatchStat", lambda: zero_on().init(
        lambda: nnx.state(WithNorm(), (nnx.Param, nnx.BatchStat)))),
    ("'w' float8_e4m3fn frozen", lambda: initialised({"w": jnp.ones(4, "float8_e4m3fn")})),
    ("'w' complex64 float32", lambda: zero_on().shard({"w": jnp.ones(4, "complex64")})),
    ("b (7,) zero.init", lambda: differentiated(params=make())),
    # An update smaller than half a unit of bf16 would be lost, step after step.
    ("params 'b' bfloat16", lambda: in_dtype("bfloat16")),
    ("params 'w' float16", lambda: in_dtype("float16", frozen="b")),
    (f"'none' (0, 3) {CRASHES_ON_EMPTY}", lambda: under(
        mock.patch.object(jax.lib, "__version__", CRASHES_ON_EMPTY),
        initialised, make() | {"none": jnp.zeros((0, 3))})),
    ("22 20 24", lambda: differentiated(batch=jnp.ones((22, 10)))),
    ("batch scalar", lambda: differentiated(batch=jnp.ones(()))),
    ("batch arrays", lambda: differentiated(batch={})),
    ("[0] 40 [1] 96", lambda: differentiated(batch=(jnp.ones((40, 3)), jnp.ones((96, 3))))),
    ("Weighted (6, 7)", lambda: differentiated(lambda p, x: x @ p["w"])),
    ("has_aux Weighted", lambda: differentiated(lambda p, x: (loss(p, x), {"aux": 1}))),
    ("has_aux 3", lambda: differentiated(lambda p, x: (loss(p, x), 1.0, 2.0))),
    ("has_aux loss", lambda: differentiated(has_aux=True)),
    ("Weighted (2,)",
     lambda: differentiated(lambda p, x: zero_jax.Weighted(loss(p, x), jnp.ones(2)))),
    ("NoneType", lambda: differentiated(lambda p, x: None)),
    ("complex", lambda: differentiated(lambda p, x: loss(p, x) * 1j)),
    ("Weighted jnp.mean", lambda: differentiated(lambda p, x: jnp.sum((x @ p["w"]) ** 2))),
    ("Weighted jnp.mean",
     lambda: zero_on().evaluate(lambda p, x: jnp.sum((x @ p["w"]) ** 2))(zero_on().init(make), X)),
    ("aux zero.batch_axes", lambda: with_aux(lambda x: (x[:, 0] > 0).sum())),
    ("aux zero.batch_axes",  # the branch that is taken differs between devices
     lambda: with_aux(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: 1, lambda: 2))),
    ("aux zero.batch_axes",  # two replicas have different rows
     lambda: with_aux(lambda x: jax.lax.psum((x[:, 0] > 0).sum(), "data"), zero=zero_jax.Zero(
        zero_jax.make_mesh(2, replica=2, devices=jax.devices()[:4])))),
    ("'m' 6 12", lambda: with_aux(lambda x: {"m": x.reshape(6, 10).mean(1)})),
    *(("weight stop_gradient", lambda fn=fn: differentiated(lambda p, x: zero_jax.Weighted(
        jnp.sum(x @ p["w"]), jnp.sum(fn(p["w"]))))) for fn in (jax.nn.sigmoid, straight_through)),
    ("lax.while_loop b", lambda: differentiated(lambda p, x: loss(p, x) + jax.lax.while_loop(
        lambda c: c < 9, lambda c: c + p["b"].sum() + 1, 0.0))),
    ("tx 'adam'", lambda: zero_on().optimizer("adam")),
    *(("tx zero.optimizer", lambda name=name, tx=tx: getattr(zero_on(), name)(loss, tx, {}, X))
      for name in ("plan", "choose") for tx in (SGD, None)),
    ("tx zero.optimizer", lambda: zero_on().train_step(loss, SGD)),
    ("tx zero.optimizer", lambda: zero_on(stage="auto").train_step(loss, optax.adam)),
    ("tx wrapped", lambda: zero_on().optimizer(zero_on().optimizer(SGD))),
    ("optimizer Precision", lambda: zero_on(precision="fp16").train_step(
        loss, zero_on().optimizer(optax.adam(1e-3)))),
    ("state tuple zero.optimizer", lambda: traced(SGD, SGD.init(make()))),
    ("state tuple zero.optimizer", lambda: updated(SGD, SGD.init({}))),
    ("'nonsense' ZeroState", lambda: state_of(optax.adam(1e-3)).nonsense),
    ("assign 'nonsense'", lambda: setattr(zero_on(), "nonsense", 1)),
    ("Zero.__init__ 'nonsense'", lambda: zero_on(nonsense=1)),
    ("gradient w (4, 8)", lambda: updated(PRIVATE)),
    # With a transformation that needs the loss the update finds it, not `init`.
    ("gradient w (4, 8)", lambda: updated(optax.chain(PRIVATE, optax.polyak_sgd(0.1)))),
    ("tx (3,)", lambda: state_of(GROWING)),
    ("tx curvature", lambda: traced(CURVED, curvature=jnp.ones(()))),
    ("'curvature' host", lambda: state_of(CURVED, offload="optimizer")),
    ("value_fn zero.value_and_grad", lambda: traced(optax.lbfgs(0.1))),
    ("grad_fn zero.value_and_grad", lambda: traced(SAM)),
    ("zero.value_and_grad", lambda: traced(LOOKAHEAD)),
    ("value", lambda: step_of()(None, None, X, value=1.0)),
    ("grad_fn zero.value_and_grad", lambda: step_of()(None, None, X, grad_fn=loss))]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_an_error_names_the_argument(words, call):
    with pytest.raises((ValueError, AttributeError, TypeError)) as caught:
        call()
    assert isinstance(caught.value, ValueError) == ("nonsense" not in words)
    assert [word for word in words.split() if word not in str(caught.value)] == []


def test_a_memory_limit_is_bytes_or_text():
    limits = {"80GB": 80 * 10**9, "64GiB": 2**36, " 1.5 tb ": 15 * 10**11, "2e3 KiB": 2048000}
    limits |= {"7": 7, "9b": 9, 80e9: 80 * 10**9, 2**40 + 1: 2**40 + 1, None: None}
    assert {given: zero_on(memory_limit=given).config.memory_limit for given in limits} == limits


def test_a_padded_parameter_is_no_array():
    """Outside a loss; only the type of its values is known to JAX."""
    leaf = zero_on().eval_shape(make)["b"]
    uses = jnp.sum, np.asarray, lambda x: 2 * x, lambda x: X @ x, lambda x: x[0], lambda x: x.T
    for use in uses:
        with pytest.raises((TypeError, AttributeError), match=r"\(7,\).*\(8,\).*zero\.unshard"):
            use(leaf)


def test_infinity_in_any_leaf_skips_an_update_outside_of_train_step():
    params = zero_on().shard({"a": jnp.ones(8), "b": jnp.ones(8)})
    for bad, guard in (("a", True), ("b", True), ("b", False)):
        tx = zero_on(skip_nonfinite=guard).optimizer(SGD)
        updates, state = tx.update(params | {bad: params[bad] * jnp.inf}, tx.init(params), params)
        changed = np.any([np.asarray(x) for x in updates.values()])
        assert int(state.guard.skipped) == guard != changed


def test_several_processes_need_a_global_batch():
    several = types.SimpleNamespace(local_devices=[0], size=2)
    check_global({"x": jax.ShapeDtypeStruct((4,), "float32")}, several)
    check_global({"x": np.ones(4)}, zero_jax.make_mesh())
    for rows in (np.ones(4), jnp.ones(4), [1.0]):
        with pytest.raises(ValueError, match=r"'x'.*zero_jax\.global_batch"):
            check_global({"x": rows}, several)
