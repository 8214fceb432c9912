"""Loss scale, steps that are skipped because a gradient is not finite, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import zero_on

import zero_jax
from zero_jax import Precision, Zero
from zero_jax.collectives import gather_scatter
from zero_jax.engine import grads
from zero_jax.engine.loss_scale import init_guard, next_guard

# 2^16, the first loss scale, is infinite in fp16.
loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32) ** 2)  # noqa: E731


def setup(precision, stage=3, **kwargs):
    zero = zero_on(4, stage, precision=precision)
    params = zero.init(lambda: {"w": jnp.ones((8, 3)), "unused": jnp.full((5,), -0.0)})
    tx = zero.optimizer(optax.adam(1e-2))
    return params, tx.init(params), zero.train_step(loss, tx, **kwargs)


def test_the_loss_scale_doubles_halves_and_stays_above_one():
    precision = Precision("fp16", initial_scale=8.0, growth_interval=3)
    guard = init_guard(precision)
    events = "gg.ggg....g"  # g good, . overflow
    scales = [8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    for event, want in zip(events, scales, strict=True):
        guard = next_guard(guard, jnp.asarray(event == "g"), precision)
        assert float(guard.loss_scale) == want
    assert (int(guard.skipped), int(guard.consecutive)) == (5, 0)
    default = init_guard(Precision("fp16"))
    assert float(default.loss_scale) == 2**16
    late = default._replace(good_steps=jnp.asarray(1999, jnp.int32))
    assert float(next_guard(late, jnp.asarray(True), Precision("fp16")).loss_scale) == 2**17


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp16")])
def test_infinity_on_one_device_makes_all_skip(stage, precision):
    params, state, step = setup(precision, stage)
    good = jnp.full((8, 8), 0.1)
    params, state, metrics = step(params, state, good)
    assert int(metrics.skipped) == 0
    bits = lambda tree: [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]  # noqa: E731
    before = bits((params, state.inner))
    bad = good.at[6, 0].set(jnp.inf)  # row 6 belongs to device 3 of 4
    params, state, metrics = step(params, state, bad)
    assert int(metrics.skipped) == 1
    assert float(metrics.loss_scale) == (2**16 if precision == "fp16" else 1)
    assert bits((params, state.inner)) == before
    assert step.first_bad_leaf(params, state, bad) == "w"
    assert step.first_bad_leaf(params, state, good) is None
    params, state, metrics = step(params, state, good)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
    assert float(metrics.loss_scale) == (2**15 if precision == "fp16" else 1)


def test_skipped_steps_in_a_row_raise_and_name_the_leaf():
    params, state, step = setup("bf16", max_skips=3)
    bad = jnp.full((8, 8), jnp.nan)
    with pytest.raises(zero_jax.NonFiniteError, match=r"\b3 .*\bw\b"):
        for _ in range(10):
            params, state, _ = step(params, state, bad)
    assert 3 <= int(state.guard.skipped) <= 3 + 2, "the host looks at most two steps late"


def test_the_loss_scale_keeps_gradients_that_fp16_loses():
    """Gradients of 2^-30 are zero in fp16, whose smallest number is 2^-24."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=2, precision="fp16")
    params = zero.init(lambda: {"w": jnp.ones((8, 8))})
    rows = jnp.ones((2048, 8))  # many rows: a mean must not be scaled down by their number
    tiny = lambda p, x: jnp.mean(x @ p["w"]).astype(jnp.float32) * 2.0**-24  # noqa: E731
    grad_fn = zero.value_and_grad(tiny)
    _, grads = grad_fn(params, rows, loss_scale=2.0**16)
    np.testing.assert_allclose(zero.unshard(grads)["w"], 2.0**-27, rtol=1e-2)
    _, lost = grad_fn(params, rows, loss_scale=1.0)
    assert not np.asarray(zero.unshard(lost)["w"]).any(), "the scale was not needed: a vacuous test"


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gradients_are_summed_in_the_reduce_dtype_and_vectors_in_fp32(reduce):
    """263 = 256 + 7 · 1 is no bf16 number; each addend is."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), precision=Precision("bf16", reduce))
    params = zero.shard({"w": jnp.ones((16, 32)), "b": jnp.ones(16)})
    rows = jnp.ones((8, 16)).at[0].set(256.0)  # one for each device

    def total(params, x):
        x = x.astype("bfloat16")
        return zero_jax.Weighted(jnp.sum(x @ params["w"]) + jnp.sum(x * params["b"]), len(x))

    grads = zero.unshard(zero.value_and_grad(total)(params, rows)[1])
    assert (grads["b"] == 263 / 8).all()
    assert (grads["w"] == 263 / 8).all() == (reduce == "fp32")


def zero_of(devices, stage, **option):
    return lambda: zero_on(devices, stage, precision=Precision(**option))


PARAMS, X = {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))
REFUSALS = [
    ("compute_dtype`='bf15'.*'bf16'", lambda: Precision(compute_dtype="bf15")),
    ("compute_dtype`=.*int32", lambda: Precision(compute_dtype=jnp.int32)),
    ("reduce_dtype`='fp16'", lambda: Precision(reduce_dtype="fp16")),
    ("growth_interval`=0", lambda: Precision(growth_interval=0)),
    ("param_comm_dtype`='int4'.*int8", lambda: Precision("bf16", param_comm_dtype="int4")),
    ("grad_comm_dtype`='fp8'.*int4", lambda: Precision("bf16", grad_comm_dtype="fp8")),
    ("loss_scale", lambda: zero_of(8, 0, compute_dtype="fp16")().value_and_grad(loss)(PARAMS, X)),
    # Nothing is communicated in integers there.
    ("param_comm_dtype", zero_of(8, 0, param_comm_dtype="int8")),
    ("grad_comm_dtype", zero_of(8, 0, grad_comm_dtype="int4")),
    ("param_comm_dtype", zero_of(1, 3, param_comm_dtype="int8")),
]


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("bucket", [4 * 8 - 1, -1, float("nan"), float("inf"), True, "1", None])
def test_a_bucket_holds_one_element_of_every_device(bucket):
    with pytest.raises(ValueError, match="bucket_bytes`=.* 32 "):
        Zero(zero_jax.make_mesh(), bucket_bytes=bucket)


# With bf16 reductions a stack of gradients of scanned layers may be stored in bf16, bitwise the
# same; a sum of several of them may not.
L, D, ROWS = 3, 16, 32
plain = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
twice = lambda x, w: jnp.tanh(x @ w) @ w.T  # noqa: E731


def scan(layer):
    return lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def repeated(layer):
    return lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=20)[0]


# Each model, other settings than stage 3, and whether its gradients are stored in bf16.
MODELS = {"scan": (scan(plain), {"stage": 2}, True),
          "micro-batches": (scan(plain), {"grad_accum_steps": 2}, True),
          "two operations": (scan(twice), {}, True),
          "norm": (scan(lambda x, w: plain(x, w / jnp.linalg.norm(w))), {"stage": 2}, True),
          "remat": (scan(jax.checkpoint(twice)), {}, True),
          "shared": (lambda x, w: scan(plain)(scan(plain)(x, w), w), {"stage": 2}, False),
          "loop of scans": (repeated(scan(plain)), {}, False),
          "loop in a layer": (scan(repeated(plain)), {"stage": 2}, True)}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_depend_on_the_storage_dtype(name, monkeypatch):
    model, settings, narrow = MODELS[name]
    precision = zero_jax.Precision("fp32", reduce_dtype="bf16")
    zero = zero_jax.Zero(zero_jax.make_mesh(), **{"stage": 3, "precision": precision} | settings)
    params = zero.init(lambda: jax.random.normal(jax.random.key(2), (L, D, D)) / D**0.5)
    loss = lambda w, x: jnp.mean(model(x, w) ** 2)  # noqa: E731
    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    traced = grads.GlobalLoss(zero.config, loss).read(params, batch, ())
    assert any(leaf.waits_in is not None for leaf in traced.leaves) == narrow
    found = zero.value_and_grad(loss)(params, batch)
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    jax.tree.map(np.testing.assert_array_equal, found, zero.value_and_grad(loss)(params, batch))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
