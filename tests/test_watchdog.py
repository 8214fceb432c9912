"""The watchdog of one process: what counts as stuck, and what is said of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_jax.watchdog import ENDED, Watchdog

ROOT = Path(__file__).parent.parent
STUCK = """
import sys, time
from zero_jax.watchdog import Watchdog
with Watchdog(sys.argv[1], dead_after=1, slow_factor=5, slow_after=1) as watchdog:
    for number in range(1, 9):
        time.sleep(0.1)
        watchdog.step(number)
    if sys.argv[2] == "pause":
        with watchdog.pause():
            time.sleep(3)
    else:
        time.sleep(600)
print("done")
"""


def run(folder, what):
    command = [sys.executable, "-c", STUCK, str(folder), what]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)


@pytest.mark.heavy
def test_a_step_that_takes_far_longer_than_those_before_ends_the_run_with_its_stacks(tmp_path):
    done = run(tmp_path, "stuck")
    assert done.returncode == ENDED
    assert "process 0 (pid" in done.stderr and "in one step for" in done.stderr
    assert "after step 8; the median is 0.1" in done.stderr
    assert 'File "<string>"' in done.stderr, "where it was"


@pytest.mark.heavy
def test_what_is_no_step_may_take_its_time(tmp_path):
    done = run(tmp_path, "pause")
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_a_start_leaves_no_more_than_its_own_folder(tmp_path):
    (tmp_path / "data").mkdir()
    for _ in range(2):
        with Watchdog(tmp_path):
            pass
    data, own = sorted(p.name for p in tmp_path.iterdir())
    assert data == "data" and own.startswith("start-")


def test_nothing_is_timed_before_there_is_something_to_compare_with(tmp_path):
    watchdog = Watchdog(tmp_path, slow_factor=2, slow_after=1e-9)
    for number in range(3):
        assert watchdog.limit is None
        watchdog.step(number)
    assert watchdog.limit is None
    watchdog.step(3)
    assert 0 < watchdog.limit < 1
    with watchdog.pause():
        assert watchdog.limit is None


@pytest.mark.parametrize("given", [{"dead_after": 0}, {"slow_factor": -1}, {"slow_after": 0}])
def test_numbers_are_checked(tmp_path, given):
    with pytest.raises(ValueError, match="positive number"):
        Watchdog(tmp_path, **given)
