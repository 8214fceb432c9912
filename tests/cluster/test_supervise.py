"""`--supervise`: a signal to each process in turn, and which ends are started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_resume import RUN, trained_until, wait_for
from test_train import finish, folder, start

from training import main as program
from training import orphans
from training.stop import handled
from training.supervise import outcome, supervise

__all__ = ["folder"]  # a fixture

OWN = ["--devices", "2", "--out", "out", "--dead-after", "3", "--steps", "100000"]
OWN += ["--warmup", "2", "--checkpoint-every", "5", "--supervise", "2"]


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


# The table of docs/launchers.md: process, signal, exit code (None: it is started again).
CASES = [
    ("supervisor", signal.SIGKILL, -signal.SIGKILL),
    ("supervisor", signal.SIGHUP, 75),
    ("process 0", signal.SIGKILL, None),
    ("process 0", signal.SIGHUP, 75),
    ("process 1", signal.SIGKILL, None),
    ("process 1", signal.SIGHUP, 75),
]


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number", "code"), CASES)
def test_a_signal_to_each_process_leaves_none_behind_and_the_command_resumes(
    folder, who, number, code
):
    run = start(*RUN, *OWN)
    saved = Path("out/checkpoints")
    wait_for(lambda: trained_until(7) and any(saved.glob("[0-9]*")), run)
    pids = children(run.pid)
    assert len(pids) == 2
    os.kill(run.pid if who == "supervisor" else pids[int(who[-1])], number)
    # A process that hangs until it is noticed takes 3 --dead-after and 10 seconds.
    wait_until(lambda: not any(map(is_running, pids)), 20 if code == -9 else 90)
    if code is None:  # started again: it trains in the process that is left
        before = len(Path("out/metrics.jsonl").read_text().splitlines())
        wait_for(lambda: len(Path("out/metrics.jsonl").read_text().splitlines()) > before, run)
        (left,) = children(run.pid)
        os.kill(left, signal.SIGTERM)  # asked to end: not started again
    ((got, out, error),) = finish([run], seconds=150)
    assert got == (75 if code is None else code), error
    assert ("starting 1 again" in error) == (code is None), error
    # The same command as a launcher gives it next; 75: to be given once more.
    ((got, out, error),) = finish([start(*RUN, *OWN, "--max-hours", "1e-6")], seconds=240)
    assert got == 75 and "Going on from" in out and "again in" not in error, error


def test_nohup_keeps_its_meaning():
    before = signal.getsignal(signal.SIGHUP)
    assert signal.SIGHUP in handled()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in handled() and signal.SIGTERM in handled()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("code", [1, 2, 75, 130])
def test_a_run_that_ended_on_purpose_is_not_started_again(tmp_path, capfd, code):
    """1: not finite, 2: a wrong setting, 75: --max-hours or SIGTERM of a child, 130: Ctrl-C."""
    script = f"open('starts', 'a').write('x'); raise SystemExit({code})"
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {script}"]
    assert supervise(command, 1, restarts=3, grace=1, divides=1, backoff=0.01) == code
    assert (tmp_path / "starts").read_text() == "x"


def test_a_run_that_crashed_is_started_again_as_often_as_allowed(tmp_path, capfd):
    script = "open('starts', 'a').write('x'); os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {script}"]
    assert supervise(command, 1, restarts=2, grace=1, divides=1, backoff=0.01) == 128 + 9
    assert (tmp_path / "starts").read_text() == "xxx"
    assert capfd.readouterr().err.count("supervise: the processes ended with 1 x -9") == 2


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ([76, 2], 0, 2),
        ([76, 1], 0, 1),
        ([75, 130], 0, 130),
        ([-15, -15], 75, 75),  # they were still starting
        ([76, 0], 75, 75),
        ([-9, 76], 0, 76),
        ([-9, -6], 0, 137),
    ],
)
def test_the_code_that_says_most_about_trying_again_is_returned(codes, asked, code):
    assert outcome(codes, asked) == code


ORPHAN = """
import sys, time; sys.path.insert(0, sys.argv[1])
from training.orphans import end_with_supervisor
if sys.argv[2] == "late": time.sleep(1)
end_with_supervisor(); open("alive", "w").close(); time.sleep(60)
"""
PARENT = """
import subprocess, sys, os
command = [sys.executable, "-c", *sys.argv[1:]]
print(subprocess.Popen(command, env={**os.environ, "NAME": str(os.getpid())}).pid, flush=True)
sys.stdin.read()
""".replace("NAME", orphans.VARIABLE)


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_child_ends_with_its_supervisor_even_if_that_ended_first(tmp_path, when):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PARENT, ORPHAN, root, when]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as parent:
        child = int(parent.stdout.readline())
        if when == "early":
            wait_until((tmp_path / "alive").exists, 30)
        parent.kill()
    wait_until(lambda: not is_running(child), 10)
    assert (tmp_path / "alive").exists() == (when == "early")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--process-id", "0"], "--process-id 0"),
        (["--num-processes", "2"], "--num-processes 2"),
        (["--coordinator", "127.0.0.1:7878"], "--coordinator 127.0.0.1:7878"),
        (["--supervise", "0"], "--supervise 0: it must be at least 1"),
        (
            ["--supervise", "1000000000"],
            "--supervise 1000000000: it must be at least 1 and at most",
        ),
        (["--restarts", "-1"], "--restarts -1: it must be at least 0"),
        (["--dead-after", "nan"], "--dead-after nan"),
    ],
)
def test_flags_that_do_not_go_with_supervise_are_refused_by_name(folder, capsys, args, named):
    given = args if "--supervise" in args else ["--supervise", "2", *args]
    assert program.main(["--out", "out", *given]) == 2
    assert named in capsys.readouterr().err


def test_a_supervisor_in_each_process_of_a_launcher_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert program.main(["--out", "out", "--supervise", "2"]) == 2
    assert "--supervise 2 in each of 4 processes" in capsys.readouterr().err
