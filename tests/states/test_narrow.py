"""Optimizer states in 8 and 16 bits: the same bits for every N, stage and tier; what stays fp32."""

import dataclasses

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
from zero_jax.states.selection import selected

ADAMW = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2))
SHAPES = {
    "table": (101, 96),  # its blocks lie on several devices where N is 2, 3 or 8
    "stack": (5, 64, 48),
    "wide": (50, 257),
    "long": (4099,),
    "bias": (7,),
    "none": (0, 3),
    "one": (),
}


def drawn(seed):
    draw = np.random.default_rng(seed)
    return {
        name: jnp.asarray(draw.standard_normal(s) * np.exp(draw.standard_normal(s)), jnp.float32)
        for name, s in SHAPES.items()
    }


def zero_of(n, *, stage=3, states="8bit", tx=None, **settings):
    """A `Zero` of n devices, and its optimizer."""
    mesh = zero_jax.make_mesh(devices=jax.devices()[:n])
    zero = zero_jax.Zero(mesh, stage=stage, states=states, **settings)
    return zero, zero.optimizer(optax.adamw(1e-2) if tx is None else tx)


def at_rest(zero, own, steps, start=None):
    """Parameters and the state after so many steps with gradients that are given.

    Args:
        start: Steps that are done, and parameters and state after them.
    """
    if start is None:
        params = zero.shard(drawn(0))
        start = 0, params, own.init(params)
    done, params, state = start
    on_device = dataclasses.replace(zero, offload=None)  # gradients are
    step = jax.jit(lambda g, s, p: own.apply(g, s, p))
    for at in range(done + 1, steps + 1):
        params, state = step(on_device.shard(drawn(at)), state, params)
    return params, state


def trained(n, stage, states, tx, *, steps=4, **settings):
    """Parameters and the state after some steps, whole."""
    zero, own = zero_of(n, stage=stage, states=states, tx=tx, **settings)
    return jax.device_get(zero.full(at_rest(zero, own, steps)))


def assert_equal(want, got):
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.array_equal(a, b)


def assert_same_bits(want, got):
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        if a.dtype in (jnp.uint8, jnp.uint16, jnp.bfloat16):
            assert np.array_equal(a, b), f"{int((a != b).sum())} of {a.size}"
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_the_bits_are_the_same_for_every_n_and_stage(states):
    want = trained(1, 3, states, ADAMW)
    kept = {x.dtype for x in jax.tree.leaves(want[1])}
    assert jnp.dtype("uint8" if states == "8bit" else "bfloat16") in kept
    for n, stage in ((2, 1), (3, 2), (3, 3), (5, 3), (8, 3), (8, 0)):
        assert_same_bits(want, trained(n, stage, states, ADAMW))


@pytest.mark.parametrize("states", [pytest.param("8bit", marks=pytest.mark.slow), "bf16"])
def test_states_in_host_memory_have_the_same_bits(states):
    """As those on devices, whatever the pieces that they come in."""
    want = trained(1, 3, states, ADAMW)
    for n, offload in ((2, "optimizer"), (3, "optimizer,params")):
        offload = dataclasses.replace(tiers.parse(offload), piece_bytes=32768)
        assert_same_bits(want, trained(n, 3, states, ADAMW, offload=offload))


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_states_on_devices_come_in_any_pieces(n):
    """Also of parts of rows of blocks that do not run along the last dim."""
    offload = dataclasses.replace(tiers.NONE, piece_bytes=32768)
    assert_equal(trained(n, 3, "8bit", ADAMW), trained(n, 3, "8bit", ADAMW, offload=offload))


def test_padding_shares_no_block_with_numbers():
    """Of zeros some transformations make something large."""

    def update(grads, state, params=None):
        squares = jax.tree.map(lambda a, g: a + g * g + 1e9 * (g == 0), state, grads)
        return jax.tree.map(lambda a, g: -0.1 * g / jnp.sqrt(a), squares, grads), squares

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    want = trained(1, 3, "8bit", tx)
    for n in (3, 8):
        assert_same_bits(want, trained(n, 3, "8bit", tx))


def test_blocks_that_straddle_devices_send_their_exponents_alone():
    """Two words for each block, where a leaf would be gathered: seen in the compiled program."""
    zero, own = zero_of(3)
    params = zero.abstract(lambda: {"table": jnp.zeros((101, 96)), "long": jnp.zeros(4099)})
    state = own.init(params)
    step = jax.jit(lambda g, s, p: own.apply(g, s, p), donate_argnums=(1, 2))
    words = zero_jax.audit(step.lower(params, state, params).compile()).words
    scales = sum(x.size for x in state.inner.scales)
    # An all-reduce of two words counts twice; and the norm that the guard takes.
    assert 4 * scales <= sum(words.values()) <= 4 * scales + 16


SPECS = {
    "^table$": PartitionSpec(None, "model"),
    "^stack$": PartitionSpec(None, "model", None),
    "^long$": PartitionSpec(),
}


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"model": 2, "data": 3}, {"model_specs": SPECS}),
        ({"replica": 2, "data": 3}, {"hierarchical": True}),
        ({"replica": 2, "data": 2, "model": 2}, {"hierarchical": True, "model_specs": SPECS}),
    ],
)
def test_other_meshes_have_the_same_bits(sizes, settings):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = zero_jax.make_mesh(**sizes, devices=devices)
    zero = zero_jax.Zero(mesh, states="8bit", **settings)
    got = jax.device_get(zero.full(at_rest(zero, zero.optimizer(ADAMW), 4)))
    assert_same_bits(trained(1, 3, "8bit", ADAMW), got)


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adamw(1e-2), 2),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
        optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    ],
)
def test_wrapped_transformations_have_the_same_bits(tx):
    assert_same_bits(trained(1, 3, "8bit", tx), trained(3, 3, "8bit", tx))


def test_a_step_that_is_skipped_changes_no_bit():
    zero, own = zero_of(3)
    params = zero.shard(drawn(0))
    step = jax.jit(lambda g, s, p: own.apply(g, s, p))
    params, state = step(zero.shard(drawn(1)), own.init(params), params)
    broken = zero.shard(drawn(2) | {"bias": jnp.full((7,), jnp.nan)})
    after, skipped = step(broken, state, params)
    assert int(skipped.guard.skipped) == 1
    assert_equal((after, skipped.inner), (params, state.inner))


def test_frozen_leaves_have_no_state_and_the_others_the_same_bits():
    want = trained(1, 3, "8bit", optax.adamw(1e-2))
    got = trained(3, 3, "8bit", optax.adamw(1e-2), frozen="^(table|bias)$")
    assert np.array_equal(got[0]["table"], drawn(0)["table"])
    masked = got[1].inner.inner.inner_state
    names = dict(paths.named_leaves(masked))
    assert not [name for name in names if "table" in name or "bias" in name]
    known = dict(paths.named_leaves(want[1].inner.inner))
    own = [name for name, x in names.items() if x.dtype == jnp.uint8]
    assert sorted(own) == [f"0/{s}/{w}" for s in ("mu", "nu") for w in ("long", "stack", "wide")]
    assert all(np.array_equal(names[name], known[name]) for name in own)


@pytest.mark.parametrize(
    ("tx", "want"),
    [
        (optax.adamw(1e-2), {"0/mu", "0/nu"}),
        (optax.sgd(1e-2, momentum=0.9), {"0/trace"}),
        (optax.lion(1e-2), {"0/mu"}),
        (optax.adam(1e-2, mu_dtype=jnp.bfloat16), {"0/nu"}),
        # z are weights.
        (optax.contrib.schedule_free_adamw(1e-2), {"base_optimizer_state/0/nu"}),
    ],
)
def test_what_is_kept_narrow_is_read_from_the_state(tx, want):
    """Statistics as large as a matrix; not averages of weights, counters, or small leaves."""
    state = initial(tx, drawn(0), "8bit")
    large = ("long", "stack", "table", "wide")
    assert set(state.narrow) == {f"{own}/{name}" for own in want for name in large}


def test_a_call_inside_init_hides_nothing():
    adam = optax.adam(1e-2)
    jitted = optax.GradientTransformation(jax.jit(adam.init), adam.update)
    assert selected(jitted, drawn(0)) == selected(adam, drawn(0))


@pytest.mark.parametrize("settings", [{}, {"states": "fp32", "offload": "optimizer"}])
def test_leaves_that_are_no_floats_stay_as_they_are(settings):
    """As frozen ones: they have a gradient that is no float either."""
    zero, own = zero_of(3, **settings)
    params = zero.shard({"w": drawn(0)["table"], "ids": jnp.arange(4099)})
    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + 0.0 * p["ids"][0], own)
    after, _, _ = step(params, own.init(params), jnp.ones((6, 101)))
    after = zero.full(after)
    assert jnp.array_equal(after["ids"], jnp.arange(4099))
    assert not jnp.array_equal(after["w"], drawn(0)["table"])


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_a_state_of_another_kind_is_refused(kept):
    zero, own = zero_of(2)
    params = zero.shard(drawn(0))
    state = zero_of(2, states=kept)[1].init(params)
    with pytest.raises(ValueError, match=rf"kept as {kept}.*states=.8bit.*restated"):
        own.update(params, state, params)


def test_states_move_between_fewer_bits_and_fp32():
    """To 8 bits within an eighth of what is in range, and back to the bit; to bf16 within 2^-7."""
    zero, own = zero_of(3)
    _, plain = zero_of(3, states="fp32")
    params, wide = at_rest(zero, plain, 3)
    state = own.restated(wide, params)
    assert state.inner.kind == "8bit" and own.restated(state, params) is state
    back = plain.restated(state, params)
    assert jax.tree.structure(back) == jax.tree.structure(wide)
    seen = 0.0
    for a, b in zip(*map(jax.tree.leaves, zero.full((wide, back))), strict=True):
        near = np.abs(b - a) <= np.abs(a) / 8
        assert near.mean() > 0.99 if near.size else True
        seen = max(seen, float(np.abs(b - a).max()) if near.size else 0.0)
    assert seen > 0
    again = plain.restated(own.restated(back, params), params)
    assert_equal(zero.full(again), zero.full(back))
    other = plain.restated(zero_of(3, states="bf16")[1].restated(wide, params), params)
    for a, b in zip(*map(jax.tree.leaves, (wide, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7)


def test_what_is_no_state_of_this_optimizer_is_not_made_one():
    zero, own = zero_of(2)
    params = zero.shard(drawn(0))
    with pytest.raises(ValueError, match=r"make it with the wrapped"):
        own.restated(optax.adamw(1e-2).init(drawn(0)), params)
    momentum = zero_of(2, states="fp32", tx=optax.sgd(1e-2, momentum=0.9))[1].init(params)
    with pytest.raises(ValueError, match=r"of another transformation.*trace.*mu"):
        own.restated(momentum, params)


def test_a_checkpoint_of_three_devices_goes_on_on_two(tmp_path):
    """To the bit of those who never stopped."""
    want = trained(1, 3, "8bit", ADAMW, steps=4)
    zero, own = zero_of(3, tx=ADAMW)
    saved = at_rest(zero, own, 2)
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(2, saved)
    zero, own = zero_of(2, tx=ADAMW)
    params = zero.abstract(lambda: drawn(0))
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        tree = checkpoints.restore((params, own.init(params))).tree
    assert_same_bits(want, jax.device_get(zero.full(at_rest(zero, own, 4, start=(2, *tree)))))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_at_rest_are_those_of_the_closed_form(states, stage):
    tx = optax.adamw(1e-2)
    for n in (1, 3, 8):
        zero, own = zero_of(n, states=states, stage=stage, tx=tx)
        params = zero.shard(drawn(0))
        rests = sum(
            x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, own.init(params)))
        )
        found = zero_jax.memory.estimate(drawn(0), shards=n, stage=stage, tx=tx, states=states)
        assert found.at_rest == rests
        if n == 1 and stage == 3:
            large = sum(int(np.prod(s)) for s in SHAPES.values() if np.prod(s) >= 4096)
            small = sum(int(np.prod(s)) for s in SHAPES.values()) - large
            scales = sum(
                int(np.prod(scales_shape(s))) for s in SHAPES.values() if np.prod(s) >= 4096
            )
            each = {"fp32": 4 * large, "bf16": 2 * large, "8bit": large + 2 * scales}[states]
            counters = found.state - 2 * (each + 4 * small)
            assert 0 < counters < 32


def test_auto_says_why_nothing_can_be_run():
    zero = zero_jax.Zero(zero_jax.make_mesh(), "auto", states="8bit", memory_limit=1e9)
    params = zero.abstract(lambda: {"w": jnp.zeros((64, 64))})
    rows = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    with pytest.raises(ValueError, match=r"no candidate can be run.*clip_by_block_rms.*8bit"):
        zero.choose(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adafactor(1e-2), params, rows)


@pytest.mark.parametrize(
    ("settings", "tx", "words"),
    [
        ({"states": "4bit"}, optax.adamw(1e-2), ["4bit", "8bit"]),
        ({"states": "8bit", "offload": "optimizer:nvme=DIR"}, optax.adamw(1e-2), ["nvme", "8bit"]),
        ({"states": "8bit"}, optax.contrib.muon(1e-2), ["8bit", "whole", "adamw"]),
        ({"states": "bf16"}, optax.adafactor(1e-2), ["bf16", "clip_by_block_rms", "adamw"]),
    ],
)
def test_what_can_not_be_kept_narrow_is_refused(settings, tx, words, tmp_path):
    """Before memory is taken, with one way out."""
    if "offload" in settings:
        settings = settings | {"offload": settings["offload"].replace("DIR", str(tmp_path))}
    with pytest.raises(ValueError) as error:
        zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, **settings)
        shapes = {"w": jnp.zeros((64, 128))}
        zero.optimizer(tx).init(zero.abstract(lambda: shapes))
    assert all(word in str(error.value) for word in words), error.value
