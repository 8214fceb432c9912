"""Unsupported arguments of checkpoints raise errors that name them."""

import errno
import fcntl
import os
import types

import jax
import jax.numpy as jnp
import pytest

from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.writer import Handler

TREE = {"weights": jnp.ones((4, 3)), "b": {"c": jnp.arange(5.0)}, "n": 3}
BYTES = 4 * (12 + 5) + 8  # of TREE


def opened(within="", **options):
    return lambda folder, _: Checkpoints(folder / within, **options).close()


def save(step, tree=TREE, **options):
    def call(folder, _):
        with Checkpoints(folder, **options) as checkpoints:
            checkpoints.save(step, tree)

    return call


def restore(step=None, within="", may_differ=None, without=None, **leaves):
    """Restores TREE with other leaves."""

    def call(folder, _):
        tree = {name: leaf for name, leaf in (TREE | leaves).items() if name != without}
        with Checkpoints(folder / within, read_only=True) as checkpoints:
            checkpoints.restore(tree, step, may_differ=may_differ)

    return call


def without_locks(folder, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    Checkpoints(folder)


def full_disk(blocks, files):
    def call(folder, monkeypatch):
        known = types.SimpleNamespace(f_bavail=blocks, f_frsize=4, f_files=10, f_favail=files)
        monkeypatch.setattr(os, "statvfs", lambda _: known)
        save(6)(folder, monkeypatch)

    return call


# fmt: off
REFUSALS = [
    ("keep=0", ValueError, opened(keep=0)),
    ("keep='3'", ValueError, opened(keep="3")),
    ("keep_every=-1", ValueError, opened(keep_every=-1)),
    ("file/inside", ValueError, opened("file/inside")),
    (os.strerror(errno.ENOSYS), ValueError, without_locks),
    ("read_only", ValueError, save(6, read_only=True)),
    *((f"step={step!r}", ValueError, save(step)) for step in (-1, 301.5, "7", None)),
    ("step 5", ValueError, save(5)),
    ("step 4", ValueError, save(jnp.int32(4))),
    ("a/b", ValueError, save(6, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})),
    ("weights.*str", ValueError, save(6, TREE | {"weights": "text"})),
    (rf"\b{BYTES - 4}\b.*\b{BYTES}\b", OSError, full_disk(BYTES // 4 - 1, 9)),
    (r"\b2\b.*\b6\b", OSError, full_disk(BYTES // 4, 2)),
    ("/none", ValueError, restore(within="none")),
    ("step 4.*5", ValueError, restore(step=4)),
    ("manifest.json", ValueError, lambda folder, _: Handler().restore(folder)),
    ("new", ValueError, restore(new=jnp.ones(2))),
    ("new", ValueError, restore(weights=jnp.ones(2), new=jnp.ones(2), may_differ="^w")),
    ("new.*like", ValueError, restore(new=jax.ShapeDtypeStruct((2,), "float32"), may_differ=".")),
    ("b/c", ValueError, restore(without="b")),
    (r"weights.*\[4, 3\].*\[3, 4\]", ValueError, restore(weights=jnp.ones((3, 4)))),
    ("weights.*float32.*int32", ValueError, restore(weights=jnp.ones((4, 3), jnp.int32))),
]
# fmt: on


@pytest.mark.parametrize(("named", "error", "call"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, named, error, call):
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, TREE)
    with pytest.raises(error, match=named):
        call(tmp_path, monkeypatch)
    monkeypatch.undo()
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps == [5], "nothing was written"
        checkpoints.restore(TREE)
