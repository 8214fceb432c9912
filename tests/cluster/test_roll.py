"""The roll call: processes that are missing, doubled, started differently, or gone are named."""

import socket
import sys
import threading
import time

import pytest

from training.supervise import free_address
from zero_jax.cluster import addresses, roll
from zero_jax.cluster.addresses import CannotJoin
from zero_jax.cluster.agreement import settings_of_jax


def called(ranks, count, wait=10.0, settings=None, counts=None, meanwhile=lambda at: None):
    """Calls the roll in threads, one for each rank; returns a `Roll` or an error of each."""
    at, results = addresses.address_of(free_address()), {}

    def one(key, rank):
        try:
            own = (settings or {}).get(rank, {"seed": 0})
            results[key] = roll.call(at, rank, (counts or {}).get(rank, count), wait, own)
        except (OSError, ValueError) as error:
            results[key] = error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    meanwhile(at)
    for thread in threads:
        thread.join()
    return [results[key] for key in range(len(ranks))]


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
        found = called(range(count), count, meanwhile=ports.append)
        assert [own.rank for own in found] == list(range(count))
        with socket.create_server(ports[0]):
            for own in found:
                own.leave()
            with pytest.raises(CannotJoin, match=f"{ports[0][1]} of 127.0.0.1"):
                roll.call(ports[0], 0, 2, 5.0, {})


# fmt: off
ERRORS = [
    ([0, 2], 4, {"wait": 0.5}, CannotJoin, "1, 3 of 4"),
    ([1], 2, {"wait": 0.5}, CannotJoin, r"process 1 .*127\.0\.0\.1:"),
    ([0, 1, 1], 3, {"wait": 3.0}, CannotJoin, "process 1 came twice"),
    ([0, 1], 2, {"wait": 3.0, "counts": {1: 3}}, CannotJoin, "1 of 3"),
    ([0, 1], 2, {"settings": {1: {"seed": 7}}}, ValueError, "seed: process 0 .*'0'.* 1 .*'7'"),
    (range(24), 24, {"settings": {5: {"seed": 7}}}, ValueError, "process 5 has '7'"),
]
# fmt: on


@pytest.mark.parametrize(("ranks", "count", "more", "error", "named"), ERRORS)
def test_an_error_of_one_process_is_named_to_all(ranks, count, more, error, named):
    began = time.monotonic()
    for found in called(ranks, count, **more):
        with pytest.raises(error, match=named):
            raise found
        assert isinstance(found, CannotJoin) == (error is CannotJoin)
    assert len(ranks) < 24 or time.monotonic() - began < 8


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_strangers_are_ignored_and_a_process_that_is_gone_early_may_come_again(order):
    """The other comes before it or after: it does not count meanwhile."""

    def meanwhile(at):
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": "1"}\n', b"\xff\n", b""):
            with connected(at) as stranger:
                stranger.sendall(said)
        with connected(at) as lost:
            lost.sendall(b'{"rank": 1, "count": 3, "name": "process 1", "settings": {}}\n')
            time.sleep(0.3)
        for rank in order:
            one = threading.Thread(target=lambda r=rank: more.append(roll.call(at, r, 3, 20.0, {})))
            threads.append(one)
            one.start()
            time.sleep(0.3)

    more, threads = [], []
    found = called([0], 3, 20.0, settings={0: {}}, meanwhile=meanwhile)
    for thread in threads:
        thread.join()
    assert sorted(own.rank for own in found + more) == [0, 1, 2]
    for own in found + more:
        own.leave()


# fmt: off
HOSTS = [
    ("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1", "127.0.0.1"),
    ("node7", "127.0.1.1", None),  # Debian's /etc/hosts: its own name, for itself alone
    ("gateway", "192.0.2.1", None)]
# fmt: on


@pytest.mark.parametrize(("host", "known", "own"), HOSTS)
def test_it_listens_at_the_address_that_was_given(monkeypatch, capsys, host, known, own):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    address, port = addresses.bind_address(host, 80)
    assert port == 80 and address in ([own] if own else ["::", "0.0.0.0"])
    assert (host in capsys.readouterr().err) == (own is None)


@pytest.mark.parametrize(("gone", "error"), [(0, None), (2, ValueError("not caught"))])
def test_a_process_that_is_gone_is_named_to_all_others_at_once(monkeypatch, gone, error):
    """Not one that leaves."""
    found, told = called([0, 1, 2, 3], 4), {}
    for own in found:
        own.on_loss = lambda why, rank=own.rank: told.setdefault(rank, why)
    found.pop()._at_exit()
    if error is not None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "last_value", error, raising=False)
            found[gone]._at_exit()  # does not count as leaving
    time.sleep(0.3)
    assert told == {}
    found[gone].drop()  # as a kernel does for a process that has ended
    end = time.monotonic() + 10
    while len(told.keys() - {gone}) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    others = [why for rank, why in told.items() if rank != gone]
    assert len(others) == 2 and all(f"process {gone} (pid" in why for why in others), told
    for own in found:
        own.leave()


def test_settings_of_jax_are_those_that_change_numbers():
    known = settings_of_jax()
    versions = {f"the version of {name}" for name in ("jax", "jaxlib", "zero_jax")}
    config = {"jax_default_prng_impl", "jax_enable_x64", "jax_default_matmul_precision"}
    assert versions | config <= known.keys()
    assert not any("cache_dir" in name or "visible_devices" in name for name in known)
