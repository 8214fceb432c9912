"""Processes that die, stop or fail: noticed, named, and restarted."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import small_runs as runs
from small_runs import finish, folder, metrics, start, start_many, wait_for

from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.distributed.watchdog import EXIT_CODE

pytestmark = pytest.mark.slow
__all__ = ["folder"]  # a fixture

FAILING = str(Path(__file__).parents[1] / "failing_run.py")
MANY = "--devices 2 --warmup-steps 2 --output-dir out --heartbeat-timeout-seconds 3"
MANY = [*runs.RUN, *MANY.split()]
FAILS = [(0, "step", False), (1, "step", True), (1, "save", False)]
LONG = [*MANY, "--max-steps", "100000", "--save-steps", "5"]


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_that_is_gone_ends_the_others_with_its_name(folder, rank, number):
    """A dead one at once, before JAX aborts the others; a stopped one after its timeout."""
    running = start_many(2, LONG)
    wait_for(lambda: runs.trained_until(5), running[0])
    addresses = [address for run in running for address in listening(run.pid)]
    gone, other = running[rank], running[1 - rank]
    gone.send_signal(number)
    began = time.monotonic()
    assert other.wait(timeout=60) == EXIT_CODE
    assert time.monotonic() - began < 3 * 3 + 10
    gone.kill()
    _, _, error = finish(running)[1 - rank]
    said = "is gone" if number == signal.SIGKILL else "has sent no heartbeat"
    assert f"process {rank} (pid {gone.pid} on" in error and said in error, error
    assert "at step" in error
    assert "Current thread" in error or "Thread 0x" in error, "the stacks"
    # Other machines cannot reach a run on one machine: 127.0.0.0/8, also in IPv6, or ::1.
    own = "(0{16}FFFF0000)?[0-9A-F]{6}7F|0{24}01000000"
    assert addresses and all(re.fullmatch(own, address) for address in addresses), addresses


def listening(pid):
    """Addresses at which a process listens, in hexadecimal; each 32 bits begin with the last."""
    links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir() if p.is_symlink()]
    known = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in known.splitlines() if "local_address" not in line]
    return [r[1].partition(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in links]


@pytest.mark.parametrize(("rank", "where", "full"), FAILS)
def test_an_error_of_one_process_ends_the_run(folder, rank, where, full):
    """Also where stderr is on a disk that is full; a save fails in all processes."""
    with open("/dev/full", "w") as device:
        how = {"stderr": device} if full else {}
        running = start_many(2, LONG, script=[FAILING, str(rank), where], **how)
        results = finish(running, seconds=200)
    assert [code for code, _, _ in results] == [EXIT_CODE if where == "step" else 2] * 2, results
    for own, (_, _, error) in enumerate(() if full else results):
        said = "this host's disk is gone" if where == "step" or own == rank else "error"
        assert said in error, error
        assert f"process {rank} (pid {running[rank].pid} on" in error or where == "save", error
    if where == "save":
        with Checkpoints("out/checkpoints", read_only=True) as checkpoints:
            assert checkpoints.steps == [5]


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


# The table of docs/multi-node.md: process, signal, exit code (None: it is started again).
CASES = [(who, signal.SIGHUP, 75) for who in ("supervisor", "process 0", "process 1")]
CASES += [("supervisor", signal.SIGKILL, -signal.SIGKILL)]
CASES += [(f"process {rank}", signal.SIGKILL, None) for rank in range(2)]


@pytest.mark.parametrize(("who", "number", "code"), CASES)
def test_a_signal_to_each_process_leaves_none_behind_and_the_command_resumes(
    folder, who, number, code
):
    ends = (who, code) == ("process 1", None)  # this run goes on to its last step
    args = [*LONG, "--supervise", "2", *(["--max-steps", "60"] if ends else [])]
    run = start(*args)
    saved = Path("out/checkpoints")
    wait_for(lambda: runs.trained_until(7) and any(p.name.isdigit() for p in saved.glob("*")), run)
    pids = children(run.pid)
    assert len(pids) == 2
    os.kill(run.pid if who == "supervisor" else pids[int(who[-1])], number)
    # A process that hangs until it is noticed takes 3 --heartbeat-timeout-seconds and 10 seconds.
    wait_until(lambda: not any(map(is_running, pids)), 20 if code == -9 else 90)
    if code is None and not ends:  # started again: it trains in the process that is left
        before = len(metrics("out"))
        wait_for(lambda: len(metrics("out")) > before, run)
        (left,) = children(run.pid)
        os.kill(left, signal.SIGTERM)  # asked to end: not started again
    ((got, out, error),) = finish([run], seconds=200)
    assert got == (0 if ends else 75 if code is None else code), error
    assert ("restarting 1 " in error) == (code is None), error
    if ends:
        assert "Resuming from" in out and len(runs.curve("out")) == 60
        assert runs.last_loss("out") < 2.5
        return
    if code == 75:
        steps = [int(p.name) for p in saved.glob("[0-9]*")]
        assert max(steps) == max(line["step"] for line in metrics("out"))
    # The same command as a launcher gives it next; 75: to be given once more.
    ((got, out, error),) = finish([start(*args, "--max-hours", "1e-6")], seconds=240)
    assert got == 75 and "Resuming from" in out and "restarting" not in error, error
