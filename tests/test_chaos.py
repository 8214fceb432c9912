"""Runs of several processes that are killed again and again; `chaos.py` does it for longer."""

import pytest
from chaos import chaos


@pytest.mark.slow
def test_killed_runs_have_the_losses_of_an_undisturbed_run(tmp_path):
    faults, found = chaos(4, 0, tmp_path, counts=(1, 2))
    assert faults.total() >= 4 and found["finished"] >= 1 and found["checkpoints"] > 0
