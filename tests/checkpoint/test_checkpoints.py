"""Checkpoints are bitwise equal on any mesh and stage, with any optimizer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from nvme_run import small_problem
from problems import ODD_GPT, Problem, assert_bitwise, gpt_problem, ulps, whole, zoo_problem
from test_parity import OPTIMIZERS

import zero_jax
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.writer import Handler

# eps: as in test_parity, so that no rounding error becomes a full step.
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
# Sums over other devices have another order: as in test_parity.
ULPS = 256
EVEN_GPT = dataclasses.replace(ODD_GPT, width=16, heads=4, vocab=20)  # a model axis divides it


@functools.cache
def problem(name: str) -> Problem:
    makers = {"zoo": lambda: zoo_problem(2), "no empty": lambda: zoo_problem(2, empty=False)}
    makers |= {"small": small_problem, "even gpt": lambda: gpt_problem(EVEN_GPT)}
    return makers[name]()


def zero_on(n, stage=3, model=1, **settings):
    mesh = zero_jax.make_mesh(model=model, devices=jax.devices()[: n * model])
    return zero_jax.Zero(mesh, stage, **settings)


def like(zero, made, tx=ADAMW):
    params = zero.abstract(made.make)
    return params, zero.optimizer(tx).init(params)


def filled(made, tx=ADAMW):
    """Parameters and state of random numbers, as NumPy arrays without padding."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return rng.random(leaf.shape).astype(leaf.dtype)
        return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, like(zero_on(1, 0), made, tx))


MASTERS = "optimizer,params"
# Devices on `data`, stage, devices on `model`, offload: each restores the checkpoint before.
# fmt: off
PLACES = {
    "zoo": [(8, 2, 1, None), (3, 3, 1, MASTERS), (1, 0, 1, None), (5, 1, 1, "optimizer"),
            (4, 3, 1, None)],
    "even gpt": [(2, 0, 2, None), (1, 1, 2, None), (2, 3, 4, None), (4, 2, 2, MASTERS)],
}
# fmt: on


@pytest.mark.parametrize("name", PLACES)
def test_bits_are_the_same_on_any_mesh_and_stage(tmp_path, name):
    want = filled(problem(name))
    more = {"config": {"a": 1}, "extra": {"sample": 240}}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(0, want, **more)
        for step, (n, stage, model, offload) in enumerate(PLACES[name], 1):
            zero = zero_on(n, stage, model, offload=offload)
            back = checkpoints.restore(like(zero, problem(name)))
            assert (back.step, back.config, back.extra) == (step - 1, *more.values())
            assert_bitwise(back.tree, want)
            checkpoints.save(step, back.tree, **more)
    manifest = Handler().restore(tmp_path / str(step) / "state")  # as Orbax alone reads it
    assert manifest.step == step and manifest.arrays.keys() == whole(want).keys()


def test_the_next_step_is_that_of_the_run_that_never_stopped(tmp_path):
    made = problem("small")
    zero = zero_on(4)
    tx = zero.optimizer(ADAMW)
    params = zero.shard(made.start)
    state, step = tx.init(params), zero.train_step(made.loss, tx)
    params, state, _ = step(params, state, made.batch)
    elsewhere = zero_on(3, 2, offload="optimizer")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (params, state))
        there = checkpoints.restore(like(elsewhere, made)).tree
        checkpoints.save(2, there)
        back = checkpoints.restore((params, state)).tree
    params, state, metrics = step(params, state, made.batch)
    again = step(*back, made.batch)
    assert_bitwise(again[:2], (params, state))
    assert again[2].loss == metrics.loss
    other = elsewhere.train_step(made.loss, elsewhere.optimizer(ADAMW))(*there, made.batch)
    np.testing.assert_allclose(other[2].loss, metrics.loss, rtol=ULPS * 2**-23)
    assert ulps(elsewhere.full(other[0]), zero.full(params)) <= ULPS


def test_a_state_in_files_is_saved_and_restored(tmp_path):
    made = problem("small")
    want = filled(made)
    filed = zero_on(4, offload=f"{MASTERS}:nvme={tmp_path / 'nvme'}")
    tx = filed.optimizer(ADAMW)
    params = filed.init(made.make)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, want)
        there = checkpoints.restore((params, tx.init(params))).tree
        assert_bitwise(there, want)
        with pytest.raises(ValueError, match="nvme"):
            tx.resume(there[0])  # the files no longer hold the state that was committed
        there = filed.train_step(made.loss, tx)(*there, made.batch)[:2]
        checkpoints.save(2, there)
        plain = zero_on(3, 1)
        back = checkpoints.restore(like(plain, made)).tree
        assert_bitwise(back, there)
        back = checkpoints.restore(like(plain, made), 1).tree
    stepped = plain.train_step(made.loss, plain.optimizer(ADAMW))(*back, made.batch)
    assert ulps(plain.full(stepped[0]), filed.full(there[0])) <= ULPS
    tx.resume(there[0])


# Their states have other shapes than the parameters, or are of several transformations.
MORE = ("MultiSteps of lamb", "masks on path and ndim")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", *SLOW])
def test_the_state_of_an_optimizer_is_restored(tmp_path, optimizer):
    tx = OPTIMIZERS[optimizer]
    made = problem("no empty" if optimizer == "muon" else "zoo")
    want = filled(made, tx)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, want)
        for step, zero in enumerate((zero_on(3), zero_on(2, 1)), 1):
            checkpoints.save(step, checkpoints.restore(like(zero, made, tx)).tree)
        assert_bitwise(checkpoints.restore(want).tree, want)


def test_numbers_keys_and_other_dtypes_are_restored(tmp_path):
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    arrays = {"empty": jnp.zeros((0, 3)), "zero": jnp.zeros(()), "host": np.arange(6).reshape(2, 3)}
    arrays |= {"bf16": jnp.arange(5, dtype=jnp.bfloat16), "done": np.array(True)}
    arrays["fp8"] = jnp.arange(5, dtype=jnp.float8_e4m3fn)
    tree = {"count": 7, "rate": 0.25, **keys, **arrays}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in keys.items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        for like in ({"key": jax.random.key(0)}, shapes):
            back = checkpoints.restore({**tree, "count": 0, "rate": 0.0, **like}).tree
            assert (back["count"], back["rate"], type(back["count"])) == (7, 0.25, int)
            for name in keys:
                assert jax.random.key_impl(back[name]) == jax.random.key_impl(tree[name])
            assert_bitwise(back, tree)


def test_arrays_that_may_differ_keep_their_value(tmp_path):
    said = []
    tree = {"a": jnp.full((2, 2), 9.0), "n": 0, "new": jnp.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"a": jnp.ones((4, 3)), "b": {"c": jnp.arange(5.0)}, "n": 3})
        back = checkpoints.restore(tree, may_differ="^(a|new|b/c)$", say=said.append)
    assert (back.missing, back.extra_arrays, back.changed) == (("new",), ("b/c",), ("a",))
    assert back.tree["n"] == 3 and float(back.tree["a"][0, 0]) == 9.0
    assert said == [str(back)] and all(name in said[0] for name in ("new", "b/c"))


def test_an_array_is_saved_as_it_was_when_save_was_called(tmp_path):
    """The next step reuses its memory while files are still being written."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        x = jnp.zeros(1 << 20)
        checkpoints.save(1, {"x": x})
        for _ in range(50):
            x = add(x)
        back = checkpoints.restore({"x": jnp.ones(1 << 20)}).tree["x"]
    assert float(jnp.abs(back).max()) == 0.0


def test_paths_with_two_dots_links_and_other_folders(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("²", "١٢", "notes"):
        (tmp_path / "ck" / name / "state").mkdir(parents=True)
        (tmp_path / "ck" / name / "state" / "manifest.json").write_text("{}")
    with Checkpoints("../link/../ck") as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(6.0)})
        assert checkpoints.directory == tmp_path / "ck" and checkpoints.steps == [1]
        assert checkpoints.restore({"w": jnp.zeros(6)}).tree["w"].sum() == 15
