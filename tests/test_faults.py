"""Processes that die or get stuck: noticed, named, and gone on from."""

import os
import signal
import time
from pathlib import Path

import pytest
from test_resume import RUN, curve, last_loss, trained_until, wait_for
from test_train import finish, folder, metrics, start, start_many

from zero_jax.watchdog import ENDED

__all__ = ["folder"]  # a fixture

MANY = [*RUN, "--devices", "2", "--warmup", "2", "--out", "out", "--dead-after", "3"]


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_process_that_is_gone_ends_the_others_with_its_name(folder, number):
    running = start_many(2, [*MANY, "--steps", "100000", "--checkpoint-every", "100"])
    wait_for(lambda: trained_until(5), running[0])
    gone = running[1]
    gone.send_signal(number)
    began = time.monotonic()
    assert running[0].wait(timeout=60) == ENDED
    assert time.monotonic() - began < 3 * 3 + 10
    gone.kill()
    (_, _, error), _ = finish(running)
    assert f"process 1 (pid {gone.pid} on" in error, error
    assert "has given no sign of life" in error and "at step" in error
    assert "Current thread" in error or "Thread 0x" in error, "the stacks"


@pytest.mark.heavy
def test_supervised_processes_go_on_in_those_that_are_left(folder):
    args = [*MANY, "--steps", "40", "--checkpoint-every", "4"]
    run = start(*args, "--supervise", "2")
    wait_for(lambda: trained_until(10), run)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    ((code, out, error),) = finish([run], seconds=200)
    assert code == 0, error
    assert "starting 1 again" in error and "Going on from" in out
    assert len(curve("out")) == 40 and last_loss("out") < 2.5


@pytest.mark.heavy
def test_what_is_asked_for_wrongly_is_not_started_again(folder):
    ((code, _, error),) = finish([start(*MANY, "--supervise", "2", "--model", "nanno")])
    assert code == 2 and "again in" not in error, error
    ((code, _, error),) = finish([start(*RUN, "--supervise", "2")])
    assert code == 2 and "--supervise needs --out" in error


@pytest.mark.heavy
def test_a_supervised_run_ends_when_it_is_asked_to(folder):
    run = start(*MANY, "--steps", "100000", "--supervise", "2")
    wait_for(lambda: trained_until(3), run)
    run.send_signal(signal.SIGTERM)
    ((code, _, error),) = finish([run], seconds=60)
    assert code == 75, error
    saved = [int(p.name) for p in Path("out/checkpoints").glob("[0-9]*")]
    assert saved == [max(line["step"] for line in metrics("out"))]
