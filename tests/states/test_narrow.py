"""Optimizer states in 8 and 16 bits: the same bits for every N, stage and tier; what stays fp32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.offload import tiers
from zero_jax.sharding import paths
from zero_jax.states.narrow import narrow_leaves

ADAMW = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2))
SHAPES = {
    "table": (101, 96),  # odd: its blocks lie on two devices or more where N is odd
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


@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_states_in_host_memory_have_the_same_bits(states):
    """As those on devices, whatever the pieces that they come in."""
    want = trained(1, 3, states, ADAMW)
    for n, offload in ((2, "optimizer"), (3, "optimizer,params")):
        offload = dataclasses.replace(tiers.parse(offload), piece_bytes=32768)
        assert_same_bits(want, trained(n, 3, states, ADAMW, offload=offload))


@pytest.mark.parametrize("n", [1, 3])
def test_states_on_devices_come_in_any_pieces(n):
    """Also of parts of rows of blocks that do not run along the last dim."""
    offload = dataclasses.replace(tiers.NONE, piece_bytes=32768)
    assert_equal(trained(n, 3, "8bit", ADAMW), trained(n, 3, "8bit", ADAMW, offload=offload))


def test_padding_shares_no_block_with_numbers():
    """Of which some transformations make NaN."""
    tx = optax.rmsprop(1e-2, eps=0.0, momentum=0.9)
    for n in (1, 3, 8):
        params, _ = trained(n, 3, "8bit", tx)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_blocks_that_straddle_devices_send_their_exponents_alone():
    """A word for each 128 numbers, where a leaf would be gathered: seen in the compiled program."""
    zero, own = zero_of(3)
    params = zero.abstract(lambda: {"table": jnp.zeros((101, 96)), "long": jnp.zeros(4099)})
    state = own.init(params)
    step = jax.jit(lambda g, s, p: own.apply(g, s, p), donate_argnums=(1, 2))
    words = zero_jax.audit(step.lower(params, state, params).compile()).words
    scales = sum(x.size for x in state.inner.scales.values())
    # An all-reduce counts twice, of exponents and signs; and the norm that the guard takes.
    assert sum(words.values()) <= 4 * scales + 16


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
    names = dict(paths.named_leaves(got[1].inner.inner))
    assert not [name for name in names if "table" in name]
    for name, x in paths.named_leaves(want[1].inner.inner):
        if name in names and x.dtype == jnp.uint8 and "stack" in name:
            assert np.array_equal(x, names[name]), name


def test_what_is_kept_narrow_is_read_from_the_state():
    """Statistics as large as a matrix; not averages of weights, counters, or small leaves."""
    kept = {
        "adamw": (optax.adamw(1e-2), {"0/mu/table", "0/nu/table"}),
        "sgd": (optax.sgd(1e-2, momentum=0.9), {"0/trace/table"}),
        "lion": (optax.lion(1e-2), {"0/mu/table"}),
        "schedule-free": (optax.contrib.schedule_free_adamw(1e-2), None),
    }
    for name, (tx, want) in kept.items():
        found = narrow_leaves(tx, drawn(0))
        own = {x for x in found if x.endswith("table")}
        assert not [x for x in found if x.endswith(("bias", "one", "none"))], name
        assert own == want or (want is None and not [x for x in own if "z/" in x]), (name, own)


def test_a_call_inside_init_hides_nothing():
    adam = optax.adam(1e-2)
    jitted = optax.GradientTransformation(jax.jit(adam.init), adam.update)
    assert narrow_leaves(jitted, drawn(0)) == narrow_leaves(adam, drawn(0))


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


def test_leaves_with_one_path_are_refused():
    shape = jnp.ones((64, 64))
    with pytest.raises(ValueError, match=r"two leaves are called '0/mu/a/b'"):
        narrow_leaves(optax.adam(1e-2), {"a/b": shape, "a": {"b": shape}})


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_a_state_of_another_kind_is_refused(kept):
    zero, own = zero_of(2)
    params = zero.shard(drawn(0))
    state = zero_of(2, states=kept)[1].init(params)
    with pytest.raises(ValueError, match=rf"kept as {kept}.*states=.8bit.*restated"):
        own.update(params, state, params)


@pytest.mark.parametrize("steps", [0, 3])
def test_states_move_between_fewer_bits_and_fp32(steps):
    """And back: the numbers of the codes, to the bit; of fp32 to a sixteenth."""
    zero, own = zero_of(3)
    _, plain = zero_of(3, states="fp32")
    params, state = at_rest(zero, own, steps)
    wide = plain.restated(state, params)
    assert jax.tree.structure(wide) == jax.tree.structure(plain.init(params))
    again = own.restated(wide, params)
    assert_equal(zero.full(plain.restated(again, params)), zero.full(wide))
    other = zero_of(3, states="bf16")[1].restated(wide, params)
    pairs = zip(*map(jax.tree.leaves, (wide, plain.restated(other, params))), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2**-7)


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
