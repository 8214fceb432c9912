"""Process 0 while the others come: who is there, and what it tells all of them."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zero_jax.cluster.addresses import Address, JoinError
from zero_jax.cluster.link import Link

# For those who come after something was found to be wrong, to be told what.
_TELL_SECONDS = 10.0


class Found(NamedTuple):
    """How a roll call ends.

    Attributes:
      fault: what is wrong, or None.
      differs: whether that is a setting.
      links, names: of the others, by rank.
    """

    fault: str | None
    differs: bool
    links: dict[int, Link]
    names: dict[int, str]


class RollCall:
    """What process 0 does in it.

    Args:
      me: what the others tell too: its rank, the count, its name and settings.
      count: how many there are.
      wait_seconds: how long to wait for all, for messages.
    """

    def __init__(self, me: Mapping[str, Any], count: int, wait_seconds: float):
        self._me, self._count, self._wait = me, count, wait_seconds
        self._links: dict[int, Link] = {}
        self._names: dict[int, str] = {}
        self._doubles: list[Link] = []
        self._fault: str | None = None
        self._differs = self._over = False
        self._changed = threading.Condition()

    def gather(self, at: Address, end: float) -> Found:
        """Waits for all until a time of the monotonic clock, and tells them how it ends."""
        with self._listening(*at):
            with self._changed:
                self._changed.wait_for(self._is_decided, max(0.0, end - time.monotonic()))
                if self._fault is not None:
                    left = max(0.0, end - time.monotonic())
                    self._changed.wait_for(self._all_came, min(left, _TELL_SECONDS))
                self._fault = self._fault or self._did_not_come()
                self._over = True
                found = Found(self._fault, self._differs, dict(self._links), dict(self._names))
        answer = {"fault": found.fault, "differs": found.differs, "name": self._me["name"]}
        for link in (*found.links.values(), *self._doubles):
            link.send(answer)
            if found.fault is not None:
                link.close()
        return found

    def _all_came(self) -> bool:
        return len(self._links) == self._count - 1 and not self._missing()

    def _is_decided(self) -> bool:
        return self._fault is not None or self._all_came()

    def _missing(self) -> list[int]:
        """Who has not come, or is gone again."""
        known = self._links
        return [r for r in range(1, self._count) if r not in known or known[r].has_ended()]

    def _did_not_come(self) -> str | None:
        missing = self._missing()
        if not missing:
            return None
        named = ", ".join(map(str, missing[:20])) + ", ..." * (len(missing) > 20)
        which = f"process {named}" if len(missing) == 1 else f"processes {named}"
        return (
            f"{which} of {self._count} did not join within {self._wait:g} s: check why they did "
            "not start, or use a longer timeout"
        )

    @contextlib.contextmanager
    def _listening(self, host: str, port: int) -> Iterator[None]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server(
                (host, port), family=family, backlog=1024, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            said = os.strerror(error.errno) if error.errno else error
            raise JoinError(
                f"process 0 can't listen on port {port} of {host}: {said}. Another program may use "
                "it: give another port to all processes"
            ) from error
        accepting = threading.Thread(
            target=self._accept, args=(server,), daemon=True, name="roll call"
        )
        with server:
            accepting.start()
            try:
                yield
            finally:
                # A socket that a thread waits at listens on after it is closed, and JAX is to
                # listen at this port next.
                self._over = True
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                accepting.join()

    def _accept(self, server: socket.socket) -> None:
        while not self._over:
            try:
                link = Link(server.accept()[0])
            except OSError:  # it is over, or who came is gone, or there are too many open files
                time.sleep(0.1)
                continue
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: Link) -> None:
        """Hears who it is. What says nothing of the kind is none of ours."""
        told = link.receive(10)
        if told is None or type(told.get("rank")) is not int or "settings" not in told:
            link.close()
            return
        rank, name = told["rank"], str(told.get("name"))
        with self._changed:
            if self._over or link.has_ended():
                link.close()
                return
            if told.get("count") != self._count or not 0 < rank < self._count:
                self._fault = self._fault or (
                    f"{name} was started as {rank} of {told.get('count')} processes, and process "
                    f"0 as one of {self._count}: start all with the same number"
                )
                self._doubles.append(link)
            elif rank in self._links and not self._links[rank].has_ended():
                self._fault = self._fault or (
                    f"two processes have rank {rank}: {self._names[rank]} and {name}"
                )
                self._doubles.append(link)
            else:
                if rank in self._links:
                    self._links[rank].close()
                self._links[rank], self._names[rank] = link, name
                fault = differing(self._me["settings"], told["settings"], rank)
                if self._fault is None and fault is not None:
                    self._fault, self._differs = fault, True
            self._changed.notify_all()


def name_of(rank: int, host: bool = True) -> str:
    """What a process is called in messages."""
    return f"process {rank}" + (f" (pid {os.getpid()} on {socket.gethostname()})" if host else "")


def differing(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str | None:
    """What to say of the first setting that two processes do not share, or None."""
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            return (
                f"the processes disagree on {name}: process 0 has {first.get(name)!r}, "
                f"process {rank} has {other.get(name)!r}. Start all with the same settings"
            )
    return None
