"""Processes that launchers start: variables, GPUs, mutual TLS, the roll call, gradients."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import zero_jax
from training.supervise import free_address
from zero_jax.distributed import agreement, initialize, watchdog
from zero_jax.distributed.rendezvous import JoinError, bind_address, parse_address, rendezvous
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.releases import MUTUAL_TLS

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
SLURM |= {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "3"}
ALONE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
FILES = ("JAX_MTLS_CA_FILE", "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE")
ROOT, PLATFORM = Path(__file__).parents[2], {"JAX_PLATFORMS": "cpu"}
LAUNCHERS = [("SLURM_PROCID", SLURM), ("OMPI_COMM_WORLD_RANK", OMPI)]
OWN = [  # environment, GPUs of this process
    ({}, None), (GPUS, None), (GPUS | STEP, [3]), (STEP | {"CUDA_VISIBLE_DEVICES": "GPU-8f"}, [0]),
    (GPUS | STEP | ALONE, [0, 1, 2, 3]), (STEP | ALONE, None),
    (GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, [2]),
    (GPUS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [0, 1, 2, 3]),
    (GPUS | STEP | {"JAX_LOCAL_DEVICE_IDS": "1,2"}, None)]  # fmt: skip
ERRORS = [  # of the roll call
    ([0, 2], 4, {"wait": 0.5}, JoinError, "1, 3 of 4"),
    ([1], 2, {"wait": 0.5}, JoinError, r"process 1 .*127\.0\.0\.1:"),
    ([0, 1, 1], 3, {"wait": 3.0}, JoinError, "two processes have rank 1"),
    ([0, 1], 2, {"counts": {1: 3}}, ValueError, "of processes: process 0 .*'2'.* 1 .*'3'"),
    ([0, 1], 2, {"settings": {1: {"seed": "7"}}}, ValueError, "seed: process 0 .*'0'.* 1 .*'7'"),
    (range(24), 24, {"settings": {5: {"seed": "7"}}}, ValueError, "process 5 has '7'")]  # fmt: skip


@pytest.mark.parametrize(("rank", "known"), LAUNCHERS)
def test_variables_of_a_launcher_are_read_or_named(monkeypatch, rank, known):
    """Before any process waits for others, also where the arguments are given."""
    assert initialize.launched_processes() == 1
    for name, text in (known | {NODES: "node1", URI: "7.0;tcp://10.0.0.1:80"}).items():
        monkeypatch.setenv(name, text)
    assert initialize.launched_processes() == 4
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    used = known.keys() - {"SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_LOCAL_SIZE"}
    for name, value in itertools.product(used, ("abc", "-1", "", "1.5", "²", "9" * 30)):
        is_local, args = "LOCAL" in name, ("127.0.0.1:1", 2, 1)
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=f"{name}="):
                zero_jax.initialize(*args if is_local else ())
    monkeypatch.setenv(rank, "4")
    with pytest.raises(ValueError, match="process_id=4 of num_processes=4"):
        zero_jax.initialize()
    monkeypatch.setenv(rank, "3")
    for name in (NODES, URI):
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="=None has no address"):
        zero_jax.initialize()


@pytest.mark.parametrize(("environment", "own"), OWN)
def test_each_process_takes_its_own_gpus_and_sends_settings_of_jax(monkeypatch, environment, own):
    """By itself JAX takes number LOCALID, also where that does not exist."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joined, met = unittest.mock.Mock(), unittest.mock.Mock(return_value={})
    monkeypatch.setattr(jax.distributed, "initialize", joined)
    monkeypatch.setattr(initialize, "rendezvous", met)
    zero_jax.initialize("127.0.0.1:1", 2, 0)
    assert joined.call_args.kwargs["local_device_ids"] == own
    settings = met.call_args.args[-1]  # those that change numbers
    versions = {f"the version of {name}" for name in ("jax", "jaxlib", "zero_jax")}
    config = {"jax_default_prng_impl", "jax_enable_x64", "jax_default_matmul_precision"}
    assert versions | config <= settings.keys()
    assert not any("cache_dir" in name or "visible_devices" in name for name in settings)


def test_files_of_mutual_tls_are_not_ignored_and_are_pem(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    monkeypatch.setattr(initialize, "MUTUAL_TLS", False)
    monkeypatch.setenv(FILES[1], "cert.pem")
    with pytest.raises(ValueError, match=FILES[1]):
        zero_jax.initialize("127.0.0.1:1", 2, 1)
    # JAX aborts with a file that is not PEM (SIGABRT, jax 0.12.0), after all processes have joined.
    (tmp_path / "key.pem").write_text("no key")
    values = {FILES[2].lower(): str(tmp_path / "key.pem")}
    monkeypatch.setattr(jax, "config", unittest.mock.Mock(values=values))
    monkeypatch.setattr(initialize, "MUTUAL_TLS", True)
    with pytest.raises(ValueError, match=FILES[2].lower()):
        zero_jax.initialize("127.0.0.1:1", 2, 1)


URI, NODES = "OMPI_MCA_orte_hnp_uri", "SLURM_STEP_NODELIST"
ADDRESSES = [  # as in the comments of JAX's sources; 62624 is 61440 + 1531576320 / 4096 % 4096
    (SLURM | {NODES: "node[001-0015],host2"}, "node001:61447"),
    (OMPI | {URI: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}, "10.96.0.1:62624"),
    (OMPI | {URI: "1531576320.0;tcp6://[fe80::b9b,2620::3000:2]:43370"}, "[fe80::b9b]:62624"),
    (OMPI | {URI: "1.0;tcp://10.0.0.1:43370", "JAX_COORDINATOR_PORT": "8"}, "10.0.0.1:8"),
    (SLURM | {NODES: "node001,host2"}, "node001:61447")]  # fmt: skip


@pytest.mark.parametrize(("environment", "address"), ADDRESSES)
def test_a_launcher_says_where_process_0_is(monkeypatch, environment, address):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert initialize.launcher_arguments() == (address, 4, 3)


REFUSALS = [
    *((f"coordinator='{at}'", partial(zero_jax.initialize, at, 2, 0))
      for at in ("10.0.0.1", "10.0.0.1:", ":80", "host:0", "host:99999", "h:a")),
    ("num_processes=None", partial(zero_jax.initialize, "h:1", process_id=0)),
    ("process_id=2 of num_processes=2", partial(zero_jax.initialize, "h:1", 2, 2)),
    ("wait_seconds=0", partial(zero_jax.initialize, "h:1", 2, 1, wait_seconds=0)),
    ("settings take 700", partial(agreement.check_agreement, {"long_name": "x" * 70_000})),
    ("seed.*'1'.*process 2.*'7'", partial(agreement.check_agreement, {"seed": 1})),
    ("dead_after=0", partial(Watchdog, dead_after=0))]  # fmt: skip


@pytest.mark.parametrize(("name", "call"), REFUSALS)
def test_an_unsupported_argument_is_named(monkeypatch, name, call):
    def gathered(mine):
        """Settings of three processes, of which the last has another `seed`."""
        other = np.frombuffer(json.dumps({"seed": "7"}).encode(), np.uint8)
        return np.stack([mine, mine, np.pad(other, (0, mine.size - other.size))])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    with pytest.raises(ValueError, match=name):
        call()


def called(ranks, count, wait=10.0, settings=None, counts=None, meanwhile=lambda at: None):
    """Meets in threads, one for each rank; returns the connections or the error of each."""
    at = parse_address(free_address())

    def one(rank):
        try:
            own = (settings or {}).get(rank, {"seed": "0"})
            return rendezvous(at, rank, (counts or {}).get(rank, count), wait, own)
        except (OSError, ValueError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        results = pool.map(one, ranks)
        meanwhile(at)
        return [*results]


def close(*connections):
    for peer in itertools.chain.from_iterable(x.values() for x in connections):
        peer.close()


def connected(at):
    """A connection to process 0, as soon as it listens."""
    for _ in range(500):
        try:
            return socket.create_connection(at)
        except OSError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_all_that_come_are_joined_and_the_port_is_free_afterwards_or_named():
    """JAX listens there next. A socket at which a thread still waits would keep it."""
    for count in (4, *[2] * 10):
        ports = []
        first, *others = called(range(count), count, meanwhile=ports.append)
        assert sorted(first) == list(range(1, count)) and all([*x] == [0] for x in others)
        with socket.create_server(ports[0]):
            close(first, *others)
            with pytest.raises(JoinError, match=f"{ports[0][1]} of 127.0.0.1"):
                rendezvous(ports[0], 0, 2, 5.0, {})


@pytest.mark.parametrize(("ranks", "count", "more", "error", "named"), ERRORS)
def test_an_error_of_one_process_is_named_to_all(ranks, count, more, error, named):
    began = time.monotonic()
    for found in called(ranks, count, **more):
        with pytest.raises(error, match=named):
            raise found
        assert isinstance(found, JoinError) == (error is JoinError)
    assert len(ranks) < 24 or time.monotonic() - began < 8


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_strangers_are_ignored_and_a_process_that_is_gone_early_may_come_again(order):
    """The other comes before it or after: it does not count meanwhile."""

    claim = {"rank": 1, "name": "process 1", "settings": {"the number of processes": "3"}}

    def meanwhile(at):
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": "1"}\n', b"\xff\n", b""):
            with connected(at) as stranger:
                stranger.sendall(said)
        with connected(at) as lost:
            lost.sendall(b"%b\n" % json.dumps(claim).encode())
            time.sleep(0.3)
        for rank in order:
            others.append(pool.submit(rendezvous, at, rank, 3, 20.0, {}))
            time.sleep(0.3)

    others = []
    with ThreadPoolExecutor(2) as pool:
        (first,) = called([0], 3, 20.0, settings={0: {}}, meanwhile=meanwhile)
    assert sorted(first) == [1, 2]
    close(first, *(other.result() for other in others))


def test_it_listens_at_the_address_that_was_given(monkeypatch, capsys):
    """Debian's /etc/hosts has 127.0.1.1 for the machine's own name, for itself alone."""
    own = "127.0.0.1"
    for host, known in (own, own), ("localhost", own), ("node7", "127.0.1.1"), ("gw", "192.0.2.1"):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known, 80))]
        monkeypatch.setattr(socket, "getaddrinfo", unittest.mock.Mock(return_value=found))
        address, port = bind_address(host, 80)
        assert port == 80 and address in ([own] if known == own else ["::", "0.0.0.0"]), host
        assert (host in capsys.readouterr().err) == (known != own), host


@pytest.mark.parametrize("gone", [0, 2])
def test_a_process_that_is_gone_is_named_to_all_others_at_once(monkeypatch, gone):
    """Not one that leaves."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    connections, told, running = called([0, 1, 2, 3], 4), {}, []
    for rank, peers in enumerate(connections):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        monkeypatch.setattr(watchdog, "peers", peers)
        running.append(Watchdog().__enter__())
        running[rank]._exit = partial(told.setdefault, rank)
    running.pop().__exit__(None, None, None)
    running[gone].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # it does not leave
    close(connections[3])
    time.sleep(0.3)
    assert told == {}
    close(connections[gone])  # as a kernel does for a process that has ended
    end = time.monotonic() + 10
    while len(told.keys() - {gone}) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    others = [why for rank, why in told.items() if rank != gone]
    assert len(others) == 2 and all(f"process {gone} (pid" in why for why in others), told
    for each in running:
        each.__exit__(None, None, None)
    close(*connections)


def outputs(commands, environments):
    """Runs Python programs together; returns their output."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    started = [
        subprocess.Popen([sys.executable, *args], env={**os.environ, **PLATFORM, **more}, **how)
        for args, more in zip(commands, environments, strict=True)
    ]
    try:
        return [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def certificate(folder, name, ca):
    """Makes a key and a certificate for 127.0.0.1, signed by an authority or by itself."""
    request = f"req -subj /CN={name} -nodes -newkey rsa:2048 -keyout {name}.key"
    signed = f"-CA {ca}.pem -CAkey {ca}.key -CAcreateserial -extfile names"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    commands = [f"{request} -out {name}.csr", f"x509 -req -in {name}.csr {signed} -out {name}.pem"]
    for words in commands if ca != name else [f"{request} -x509 -days 2 -out {name}.pem"]:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


JOIN = """
import sys, jax, zero_jax
jax.config.update("jax_num_cpu_devices", 1)
args = (sys.argv[1], 2, int(sys.argv[2])) if len(sys.argv) > 2 else ()
zero_jax.initialize(*args, wait_seconds=float(sys.argv[-1]))
print("joined", jax.process_count(), len(jax.devices()))
with zero_jax.Watchdog(dead_after=5): pass
"""


@pytest.mark.slow
def test_processes_of_a_launcher_join_without_arguments():
    known = {"JAX_COORDINATOR_PORT": free_address()[10:], URI: "4096.0;tcp://127.0.0.1:34911"}
    ranks = [{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank} for rank in "01"]
    said = outputs([["-c", JOIN, "60"]] * 2, [known | rank for rank in ranks])
    assert all("joined 2 2" in text and "Error" not in text for text in said), said


@pytest.mark.slow
def test_processes_join_with_certificates_of_one_authority_alone(tmp_path):
    """On a release without mutual TLS the variables are an error: they would be ignored."""

    def join(second, seconds):
        at = free_address()
        named = [("ca.pem", f"{own}.pem", f"{own}.key") for own in ("first", second)]
        files = [[f"{tmp_path}/{name}" for name in names] for names in named]
        environments = [dict(zip(FILES, paths, strict=True)) for paths in files]
        return outputs([["-c", JOIN, at, rank, seconds] for rank in "01"], environments)

    for name, ca in (("ca", "ca"), ("first", "ca"), ("second", "ca"), ("other", "other")):
        certificate(tmp_path, name, ca)
    certificate(tmp_path, "stranger", "other")
    said = join("second", "60")
    if not MUTUAL_TLS:
        assert all(f"ValueError: `{FILES[0]}`" in text for text in said), said
        return
    assert all("joined 2 2" in text for text in said), said
    said = join("stranger", "8")
    assert not any("joined" in text for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize("rounded", ["none", "int4", "fp8"])
def test_gradients_of_two_processes_are_those_of_one(tmp_path, rounded):
    """To rounding, each time: a race in a sum is wrong now and then, for a few numbers."""
    script, at = [str(ROOT / "tests" / "process_gradients.py")], free_address()
    for name, *ranks in (("one", []), ("two", *([at, "2", rank] for rank in "01"))):
        commands = [[*script, str(tmp_path / name), rounded, *rank] for rank in ranks]
        # With XLA's own settings, as users have them: how the program is scheduled matters here.
        said = outputs(commands, [{"XLA_FLAGS": ""}] * len(ranks))
    want = np.load(tmp_path / "one-0.npz")
    for number in range(3):
        got = np.load(tmp_path / f"two-{number}.npz")
        assert want.keys() == got.keys(), said
        for name in want:
            largest, off = np.abs(want[name]).max(), np.abs(got[name] - want[name])
            same = off <= 1e-5 * largest + 1e-9
            # Where a number is half-way between two steps, an ulp decides which one it becomes.
            assert np.mean(~same) <= (0 if rounded == "none" else 1e-3), name
            assert np.all(off <= largest / 2), name
