"""Environment variables of launchers that can't be, and mutual TLS between processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import zero_jax
from training.supervise import free_address
from zero_jax.cluster.launchers import launched_processes
from zero_jax.releases import MUTUAL_TLS

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4"}
SLURM |= {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
FILES = ("JAX_MTLS_CA_FILE", "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE")


@pytest.mark.parametrize("value", ["abc", "-1", "", "1.5", "²", "9" * 30])
@pytest.mark.parametrize("name", [*SLURM, *OMPI])
def test_a_variable_of_a_launcher_that_is_no_number_is_named(monkeypatch, name, value):
    """Before anything waits for others, also where the other arguments are given."""
    for known, text in {**(SLURM if name in SLURM else OMPI), name: value}.items():
        monkeypatch.setenv(known, text)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    with pytest.raises(ValueError, match=f"{name}="):
        zero_jax.initialize()
    with pytest.raises(ValueError, match=f"{name}="):
        zero_jax.initialize("127.0.0.1:1", 2, 1)


@pytest.mark.parametrize(
    ("rank", "known"), [("SLURM_PROCID", SLURM), ("OMPI_COMM_WORLD_RANK", OMPI)]
)
def test_a_rank_beyond_the_number_of_processes_is_named(monkeypatch, rank, known):
    for name, text in {**known, rank: "4"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{rank}=4 of .*=4"):
        zero_jax.initialize()


@pytest.mark.parametrize("known", [SLURM, OMPI])
def test_what_launchers_set_is_read(monkeypatch, known):
    assert launched_processes() == 1
    for name, text in known.items():
        monkeypatch.setenv(name, text)
    assert launched_processes() == 4


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def authority(folder, name="ca"):
    """Makes a certificate authority."""
    subject = ["-subj", f"/CN={name}", "-days", "2", "-nodes", "-newkey", "rsa:2048", "-x509"]
    openssl(folder, "req", *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def certificate(folder, name, ca="ca"):
    """A key and a certificate for 127.0.0.1, signed by an authority."""
    request = ["-subj", f"/CN={name}", "-nodes", "-newkey", "rsa:2048"]
    openssl(folder, "req", *request, "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ["-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial"]
    openssl(
        folder, "x509", "-req", *signed, "-days", "2", "-extfile", "names", "-out", f"{name}.pem"
    )


JOIN = """
import sys, jax, zero_jax
jax.config.update("jax_num_cpu_devices", 1)
try:
    zero_jax.initialize(sys.argv[1], 2, int(sys.argv[2]), wait_seconds=float(sys.argv[3]))
except (ValueError, OSError) as error:
    print("refused:", error); sys.exit(3)
print("joined", jax.process_count(), len(jax.devices()))
"""


def join(folder, second, seconds="60"):
    """Two processes that join, the second with a certificate of its own; what each says."""
    names, address = ("first", second), free_address()
    own = [
        {**os.environ, "JAX_PLATFORMS": "cpu", FILES[0]: str(folder / "ca.pem")}
        | {FILES[1]: str(folder / f"{name}.pem"), FILES[2]: str(folder / f"{name}.key")}
        for name in names
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, address, str(rank), seconds],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, environment in enumerate(own)
    ]
    try:
        return [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_processes_join_with_certificates_of_one_authority_alone(tmp_path):
    """On a release without mutual TLS the variables are an error: they would be ignored."""
    authority(tmp_path)
    for name in ("first", "second"):
        certificate(tmp_path, name)
    said = join(tmp_path, "second")
    if not MUTUAL_TLS:
        assert all("refused: `JAX_MTLS_CA_FILE`" in text and "jax 0.12" in text for text in said)
        return
    assert all("joined 2 2" in text for text in said), said
    authority(tmp_path, "other")
    certificate(tmp_path, "stranger", "other")
    said = join(tmp_path, "stranger", "8")
    assert not any("joined" in text for text in said), said


def test_files_of_mutual_tls_are_checked_before_processes_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "key.pem").write_text("no key")
    path = str(tmp_path / "ca.pem")
    if not MUTUAL_TLS:
        monkeypatch.setenv(FILES[1], path)
        with pytest.raises(ValueError, match=f"`{FILES[1]}`.*jax 0.12"):
            zero_jax.initialize("127.0.0.1:1", 2, 1)
        return
    wrong = {"jax_mtls_key_file": [None, str(tmp_path / "none"), str(tmp_path / "key.pem")]}
    before = {name.lower(): jax.config.values[name.lower()] for name in FILES}
    try:
        for name in FILES[:2]:
            jax.config.update(name.lower(), path)
        for name, values in wrong.items():
            for value in values:
                jax.config.update(name, value)
                with pytest.raises(ValueError, match=f"`{name}`"):
                    zero_jax.initialize("127.0.0.1:1", 2, 1)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
