"""Connections between the processes of a run, opened before they join JAX's process group.

JAX's own join aborts every process (SIGABRT, jax 0.10.2 to 0.12.0) if one is missing or has the
rank of another, and names nobody. The connections stay open for `Watchdog`.
"""

import contextlib
import functools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zero_jax.distributed.agreement import difference
from zero_jax.names import few

T = TypeVar("T")
Address = tuple[str, int]
_LONGEST_LINE = 1 << 20  # bytes
_POLL_SECONDS = 0.1
_LATE_SECONDS = 10.0  # for which process 0 waits after an error, to send it to late processes too


class JoinError(OSError):
    """Raised if the processes of a run do not find each other."""


class Peer:
    """Another process of the run. A thread reads its messages: one JSON object per line."""

    def __init__(self, connection: socket.socket):
        self.state: dict[str, Any] = {}  # the values that it sent last
        self.silence = 0.0  # seconds since its last message, counted by `Watchdog`
        self.is_closed = False  # the connection has ended
        self.on_change: Callable[[Peer], None] = lambda _: None  # called by the thread
        self._connection = connection
        connection.settimeout(None)
        threading.Thread(target=self._read, daemon=True, name="peer").start()

    def send(self, **values: object) -> None:
        """Sends values; does nothing if the connection has ended, which `is_closed` shows."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(values).encode() + b"\n")

    def close(self) -> None:
        """Ends the connection; values that were sent still arrive."""
        with contextlib.suppress(OSError):  # the other process has ended it
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with self._connection, self._connection.makefile("rb") as file:
            while not self.is_closed:
                try:
                    self.state = {**self.state, **json.loads(file.readline(_LONGEST_LINE))}
                    self.silence = 0.0
                except (OSError, TypeError, ValueError, RecursionError):
                    self.is_closed = True  # the other end is closed, or is not zero_jax
                self.on_change(self)


def process_name(rank: int) -> str:
    """Returns the name of this process in messages."""
    return f"process {rank} (pid {os.getpid()} on {socket.gethostname()})"


def parse_address(coordinator: str) -> Address:
    """Splits an address into host and port.

    >>> parse_address("10.0.0.1:7878"), parse_address("[::1]:7878")
    (('10.0.0.1', 7878), ('::1', 7878))
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator={coordinator!r}: it must be host:port, like 10.0.0.1:7878")
    return host.strip("[]"), int(port)


def bind_address(host: str, port: int, wait_seconds: float = 0.0) -> Address:
    """Returns the address at which process 0 listens: that of `host`, on one interface.

    If other machines can't reach it, as with a host name with a loopback address (Debian's own) or
    the address of a gateway, it is that of all interfaces. Raises JoinError for an unknown name.
    """
    # A new pod has no DNS entry in its first seconds.
    results = _repeated(
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
        time.monotonic() + wait_seconds,
        f"the address of process 0, {host}, is unknown",
    )
    family, address = results[0][0], str(results[0][4][0])
    is_loopback = address.startswith("127.") or address == "::1"
    if host in ("localhost", address) or not is_loopback:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
            return address, port
    why = f"because other machines can't reach it at {host} ({address})"
    print(f"warning: process 0 listens on all interfaces, {why}", file=sys.stderr)
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", port


def _repeated(call: Callable[[], T], end: float, problem: str) -> T:
    """Calls until there is no OSError; raises JoinError at `end`."""
    while True:
        try:
            return call()
        except (OSError, UnicodeError) as error:  # UnicodeError: the host can't be a name
            if isinstance(error, UnicodeError) or time.monotonic() >= end:
                raise JoinError(f"{problem}: {error}") from error
            time.sleep(_POLL_SECONDS)


def rendezvous(
    address: Address, rank: int, count: int, wait_seconds: float, settings: Mapping[str, str]
) -> dict[int, Peer]:
    """Waits until all processes have reported to process 0, which listens at `address`.

    Returns connections by rank: to all other processes in process 0, to process 0 in the others.
    Raises JoinError if one is missing or two have the same rank, and ValueError if a setting or the
    number of processes differs.
    """
    settings = {**settings, "the number of processes": str(count)}
    if rank == 0:
        return _gather(address, count, wait_seconds, settings)
    end, place = time.monotonic() + wait_seconds, f"process 0 at {address[0]}:{address[1]}"
    connection = _repeated(
        functools.partial(socket.create_connection, address, timeout=min(10.0, wait_seconds)),
        end,
        f"process {rank} did not reach {place} within {wait_seconds:g} s: check that it runs "
        "there, and that this machine can reach the port",
    )
    peer = Peer(connection)
    peer.send(rank=rank, name=process_name(rank), settings=settings)
    while "fault" not in peer.state and not peer.is_closed and time.monotonic() < end + 5:
        time.sleep(_POLL_SECONDS)
    no_answer = f"{place} did not answer: it ended, or another program listens at that port"
    if fault := peer.state.get("fault", no_answer):
        peer.close()
        raise (ValueError if peer.state.get("differs") else JoinError)(fault)
    return {0: peer}


def _gather(
    address: Address, count: int, wait_seconds: float, settings: Mapping[str, str]
) -> dict[int, Peer]:
    """Waits in process 0 until all others have reported, and answers them."""
    accepted, peers = list[Peer](), dict[int, Peer]()
    late = end = time.monotonic() + wait_seconds
    with _listen(*address) as server:
        server.settimeout(_POLL_SECONDS)
        while not peers.keys() >= {*range(1, count)} and time.monotonic() < late:
            with contextlib.suppress(OSError):  # nobody connects, or a process has ended again
                accepted.append(Peer(server.accept()[0]))
                continue
            peers, fault = _compare(settings, accepted)
            late = end if fault is None else min(late, time.monotonic() + _LATE_SECONDS)
    peers, fault = _compare(settings, accepted)
    missing = [str(rank) for rank in range(1, count) if rank not in peers]
    if missing and fault is None:
        fault = JoinError(
            f"ranks {few(missing, ', ')} of {count} did not join within {wait_seconds:g} s: check "
            "why they did not start, or use a longer timeout"
        )
    differs = isinstance(fault, ValueError)
    for peer in accepted:
        peer.send(fault=str(fault or ""), differs=differs, name=process_name(0))
        if fault is not None or peer not in peers.values():
            peer.close()
    if fault is not None:
        raise fault
    return peers


def _compare(
    settings: Mapping[str, str], accepted: list[Peer]
) -> tuple[dict[int, Peer], Exception | None]:
    """Returns the processes that have reported, by rank, and the first error in their reports."""
    peers, faults = dict[int, Peer](), list[Exception]()
    for peer in accepted:
        rank, others = peer.state.get("rank"), peer.state.get("settings")
        if peer.is_closed or type(rank) is not int or not isinstance(others, dict):
            continue
        if message := difference(settings, others, rank):
            faults.append(ValueError(message))
        elif rank in peers:
            names = f"{peers[rank].state.get('name')} and {peer.state.get('name')}"
            faults.append(JoinError(f"two processes have rank {rank}: {names}"))
        peers.setdefault(rank, peer)
    return peers, next(iter(faults), None)


def _listen(host: str, port: int) -> socket.socket:
    family, dual = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::"
    try:
        return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        raise JoinError(
            f"process 0 can't listen on port {port} of {host}: {error}. Another program may use "
            "it: give another port to all processes"
        ) from error
