"""Optimizer state in 8 and 16 bits: bitwise the same on every mesh, stage and memory tier."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zero_jax
from zero_jax.offload import tiers
from zero_jax.sharding import paths
from zero_jax.states.codes import scales_shape
from zero_jax.states.narrow import initial

ADAMW = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2))
SHAPES = {
    "table": (101, 96),  # a block spans several devices where N is 2, 3 or 8
    "stack": (5, 64, 48),
    "wide": (50, 257),  # blocks along dim 0
    "long": (4099,),
    "bias": (7,),
    "none": (0, 3),
    "one": (),
}
ALL, FEW = tuple(SHAPES), ("wide", "long", "bias")
LARGE = ("long", "stack", "table", "wide")  # of at least 4096 elements


def drawn(seed, names=ALL):
    draw = np.random.default_rng(seed)
    values = {
        name: draw.standard_normal(s) * np.exp(draw.standard_normal(s))
        for name, s in SHAPES.items()
    }
    return {name: jnp.asarray(values[name], jnp.float32) for name in names}


def zero_of(n, *, stage=3, states="8bit", tx=ADAMW, **settings):
    """A `Zero` of n devices, and its optimizer."""
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, stage=stage, states=states, **settings)
    return zero, zero.optimizer(tx)


def updated(zero, own, steps, start=None, names=ALL):
    """Parameters and state after so many steps with given gradients.

    Args:
        start: (steps done, parameters, state) to continue from.
    """
    if start is None:
        params = zero.shard(drawn(0, names))
        start = 0, params, own.init(params)
    done, params, state = start
    on_device = dataclasses.replace(zero, offload=None)  # gradients are
    step = jax.jit(lambda g, s, p: own.apply(g, s, p))
    for at in range(done + 1, steps + 1):
        params, state = step(on_device.shard(drawn(at, names)), state, params)
    return params, state


def trained(n, stage, states, tx=ADAMW, names=ALL, **settings):
    """Unsharded parameters and state after four steps."""
    zero, own = zero_of(n, stage=stage, states=states, tx=tx, **settings)
    return jax.device_get(zero.full(updated(zero, own, 4, names=names)))


@functools.cache
def single(states, tx=ADAMW, names=ALL):
    """The same on one device."""
    return trained(1, 3, states, tx, names)


def assert_same_bits(want, got):
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        if a.dtype in (jnp.uint8, jnp.uint16, jnp.bfloat16):
            assert np.array_equal(a, b), f"{int((a != b).sum())} of {a.size}"
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("states", "n", "stage"), [("8bit", 3, 3), ("8bit", 8, 0), ("bf16", 5, 1)])
def test_bits_do_not_depend_on_n_or_stage(states, n, stage):
    want = single(states)
    narrow = jnp.dtype("uint8" if states == "8bit" else "bfloat16")
    assert narrow in {x.dtype for x in jax.tree.leaves(want[1])}
    assert_same_bits(want, trained(n, stage, states))


@pytest.mark.parametrize(
    ("states", "n", "offload"),
    [
        ("8bit", 3, tiers.NONE),
        ("8bit", 2, tiers.parse("optimizer,params")),
    ],
    ids=["device", "host"],
)
def test_bits_do_not_depend_on_pieces_or_memory_tier(states, n, offload):
    """Pieces also hold parts of rows of blocks that do not run along the last dim."""
    offload = dataclasses.replace(offload, piece_bytes=32768)
    got = trained(n, 3, states, names=FEW, offload=offload)
    assert_same_bits(single(states, names=FEW), got)


SPECS = {
    "^table$": PartitionSpec(None, "model"),
    "^stack$": PartitionSpec(None, "model", None),
    "^long$": PartitionSpec(),
}


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"model": 2, "data": 3}, {}),
        ({"replica": 2, "data": 2, "model": 2}, {"hierarchical": True}),
    ],
)
def test_bits_do_not_depend_on_the_mesh(sizes, settings):
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = zero_jax.make_mesh(**sizes, devices=devices)
    zero = zero_jax.Zero(mesh, states="8bit", model_specs=SPECS, **settings)
    got = jax.device_get(zero.full(updated(zero, zero.optimizer(ADAMW), 4)))
    assert_same_bits(single("8bit"), got)


def squares_of_zeros():
    """A transformation that makes something large of zeros."""

    def update(grads, state, params=None):
        squares = jax.tree.map(lambda a, g: a + g * g + 1e9 * (g == 0), state, grads)
        return jax.tree.map(lambda a, g: -0.1 * g / jnp.sqrt(a), squares, grads), squares

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.parametrize(
    "tx",
    [
        squares_of_zeros(),  # padding must not share a block with numbers
        optax.MultiSteps(optax.adamw(1e-2, mu_dtype=jnp.bfloat16), 2),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    ],
    ids=["padding", "MultiSteps, bf16 mu", "inject_hyperparams"],
)
def test_bits_of_other_transformations_do_not_depend_on_n(tx):
    assert_same_bits(single("8bit", tx, FEW), trained(3, 3, "8bit", tx, FEW))


def test_a_block_on_several_devices_sends_two_elements():
    """An all-reduce of its exponents, in the compiled update; elements are not gathered."""
    zero, own = zero_of(3, tx=optax.adamw(1e-2))
    params = zero.abstract(lambda: {"table": jnp.zeros((101, 96)), "long": jnp.zeros(4099)})
    state = own.init(params)
    step = jax.jit(lambda g, s, p: own.apply(g, s, p), donate_argnums=(1, 2))
    words = zero_jax.audit(step.lower(params, state, params).compile()).words
    scales = sum(x.size for x in state.inner.scales)
    # An all-reduce of two elements counts twice; 16 are for the norm.
    assert 4 * scales <= sum(words.values()) <= 4 * scales + 16


def test_a_skipped_step_changes_no_bit():
    zero, own = zero_of(3)
    params = zero.shard(drawn(0, FEW))
    step = jax.jit(lambda g, s, p: own.apply(g, s, p))
    params, state = step(zero.shard(drawn(1, FEW)), own.init(params), params)
    broken = zero.shard(drawn(2, FEW) | {"bias": jnp.full((7,), jnp.nan)})
    after, skipped = step(broken, state, params)
    assert int(skipped.guard.skipped) == 1
    pairs = zip(*map(jax.tree.leaves, ((after, skipped.inner), (params, state.inner))), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_frozen_leaves_have_no_state_and_the_others_the_same_bits():
    params, state = trained(3, 3, "8bit", frozen="^(table|bias)$")
    assert np.array_equal(params["table"], drawn(0)["table"])
    names = dict(paths.named_leaves(state.inner.inner.inner_state))
    assert not [name for name in names if "table" in name or "bias" in name]
    known = dict(paths.named_leaves(single("8bit")[1].inner.inner))
    own = [name for name, x in names.items() if x.dtype == jnp.uint8]
    assert sorted(own) == [f"1/0/{s}/{w}" for s in ("mu", "nu") for w in ("long", "stack", "wide")]
    assert all(np.array_equal(names[name], known[name]) for name in own)


ADAM = optax.adam(1e-2)


@pytest.mark.parametrize(
    ("tx", "want"),
    [
        (optax.adamw(1e-2), {"0/mu", "0/nu"}),
        (optax.GradientTransformation(jax.jit(ADAM.init), ADAM.update), {"0/mu", "0/nu"}),
        (optax.sgd(1e-2, momentum=0.9), {"0/trace"}),
        (optax.lion(1e-2), {"0/mu"}),
        (optax.adam(1e-2, mu_dtype=jnp.bfloat16), {"0/nu"}),
        # z are weights.
        (optax.contrib.schedule_free_adamw(1e-2), {"base_optimizer_state/0/nu"}),
    ],
)
def test_statistics_of_large_leaves_are_narrow(tx, want):
    """Averages of weights, counters and small leaves stay fp32."""
    state = jax.eval_shape(lambda p: initial(tx, p, "8bit"), drawn(0))
    assert set(state.narrow) == {f"{own}/{name}" for own in want for name in LARGE}


@pytest.mark.parametrize("settings", [{}, {"states": "fp32", "offload": "optimizer"}])
def test_integer_leaves_are_not_updated(settings):
    zero, own = zero_of(3, tx=optax.adamw(1e-2), **settings)
    params = zero.shard({"w": drawn(0)["table"], "ids": jnp.arange(4099)})
    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + 0.0 * p["ids"][0], own)
    after, _, _ = step(params, own.init(params), jnp.ones((6, 101)))
    after = zero.full(after)
    assert jnp.array_equal(after["ids"], jnp.arange(4099))
    assert not jnp.array_equal(after["w"], drawn(0)["table"])


def test_states_are_converted_between_dtypes():
    """To 8 bits within an eighth of what is in range, and back bitwise; to bf16 within 2^-7."""
    zero, own = zero_of(3)
    _, plain = zero_of(3, states="fp32")
    params, wide = updated(zero, plain, 3, names=FEW)
    state = own.restated(wide, params)
    assert state.inner.kind == "8bit" and own.restated(state, params) is state
    back = plain.restated(state, params)
    assert jax.tree.structure(back) == jax.tree.structure(wide)
    changed = 0.0
    for a, b in zip(*map(jax.tree.leaves, zero.full((wide, back))), strict=True):
        assert (np.abs(b - a) <= np.abs(a) / 8).mean() > 0.99
        changed = max(changed, float(np.abs(b - a).max()))
    assert changed > 0
    again = plain.restated(own.restated(back, params), params)
    for a, b in zip(*map(jax.tree.leaves, zero.full((again, back))), strict=True):
        assert np.array_equal(a, b)
    other = plain.restated(zero_of(3, states="bf16")[1].restated(wide, params), params)
    for a, b in zip(*map(jax.tree.leaves, (wide, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7)


def test_a_checkpoint_of_three_devices_resumes_on_two_with_the_same_bits(tmp_path):
    zero, own = zero_of(3)
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(2, updated(zero, own, 2, names=FEW))
    zero, own = zero_of(2)
    params = zero.abstract(lambda: drawn(0, FEW))
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        tree = checkpoints.restore((params, own.init(params))).tree
    resumed = updated(zero, own, 4, start=(2, *tree), names=FEW)
    assert_same_bits(single("8bit", names=FEW), jax.device_get(zero.full(resumed)))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(("stage", "n"), [(3, 1), (3, 3), (1, 8), (0, 8)])
def test_stored_bytes_per_device(stage, n, states):
    tx = optax.adamw(1e-2)
    zero, own = zero_of(n, states=states, stage=stage, tx=tx)
    params = zero.abstract(lambda: drawn(0))
    leaves = jax.tree.leaves((params, own.init(params)))
    stored = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    found = zero_jax.memory.estimate(drawn(0), shards=n, stage=stage, tx=tx, states=states)
    assert found.at_rest == stored
    if n == 1:
        large = sum(math.prod(SHAPES[name]) for name in LARGE)
        small = sum(map(math.prod, SHAPES.values())) - large
        scales = sum(math.prod(scales_shape(SHAPES[name])) for name in LARGE)
        each = {"fp32": 4 * large, "bf16": 2 * large, "8bit": large + 2 * scales}[states]
        counters = found.state - 2 * (each + 4 * small)
        assert 0 < counters < 32
