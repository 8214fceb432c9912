"""Who takes part in a run: asked before JAX makes a group of them, and watched while it lasts.

JAX aborts a process that waits for the others in vain, or whose first process is gone, without a
word of who is missing. So every process first tells process 0 its rank and its settings over a
connection of its own, and all learn who did not come, came twice or was started otherwise. The
connections stay: when a process is gone the kernel closes its own, and before JAX aborts the others
they have said who it was, and ended with exit code ENDED.
"""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from zero_jax.cluster.addresses import Address, JoinError
from zero_jax.cluster.link import Link
from zero_jax.cluster.roll_call import RollCall, name_of

ENDED = 76  # of a process whose run was ended because another is gone, stuck or has an error
_RETRY = 0.2


class Roll:
    """Connections between process 0 and all others; made by `call`.

    Args:
      rank: of this process.
      links: to others by rank: all of them in process 0, and process 0 in these.
      names: of those others.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], names: Mapping[int, str]):
        self.rank, self._links, self._names = rank, dict(links), dict(names)
        self.on_loss: Callable[[str], Any] = _end
        self._left = threading.Event()
        for other in self._links:
            name = f"link to process {other}"
            threading.Thread(target=self._watch, args=(other,), daemon=True, name=name).start()
        atexit.register(self._at_exit)

    def leave(self) -> None:
        """Tells the others that this process ends because it is done."""
        if not self._left.is_set():
            self._left.set()
            for link in self._links.values():
                link.send({"left": True})

    def drop(self) -> None:
        """Ends the connections without a word: the others take this process for gone."""
        self._left.set()
        for link in self._links.values():
            link.close()

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # no exception ends this process
            self.leave()

    def _watch(self, other: int) -> None:
        said = self._links[other].receive()
        if self._left.is_set() or (said is not None and said.get("left")):
            return
        why = f"{self._names[other]} is gone: its connection ended"
        why = said["lost"] if said is not None and "lost" in said else why
        if self.rank == 0:
            for link in self._links.values():
                link.send({"lost": why})
        self.on_loss(why)


def call(
    at: Address, rank: int, count: int, wait_seconds: float, settings: Mapping[str, Any]
) -> Roll:
    """Waits until all processes are there.

    Args:
      at: where process 0 listens, and where the others look for it.
      rank: of this process.
      count: how many there are.
      wait_seconds: how long to wait for all.
      settings: what must be equal in all of them; `str` tells values apart.

    Raises:
      JoinError: naming who did not come, or came twice.
      ValueError: naming what differs.
    """
    me = {"rank": rank, "count": count, "name": name_of(rank), "settings": _texts(settings)}
    end = time.monotonic() + wait_seconds
    if rank == 0:
        found = RollCall(me, count, wait_seconds).gather(at, end)
        _raise_for(found.fault, found.differs)
        return Roll(0, found.links, found.names)
    link = _connect(at, rank, end, wait_seconds)
    link.send(me)
    answer = link.receive(end - time.monotonic() + 5)
    if answer is None or not answer.keys() >= {"fault", "differs", "name"}:
        link.close()
        raise JoinError(
            f"process 0 at {at[0]}:{at[1]} did not answer: it ended before all processes joined, "
            "or another program listens at that port"
        )
    if answer["fault"] is not None:
        link.close()
    _raise_for(answer["fault"], answer["differs"])
    return Roll(rank, {0: link}, {0: answer["name"]})


def _raise_for(fault: str | None, differs: bool) -> None:
    if fault is not None:
        raise (ValueError if differs else JoinError)(fault)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in settings.items()}


def _end(why: str) -> None:
    try:
        print(f"{why}. This process exits with code {ENDED}", file=sys.stderr, flush=True)
    finally:  # also where stderr is on a disk that is full
        os._exit(ENDED)


def _connect(at: Address, rank: int, end: float, wait_seconds: float) -> Link:
    trouble: Exception = TimeoutError("timed out")
    while (left := end - time.monotonic()) > 0:
        try:
            return Link(socket.create_connection(at, timeout=min(left, 10)))
        except (OSError, UnicodeError) as error:  # the latter of a name that can be none
            trouble = error
            time.sleep(_RETRY)
    raise JoinError(
        f"process {rank} did not reach process 0 at {at[0]}:{at[1]} within {wait_seconds:g} s "
        f"({trouble}): check that it runs there, and that this machine can reach the port"
    ) from trouble
