"""Commands whose stdout is closed, has no reader, or can't write a character."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_train import HERE

from training import main as program
from training.config import Config

ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from zero_jax.streams import lasting_streams
lasting_streams()
for _ in range(3):
    print("3\\u03a8 elements", flush=True)
    print("x" * 100_000)
sys.stderr.write("done")
"""


def shell(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, WRITE],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
    )


@pytest.mark.parametrize(
    "how",
    [
        '"$1" -c "$2" >&-',
        'set -o pipefail; "$1" -c "$2" | head -1',
        'PYTHONIOENCODING=ascii "$1" -c "$2"',
        'LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 "$1" -c "$2"',
    ],
    ids=["closed", "no reader", "ascii", "C locale"],
)
def test_a_command_finishes_with_its_own_exit_code_whatever_stdout_is(how):
    done = shell(how)
    assert (done.returncode, done.stderr) == (0, "done")
    if "head" not in how and ">&-" not in how:
        assert done.stdout.startswith("3\\u03a8 elements" if "C " not in how else "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["-m zero_jax.plan --model nano", "-m zero_jax.doctor --quick", "train.py --help"],
)
def test_closed_output_gives_no_traceback(command):
    for how in (f'"$1" {command} >&-', f'set -o pipefail; "$1" {command} | head -0'):
        done = shell(how)
        assert (done.returncode, done.stderr) == (0, ""), how


def test_more_devices_than_a_process_simulates_are_refused_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("taken"))
    for config in (Config(devices=2**31 - 1), Config(mesh="data=1025")):
        with pytest.raises(ValueError, match=r"(--devices 2147483647|--mesh data=1025) is .* 1024"):
            program.join(config)


def test_more_memory_than_there_is_is_an_error_of_one_line(monkeypatch, capsys):
    def run(_):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(program, "run", run)
    assert program.main(HERE) == 2
    assert "memory of this machine: Unable to allocate 9 TiB. Less" in capsys.readouterr().err


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_of_a_device_may_be_tried_again(monkeypatch, capsys, debug):
    """76, as of several processes; its traceback is shown."""

    def run(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(program, "run", run)
    if debug:
        with pytest.raises(jax.errors.JaxRuntimeError):
            program.main([*HERE, "--debug"])
        return
    assert program.main(HERE) == 76
    error = capsys.readouterr().err
    assert "Traceback" in error and "error: INTERNAL: the device is gone" in error
