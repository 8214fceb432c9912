"""Checkpoints that do not fit, are damaged or cannot be written; and what a save takes."""

import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.checkpoint import arrays, writer
from zero_jax.checkpoint.arrays import Damaged
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import Manifest

ROOT = pathlib.Path(__file__).parents[2]


# What does not match, or is not there.


def small(value=1.0):
    return {"a": jnp.full((4, 3), value), "b": {"c": jnp.arange(5.0)}, "n": 3}


@pytest.fixture
def one(tmp_path):
    with Checkpoints(tmp_path / "one") as checkpoints:
        checkpoints.save(5, small())
    return tmp_path / "one"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (small() | {"d": jnp.ones(2)}, "d is missing"),
        ({"a": jnp.ones((4, 3)), "n": 3}, "b/c was not asked for"),
        (small() | {"a": jnp.ones((3, 4))}, r"a is float32\[4, 3\], not float32\[3, 4\]"),
        (small() | {"a": jnp.ones((4, 3), jnp.int32)}, r"a is float32\[4, 3\], not int32"),
        (small() | {"a": "text"}, "a is a str"),
    ],
)
def test_what_does_not_match_is_refused_with_its_path(one, tree, words):
    with Checkpoints(one, read_only=True) as checkpoints:
        with pytest.raises(ValueError, match=words):
            checkpoints.restore(tree)


def test_what_may_differ_keeps_its_value_and_is_told(one):
    said = []
    tree = {"a": jnp.full((2, 2), 9.0), "n": 0, "new": jnp.ones(2)}
    with Checkpoints(one, read_only=True) as checkpoints:
        back = checkpoints.restore(tree, may_differ="^(a|new|b/c)$", say=said.append)
        with pytest.raises(ValueError, match="new is missing"):
            checkpoints.restore(tree, may_differ="^(a|b)")
        with pytest.raises(ValueError, match="no value in `like`"):
            abstract = tree | {"new": jax.ShapeDtypeStruct((2,), jnp.float32)}
            checkpoints.restore(abstract, may_differ=".")
    assert (back.missing, back.extra_arrays, back.changed) == (("new",), ("b/c",), ("a",))
    assert back.tree["n"] == 3 and float(back.tree["a"][0, 0]) == 9.0
    assert said == [
        "step 5: restored 1 arrays; missing: new; extra: b/c; of another shape or dtype: a"
    ]


def test_two_leaves_of_one_name_are_refused_before_anything_is_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="two leaves are called 'a/b'"):
            checkpoints.save(1, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})
        assert checkpoints.latest is None


def test_a_folder_without_checkpoints_says_what_there_is(tmp_path, one):
    with Checkpoints(tmp_path / "none", read_only=True) as checkpoints:
        assert checkpoints.steps == [] and checkpoints.latest is None
        with pytest.raises(ValueError, match="does not hold a checkpoint: there are none"):
            checkpoints.restore(small())
    with Checkpoints(one, read_only=True) as checkpoints:
        with pytest.raises(ValueError, match="step 4: there are steps 5"):
            checkpoints.restore(small(), step=4)
        with pytest.raises(ValueError, match="read_only"):
            checkpoints.save(6, small())


def test_a_later_format_is_refused(one):
    path = one / "5" / "state" / "manifest.json"
    known = dataclasses.asdict(Manifest.read(path.parent)) | {"format": 99}
    text = json.dumps(known)
    path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    (one / "5" / "seal.json").unlink()
    with Checkpoints(one, read_only=True) as checkpoints:
        with pytest.raises(ValueError, match="later zero_jax"):
            checkpoints.restore(small())


def test_the_latest_and_every_kth_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, {"w": jnp.full(3, step)})
        assert checkpoints.steps == [4, 7, 8]
        with pytest.raises(ValueError, match="holds step 8 already"):
            checkpoints.save(8, {"w": jnp.ones(3)})
        assert float(checkpoints.restore({"w": jnp.ones(3, int)}, 7).tree["w"][0]) == 7


@pytest.mark.parametrize("given", [{"keep": 0}, {"keep": "3"}, {"keep_every": -1}])
def test_counts_are_checked(tmp_path, given):
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, **given)


def test_no_space_and_no_folder_are_said_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be written to"):
        Checkpoints(tmp_path / "file" / "inside")
    with Checkpoints(tmp_path / "full") as checkpoints:
        checkpoints.save(1, small())
        full = types.SimpleNamespace(f_bavail=1, f_frsize=10, f_files=0, f_favail=0)
        monkeypatch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(OSError, match="make room"):
            checkpoints.save(2, small())
        assert checkpoints.steps == [1]
        checkpoints.restore(small())


def test_a_write_that_fails_is_told_and_leaves_the_one_before(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small())
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(arrays.Array, "write", broken)
            checkpoints.save(2, small())
            with pytest.raises(OSError, match="saving to .* failed: disk on fire"):
                checkpoints.wait()
        assert checkpoints.steps == [1]
        checkpoints.save(2, small(2.0))
        assert float(checkpoints.restore(small()).tree["a"][0, 0]) == 2.0


def broken(*_):
    raise OSError("disk on fire")


def test_a_process_whose_part_is_not_there_fails_the_save(tmp_path, monkeypatch):
    """Each would write to a disk of its own: found at the save, not at the restore."""
    with Checkpoints(tmp_path) as checkpoints:
        write = writer.write_part

        def elsewhere(folder, args):
            write(folder, args)
            for part in folder.glob("part-*.json"):
                part.unlink()

        monkeypatch.setattr(writer, "write_part", elsewhere)
        checkpoints.save(1, small())
        with pytest.raises(OSError, match="parts of 0 of 1 processes"):
            checkpoints.wait()
        assert checkpoints.steps == []


def test_what_is_saved_is_what_it_was_when_save_was_called(tmp_path):
    """The step that follows reuses its memory while files are still being written."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        x = jnp.zeros(1 << 20)
        checkpoints.save(1, {"x": x})
        for _ in range(50):
            x = add(x)
        back = checkpoints.restore({"x": jnp.ones(1 << 20)}).tree["x"]
    assert float(jnp.abs(back).max()) == 0.0


# Two runs, and runs that are killed.


def test_storage_without_locks_is_no_other_run(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match="can't be locked.*Function not implemented.*flock"):
        Checkpoints(tmp_path)


HOLD = """
import sys, time
from zero_jax.checkpoint.checkpoints import Checkpoints
held = Checkpoints(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_until_the_first_has_ended_however(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another run writes .*process {first.pid} on"):
        Checkpoints(tmp_path)
    Checkpoints(tmp_path, read_only=True).close()
    first.kill()
    first.communicate()
    Checkpoints(tmp_path).close()


# Damage.


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:3])
    zero = zero_jax.Zero(mesh, 3)
    params = zero.init(lambda: {"w": jnp.arange(21.0).reshape(7, 3), "b": jnp.ones(3)})
    state = zero.optimizer(optax.sgd(0.1, momentum=0.9)).init(params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (params, state), config={"width": 3})
    folder, rng = tmp_path / "1", np.random.default_rng(0)
    files = files_of(folder)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        quiet = functools.partial(checkpoints.restore, (params, state), say=lambda _: None)
        quiet()
        for trial in range(240):
            path = files[trial % len(files)]
            good = path.read_bytes()
            at = int(rng.integers(len(good)))
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(good[:at] if trial % 3 == 0 else bad)
            with pytest.raises((Damaged, ValueError)):
                quiet()
                pytest.fail(f"{path}, byte {at} of {len(good)}: not noticed")
            path.write_bytes(good)
        for path in files:
            good = path.read_bytes()
            path.unlink()
            if path.name != "seal.json":  # a run can be killed before it is written
                with pytest.raises((Damaged, ValueError)):
                    quiet()
            path.write_bytes(good)
        for back, own in zip(*map(jax.tree.leaves, (quiet().tree, (params, state))), strict=True):
            assert np.asarray(back).tobytes() == np.asarray(own).tobytes()


def test_what_reaches_the_device_is_what_was_checked(one, monkeypatch):
    """A fault between the disk and the device: chunks are right, the array is not."""
    read = arrays.Array.read
    monkeypatch.setattr(arrays.Array, "read", lambda *a: read(*a) + np.float32(1))
    with Checkpoints(one, read_only=True) as checkpoints:
        with pytest.raises(Damaged, match="a is not as it was saved"):
            checkpoints.restore(small())
