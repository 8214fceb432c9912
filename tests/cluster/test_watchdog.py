"""The watchdog of one process: what counts as stuck, and what is said of it."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from zero_jax.cluster.signs import Other
from zero_jax.cluster.watchdog import ENDED, Watchdog

ROOT = Path(__file__).parents[2]
STUCK = """
import sys, time
from zero_jax.cluster.watchdog import Watchdog
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


@pytest.mark.slow
def test_a_step_that_takes_far_longer_than_those_before_ends_the_run_with_its_stacks(tmp_path):
    done = run(tmp_path, "stuck")
    assert done.returncode == ENDED
    assert "process 0 (pid" in done.stderr and "in one step for" in done.stderr
    assert "after step 8; the median is 0.1" in done.stderr
    assert 'File "<string>"' in done.stderr, "where it was"


@pytest.mark.slow
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


def test_a_start_leaves_what_another_one_watches(tmp_path):
    with Watchdog(tmp_path) as first, Watchdog(tmp_path):
        assert first.signs.path_of(0).parent.is_dir()


LONG = 12 * 0.1  # of the first steps and of a pause: 12 times `dead_after`, as `Watchdog` says


def test_first_steps_and_pauses_have_a_longer_limit_than_later_steps(tmp_path):
    with Watchdog(tmp_path, dead_after=0.1, slow_factor=2, slow_after=1e-9) as watchdog:
        for number in range(3):
            assert watchdog.limit == pytest.approx(LONG)
            watchdog.step(number)
        assert watchdog.limit == pytest.approx(LONG)
        watchdog.step(3)
        assert 0.2 <= watchdog.limit < 1, "twice dead_after: who waits for a dead one is not stuck"
        with watchdog.pause("an evaluation"):
            assert watchdog.limit == pytest.approx(LONG)
        with watchdog.pause("saving", times=5):
            assert watchdog.limit == pytest.approx(5 * LONG)


HANGS = {"before its first step": 0, "after step 2": 2, "in an evaluation": 8}


@pytest.mark.parametrize("said", HANGS)
def test_a_hang_before_four_steps_or_in_an_evaluation_is_noticed(tmp_path, said):
    with Watchdog(tmp_path, dead_after=0.25, slow_after=0.5) as watchdog:
        watchdog.end_run = (told := []).append
        for number in range(1, HANGS[said] + 1):
            watchdog.step(number)
        pause = watchdog.pause("an evaluation") if "evaluation" in said else nullcontext()
        with pause:
            time.sleep(0.6)
            assert not told
            for _ in range(300):
                if told:
                    break
                time.sleep(0.1)
    assert told and said in told[0], told
    assert "`dead_after`" in told[0] and "limit is 3 s" in told[0]


def test_an_evaluation_that_makes_progress_may_take_any_time(tmp_path):
    with Watchdog(tmp_path, dead_after=0.25, slow_after=0.5) as watchdog:
        watchdog.end_run = (told := []).append
        watchdog.step(1)
        with watchdog.pause("an evaluation"):  # 4 s, with a limit of 3
            for _ in range(10):
                time.sleep(0.4)
                watchdog.progress()
    assert not told


def test_after_the_last_step_nothing_is_timed_until_there_is_another(tmp_path):
    watchdog = Watchdog(tmp_path)
    for number in range(5):
        watchdog.step(number)
    with watchdog.pause():
        pass
    assert watchdog.limit is not None
    watchdog.rest()
    with watchdog.pause():  # of an evaluation, say: what comes after it is no step either
        pass
    assert watchdog.limit is None
    watchdog.step(4)
    assert watchdog.limit is not None


@pytest.mark.parametrize("given", [{"dead_after": 0}, {"slow_factor": -1}, {"slow_after": 0}])
def test_numbers_are_checked(tmp_path, given):
    with pytest.raises(ValueError, match="positive number"):
        Watchdog(tmp_path, **given)


def holding(watchdog, count):
    """Has the first of so many processes meet an error; what it tells, when it is through."""
    told = []
    watchdog.count, watchdog.end_run = count, told.append
    held = threading.Thread(target=watchdog.hold, args=(OSError("gone"),))
    held.start()
    return told, held


def others(watchdog, **how):
    for rank, known in how.items():
        known = {"counter": 5, "step": 1, "process": rank, "failed": False} | known
        watchdog.signs.path_of(int(rank[1:])).write_text(json.dumps(known))


def test_an_error_goes_on_when_all_others_have_one_or_are_done(tmp_path):
    """All of them, not those alone that this one watches."""
    with Watchdog(tmp_path, dead_after=2) as watchdog:
        alike = {key: {"failed": True} for key in ("r1", "r2", "r3", "r4")}
        others(watchdog, **alike, r5={})
        told, held = holding(watchdog, 6)
        held.join(1.5)
        assert held.is_alive(), "one has none yet"
        assert json.loads(watchdog.signs.path_of(0).read_text())["failed"], "it is told"
        others(watchdog, r5={"counter": 0})
        held.join(20)
        assert not held.is_alive() and not told


def test_an_error_that_one_other_does_not_have_ends_the_run(tmp_path):
    with Watchdog(tmp_path, dead_after=0.5) as watchdog:
        others(watchdog, r1={"failed": True}, r2={})
        told, held = holding(watchdog, 3)
        held.join(20)
        assert not held.is_alive()
    (why,) = told
    assert "process 0 (pid" in why and why.endswith("do not have: OSError: gone")


class OnFullDisk:
    """What is written to it is lost."""

    def write(self, text):
        raise OSError("No space left on device")

    flush = write


@pytest.mark.parametrize("stderr", [io.StringIO, OnFullDisk])
def test_storage_that_is_away_or_full_says_nothing_of_anyone(tmp_path, monkeypatch, stderr):
    """It looks on though it cannot tell, and all others have their time again."""
    monkeypatch.setattr(sys, "stderr", said := stderr())
    with Watchdog(tmp_path, dead_after=1) as watchdog:
        others(watchdog, r1={})
        watchdog._others = {1: Other(time.monotonic())}
        watchdog.end_run = (told := []).append

        def full(counter):
            raise OSError("No space left on device")

        monkeypatch.setattr(watchdog, "_beat", full)
        time.sleep(3)
        assert not told
        assert watchdog._others[1].counter == 5, "it looks"
        monkeypatch.delattr(watchdog, "_beat")
        time.sleep(2)
        assert told, "and its time runs again"
    if stderr is io.StringIO:
        assert said.getvalue().count("No space left on device") == 1, "once, not each second"


def test_a_step_is_timed_where_no_file_can_be_read(tmp_path, monkeypatch):
    with Watchdog(tmp_path, dead_after=0.5, slow_after=0.5, slow_factor=1) as watchdog:
        watchdog.end_run = (told := []).append

        def away():
            raise OSError("the storage is away")

        monkeypatch.setattr(watchdog, "_look", away)
        for number in range(5):
            watchdog.step(number)
        time.sleep(2.5)
    assert told and "has been in one step" in told[0]
