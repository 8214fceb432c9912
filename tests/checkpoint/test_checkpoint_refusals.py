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
ABSTRACT = jax.ShapeDtypeStruct((2,), jnp.float32)
NO_LOCKS = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def without_locks(c, m):
    def flock(*_):
        raise NO_LOCKS

    m.setattr(fcntl, "flock", flock)
    Checkpoints(c.directory / "other")


def full_disk(blocks, files):
    known = types.SimpleNamespace(f_bavail=blocks, f_frsize=4, f_files=10, f_favail=files)
    return lambda c, m: (m.setattr(os, "statvfs", lambda _: known), c.save(6, TREE))


# fmt: off
REFUSALS = [  # c: checkpoints, m: monkeypatch
    ("keep=0", ValueError, lambda c, m: Checkpoints(c.directory, keep=0)),
    ("keep='3'", ValueError, lambda c, m: Checkpoints(c.directory, keep="3")),
    ("keep_every=-1", ValueError, lambda c, m: Checkpoints(c.directory, keep_every=-1)),
    ("file/inside", ValueError, lambda c, m: Checkpoints(c.directory / "file" / "inside")),
    (NO_LOCKS.strerror, ValueError, without_locks),
    ("read_only", ValueError, lambda c, m: Checkpoints(c.directory, read_only=True).save(6, TREE)),
    ("step=-1", ValueError, lambda c, m: c.save(-1, TREE)),
    ("step=301.5", ValueError, lambda c, m: c.save(301.5, TREE)),
    ("step='7'", ValueError, lambda c, m: c.save("7", TREE)),
    ("step 5", ValueError, lambda c, m: c.save(5, TREE)),
    ("step 4", ValueError, lambda c, m: c.save(jnp.int32(4), TREE)),
    ("a/b", ValueError, lambda c, m: c.save(6, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}})),
    ("weights.*str", ValueError, lambda c, m: c.save(6, TREE | {"weights": "text"})),
    ("weights.*str", ValueError, lambda c, m: c.restore(TREE | {"weights": "text"})),
    (rf"\b{BYTES - 4}\b.*\b{BYTES}\b", OSError, full_disk(BYTES // 4 - 1, 9)),
    (r"\b2\b.*\b6\b", OSError, full_disk(BYTES // 4, 2)),
    ("/none", ValueError,
     lambda c, m: Checkpoints(c.directory / "none", read_only=True).restore(TREE)),
    ("step 4.*5", ValueError, lambda c, m: c.restore(TREE, 4)),
    ("manifest.json", ValueError, lambda c, m: Handler().restore(c.directory)),
    ("new", ValueError, lambda c, m: c.restore(TREE | {"new": jnp.ones(2)})),
    ("new", ValueError, lambda c, m: c.restore(
        TREE | {"new": jnp.ones(2), "weights": jnp.ones(2)}, may_differ="^w")),
    ("new.*like", ValueError, lambda c, m: c.restore(TREE | {"new": ABSTRACT}, may_differ=".")),
    ("b/c", ValueError, lambda c, m: c.restore(TREE | {"b": {}})),
    (r"weights.*\[4, 3\].*\[3, 4\]", ValueError,
     lambda c, m: c.restore(TREE | {"weights": jnp.ones((3, 4))})),
    ("weights.*float32.*int32", ValueError,
     lambda c, m: c.restore(TREE | {"weights": jnp.ones((4, 3), jnp.int32)})),
]
# fmt: on


@pytest.mark.parametrize(("named", "error", "call"), REFUSALS)
def test_refusals(tmp_path, monkeypatch, named, error, call):
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, TREE)
        with pytest.raises(error, match=named):
            call(checkpoints, monkeypatch)
        monkeypatch.undo()
        assert checkpoints.steps == [5], "nothing was written"
        checkpoints.restore(TREE)
