"""Processes that launchers start: environment variables, GPUs, mutual TLS, the same gradients."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import zero_jax
from training.supervise import free_address
from zero_jax.cluster import processes, roll
from zero_jax.cluster.launchers import launched_processes
from zero_jax.releases import MUTUAL_TLS

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4"}
SLURM |= {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "3"}
ALONE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
FILES = ("JAX_MTLS_CA_FILE", "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE")
KINDS = (".pem", ".key")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("value", ["abc", "-1", "", "1.5", "²", "9" * 30])
@pytest.mark.parametrize("name", [*SLURM, *OMPI])
def test_a_variable_of_a_launcher_that_is_no_number_is_named(monkeypatch, name, value):
    """Before any process waits for others, also where the arguments are given."""
    for known, text in {**(SLURM if name in SLURM else OMPI), name: value}.items():
        monkeypatch.setenv(known, text)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    for args in ((), ("127.0.0.1:1", 2, 1)):
        with pytest.raises(ValueError, match=f"{name}="):
            zero_jax.initialize(*args)


@pytest.mark.parametrize(
    ("rank", "known"), [("SLURM_PROCID", SLURM), ("OMPI_COMM_WORLD_RANK", OMPI)]
)
def test_ranks_and_numbers_of_processes_are_read(monkeypatch, rank, known):
    assert launched_processes() == 1
    for name, text in known.items():
        monkeypatch.setenv(name, text)
    assert launched_processes() == 4
    monkeypatch.setenv(rank, "4")
    with pytest.raises(ValueError, match=f"{rank}=4 of .*=4"):
        zero_jax.initialize()


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({}, None),
        (GPUS, None),
        (GPUS | STEP, [3]),
        (STEP | {"CUDA_VISIBLE_DEVICES": "GPU-8f"}, [0]),
        (GPUS | STEP | ALONE, [0, 1, 2, 3]),
        (STEP | ALONE, None),
        (GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, [2]),
        (GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [0, 1, 2, 3]),
        (GPUS | STEP | {"JAX_LOCAL_DEVICE_IDS": "1,2"}, None),
    ],
)
def test_each_process_takes_its_own_gpus(monkeypatch, environment, own):
    """By itself JAX takes number LOCALID, also where that does not exist."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told = []

    def initialize(*, local_device_ids, **_):
        told.append(local_device_ids)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(roll, "call", lambda *_: None)
    monkeypatch.setattr(processes, "_links", [])
    zero_jax.initialize("127.0.0.1:1", 2, 0)
    assert told == [own]


# Mutual TLS.


def test_files_of_mutual_tls_are_checked_before_processes_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "key.pem").write_text("no key")
    path = str(tmp_path / "ca.pem")
    if not MUTUAL_TLS:
        monkeypatch.setenv(FILES[1], path)
        with pytest.raises(ValueError, match=FILES[1]):
            zero_jax.initialize("127.0.0.1:1", 2, 1)
        return
    before = {name.lower(): jax.config.values[name.lower()] for name in FILES}
    try:
        for name in FILES[:2]:
            jax.config.update(name.lower(), path)
        for value in (None, str(tmp_path / "none"), str(tmp_path / "key.pem")):
            jax.config.update("jax_mtls_key_file", value)
            with pytest.raises(ValueError, match="jax_mtls_key_file"):
                zero_jax.initialize("127.0.0.1:1", 2, 1)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def certificate(folder, name, ca=None):
    """A key and a certificate for 127.0.0.1: of an authority, or signed by one."""
    request = ["req", "-subj", f"/CN={name}", "-nodes", "-newkey", "rsa:2048"]
    made = ["-days", "2", "-out", f"{name}.pem"]
    commands = [[*request, "-x509", "-keyout", f"{name}.key", *made]]
    if ca is not None:
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        signed = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial"]
        commands = [
            [*request, "-keyout", f"{name}.key", "-out", f"{name}.csr"],
            ["x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", "names", *made],
        ]
    for words in commands:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


JOIN = """
import sys, jax, zero_jax
jax.config.update("jax_num_cpu_devices", 1)
try:
    zero_jax.initialize(sys.argv[1], 2, int(sys.argv[2]), wait_seconds=float(sys.argv[3]))
except (ValueError, OSError) as error:
    print("refused:", error); sys.exit(3)
print("joined", jax.process_count(), len(jax.devices()))
"""


def outputs(commands, environments):
    """Runs processes together; returns what each prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    started = [
        subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu", **more}, **pipes)
        for command, more in zip(commands, environments, strict=True)
    ]
    try:
        return [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def join(folder, second, seconds="60"):
    """Two processes that join, the second with a certificate of its own."""
    command = [sys.executable, "-c", JOIN, free_address()]
    environments = [
        {name: str(folder / f"{own}{kind}") for name, kind in zip(FILES[1:], KINDS, strict=True)}
        | {FILES[0]: str(folder / "ca.pem")}
        for own in ("first", second)
    ]
    return outputs([[*command, str(rank), seconds] for rank in range(2)], environments)


@pytest.mark.slow
def test_processes_join_with_certificates_of_one_authority_alone(tmp_path):
    """On a release without mutual TLS the variables are an error: they would be ignored."""
    certificate(tmp_path, "ca")
    for name in ("first", "second"):
        certificate(tmp_path, name, "ca")
    said = join(tmp_path, "second")
    if not MUTUAL_TLS:
        assert all(text.startswith("refused:") and FILES[0] in text for text in said), said
        return
    assert all("joined 2 2" in text for text in said), said
    certificate(tmp_path, "other")
    certificate(tmp_path, "stranger", "other")
    said = join(tmp_path, "stranger", "8")
    assert not any("joined" in text for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["none", "int4"])
def test_gradients_of_two_processes_are_those_of_one(tmp_path, scatter):
    """To rounding, each time: a race in a sum is wrong now and then, for a few numbers."""
    script = str(ROOT / "tests" / "process_gradients.py")
    group = (scatter, free_address(), "2")
    for out, *runs in (("one", (scatter,)), ("two", (*group, "0"), (*group, "1"))):
        commands = [[sys.executable, script, str(tmp_path / out), *args] for args in runs]
        # With XLA's own settings, as users have them: how the program is scheduled matters here.
        said = outputs(commands, [{"XLA_FLAGS": ""}] * len(runs))
    want = np.load(tmp_path / "one-0.npz")
    for number in range(3):
        got = np.load(tmp_path / f"two-{number}.npz")
        assert want.keys() == got.keys(), said
        for name in want:
            largest = np.abs(want[name]).max()
            off = np.abs(got[name] - want[name])
            same = off <= 1e-5 * largest + 1e-9
            # Where a number is half-way between two steps, an ulp decides which one it becomes.
            assert np.mean(~same) <= (0 if scatter == "none" else 1e-3), name
            assert np.all(off <= largest / 2), name
