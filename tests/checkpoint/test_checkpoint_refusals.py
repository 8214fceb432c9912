"""Unsupported arguments of checkpoints raise errors that name them."""

import errno
import fcntl
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.writer import Handler

TREE = {"weights": jnp.ones((4, 3)), "b": {"c": jnp.arange(5.0)}, "n": 3}


def opened(folder, **options):
    with Checkpoints(folder, **options):
        pass


def save(step, tree=TREE, **options):
    def call(folder, _):
        with Checkpoints(folder, **options) as checkpoints:
            checkpoints.save(step, tree)

    return call


def restore(tree=TREE, step=None, **options):
    def call(folder, _):
        with Checkpoints(folder, read_only=True) as checkpoints:
            checkpoints.restore(tree, step, **options)

    return call


def elsewhere(folder, _):
    (folder / "file").write_text("")
    opened(folder / "file" / "inside")


def without_locks(folder, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    opened(folder)


def disk_with(blocks, files):
    def call(folder, monkeypatch):
        known = types.SimpleNamespace(f_bavail=blocks, f_frsize=4, f_files=10, f_favail=files)
        monkeypatch.setattr(os, "statvfs", lambda _: known)
        save(6)(folder, monkeypatch)

    return call


BYTES = 4 * (12 + 5) + 8  # of TREE
SHAPELESS = TREE | {"new": jax.ShapeDtypeStruct((2,), jnp.float32)}
# fmt: off
REFUSALS = [
    ("keep=0", ValueError, lambda f, _: opened(f, keep=0)),
    ("keep='3'", ValueError, lambda f, _: opened(f, keep="3")),
    ("keep_every=-1", ValueError, lambda f, _: opened(f, keep_every=-1)),
    ("file/inside", ValueError, elsewhere),
    (os.strerror(errno.ENOSYS), ValueError, without_locks),
    ("read_only", ValueError, save(6, read_only=True)),
    ("step=-1", ValueError, save(-1)),
    ("step=301.5", ValueError, save(301.5)),
    ("step='7'", ValueError, save("7")),
    ("step=None", ValueError, save(None)),
    ("step 5", ValueError, save(np.int64(5))),
    ("step 4", ValueError, save(jnp.int32(4))),
    ("a/b", ValueError, save(6, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})),
    ("weights.*str", ValueError, save(6, TREE | {"weights": "text"})),
    (rf"\b{BYTES - 4}\b.*\b{BYTES}\b", OSError, disk_with(BYTES // 4 - 1, 9)),
    (r"\b2\b.*\b6\b", OSError, disk_with(BYTES // 4, 2)),
    ("none", ValueError, lambda f, _: restore()(f / "none", _)),
    ("step 4.*5", ValueError, restore(step=4)),
    ("manifest.json", ValueError, lambda f, _: Handler().restore(f)),
    ("new", ValueError, restore(TREE | {"new": jnp.ones(2)})),
    ("new", ValueError, restore(TREE | {"new": jnp.ones(2)}, may_differ="^b")),
    ("new.*like", ValueError, restore(SHAPELESS, may_differ=".")),
    ("b/c", ValueError, restore({"weights": jnp.ones((4, 3)), "n": 3})),
    (r"weights.*\[4, 3\].*\[3, 4\]", ValueError, restore(TREE | {"weights": jnp.ones((3, 4))})),
    ("weights.*float32.*int32", ValueError,
     restore(TREE | {"weights": jnp.ones((4, 3), jnp.int32)})),
]
# fmt: on


@pytest.mark.parametrize(("name", "error", "call"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, name, error, call):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, TREE)
    with pytest.raises(error, match=name):
        call(tmp_path, monkeypatch)
    monkeypatch.undo()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps == [5], "nothing was written"
        checkpoints.restore(TREE)
