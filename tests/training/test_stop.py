"""Signals to a run, and streams that are closed, have no reader, or lack a character."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from training.stop import Stop

ROOT = Path(__file__).parents[2]
HANGS = """
import concurrent.futures, time
import jax
from jax.sharding import Mesh
import training.stop
training.stop._PATIENCE = 1.0
with training.stop.Stop(Mesh(jax.devices(), ("data",))) as stop:
    # As documents.py reads: a thread, which the end of its block waits for.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        reading = thread.submit(time.sleep, 600)
        print("hangs", flush=True)
        reading.result()
"""
WRITE = """
import runpy, sys
runpy.run_path("zero_jax/streams.py")["lasting_streams"]()
for _ in range(3):
    print("3\\u03a8 elements", flush=True)
    print("x" * 100_000)
sys.stderr.write("done")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def test_the_first_signal_ends_a_run_between_steps(capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    codes = [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75), ("SIGUSR1", 75)]
    for name, code in codes:
        with Stop(Mesh(jax.devices(), ("data",))) as stop:
            assert stop() == 0
            os.kill(os.getpid(), getattr(signal, name))
            assert stop() == code
        assert ("once more" in capfd.readouterr().err) == (name == "SIGINT")
    assert Stop(Mesh(jax.devices(), ("data",)), hours=0)() == 75
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_second_interrupt_ends_a_run_whose_reader_hangs():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "-c", HANGS], env=ENVIRONMENT, **pipes)
    assert run.stdout.readline()
    run.send_signal(signal.SIGINT)
    assert "once more stops at once" in run.stderr.readline()
    run.send_signal(signal.SIGINT)
    try:
        _, error = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130 and "second Ctrl-C" in error


@pytest.mark.parametrize(
    ("how", "start"),
    [
        ('"$1" -c "$2" >&-', ""),
        ('set -o pipefail; "$1" -c "$2" | head -1', ""),
        ('PYTHONIOENCODING=ascii "$1" -c "$2"', "3\\u03a8 elements"),
        ('LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 "$1" -c "$2"', "3"),
    ],
    ids=["closed", "no reader", "ascii", "C locale"],
)
def test_a_command_ends_with_its_own_exit_code_whatever_stdout_is(how, start):
    command = ["bash", "-c", how, "bash", sys.executable, WRITE]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "done")
    assert done.stdout.startswith(start)
