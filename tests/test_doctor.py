"""`python -m zero_jax doctor` prints what a report of a problem needs, and no secrets."""

import os
import subprocess
import sys

import jax

from zero_jax import __version__, doctor
from zero_jax.engine import offload_check
from zero_jax.offload import host


def lines(capsys, *args, code=0):
    assert doctor.main(args) == code
    printed = capsys.readouterr().out
    return dict(line.split(maxsplit=1) for line in printed.splitlines()), printed


def test_versions_devices_and_settings():
    secret = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "do not tell"}
    command = [sys.executable, "-m", "zero_jax", "doctor", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | secret)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert found["zero_jax"] == __version__ and found["jax"] == jax.__version__
    assert found["devices"].endswith(" x cpu") and found["make_mesh()"].startswith("data ")
    assert found["NCCL_DEBUG"] == "INFO" and "do not tell" not in done.stdout
    assert "GB, " in found["host"] and "locked" in found and "offload" not in found


def test_offload_is_checked(capsys, monkeypatch):
    monkeypatch.setattr(host, "HOST", "far_memory")  # one comparison fails, the other still runs
    printed = lines(capsys, code=1)[1]
    assert "FAILED: a step" in printed and "no far_memory" in printed and "passed: saved" in printed
    for error, said in ((0.0, "passed: saved"), (0.5, "FAILED: saved activations: off by 0.5")):
        outcome = offload_check.Outcome("saved activations", error)
        monkeypatch.setattr(offload_check, "check", lambda device, found=outcome: [found])
        assert said in lines(capsys, code=int(error > 0))[1]


def test_an_error_of_the_driver_is_one_line(capsys, monkeypatch):
    def no_driver():
        raise RuntimeError("no driver\nin three more lines")

    monkeypatch.setattr(jax, "devices", no_driver)
    found, printed = lines(capsys, "--quick")
    assert "RuntimeError: no driver" in found["devices"]
    assert "three more" not in printed and "host" in found and "jaxlib" in found


def test_the_memory_limit_of_a_container(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_CGROUPS", (str(tmp_path / "limit"),))
    for limit, shown in ((2**63 - 1, "no limit"), ("max", "no limit"), (3_000_000_000, "3.00 GB")):
        (tmp_path / "limit").write_text(f"{limit}\n")
        assert lines(capsys, "--quick")[0]["cgroup"].endswith(shown)
