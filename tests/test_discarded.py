"""A checkpoint that has a name is whole, also when it was about to be deleted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax import Checkpoints, discarded

RUN = Path(__file__).parent / "deleting_run.py"


@pytest.mark.parametrize("files", [0, 2, 4, 6, 8])
def test_killed_while_deleting_it_leaves_whole_checkpoints(tmp_path, files):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(RUN), str(tmp_path), str(files)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    like = {name: jnp.zeros(3, int) for name in ("a", "b", "c")}
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert len(checkpoints.steps) >= 2
        for step in checkpoints.steps:
            tree = checkpoints.restore(like, step, say=lambda _: None).tree
            assert all(np.all(np.asarray(x) == step) for x in tree.values())
    # The next run ends the work, and can save and discard the same steps again.
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert not (tmp_path / discarded.FOLDER).exists()
        for step in range(checkpoints.latest + 1, 8):
            checkpoints.save(step, {name: jnp.full(3, step) for name in like})
        assert checkpoints.steps == [6, 7]
    assert not (tmp_path / discarded.FOLDER).exists()


def test_what_cannot_be_deleted_is_said(tmp_path, monkeypatch, capsys):
    def fails(path):
        raise PermissionError(13, "not yours", str(path))

    discarded.clear(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(discarded.shutil, "rmtree", fails)
    discarded.clear(tmp_path)
    assert "still there: [Errno 13] not yours" in capsys.readouterr().err
