"""Signals to a run whose data hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = """
import concurrent.futures, signal, sys, time
import jax
from jax.sharding import Mesh
import training.stop
training.stop._PATIENCE = 1.0
def wait():
    # As documents.py reads: a thread, which the end of its block waits for.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        print("hangs", flush=True)
        thread.submit(time.sleep, 600).result()
with training.stop.Stop(Mesh(jax.devices(), ("data",))) as stop:
    if sys.argv[1] == "hang":
        wait()
    print("runs", flush=True)
    while not (code := stop()):
        time.sleep(0.01)
sys.exit(code)
"""


def begun(how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HANGS, how]
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert run.stdout.readline()
    return run


def test_a_second_interrupt_ends_a_run_whose_reader_hangs():
    run = begun("hang")
    for count in range(2):
        run.send_signal(signal.SIGINT)
        if not count:
            assert "once more stops at once" in run.stderr.readline()
    try:
        _, error = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert "no end within 1 s of the second Ctrl-C" in error


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75)],
)
def test_the_first_signal_ends_a_run_between_steps(number, code):
    run = begun("run")
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == code
