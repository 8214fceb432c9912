"""Optimizer state in 8 and 16 bits: bitwise the same on every mesh, stage and memory tier."""

import dataclasses
import functools
import math
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.low_bit import codes
from zero_jax.low_bit.codes import noise, to_bfloat16
from zero_jax.low_bit.state import initial
from zero_jax.offload import host

pytestmark = pytest.mark.filterwarnings("error")  # also JAX's about jaxprs without debug info
ADAMW = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2))
# A block of the table spans several devices where N is 2, 3 or 8; blocks of "wide" run along dim 0.
SHAPES = {"table": (101, 96), "stack": (5, 64, 48), "wide": (50, 257), "long": (4099,)}
SHAPES |= {"bias": (7,), "none": (0, 3), "one": ()}
PLAIN = optax.adamw(1e-2)
ALL, FEW = tuple(SHAPES), ("wide", "long", "bias")
LARGE = ("long", "stack", "table", "wide")  # of at least 4096 elements
P = jax.sharding.PartitionSpec
SPECS = {"^table$": P(None, "model"), "^stack$": P(None, "model", None), "^long$": P()}


def drawn(seed, names=ALL):
    draw = np.random.default_rng(seed)
    normal = draw.standard_normal
    values = {name: normal(s) * np.exp(normal(s)) for name, s in SHAPES.items()}
    return {name: jnp.asarray(values[name], jnp.float32) for name in names}


def zero_of(n, *, kind="8bit", tx=ADAMW, sizes=(), **settings):
    mesh = zero_jax.make_mesh(**dict(sizes), devices=jax.devices()[:n])
    specs = SPECS if "model" in sizes else None
    zero = zero_jax.Zero(mesh, optimizer_state_dtype=kind, param_specs=specs, **settings)
    return zero, zero.optimizer(tx)


def updated(zero, own, steps, start=None, names=ALL):
    """Parameters and state after so many steps, from (steps done, parameters, state)."""
    params = zero.shard(drawn(0, names))
    done, params, state = start or (0, params, own.init(params))
    on_device = zero.replace(offload=None)  # gradients are
    step = jax.jit(lambda g, s, p: own.apply(g, s, p))
    for at in range(done + 1, steps + 1):
        params, state = step(on_device.shard(drawn(at, names)), state, params)
    return params, state


@functools.cache
def single(states, tx=ADAMW, names=ALL):
    """Unsharded parameters and state after four steps on one device."""
    zero, own = zero_of(1, kind=states, tx=tx)
    return jax.device_get(zero.unshard(updated(zero, own, 4, names=names)))


def assert_same_bits(want, got):
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        if a.dtype in (jnp.uint8, jnp.uint16, jnp.bfloat16):
            assert np.array_equal(a, b), f"{int((a != b).sum())} of {a.size}"
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def large_of_zeros(grads, state, params=None):
    squares = jax.tree.map(lambda a, g: a + g * g + 1e9 * (g == 0), state, grads)
    return jax.tree.map(lambda a, g: -0.1 * g / jnp.sqrt(a), squares, grads), squares


ZEROS = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
# Pieces also hold parts of rows of blocks that do not run along the last dim.
PIECES = dataclasses.replace(host.NONE, piece_bytes=32768)
HOST = dataclasses.replace(host.parse("optimizer,params"), piece_bytes=32768)
SECONDARY = {"secondary_shards": True}
CASES = {
    "8 bits": (3, ALL, {}), "stage 0": (8, ALL, {"stage": 0}),
    "bf16": (5, ALL, {"stage": 1, "kind": "bf16"}), "pieces": (3, FEW, {"offload": PIECES}),
    "host": (2, FEW, {"offload": HOST}),
    "replicas": (8, ALL, {"sizes": dict.fromkeys(("replica", "data", "model"), 2), **SECONDARY}),
    "padding": (3, FEW, {"tx": optax.GradientTransformation(ZEROS, large_of_zeros)}),
    "MultiSteps": (3, FEW, {"tx": optax.MultiSteps(optax.adamw(1e-2, mu_dtype=jnp.bfloat16), 2)}),
    "hyperparams": (3, FEW, {"tx": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)}),
}  # fmt: skip


SLOW = ("replicas", "pieces", "bf16", "padding")
NAMES = [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_mesh_stage_pieces_or_memory_tier(name):
    n, names, settings = CASES[name]
    zero, own = zero_of(n, **settings)
    kind = zero.config.optimizer_state_dtype
    want = single(kind, settings.get("tx", ADAMW), names)
    narrow = jnp.dtype("uint8" if kind == "8bit" else "bfloat16")
    assert narrow in {x.dtype for x in jax.tree.leaves(want[1])}
    assert_same_bits(want, jax.device_get(zero.unshard(updated(zero, own, 4, names=names))))


def test_a_block_on_several_devices_sends_two_elements():
    """An all-reduce of its exponents, in the compiled update; elements are not gathered."""
    zero, own = zero_of(3, tx=PLAIN)
    params = zero.eval_shape(lambda: {"table": jnp.zeros((101, 96)), "long": jnp.zeros(4099)})
    state = own.init(params)
    step = jax.jit(lambda g, s, p: own.apply(g, s, p), donate_argnums=(1, 2))
    words = zero_jax.audit(step.lower(params, state, params).compile()).sent_elements
    scales = sum(x.size for x in state.inner.scales)
    # An all-reduce of two elements counts twice; 16 are for the norm.
    assert 4 * scales <= sum(words.values()) <= 4 * scales + 16


ADAM = optax.adam(1e-2)
NARROW = [
    (PLAIN, {"0/mu", "0/nu"}),
    (optax.GradientTransformation(jax.jit(ADAM.init), ADAM.update), {"0/mu", "0/nu"}),
    (optax.sgd(1e-2, momentum=0.9), {"0/trace"}), (optax.lion(1e-2), {"0/mu"}),
    (optax.adam(1e-2, mu_dtype=jnp.bfloat16), {"0/nu"}),
    # z are weights.
    (optax.contrib.schedule_free_adamw(1e-2), {"base_optimizer_state/0/nu"})]  # fmt: skip


@pytest.mark.parametrize(("tx", "want"), NARROW)
def test_statistics_of_large_leaves_are_narrow(tx, want):
    """Averages of weights, counters and small leaves stay fp32."""
    state = jax.eval_shape(lambda p: initial(tx, p, "8bit"), drawn(0))
    assert set(state.narrow) == {f"{own}/{name}" for own in want for name in LARGE}


@pytest.mark.parametrize("settings", [{}, {"kind": "fp32", "offload": "optimizer"}])
def test_integer_leaves_are_not_updated(settings):
    zero, own = zero_of(3, tx=PLAIN, **settings)
    params = zero.shard({"w": drawn(0)["table"], "ids": jnp.arange(4099)})
    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + 0.0 * p["ids"][0], own)
    after, _, _ = step(params, own.init(params), jnp.ones((6, 101)))
    after = zero.unshard(after)
    assert jnp.array_equal(after["ids"], jnp.arange(4099))
    assert not jnp.array_equal(after["w"], drawn(0)["table"])


def test_states_are_converted_between_dtypes():
    """To 8 bits within an eighth of what is in range, and back bitwise; to bf16 within 2^-7."""
    zero, own = zero_of(3)
    _, plain = zero_of(3, kind="fp32")
    params, wide = updated(zero, plain, 3, names=FEW)
    state = own.restated(wide, params)
    assert state.inner.kind == "8bit" and own.restated(state, params) is state
    back = plain.restated(state, params)
    assert jax.tree.structure(back) == jax.tree.structure(wide)
    pairs = list(zip(*map(jax.tree.leaves, zero.unshard((wide, back))), strict=True))
    assert all((np.abs(b - a) <= np.abs(a) / 8).mean() > 0.99 for a, b in pairs)
    assert any((a != b).any() for a, b in pairs)
    again = plain.restated(own.restated(back, params), params)
    jax.tree.map(np.testing.assert_array_equal, *zero.unshard((again, back)))
    other = plain.restated(zero_of(3, kind="bf16")[1].restated(wide, params), params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-7), wide, other)


def test_a_checkpoint_of_three_devices_resumes_on_two_with_the_same_bits(tmp_path):
    zero, own = zero_of(3)
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(2, updated(zero, own, 2, names=FEW))
    zero, own = zero_of(2)
    params = zero.eval_shape(lambda: drawn(0, FEW))
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        tree = checkpoints.restore((params, own.init(params))).tree
    resumed = updated(zero, own, 4, start=(2, *tree), names=FEW)
    assert_same_bits(single("8bit", names=FEW), jax.device_get(zero.unshard(resumed)))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_stored_bytes_per_device(states):
    for shape in [(4096, 1), (1, 4096), (8, 4096), (16, 4096), (50257, 2)]:
        assert 8 + 16 * np.prod(codes.scales_shape(shape)) / np.prod(shape) <= 9
    for stage, n in ((3, 1), (3, 3), (0, 8)):
        zero, own = zero_of(n, kind=states, stage=stage, tx=PLAIN)
        params = zero.eval_shape(lambda: drawn(0))
        leaves = jax.tree.leaves((params, own.init(params)))
        stored = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
        assert zero_jax.memory.estimate(drawn(0), zero.config, PLAIN).at_rest == stored


def initialise(tx, **settings):
    zero, own = zero_of(8, tx=tx, **settings)
    own.init(zero.eval_shape(lambda: {"w": jnp.zeros((64, 128))}))


def choose():
    zero, tx = zero_of(8, tx=optax.adafactor(1e-2), stage="auto", memory_limit=1e9)
    params = zero.eval_shape(lambda: jnp.zeros((64, 64)))
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    zero.choose(lambda w, x: jnp.mean((x @ w) ** 2), tx, params, rows)


def misuse(make, update=False):
    zero, own = zero_of(2, tx=PLAIN)
    params = zero.shard(drawn(0, FEW))
    own.update(params, make(params), params) if update else own.restated(make(params), params)


MOMENTUM = optax.sgd(1e-2, momentum=0.9)
NVME = f"optimizer:nvme={tempfile.gettempdir()}"
REFUSALS = [("optimizer_state_dtype`='4bit'", lambda: initialise(PLAIN, kind="4bit")),
            ("nvme", lambda: initialise(PLAIN, kind="8bit", offload=NVME)),
            ("8bit", lambda: initialise(optax.contrib.muon(1e-2), kind="8bit")),
            ("clip_by_block_rms", lambda: initialise(optax.adafactor(1e-2), kind="bf16")),
            ("clip_by_block_rms", choose),
            ("fp32", lambda: misuse(zero_of(2, kind="fp32", tx=PLAIN)[1].init, update=True)),
            ("bf16", lambda: misuse(zero_of(2, kind="bf16", tx=PLAIN)[1].init, update=True)),
            ("state", lambda: misuse(PLAIN.init)),
            ("trace", lambda: misuse(zero_of(2, kind="fp32", tx=MOMENTUM)[1].init))]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), REFUSALS)
def test_refused(named, call):
    with pytest.raises(ValueError, match=named):
        call()


SIZE = 400  # three blocks of 128 and a part of one


def spread(shape, octaves):
    """Numbers of both signs, evenly over so many octaves."""
    draw = np.random.default_rng(0)
    size = 2.0 ** -draw.uniform(0, octaves, shape)
    return jnp.asarray(size * draw.choice([-1, 1], shape), jnp.float32)


@jax.jit
def rounded(x, uniform):
    scales = codes.scales_of(x, 0)
    return codes.decode(codes.encode(x, scales, 0, uniform), scales, 0)


drawn_at = lambda x, step: noise(x.shape, (0,) * x.ndim, x.shape, 0, jnp.int32(step))  # noqa: E731
round_trip = lambda x, step=0: rounded(x, drawn_at(x, step))  # noqa: E731
in_bf16 = jax.jit(lambda x, step=0: to_bfloat16(x, drawn_at(x, step)).astype(jnp.float32))


def test_error_range_sign_and_zeros():
    for size in (1, 129, SIZE):
        x = spread((size, 3), octaves=14)
        np.testing.assert_array_less(jnp.abs(round_trip(x) / x - 1), 1 / 8)
        np.testing.assert_array_less(jnp.abs(round_trip(x * x) / (x * x) - 1), 1 / 8)
    squares = jnp.where(jnp.arange(SIZE) % 5 == 0, 0.0, spread((SIZE,), octaves=60) ** 2)
    back = round_trip(squares)
    assert jnp.array_equal(back == 0, squares == 0), "a square is never rounded to zero"
    assert (back >= 0).all()
    mixed = jnp.zeros(SIZE).at[:4].set(jnp.array([1.0, -1.0, 2.0**-16, -(2.0**-20)]))
    assert jnp.array_equal(round_trip(mixed), mixed.at[2:].set(0.0)), "below the range of signs"
    once = round_trip(spread((SIZE,), octaves=15))
    assert jnp.array_equal(round_trip(once, 7), once), "a representable number is not rounded"
    for scale in (1e-36, 1e37):
        x = jnp.abs(spread((SIZE,), octaves=3)) * scale
        np.testing.assert_array_less(jnp.abs(round_trip(x) - x), x / 8)
    for largest in (1e-44, 1e-38, 1e-30, 1.0):
        x = np.float32(largest) * np.eye(1, SIZE, dtype=np.float32)[0]
        x[1] = 1e-45
        back = np.asarray(round_trip(jnp.asarray(x)))
        assert np.array_equal(back > 0, x > 0) and back[1] <= 2.0**-30
    # The largest floats stay finite.
    largest, most = jnp.float32(np.finfo(np.float32).max), jnp.uint32(2**32 - 1)
    x = jnp.array([largest, largest / 2, -largest])
    for values in (x[:2], x):
        back = rounded(values, jnp.full(values.shape, most))
        np.testing.assert_array_less(jnp.abs(back / values - 1), 1 / 5)
    assert jnp.isfinite(to_bfloat16(x, jnp.full((3,), most))).all()
    signalling = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)
    assert jnp.isnan(to_bfloat16(signalling, most))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_keep_their_kind_and_leave_the_block_alone(bad):
    for sign in (1, -1):
        x = jnp.ones(SIZE).at[7].set(sign).at[3].set(bad)
        assert jnp.array_equal(round_trip(x), x, equal_nan=True)
        assert jnp.array_equal(in_bf16(x), x, equal_nan=True)
    if not bad < 0:
        x = (spread((SIZE,), octaves=12) ** 2).at[3].set(bad)
        back = round_trip(x)
        np.testing.assert_array_less(jnp.abs(back / x - 1).at[3].set(0.0), 1 / 8)
        assert jnp.array_equal(back[3], x[3], equal_nan=True)


@pytest.mark.parametrize(
    ("fun", "value", "spacing"), [(round_trip, 1.03, 1 / 8), (in_bf16, 1.0013, 2**-7)]
)
def test_rounding_is_unbiased_over_steps(fun, value, spacing):
    x = jnp.full((64,), value)
    mean = jax.jit(jax.vmap(fun, (None, 0)))(x, jnp.arange(256)).mean(0)
    # A low-discrepancy sequence is off by a few of 256 steps; random bits would be by sixteen.
    np.testing.assert_allclose(mean, x, rtol=3 / 256 * spacing)
