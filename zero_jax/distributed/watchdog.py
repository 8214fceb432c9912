"""Detection of dead, stuck and failed processes.

JAX's heartbeats end a run after 100 seconds, by SIGABRT, without a stack trace. Here every process
also sends some over its connection with process 0, which ends at once if a process dies.
"""

import collections
import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils

from zero_jax.distributed.initialize import peers
from zero_jax.distributed.rendezvous import Peer, process_name

EXIT_CODE = 76  # of a process whose run was ended because one is dead, stuck or failed
# A step is stuck after so many times the median of some earlier ones, and so many seconds.
_SLOW_FACTOR, _LEAST_STEPS, _SLOW_SECONDS = 20.0, 3, 120.0
# In units of `dead_after`: first a dead process is named, then one with an error, then a stuck one,
# because a step that waits for the former two is not stuck itself.
_HELD, _STUCK = 1.5, 2.0


class _Activity(NamedTuple):
    """A step or a pause that is timed; `since` and `limit` are in seconds."""

    name: str
    since: float
    limit: float


class Watchdog:
    """Ends a run of several processes if one is dead, stuck or failed; a context manager.

    All processes start it together, after `zero_jax.initialize`. A process is dead or stopped if it
    sends no heartbeats, and stuck if a step takes far longer than earlier ones. It is failed if it
    has an error that the others do not have after 1.5 × `dead_after` seconds. Then all processes
    print the reason and their stacks, and exit with code 76, for a supervisor that restarts the
    run. An error that all processes have, except those that are done, is raised as usual::

        with Watchdog(dead_after=60) as watchdog:
            for number, batch in enumerate(batches):
                params, opt_state, metrics = step(params, opt_state, batch)
                watchdog.step(number)
            watchdog.rest()  # no step is timed from here

    Args:
      dead_after: Seconds without a heartbeat after which a process counts as dead. The limit of a
        step is 20 times the median of earlier ones, 2 minutes or 2 × `dead_after`, whichever is
        longest. Pauses and the first steps may take 12 minutes or 12 × `dead_after`.

    Raises:
      ValueError: `dead_after` is not positive, or `zero_jax.initialize` did not join the processes.
    """

    def __init__(self, *, dead_after: float = 60.0):
        if not dead_after > 0:
            raise ValueError(f"dead_after={dead_after!r}: it must be a positive number")
        self._dead_after, self._long = dead_after, max(6 * _SLOW_SECONDS, 12 * dead_after)
        self._interval = min(1.0, dead_after / 5)
        self._rank, self._peers = jax.process_index(), peers
        if jax.process_count() > 1:
            if not peers:
                raise ValueError("Watchdog needs `zero_jax.initialize` in place of JAX's own")
            multihost_utils.sync_global_devices("zero_jax.Watchdog")
        self._durations: collections.deque[float] = collections.deque(maxlen=100)
        self._activity: _Activity | None = None
        self._number: int | None = None  # of the last step
        self._error: Exception | None = None
        self._ending, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        for peer in self._peers.values():
            peer.silence, peer.on_change = 0.0, self._check_peer
        self.begin()
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.hold(error)
            if self._error is error:
                return  # the thread goes on: a usual exit waits for processes that may be dead
        self._ended.set()
        self._thread.join()
        if error is None or not jax.distributed.is_initialized():
            self._send(left=True)

    def step(self, number: int) -> None:
        """Records that step `number` is done, and its duration."""
        if self._activity is not None and self._number is not None:  # the first one was compiled
            self._durations.append(time.monotonic() - self._activity.since)
        self._number = number
        self.begin()

    def begin(self) -> None:
        """Starts timing the next step, also after `rest`."""
        limit = self._long
        if len(self._durations) >= _LEAST_STEPS:
            least = max(_SLOW_SECONDS, _STUCK * self._dead_after)
            limit = max(least, _SLOW_FACTOR * statistics.median(self._durations))
        self._activity = _Activity("one step", time.monotonic(), limit)

    def rest(self) -> None:
        """Stops timing until the next step is done."""
        self._activity = None

    @contextlib.contextmanager
    def pause(self, what: str = "a pause", *, times: float = 1.0) -> Iterator[None]:
        """Context manager for work that is not a step: evaluation, compilation, waiting for a save.

        Messages call it `what`, and `times` multiplies its time limit, which `progress` restarts.
        """
        outer = self._activity
        self._activity = _Activity(what, time.monotonic(), times * self._long)
        try:
            yield
        finally:
            self._activity = outer
            self.progress()

    def progress(self) -> None:
        """Records progress in a pause: its time limit starts again."""
        if self._activity is not None:
            self._activity = self._activity._replace(since=time.monotonic())

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Context manager that reports an error in its block at once, and holds it there.

        Use it while checkpoints are open: closing them waits for processes that may wait for this.
        """
        try:
            yield
        except Exception as error:
            self.hold(error)
            raise

    def hold(self, error: Exception) -> None:
        """Waits until all other processes have an error too or are done; otherwise ends the run."""
        if not self._peers or self._error is error or not jax.distributed.is_initialized():
            return
        self._error, self._activity = error, None
        end = time.monotonic() + _HELD * self._dead_after
        while time.monotonic() < end:
            time.sleep(self._interval)
            if not self._running():
                # The others must receive that first: JAX aborts them when process 0 exits.
                time.sleep((4 if self._rank == 0 else 2) * self._interval)
                return
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        name = process_name(self._rank)
        self.end_run(f"{name} has an error that the others do not have: {reason}")

    def end_run(self, why: str) -> None:
        """Sends the reason to all processes, prints it with the stacks, and ends this one."""
        self._send(verdict=why)
        self._exit(why)

    def _exit(self, why: str) -> None:
        self._ending.acquire()  # never released: one thread prints, and ends the process
        try:
            print(f"watchdog of {process_name(self._rank)}: {why}", file=sys.stderr, flush=True)
            if self._error is not None:
                traceback.print_exception(self._error)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
        finally:  # also if stderr is on a disk that is full
            if self._rank == 0:
                time.sleep(2 * self._interval)  # JAX aborts the others when this process ends
            os._exit(EXIT_CODE)  # a usual exit waits for the other processes

    def _send(self, **values: object) -> None:
        for peer in self._peers.values():
            peer.send(**values)

    def _running(self) -> int:
        """Returns how many processes have no error and are not done, as process 0 knows."""
        states = [peer.state for peer in self._peers.values() if not peer.state.get("left")]
        if self._rank == 0:
            return (self._error is None) + sum(not state.get("failed") for state in states)
        return sum(state.get("running", 1) for state in states)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            failed = self._error is not None
            self._send(step=self._number, failed=failed, left=False, running=self._running())
            for peer in self._peers.values():
                peer.silence += self._interval  # not real time: this process may be suspended
                self._check_peer(peer)
            activity, now = self._activity, time.monotonic()  # another thread sets it
            if activity is not None and now - activity.since > activity.limit:
                number = self._number
                at = "before its first step" if number is None else f"after step {number}"
                self.end_run(
                    f"{process_name(self._rank)} has been stuck in {activity.name} for "
                    f"{now - activity.since:.0f} s, {at}; the limit is {activity.limit:.0f} s. To "
                    "allow more, increase `dead_after` (train.py: --heartbeat-timeout-seconds)"
                )

    def _check_peer(self, peer: Peer) -> None:
        """Ends the run if another process ends it, is dead, or is stopped."""
        state, name = peer.state, peer.state.get("name")
        if self._ended.is_set():
            return
        if "verdict" in state:
            self.end_run(state["verdict"])
        elif state.get("left") or (state.get("failed") and self._error is not None):
            return
        elif peer.is_closed:
            self.end_run(f"{name} is gone: its connection ended at step {self._number or 0}")
        elif peer.silence > self._dead_after:
            silent = f"{name} has sent no heartbeat for {peer.silence:.0f} s"
            self.end_run(f"{silent}, last at step {state.get('step') or 0}: it is dead or stopped")
