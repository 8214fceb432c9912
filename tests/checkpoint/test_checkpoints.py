"""Checkpoints are bitwise equal on any mesh and stage; errors name unsupported arguments."""

import dataclasses
import errno
import fcntl
import os
import shutil
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from nvme_run import small_problem
from problems import ODD_GPT, assert_bitwise, gpt_problem, ulps, whole, zero_on, zoo_problem
from test_parity import OPTIMIZERS

from zero_jax.checkpoint.checkpoints import Checkpoints, OrbaxHandler
from zero_jax.checkpoint.leaves import leaves

# eps and ULPS as in test_parity.
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
ULPS = 256
SMALL = small_problem()
EVEN_GPT = dataclasses.replace(ODD_GPT, width=16, heads=4, vocab=20)  # a model axis divides it


def like(zero, made, tx=ADAMW):
    params = zero.eval_shape(made.make)
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
# Devices on `data`, stage, devices on `model`, offload, and "replicas" where shards are stored in
# parts over two of them: each restores the checkpoint before. The states of Adafactor and Muon
# have other shapes than the parameters.
PLACES = {
    "zoo": [(8, 2, 1, None), (3, 3, 1, MASTERS), (1, 0, 1, None), (5, 1, 1, "optimizer"),
            (4, 3, 1, None), (3, 3, 1, None, "replicas"),
            (4, 2, 1, None), (3, 3, 1, None, "replicas")],
    "even gpt": [(2, 0, 2, None), (1, 1, 2, None), (2, 3, 4, None), (4, 2, 2, MASTERS)],
    "adafactor": [(3, 3, 1, None), (2, 1, 1, None)], "muon": [(3, 3, 1, None), (2, 1, 1, None)],
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_bits_are_the_same_on_any_mesh_and_stage(tmp_path, name):
    made = gpt_problem(EVEN_GPT) if name == "even gpt" else zoo_problem(2, empty=name != "muon")
    tx, more = OPTIMIZERS.get(name, ADAMW), {"config": {"a": 1}, "extra": {"sample": 240}}
    want = filled(made, tx)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(0, want, **more)
        for step, (n, stage, model, offload, *parts) in enumerate(PLACES[name], 1):
            sizes = {"data": n, "model": model, "replica": 2 if parts else 1}
            zero = zero_on(sizes, stage, offload=offload, secondary_shards=bool(parts))
            back = checkpoints.restore(like(zero, made, tx))
            assert (back.step, back.config, back.extra) == (step - 1, *more.values())
            assert_bitwise(back.tree, want)
            checkpoints.save(step, back.tree, **more)
    manifest = OrbaxHandler().restore(tmp_path / str(step) / "state")  # as Orbax alone reads it
    assert manifest.step == step and manifest.arrays.keys() == whole(want).keys()


def test_a_state_in_files_is_saved_and_restored(tmp_path):
    filed = zero_on(4, offload=f"{MASTERS}:nvme={tmp_path / 'nvme'}")
    tx, params, want = filed.optimizer(ADAMW), filed.init(SMALL.make), filled(SMALL)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, want)
        there = checkpoints.restore((params, tx.init(params))).tree
        assert_bitwise(there, want)
        with pytest.raises(ValueError, match="nvme"):
            tx.resume(there[0])  # the files no longer hold the state that was committed
        there = filed.train_step(SMALL.loss, tx)(*there, SMALL.batch)[:2]
        checkpoints.save(2, there)
        plain = zero_on(3, 1)
        assert_bitwise(checkpoints.restore(like(plain, SMALL)).tree, there)
        back = checkpoints.restore(like(plain, SMALL), 1).tree
    stepped = plain.train_step(SMALL.loss, plain.optimizer(ADAMW))(*back, SMALL.batch)
    assert ulps(plain.unshard(stepped[0]), filed.unshard(there[0])) <= ULPS
    tx.resume(there[0])


def test_numbers_keys_and_other_dtypes_are_restored(tmp_path):
    """From a new checkpoint, and from one that zero_jax wrote in November 2026 on jax 0.10.2."""
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    arrays = {"empty": jnp.zeros((0, 3)), "zero": jnp.zeros(()), "host": np.arange(6).reshape(2, 3)}
    arrays |= {"bf16": jnp.arange(5, dtype=jnp.bfloat16), "done": np.array(True)}
    arrays["fp8"] = jnp.arange(5, dtype=jnp.float8_e4m3fn)
    params = {"w": jnp.arange(35.0).reshape(7, 5)}
    params["half"] = jnp.arange(40, dtype=jnp.bfloat16).reshape(10, 4)
    tree = {"count": 7, "rate": 0.25, **keys, **arrays, "params": zero_on(3).shard(params)}
    other = {"count": 0, "rate": 0.0, "params": zero_on(4).eval_shape(lambda: params)}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in keys.items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
        shutil.unpack_archive(os.path.dirname(__file__) + "/format_1.zip", tmp_path)
        for step, like in (0, {"key": jax.random.key(0)}), (0, shapes), (3, shapes):
            back = checkpoints.restore({**tree, **other, **like}, step).tree
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
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        x = jnp.zeros(1 << 20)
        checkpoints.save(1, {"x": x})
        for _ in range(50):
            x = add(x)
        back = checkpoints.restore({"x": jnp.ones(1 << 20)}).tree["x"]
    assert float(jnp.abs(back).max()) == 0.0
    held = [leaf.pieces() for leaf in leaves({"x": x})]
    add(x)
    assert held and x.is_deleted(), "a view of it would prevent its donation"


def test_paths_with_two_dots_and_links_and_what_is_kept(tmp_path, monkeypatch):
    """The latest two and every fourth; other folders are no checkpoints."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("²", "١٢", "notes"):
        (tmp_path / "ck" / name / "state").mkdir(parents=True)
        (tmp_path / "ck" / name / "state" / "manifest.json").write_text("{}")
    with Checkpoints("../link/../ck", keep=2, keep_every=4) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, {"w": jnp.full(3, step)})
        assert checkpoints.directory == tmp_path / "ck" and checkpoints.steps == [4, 7, 8]
        for step in (7, np.int64(7), jnp.int32(7)):
            back = checkpoints.restore({"w": jnp.ones(3, int)}, step).tree
            assert float(back["w"][0]) == checkpoints.manifest(step).step == 7


NEW = {"new": jnp.ones(2)}
TREE = {"weights": jnp.ones((4, 3)), "b": {"c": jnp.arange(5.0)}, "n": 3}
BYTES = 4 * (12 + 5) + 8  # of TREE
NO_LOCKS = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def full_disk(blocks, files):
    known = types.SimpleNamespace(f_bavail=blocks, f_frsize=4, f_files=10, f_favail=files)
    return lambda c, m: (m.setattr(os, "statvfs", lambda _: known), c.save(6, TREE))


def restoring(more, *args, **settings):
    return lambda c, m: c.restore(TREE | more, *args, **settings)


def saving(step, more):
    return lambda c, m: c.save(step, TREE | more)


REFUSALS = [  # c: checkpoints, m: monkeypatch
    ("keep=0", ValueError, lambda c, m: Checkpoints(c.directory, keep=0)),
    ("keep='3'", ValueError, lambda c, m: Checkpoints(c.directory, keep="3")),
    ("keep_every=-1", ValueError, lambda c, m: Checkpoints(c.directory, keep_every=-1)),
    ("file/inside", ValueError, lambda c, m: Checkpoints(c.directory / "file" / "inside")),
    ("/test_.*process PID ", ValueError, lambda c, m: Checkpoints(c.directory)),
    (NO_LOCKS.strerror, ValueError, lambda c, m: (
        m.setattr(fcntl, "flock", unittest.mock.Mock(side_effect=NO_LOCKS)),
        Checkpoints(c.directory / "other"))),
    ("read_only", ValueError, lambda c, m: Checkpoints(c.directory, read_only=True).save(6, TREE)),
    *((f"step={step!r}", ValueError, saving(step, {})) for step in (-1, 301.5, "7")),
    ("step=5", ValueError, saving(5, {})), ("step=.*4", ValueError, saving(jnp.int32(4), {})),
    ("b/c", ValueError, saving(6, {"b/c": jnp.ones(2)})),
    ("weights.*str", ValueError, saving(6, {"weights": "text"})),
    ("weights.*str", ValueError, restoring({"weights": "text"})),
    (rf"\b{BYTES - 4}\b.*\b{BYTES}\b", OSError, full_disk(BYTES // 4 - 1, 9)),
    (r"\b2\b.*\b6\b", OSError, full_disk(BYTES // 4, 2)),
    ("/none", ValueError,
     lambda c, m: Checkpoints(c.directory / "none", read_only=True).restore(TREE)),
    ("step 4.*5", ValueError, restoring({}, 4)),
    ("manifest.json", ValueError, lambda c, m: OrbaxHandler().restore(c.directory)),
    ("new", ValueError, restoring(NEW)),
    ("new", ValueError, restoring(NEW | {"weights": jnp.ones(2)}, may_differ="^w")),
    ("new.*like", ValueError, restoring(jax.eval_shape(lambda: NEW), may_differ=".")),
    ("b/c", ValueError, restoring({"b": {}})),
    (r"weights.*\[4, 3\].*\[3, 4\]", ValueError, restoring({"weights": jnp.ones((3, 4))})),
    ("weights.*float32.*int32", ValueError, restoring({"weights": jnp.ones((4, 3), jnp.int32)})),
]  # fmt: skip


@pytest.mark.parametrize(("named", "error", "call"), REFUSALS)
def test_an_unsupported_argument_is_named(tmp_path, monkeypatch, named, error, call):
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, TREE)
        with pytest.raises(error, match=named.replace("PID", str(os.getpid()))):
            call(checkpoints, monkeypatch)
        monkeypatch.undo()
        assert checkpoints.steps == [5], "nothing was written"
        checkpoints.restore(TREE)
