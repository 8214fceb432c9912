"""The watchdog of one process: which steps and processes count as stuck, and its messages."""

import contextlib
import socket
import threading
import time

import jax
import pytest

from zero_jax.distributed.rendezvous import Peer
from zero_jax.distributed.watchdog import Watchdog

HANGS = [("before its first step", 0), ("after step 2", 2), ("in an evaluation", 8)]


def slow(monkeypatch, seconds, factor=20.0):
    """Sets when a step may be stuck."""
    monkeypatch.setattr("zero_jax.distributed.watchdog._SLOW_SECONDS", seconds)
    monkeypatch.setattr("zero_jax.distributed.watchdog._SLOW_FACTOR", factor)


def started(count=1, dead_after=0.5):
    """A watchdog, the reasons for which it would end the run, and those it is connected with."""
    watchdog, told = Watchdog(dead_after=dead_after), []
    pairs = [socket.socketpair() for _ in range(1, count)]
    watchdog.end_run = told.append
    watchdog._peers = {i: Peer(own) for i, (own, _) in enumerate(pairs, 1)}
    others = [Peer(other) for _, other in pairs]
    for i, other in enumerate(others, 1):
        other.send(name=f"r{i}", step=1)
    return watchdog, told, others


def test_limits_of_first_steps_pauses_and_later_steps(monkeypatch):
    slow(monkeypatch, 1e-9, 2)
    long = 12 * 0.1  # of the first steps and of a pause: 12 times `dead_after`, as `Watchdog` says
    with Watchdog(dead_after=0.1) as watchdog:
        for number in range(3):
            assert watchdog._activity.limit == pytest.approx(long)
            watchdog.step(number)
        assert watchdog._activity.limit == pytest.approx(long)
        watchdog.step(3)
        assert 0.2 <= watchdog._activity.limit < 1  # twice dead_after: it may wait for a dead one
        for times, limit in ((1, long), (5, 5 * long)):
            with watchdog.pause("saving", times=times):
                assert watchdog._activity.limit == pytest.approx(limit)
        assert watchdog._activity.limit < 1
        watchdog.rest()
        with watchdog.pause():  # no step follows it
            pass
        assert watchdog._activity is None
        watchdog.step(4)
        assert watchdog._activity is not None


@pytest.mark.parametrize(("said", "steps"), HANGS)
def test_a_hang_before_four_steps_or_in_an_evaluation_is_noticed(said, steps, monkeypatch):
    """An evaluation that makes progress may take any time."""
    slow(monkeypatch, 0.25)
    watchdog, told, _ = started(dead_after=0.125)  # a limit of 1.5 s
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


def holding(watchdog):
    """The first process has an error."""
    held = threading.Thread(target=watchdog.hold, args=(OSError("gone"),))
    held.start()
    return held


def test_an_error_is_raised_when_all_others_have_one_or_are_done_or_ends_the_run(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    watchdog, told, others = started(6, dead_after=2)
    with watchdog:
        for other in others[:4]:
            other.send(failed=True)
        held = holding(watchdog)
        held.join(1.5)
        assert held.is_alive() and others[0].state["running"] == 1, "one has none yet"
        others[4].send(left=True)
        held.join(20)
        assert others[0].state["failed"] and others[0].state["running"] == 0
        others[0].close()
        time.sleep(0.5)
    assert not held.is_alive() and not told
    watchdog, told, others = started(3)
    with watchdog:
        others[0].send(failed=True)
        held = holding(watchdog)
        while held.is_alive():
            others[1].send(step=2)
            time.sleep(0.05)
    (why,) = told
    assert "process 0 (pid" in why and why.endswith("OSError: gone")


def test_a_finished_process_is_not_dead_and_a_silent_one_is():
    watchdog, told, others = started(3)
    with watchdog:
        others[0].send(left=True)
        time.sleep(1.5)
    assert told and all(why.startswith("r2 ") for why in told), told
    assert "has sent no heartbeat" in told[0] and "at step 1" in told[0]


def test_a_step_that_takes_far_longer_than_those_before_is_stuck(monkeypatch):
    slow(monkeypatch, 0.5, 1)
    watchdog, told, _ = started()
    with watchdog:
        for number in range(5):
            watchdog.step(number)
        time.sleep(2)
    assert told and "in one step" in told[0] and "after step 4; the limit is 1 s" in told[0]
