"""The watchdog of one process: which steps and processes count as stuck, and its messages."""

import contextlib
import json
import sys
import threading
import time
import unittest.mock

import pytest

from zero_jax.cluster.signs import Other
from zero_jax.cluster.watchdog import Watchdog

FULL = unittest.mock.Mock(side_effect=OSError("No space left on device"))
HANGS = [("before its first step", 0), ("after step 2", 2), ("in an evaluation", 8)]


def started(folder, **limits):
    """A watchdog, and the list of reasons for which it would end the run."""
    watchdog, told = Watchdog(folder, **limits), []
    watchdog.end_run = told.append
    return watchdog, told


def test_folders_of_earlier_starts_are_removed(tmp_path):
    (tmp_path / "data").mkdir()
    with Watchdog(tmp_path):
        pass
    with Watchdog(tmp_path) as first, Watchdog(tmp_path) as second:
        names = {watchdog.signs.folder.name for watchdog in (first, second)}
        assert {p.name for p in tmp_path.iterdir()} == {"data", *names}


def test_limits_of_first_steps_pauses_and_later_steps(tmp_path):
    long = 12 * 0.1  # of the first steps and of a pause: 12 times `dead_after`, as `Watchdog` says
    with Watchdog(tmp_path, dead_after=0.1, slow_factor=2, slow_after=1e-9) as watchdog:
        for number in range(3):
            assert watchdog.limit == pytest.approx(long)
            watchdog.step(number)
        assert watchdog.limit == pytest.approx(long)
        watchdog.step(3)
        assert 0.2 <= watchdog.limit < 1, "twice dead_after: waiting for a dead one is not stuck"
        for times, limit in ((1, long), (5, 5 * long)):
            with watchdog.pause("saving", times=times):
                assert watchdog.limit == pytest.approx(limit)
        assert watchdog.limit < 1
        watchdog.rest()
        with watchdog.pause():  # no step follows it
            pass
        assert watchdog.limit is None
        watchdog.step(4)
        assert watchdog.limit is not None


@pytest.mark.parametrize(("said", "steps"), HANGS)
def test_a_hang_before_four_steps_or_in_an_evaluation_is_noticed(tmp_path, said, steps):
    """An evaluation that makes progress may take any time."""
    watchdog, told = started(tmp_path, dead_after=0.125, slow_after=0.25)  # a limit of 1.5 s
    with watchdog, contextlib.ExitStack() as stack:
        for number in range(1, steps + 1):
            watchdog.step(number)
        if "evaluation" in said:
            stack.enter_context(watchdog.pause("an evaluation"))
            for _ in range(8):
                time.sleep(0.25)
                watchdog.progress()
        time.sleep(0.3)
        assert not told
        end = time.monotonic() + 30
        while not told and time.monotonic() < end:
            time.sleep(0.1)
    assert told and said in told[0] and "`dead_after`" in told[0] and "2 s" in told[0], told


def others(watchdog, **how):
    for rank, known in how.items():
        known = {"counter": 5, "step": 1, "process": rank, "failed": False} | known
        watchdog.signs.path_of(int(rank[1:])).write_text(json.dumps(known))


def holding(watchdog, count):
    """The first of so many processes has an error."""
    watchdog.count = count
    held = threading.Thread(target=watchdog.hold, args=(OSError("gone"),))
    held.start()
    return held


def test_an_error_is_raised_when_all_others_have_one_or_are_done_or_ends_the_run(tmp_path):
    """All of them, not only those that this one watches."""
    watchdog, told = started(tmp_path, dead_after=2)
    with watchdog:
        others(watchdog, **{f"r{rank}": {"failed": True} for rank in range(1, 5)}, r5={})
        held = holding(watchdog, 6)
        held.join(1.5)
        assert held.is_alive(), "one has none yet"
        assert json.loads(watchdog.signs.path_of(0).read_text())["failed"], "the others can read it"
        others(watchdog, r5={"counter": 0})
        held.join(20)
    assert not held.is_alive() and not told
    watchdog, told = started(tmp_path, dead_after=0.5)
    with watchdog:
        others(watchdog, r1={"failed": True}, r2={})
        holding(watchdog, 3).join(20)
    (why,) = told
    assert "process 0 (pid" in why and why.endswith("OSError: gone")


def test_a_finished_process_is_not_dead(tmp_path):
    watchdog, told = started(tmp_path, dead_after=0.5)
    with watchdog:
        others(watchdog, r1={"counter": 0}, r2={})
        watchdog._others = {rank: Other(time.monotonic()) for rank in (1, 2)}
        time.sleep(1.5)
    assert told and all(why.startswith("r2 ") for why in told), told


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_storage_that_fails_does_not_count_against_others(tmp_path, monkeypatch, capsys, lost):
    """It looks at the others and times its step though it cannot write, nor to stderr if `lost`."""
    if lost:
        monkeypatch.setattr(sys.stderr, "write", FULL, raising=False)
    watchdog, told = started(tmp_path, dead_after=1)
    with watchdog:
        others(watchdog, r1={})
        watchdog._others = {1: Other(time.monotonic())}
        monkeypatch.setattr(watchdog, "_beat", FULL)
        time.sleep(2)
        assert not told and watchdog._others[1].counter == 5, "it looks"
        monkeypatch.delattr(watchdog, "_beat")
        time.sleep(2)
        assert told and told[0].startswith("r1 "), "and the time of the other runs again"
    if not lost:
        assert capsys.readouterr().err.count("No space left") == 1, "once, not each second"
    watchdog, told = started(tmp_path, dead_after=0.5, slow_after=0.5, slow_factor=1)
    with watchdog:
        monkeypatch.setattr(watchdog, "_look", FULL)
        for number in range(5):
            watchdog.step(number)
        time.sleep(2)
    assert told and "in one step" in told[0] and "after step 4; the median is " in told[0]
