"""Network addresses of processes: parsing them, and choosing where to listen."""

import contextlib
import random
import socket
import sys
import time

Address = tuple[str, int]
_RETRY = 0.5


class JoinError(OSError):
    """Raised if the processes of a run do not find each other."""


def address_of(coordinator: str) -> Address:
    """Splits an address into host and port.

    Raises:
      ValueError: `coordinator` is not host:port.
    >>> address_of("10.0.0.1:7878"), address_of("[::1]:7878")
    (('10.0.0.1', 7878), ('::1', 7878))
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"coordinator={coordinator!r}: it must be host:port of process 0, with a port from 1 "
            "to 65535, for example 10.0.0.1:7878"
        )
    return host.strip("[]"), int(port)


def written(host: str, port: int) -> str:
    """An address as host:port.

    >>> written("::1", 7878)
    '[::1]:7878'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(host: str, port: int, wait_seconds: float = 0.0) -> Address:
    """Returns the address at which process 0 listens: that of `host`, and no other.

    It listens on all interfaces, and prints a warning, where other machines can't reach that
    address: a loopback address (Debian maps the own host name to one), or that of a gateway.

    Args:
      host: Host name or address.
      port: Port.
      wait_seconds: Seconds to wait until the name is known, as for a pod that has just started.

    Raises:
      JoinError: The name is still unknown.
    """
    end = time.monotonic() + wait_seconds
    while True:
        try:
            known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:
            if isinstance(error, UnicodeError) or time.monotonic() >= end:
                raise JoinError(f"the address of process 0, {host}, is unknown: {error}") from error
            time.sleep(_RETRY)
    family, address = known[0][0], str(known[0][4][0])
    meant = host in ("localhost", address)
    if meant or not _is_loopback(address):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
            return address, port
    print(
        f"warning: process 0 listens on all interfaces, because other machines can't reach it "
        f"at {host} ({address})",
        file=sys.stderr,
    )
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", port


def free_port() -> int:
    """Returns a port at which no program listens.

    The system's own choice would be unsafe: a connection that opens meanwhile could get it.
    """
    for _ in range(1000):
        port = random.randrange(20000, 32000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise JoinError("no port from 20000 to 32000 is free")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
