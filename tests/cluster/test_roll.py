"""Who takes part in a run: named if missing, doubled, started otherwise, or gone."""

import socket
import sys
import threading
import time

import pytest

import zero_jax
from training.supervise import free_address
from zero_jax.cluster import addresses, roll
from zero_jax.cluster.addresses import CannotJoin
from zero_jax.cluster.agreement import settings_of_jax


def called(ranks, count, wait=10.0, settings=None, meanwhile=lambda at: None):
    """What a roll call gives processes of these ranks, here threads: a `Roll` or an error."""
    at = addresses.address_of(free_address())
    results = {}

    def one(key, rank):
        try:
            own = (settings or {}).get(rank, {"seed": 0})
            results[key] = roll.call(at, rank, count, wait, own)
        except (OSError, ValueError) as error:
            results[key] = error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    meanwhile(at)
    for thread in threads:
        thread.join()
    return [results[key] for key in range(len(ranks))]


def left(rolls):
    for own in rolls:
        own.leave()


def test_all_that_come_are_joined():
    found = called([0, 1, 2, 3], 4)
    assert [own.rank for own in found] == [0, 1, 2, 3]
    left(found)


def test_the_port_is_free_as_soon_as_all_are_there():
    """JAX listens there next. A socket that a thread still waits at would keep it."""
    for _ in range(20):
        ports = []
        left(called([0, 1], 2, meanwhile=ports.append))
        with socket.create_server(ports[0]):
            pass


def test_who_does_not_come_is_named_to_all():
    for error in called([0, 2], 4, wait=0.5):
        assert isinstance(error, CannotJoin)
        assert "processes 1, 3 of 4 did not come within 0.5 s" in str(error)
    (error,) = called([1], 2, wait=0.5)
    assert "process 1 did not find process 0 at 127.0.0.1:" in str(error)


def test_who_comes_twice_is_named_to_all():
    for error in called([0, 1, 1], 3):
        assert isinstance(error, CannotJoin) and "process 1 came twice" in str(error)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_who_is_gone_before_all_are_there_may_come_again(order):
    """Whether the other comes before it or after: it does not count meanwhile."""
    at, found = addresses.address_of(free_address()), {}

    def one(rank):
        found[rank] = roll.call(at, rank, 3, 20.0, {})

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1, 2)]
    threads[0].start()
    lost = socket.create_connection(at) if wait_for_port(at) else None
    lost.sendall(b'{"rank": 1, "count": 3, "name": "process 1", "settings": {}}\n')
    time.sleep(0.3)
    lost.close()
    for rank in order:
        threads[rank].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    left(found.values())


def test_all_of_many_are_told_what_is_wrong_with_one():
    began = time.monotonic()
    found = called(range(24), 24, settings={5: {"seed": 7}})
    assert all("process 5 has '7'" in str(error) for error in found), found
    assert time.monotonic() - began < 8


def wait_for_port(at):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            socket.create_connection(at).close()
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def test_what_differs_is_told_with_both_values():
    for error in called([0, 1], 2, settings={1: {"seed": 7}}):
        assert type(error) is ValueError
        assert "disagree on seed: process 0 has '0', process 1 has '7'" in str(error)


def test_another_number_of_processes_is_told():
    at = addresses.address_of(free_address())
    results = []

    def other():
        with pytest.raises(CannotJoin, match="as 1 of 3 processes, and process 0 as one of 2"):
            roll.call(at, 1, 3, 10.0, {})
        results.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(CannotJoin, match="as 1 of 3"):
        roll.call(at, 0, 2, 10.0, {})
    thread.join()
    assert results


def test_strangers_are_none_of_ours():
    def strangers(at):
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": "1"}\n', b"\xff\n", b""):
            with socket.create_connection(at) as stranger:
                stranger.sendall(said)

    def meanwhile(at):
        for _ in range(100):
            try:
                strangers(at)
                break
            except OSError:
                time.sleep(0.05)
        threads.append(threading.Thread(target=last, args=(at,)))
        threads[0].start()

    def last(at):
        found.append(roll.call(at, 1, 2, 10.0, {"seed": 0}))

    threads, found = [], []
    found += called([0], 2, meanwhile=meanwhile)
    threads[0].join()
    assert sorted(own.rank for own in found) == [0, 1]
    left(found)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotJoin, match=f"can't listen on port {port} of 127.0.0.1: Addr"):
            roll.call(("127.0.0.1", port), 0, 2, 5.0, {})


@pytest.mark.parametrize("given", ["10.0.0.1", "10.0.0.1:", ":80", "host:0", "host:99999", "h:a"])
def test_an_address_is_a_host_and_a_port(given):
    with pytest.raises(ValueError, match="write host:port"):
        zero_jax.initialize(given, 2, 0)
    assert addresses.address_of("[fe80::1]:80") == ("fe80::1", 80)


def test_ranks_and_seconds_are_checked():
    with pytest.raises(ValueError, match="ranks go from 0 to 1"):
        zero_jax.initialize("h:1", 2, 2)
    with pytest.raises(ValueError, match="give a positive number"):
        zero_jax.initialize("h:1", 2, 1, wait_seconds=0)


@pytest.mark.parametrize(
    ("host", "known", "own"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", None),  # Debian's /etc/hosts: its own name, for itself alone
        ("gateway", "192.0.2.1", None),
    ],
)
def test_it_listens_at_the_address_that_was_given(monkeypatch, capsys, host, known, own):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    address, port = addresses.bind_address(host, 80)
    assert port == 80
    if own is None:
        assert address in ("::", "0.0.0.0")
        assert f"listens on all interfaces: {host} ({known})" in capsys.readouterr().err
    else:
        assert (address, capsys.readouterr().err) == (own, "")


@pytest.mark.parametrize("error", [None, ValueError("an exception that nobody caught")])
@pytest.mark.parametrize("gone", [0, 2])
def test_who_is_gone_is_told_to_all_others_at_once(monkeypatch, gone, error):
    found, told = called([0, 1, 2], 3), {}
    for own in found:
        own.on_loss = lambda why, rank=own.rank: told.setdefault(rank, why)
    if error is not None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "last_value", error, raising=False)
            found[gone]._at_exit()  # is no leaving
    found[gone].drop()  # as a kernel does for a process that has ended
    end = time.monotonic() + 10
    while len(told.keys() - {gone}) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    others = [why for rank, why in told.items() if rank != gone]
    assert len(others) == 2 and all(f"process {gone} (pid" in why for why in others), told
    left(found)


def test_who_leaves_is_not_missed():
    found, told = called([0, 1, 2], 3), []
    for own in found:
        own.on_loss = told.append
    left(found[1:])
    for own in found[1:]:
        for link in own._links.values():
            link.close()
    time.sleep(0.3)
    assert told == []  # process 0 among them, which is still there
    left(found)


def test_settings_of_jax_are_those_that_change_numbers():
    known = settings_of_jax()
    for name in ("jax_default_prng_impl", "jax_enable_x64", "jax_default_matmul_precision"):
        assert name in known
    for name in ("jax", "jaxlib", "zero_jax"):
        assert f"the version of {name}" in known
    assert not any("cache_dir" in name or "visible_devices" in name for name in known)
