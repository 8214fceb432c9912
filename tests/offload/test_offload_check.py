"""The check that offload changes no value here, and how its result is remembered."""

import functools
import runpy
import sys

import jax
import pytest
from jax.experimental import multihost_utils
from test_offload import ADAMW, zero_on

from zero_jax.commands.offload import main
from zero_jax.engine import offload_check

RUNS = {name: functools.cache(getattr(offload_check, name)) for name in ("_states", "_residuals")}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A machine that was not checked; each program runs once for all tests."""
    monkeypatch.setenv("ZERO_JAX_CACHE", str(tmp_path / "cache"))
    for name, run in RUNS.items():
        monkeypatch.setattr(offload_check, name, run)
    offload_check.fault_on.cache_clear()
    yield offload_check.marker_of(jax.local_devices()[0])
    offload_check.fault_on.cache_clear()


def test_the_check_passes_here_alone_and_is_remembered(fresh, monkeypatch, capsys):
    """Other processes may have passed it before, and would not take part in a collective."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = lambda x, **_: pytest.fail("a collective of all processes")  # noqa: E731
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(sys, "argv", ["offload", "--check"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.offload", run_name="__main__")
    assert capsys.readouterr().out.count("passed: ") == 2
    assert fresh.exists() and jax.__version__ in fresh.name
    monkeypatch.undo()
    monkeypatch.setenv("ZERO_JAX_CACHE", str(fresh.parent))
    monkeypatch.setattr(offload_check, "check", lambda device: pytest.fail("ran again"))
    zero_on(2, offload="optimizer").optimizer(ADAMW)


@pytest.mark.parametrize("name", RUNS)
def test_a_difference_raises_with_the_versions(fresh, name, monkeypatch, capsys):
    wrong = lambda device, on: jax.tree.map(lambda x: x + on, RUNS[name](device, on))  # noqa: E731
    monkeypatch.setattr(offload_check, name, wrong)
    with pytest.raises(ValueError, match=f"offload.*{jax.__version__}"):
        zero_on(2, offload="optimizer").optimizer(ADAMW)
    assert not fresh.exists()
    assert main(["--check"]) == 1 and "FAILED: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_a_cache_that_cannot_be_written_is_left_alone(fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_JAX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(offload_check, "check", lambda device: [offload_check.Outcome("it", 0.0)])
    zero_on(2, offload="optimizer").optimizer(ADAMW)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
