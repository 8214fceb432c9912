"""A run of `train.py` that several files look at, and trainers that are compiled once."""

import contextlib
import io

import pytest
from small_runs import FIRST, TEXT, shared_trainer

import training.run
from training import charts
from training.main import main


@pytest.fixture
def no_picture():
    """Runs draw no picture, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "draw_losses", lambda folder: None)
        yield patch


@pytest.fixture
def shared(monkeypatch, no_picture):
    """Runs with equal settings have one compiled step."""
    monkeypatch.setattr(training.run, "Trainer", shared_trainer)


@pytest.fixture(scope="session")
def first_run(tmp_path_factory):
    """The folder of a run of four steps (`out`) and of its model (`small`), and its stdout."""
    home = tmp_path_factory.mktemp("first")
    (home / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.chdir(home)
        patch.setattr(training.run, "Trainer", shared_trainer)
        own = ["--output-dir", "out", "--export-dir", "small", "--sample-tokens", "8"]
        assert main([*FIRST, *own]) == 0
    return home, said.getvalue()
