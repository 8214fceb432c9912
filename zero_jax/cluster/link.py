"""A connection between two processes of a run, which carries lines of JSON."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

_LONGEST = 1 << 20  # of one message
# A link without a word for 10 + 3 * 5 seconds is cut; JAX takes 100.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Link:
    """One connection, which carries lines of JSON."""

    def __init__(self, connection: socket.socket):
        self._socket, self._rest = connection, b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends it, unless the other end is gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None if the connection ends, or what comes is none."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            self._socket.settimeout(None if seconds is None else max(seconds, 0.01))
            while b"\n" not in self._rest and len(self._rest) < _LONGEST:
                part = self._socket.recv(1 << 16)
                if not part:
                    return None
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\n")
            found = json.loads(line)
            return found if isinstance(found, dict) else None
        return None

    def has_ended(self) -> bool:
        """Whether the other end is gone; does not wait."""
        try:
            self._socket.settimeout(0)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """Ends the connection, also where a thread waits for more; what was sent arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
