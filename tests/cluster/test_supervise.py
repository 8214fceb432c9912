"""`--supervise`: which runs are restarted, and processes that end with their supervisor."""

import signal
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest
from small_runs import HERE, folder
from test_faults import is_running, wait_until

from training import main as program
from training.supervise import VARIABLE, free_address, handled, outcome, supervise

__all__ = ["folder"]  # a fixture


def test_nohup_keeps_its_meaning():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in handled()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in handled() and signal.SIGTERM in handled()
    finally:
        signal.signal(signal.SIGHUP, before)


ENDS = [("os.kill(os.getpid(), 9)", 2, 137)]
# 1: not finite, 2: a wrong setting, 75: --max-hours or SIGTERM of a child, 130: Ctrl-C.
ENDS += [(f"raise SystemExit({n})", 0, n) for n in (1, 2, 75, 130)]


@pytest.mark.parametrize(("ends", "restarts", "code"), ENDS)
def test_a_run_that_crashed_is_restarted_and_one_that_ended_on_purpose_is_not(
    tmp_path, capfd, ends, restarts, code
):
    script = f"import os; os.chdir({str(tmp_path)!r}); open('starts', 'a').write('x'); {ends}"
    command = [sys.executable, "-c", script]
    most = restarts or 3
    assert supervise(command, 1, restarts=most, grace=1, divides=1, backoff=0.01) == code
    assert (tmp_path / "starts").read_text() == "x" * (1 + restarts)
    assert capfd.readouterr().err.count("1 x -9") == restarts


def test_the_code_that_decides_on_a_restart_is_returned():
    codes = [[76, 2], [76, 1], [75, 130], [-9, 76], [-9, -6]]
    assert [outcome(each) for each in codes] == [2, 1, 130, 76, 137]
    assert [outcome(each, asked=75) for each in ([76, 0], [-15, -15])] == [75, 75]


ORPHAN = """
import sys, time; sys.path.insert(0, sys.argv[1])
from training.supervise import end_with_supervisor
if sys.argv[2] == "late": time.sleep(1)
end_with_supervisor(); open("alive", "w").close(); time.sleep(60)
"""
PARENT = """
import subprocess, sys, os
command = [sys.executable, "-c", *sys.argv[1:]]
print(subprocess.Popen(command, env={**os.environ, "NAME": str(os.getpid())}).pid, flush=True)
sys.stdin.read()
""".replace("NAME", VARIABLE)


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_child_ends_with_its_supervisor_even_if_that_ended_first(tmp_path, when):
    command = [sys.executable, "-c", PARENT, ORPHAN, str(Path(__file__).parents[2]), when]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as parent:
        child = int(parent.stdout.readline())
        if when == "early":
            wait_until((tmp_path / "alive").exists, 30)
        parent.kill()
    wait_until(lambda: not is_running(child), 10)
    assert (tmp_path / "alive").exists() == (when == "early")


FLAGS = ["--process-id 0", "--num-processes 2", "--coordinator-address 127.0.0.1:7878"]
FLAGS += ["--supervise 1000000000", "--max-restarts -1", "--heartbeat-timeout-seconds nan"]
FLAGS += ["--supervise 0", "--supervise 2", "--output-dir"]


@pytest.mark.parametrize("flag", FLAGS)
def test_unsupported_flags_are_named(folder, capsys, monkeypatch, flag):
    if flag == "--supervise 2":  # in each task of a launcher
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    given = [] if flag == "--output-dir" else ["--output-dir", "out", *flag.split()]
    assert program.main(given + ["--supervise", "2"] * ("--supervise" not in given)) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--supervise=2", "--supervise 3 --supervise 2", "supervise: 2"])
def test_the_processes_do_not_supervise_others(folder, monkeypatch, words):
    monkeypatch.setattr(program, "supervise", started := unittest.mock.Mock(return_value=0))
    monkeypatch.setattr(program, "run", trained := unittest.mock.Mock())
    Path("run.yaml").write_text(words if (in_file := ":" in words) else "max_steps: 3")
    own = ["--config=run.yaml", "--output-dir", "out", *HERE, *words.split() * (not in_file)]
    for _ in range(2):  # the second as one of the processes
        assert program.main(own) == 0
        monkeypatch.setenv(VARIABLE, "1")
    assert (started.call_args[0][0][2:], started.call_args[0][1]) == (own, 2)
    assert started.call_count == trained.call_count == 1


def test_a_process_that_cannot_join_exits_with_a_code_of_its_own(folder, capsys):
    group = ["--coordinator-address", free_address(), "--num-processes", "2", "--process-id", "1"]
    group += ["--output-dir", "out", "--devices", "16", "--join-timeout-seconds", "1"]
    assert program.main(group) == 69
    assert "process 1 did not reach process 0" in capsys.readouterr().err
