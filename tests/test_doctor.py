"""python -m zero_jax.doctor: all that a report needs, and nothing that it must not have."""

import subprocess
import sys

import jax
import pytest

from zero_jax import __version__, doctor
from zero_jax.engine import offload_check


def lines(capsys, *args, code=0):
    assert doctor.main(args) == code
    printed = capsys.readouterr().out
    return dict(line.split(maxsplit=1) for line in printed.splitlines()), printed


def test_versions_devices_and_settings_are_said(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do not tell")
    found, printed = lines(capsys, "--quick")
    assert found["zero_jax"] == __version__ and found["jax"] == jax.__version__
    assert found["devices"] == f"{jax.device_count()} x cpu"
    assert found["make_mesh()"] == f"data {jax.device_count()}"
    assert found["NCCL_DEBUG"] == "INFO" and "do not tell" not in printed
    assert "GB, " in found["host"] and "locked" in found and "offload" not in found


def test_offload_is_checked(capsys, monkeypatch):
    _, printed = lines(capsys)
    assert printed.count("offload") >= 2 and "passed: saved activations" in printed
    wrong = [offload_check.Outcome("saved activations", 0.5)]
    monkeypatch.setattr(offload_check, "check", lambda device: wrong)
    assert "FAILED: saved activations: off by 0.5" in lines(capsys, code=1)[1]


def test_what_can_not_be_found_out_stops_nothing(capsys, monkeypatch):
    def no_driver():
        raise RuntimeError("no driver\nin three more lines")

    monkeypatch.setattr(jax, "devices", no_driver)
    found, printed = lines(capsys, "--quick")
    assert found["devices"] == "not found out: RuntimeError: no driver"
    assert "three more" not in printed and "host" in found and "jaxlib" in found


@pytest.mark.parametrize(
    ("said", "shown"),
    [("max", "no limit"), (str(2**63 - 1), "no limit"), ("3000000000", "3.00 GB")],
)
def test_the_limit_of_a_container_is_said(said, shown, capsys, monkeypatch, tmp_path):
    (tmp_path / "limit").write_text(said + "\n")
    monkeypatch.setattr(doctor, "_CGROUPS", (str(tmp_path / "limit"),))
    printed = lines(capsys, "--quick")[1]
    assert next(x for x in printed.splitlines() if x.startswith("of this group")).endswith(shown)


def test_it_is_one_of_the_commands():
    command = [sys.executable, "-m", "zero_jax", "doctor", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "make_mesh()" in done.stdout, done.stderr
