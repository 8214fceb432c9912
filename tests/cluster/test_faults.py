"""Processes that die or get stuck: noticed, named, and gone on from."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from test_resume import RUN, curve, last_loss, trained_until, wait_for
from test_train import finish, folder, metrics, start, start_many

from training.supervise import free_address
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.cluster.watchdog import ENDED

__all__ = ["folder"]  # a fixture

FAILING = str(Path(__file__).parents[1] / "failing_run.py")
MANY = [*RUN, "--devices", "2", "--warmup", "2", "--out", "out", "--dead-after", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_process_that_is_gone_ends_the_others_with_its_name(folder, number, rank):
    """A dead one at once, before JAX aborts the others; a stopped one after --dead-after."""
    running = start_many(2, [*MANY, "--steps", "100000", "--checkpoint-every", "100"])
    wait_for(lambda: trained_until(5), running[0])
    gone, other = running[rank], running[1 - rank]
    gone.send_signal(number)
    began = time.monotonic()
    assert other.wait(timeout=60) == ENDED
    assert time.monotonic() - began < 3 * 3 + 10
    gone.kill()
    _, _, error = finish(running)[1 - rank]
    said = "is gone" if number == signal.SIGKILL else "has given no sign of life"
    assert f"process {rank} (pid {gone.pid} on" in error and said in error, error
    assert "at step" in error
    assert "Current thread" in error or "Thread 0x" in error, "the stacks"


@pytest.mark.slow
def test_processes_that_do_not_find_each_other_say_so_with_a_code_of_their_own(folder):
    args = [*MANY, "--devices", "3", "--join-seconds", "3", "--coordinator", free_address()]
    args += ["--num-processes", "3"]
    results = finish([start(*args, "--process-id", rank) for rank in ("0", "2")])
    assert [code for code, _, _ in results] == [69, 69], results
    for _, _, error in results:
        assert "process 1 of 3 did not come within 3 s" in error and "Traceback" not in error
    ((code, _, error),) = finish(
        [start(*MANY, "--coordinator", "here", "--num-processes", "2", "--process-id", "0")]
    )
    assert code == 2 and "write host:port" in error and "Traceback" not in error


@pytest.mark.slow
def test_a_setting_of_jax_that_differs_is_told_before_the_run(folder):
    args = [*MANY, "--coordinator", free_address(), "--num-processes", "2", "--process-id"]
    other = {"JAX_DEFAULT_PRNG_IMPL": "rbg"}
    results = finish([start(*args, "0"), start(*args, "1", environment=other)])
    for code, _, error in results:
        assert code == 2, error
        assert "disagree on jax_default_prng_impl: process 0 has 'threefry2x32'" in error


@pytest.mark.slow
def test_a_run_on_one_machine_cannot_be_reached_from_others(folder):
    running = start_many(2, [*MANY, "--steps", "100000", "--checkpoint-every", "100"])
    wait_for(lambda: trained_until(1), running[0])
    found = [address for run in running for address in listening(run.pid)]
    for run in running:
        run.kill()
    finish(running)
    own = ("127.", "::1", "::ffff:127.")  # the last is the first, as a socket of IPv6 has it
    assert found and all(address.startswith(own) for address in found), found


def listening(pid):
    """Addresses at which a process listens."""
    links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir() if p.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in own:
                address = bytes.fromhex(words[1].partition(":")[0])
                parts = [address[i : i + 4][::-1] for i in range(0, len(address), 4)]
                found.append(socket.inet_ntop(family, b"".join(parts)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_alone_ends_the_run(folder, rank):
    args = [*MANY, "--steps", "100000", "--checkpoint-every", "5"]
    running = start_many(2, args, script=[FAILING, str(rank), "step"])
    results = finish(running, seconds=200)
    assert [code for code, _, _ in results] == [ENDED] * 2, results
    said = f"process {rank} (pid {running[rank].pid} on"
    for _, _, error in results:
        assert said in error and "an error that the others do not have" in error, error
        assert "this host's disk is gone" in error, error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_it_ends_also_where_what_it_says_goes_to_a_disk_that_is_full(folder, rank):
    args = [*MANY, "--steps", "100000", "--checkpoint-every", "5"]
    with open("/dev/full", "w") as full:
        running = start_many(2, args, script=[FAILING, str(rank), "step"], stderr=full)
        results = finish(running, seconds=60)
    assert [code for code, _, _ in results] == [ENDED] * 2, results


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_in_one_process_fails_in_all(folder, rank):
    args = [*MANY, "--steps", "100000", "--checkpoint-every", "5", "--keep", "1"]
    running = start_many(2, args, script=[FAILING, str(rank), "save"])
    results = finish(running, seconds=200)
    assert [code for code, _, _ in results] == [2, 2], results
    errors = [error for _, _, error in results]
    assert "checkpoints failed: this host's disk is gone" in errors[rank], errors
    assert "see" in errors[1 - rank] and "error" in errors[1 - rank], errors
    with Checkpoints("out/checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps == [5]


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_asked_for_wrongly_is_not_started_again(folder):
    ((code, _, error),) = finish([start(*MANY, "--supervise", "2", "--model", "nanno")])
    assert code == 2 and "again in" not in error, error
    ((code, _, error),) = finish([start(*RUN, "--supervise", "2")])
    assert code == 2 and "--supervise needs --out" in error


@pytest.mark.slow
def test_a_supervised_run_ends_when_it_is_asked_to(folder):
    run = start(*MANY, "--steps", "100000", "--supervise", "2")
    wait_for(lambda: trained_until(3), run)
    run.send_signal(signal.SIGTERM)
    ((code, _, error),) = finish([run], seconds=60)
    assert code == 75, error
    saved = [int(p.name) for p in Path("out/checkpoints").glob("[0-9]*")]
    assert saved == [max(line["step"] for line in metrics("out"))]
