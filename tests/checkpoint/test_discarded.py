"""A checkpoint that has a name is whole, also when it was about to be deleted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from zero_jax import Checkpoints
from zero_jax.checkpoint import retention

RUN = Path(__file__).parents[1] / "deleting_run.py"


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
        for step in range(checkpoints.latest + 1, 8):
            checkpoints.save(step, {name: jnp.full(3, step) for name in like})
        assert checkpoints.steps == [6, 7]
    assert not list((tmp_path / retention.FOLDER).iterdir())


def test_a_step_is_set_aside_twice(tmp_path):
    """As by a run that goes back and comes to the same step again; the first is not gone yet."""
    (tmp_path / retention.FOLDER / "1" / "state").mkdir(parents=True)
    (tmp_path / retention.FOLDER / "1" / "state" / "left").write_text("by a run that was killed")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3)})
        assert checkpoints.steps == [2]
    assert not list((tmp_path / retention.FOLDER).iterdir())


def test_what_cannot_be_deleted_is_said_once_and_the_rest_goes(tmp_path, monkeypatch, capsys):
    folder = tmp_path / retention.FOLDER
    for name in ("1/a", "1/b", "2/a"):
        (folder / name).mkdir(parents=True)
    real = os.rmdir

    def fails(path, **kwargs):
        if Path(path).name == "a" and ("1." in str(path) or "dir_fd" in kwargs):
            raise PermissionError(13, "not yours", str(path))
        real(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", fails)
    monkeypatch.setattr(retention, "_INTERVAL", 0.01)
    sweeper = retention.Sweeper(tmp_path)
    time.sleep(0.1)
    sweeper.close()
    assert capsys.readouterr().err.count("is discarded, but can't be deleted") == 2
    assert not list(folder.glob("*/b"))
    monkeypatch.undo()
    retention.Sweeper(tmp_path).close()
    assert not list(folder.iterdir())


def test_a_save_that_fails_is_told_and_not_waited_for(tmp_path, monkeypatch):
    """What Orbax says of a save in progress stays true when processes can't agree that it ended."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
        checkpoints.wait()

        def fails(_):
            raise RuntimeError("another process is gone")

        monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", fails)
        monkeypatch.setattr(ocp.CheckpointManager, "is_saving_in_progress", lambda _: True)
        with pytest.raises(OSError, match="another process is gone"):
            checkpoints.save(2, {"w": jnp.ones(3)})
        monkeypatch.undo()
