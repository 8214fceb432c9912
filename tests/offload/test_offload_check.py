"""The check that offload changes no value here, and what is remembered of it."""

import os
import subprocess
import sys

import jax
import pytest
from jax.experimental import multihost_utils
from test_offload import ADAMW, zero_on

from zero_jax.commands.offload import main
from zero_jax.engine import offload_check


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_JAX_CACHE", str(tmp_path / "cache"))
    offload_check.fault_on.cache_clear()
    yield offload_check.marker_of(jax.local_devices()[0])
    offload_check.fault_on.cache_clear()


def test_the_check_passes_here_and_is_remembered(fresh, capsys):
    assert main(["--check"]) == 0
    assert capsys.readouterr().out.count("passed: ") == 2
    assert fresh.exists() and jax.__version__ in fresh.name


@pytest.mark.parametrize("what", ["_states", "_residuals"])
def test_a_difference_refuses_offload_with_the_versions(fresh, what, monkeypatch, capsys):
    run = getattr(offload_check, what)
    wrong = lambda device, on: jax.tree.map(lambda x: x + on, run(device, on))  # noqa: E731
    monkeypatch.setattr(offload_check, what, wrong)
    with pytest.raises(ValueError, match=f"wrong results with jax {jax.__version__}.*FAILED"):
        zero_on(2, offload="optimizer").optimizer(ADAMW)
    assert not fresh.exists()
    assert main(["--check"]) == 1 and "FAILED: " in capsys.readouterr().out


def test_a_cache_that_can_not_be_written_is_left_alone(fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_JAX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(offload_check, "check", lambda device: [offload_check.Outcome("it", 0.0)])
    zero_on(2, offload="optimizer").optimizer(ADAMW)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_was_remembered_is_not_run_again(fresh, monkeypatch):
    offload_check.remember(fresh)
    monkeypatch.setattr(offload_check, "check", lambda device: pytest.fail("ran again"))
    zero_on(2, offload="optimizer").optimizer(ADAMW)


def test_the_check_asks_no_other_process(fresh, monkeypatch):
    """Others may have passed it before, and do not come."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = lambda x, **_: pytest.fail("a collective of all processes")  # noqa: E731
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert [str(o) for o in offload_check.check(jax.local_devices()[0]) if not o.passed] == []


def test_the_command_line_says_what_it_did(tmp_path):
    env = {**os.environ, "ZERO_JAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "zero_jax.offload", "--help"]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "--check" in out.stdout and not out.stderr
