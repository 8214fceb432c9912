"""Runs of several processes that are killed again and again; `chaos.py` does it for longer."""

import pytest
from chaos import chaos


@pytest.mark.slow
def test_killed_runs_end_with_the_curve_of_one_that_nobody_disturbed(tmp_path):
    outcome = chaos(4, 0, tmp_path, counts=(1, 2))
    assert sum(outcome.kills.values()) >= 4 and outcome.finished >= 1
    assert outcome.checked > 0 and outcome.worst < 1e-4
