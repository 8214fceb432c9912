"""Ends a run of several processes if one of them is dead or stuck, and reports which.

A collective waits indefinitely for a stopped process, and long for a dead one. So every process
writes a counter to a file in a shared folder once a second, and reads those of the next few
ranks. A process whose counter does not change is dead or stopped. A step that takes far longer than
those before it is stuck, though its process is alive. The first steps, which compile, and a pause
between steps have a longer limit. A process with an error that the others do not have leaves them
waiting for it. In each case a file informs all others. Every process that still can prints its
stacks and ends with exit code ENDED, for a supervisor that restarts it.

    with Watchdog(folder, dead_after=60) as watchdog:
        for number, batch in enumerate(batches):
            params, opt_state, metrics = step(params, opt_state, batch)
            watchdog.step(number)
        watchdog.rest()  # no step is timed from here
"""

import collections
import contextlib
import faulthandler
import os
import pathlib
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero_jax.cluster.processes import the_roll
from zero_jax.cluster.roll import ENDED
from zero_jax.cluster.roll_call import name_of
from zero_jax.cluster.signs import LEFT, Other, Signs

# How many of the ranks after its own a process watches: a host that dies as a whole is watched by
# the ranks before it, and the load on the storage does not grow with the square of their number.
_WATCHED = 3
_LEAST_STEPS = 3
# In units of `dead_after`: first a dead process is named, then one with an error, then a stuck one.
_HELD, _STUCK = 1.5, 2.0
# Limits of the first steps and of a pause, which have nothing to compare with: in units of
# `slow_after` and of `dead_after`, whichever is longer; 12 minutes by default.
_LONG = {"slow_after": 6.0, "dead_after": 12.0}


class Watchdog:
    """Ends a run of several processes if one is dead, stuck or failed; a context manager.

    It monitors the processes from a thread. If an error leaves the `with` block in one process,
    that process waits until all others have an error too or are done; the error is then raised as
    usual. If that takes longer than 1.5 × `dead_after` seconds, the run ends with this error.

    Args:
      folder: Folder on storage that all processes share; created if missing. Each start has its own
        folder in it.
      dead_after: Seconds without a sign of life after which a process counts as dead.
      slow_factor: A step is stuck if it takes this many times the median of earlier steps.
      slow_after: A step must also take this many seconds, and 2 × `dead_after`, to be stuck.
        Pauses, the time until the first step is done, and the first three steps have a longer
        limit: 6 × `slow_after` or 12 × `dead_after`, whichever is longer (12 minutes by default).

    Raises:
      ValueError: A number is not positive.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dead_after: float = 60.0,
        slow_factor: float = 20.0,
        slow_after: float = 120.0,
    ):
        limits = {"dead_after": dead_after, "slow_factor": slow_factor, "slow_after": slow_after}
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}: it must be a positive number")
        self._dead_after, self._slow = dead_after, (slow_factor, slow_after)
        self._rank, self.count = jax.process_index(), jax.process_count()
        self.signs = Signs(pathlib.Path(folder), _agreed(time.time_ns()), self._rank)
        nexts = {(self._rank + d) % self.count for d in range(1, _WATCHED + 1)} - {self._rank}
        self._others = {rank: Other(time.monotonic()) for rank in sorted(nexts)}
        self._durations: collections.deque[float] = collections.deque(maxlen=100)
        self._last: float | None = None  # when it began to wait for a step; None: it does not
        self._pause: tuple[float, str, float] | None = None  # since when, for what, its limit
        self._number: int | None = None
        self._error: Exception | None = None
        self._said: set[str] = set()  # of storage that failed
        self._ending = threading.Lock()
        self._interval = min(1.0, dead_after / 5)
        self._ended = threading.Event()
        self._before: Callable[[str], Any] | None = None  # who was told of a process that is gone
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        self.signs.open()
        self._last = time.monotonic()
        self._thread.start()
        links = the_roll()
        if links is not None:
            self._before, links.on_loss = links.on_loss, self.lost
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception) and self._others and jax.distributed.is_initialized():
            self.hold(error)
            return  # the thread goes on: a usual exit waits for processes that may be dead
        links = the_roll()
        if links is not None and self._before is not None:
            links.on_loss = self._before
        self._ended.set()
        self._thread.join()
        if error is None or not jax.distributed.is_initialized():
            with contextlib.suppress(OSError):
                self._beat(LEFT)
        self.signs.close()

    def step(self, number: int) -> None:
        """Records that step `number` is done, and its duration."""
        now = time.monotonic()
        if self._last is not None and self._number is not None:  # the first one was compiled
            self._durations.append(now - self._last)
        self._last, self._number = now, number

    @contextlib.contextmanager
    def pause(self, what: str = "a pause", *, times: float = 1.0) -> Iterator[None]:
        """Context manager for work that is not a step: evaluation, compilation, waiting for a save.

        A pause that takes too long ends the run too, after 12 minutes by default. Call `progress`
        in it if it takes longer.

        Args:
          what: Name of the pause, for the message.
          times: Factor of the limit.
        """
        outer, timed, self._last = self._pause, self._last is not None, None
        self._pause = time.monotonic(), what, times * self._long
        try:
            yield
        finally:
            self._pause = None if outer is None else (time.monotonic(), *outer[1:])
            self._last = time.monotonic() if timed else None

    def progress(self) -> None:
        """Records progress in a pause: its time limit starts again."""
        pause = self._pause
        if pause is not None:
            self._pause = time.monotonic(), *pause[1:]

    def begin(self) -> None:
        """Starts timing again after `rest`: the next step is timed."""
        self._last = time.monotonic()

    def rest(self) -> None:
        """Stops timing until the next step is done."""
        self._last = None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Context manager that reports an error in its block at once, and holds it there.

        Use it inside a `with` block of checkpoints: closing them waits for the other processes,
        which may wait for this one.
        """
        try:
            yield
        except Exception as error:
            if self._others and jax.distributed.is_initialized():
                self.hold(error)
            raise

    def hold(self, error: Exception) -> None:
        """Waits until all other processes have an error too or are done; otherwise ends the run."""
        if self._error is error:
            return  # they have, and were told
        self._error, self._last, self._pause = error, None, None
        end = time.monotonic() + _HELD * self._dead_after
        waited_for = [rank for rank in range(self.count) if rank != self._rank]
        while time.monotonic() < end:
            time.sleep(self._interval)  # the thread tells of this error, or that one is dead
            while waited_for and self._is_through(waited_for[-1]):
                waited_for.pop()
            if not waited_for:
                links = the_roll()
                if links is not None:
                    links.leave()  # with an error of its own, as all others
                # What this one has told is to be read before it goes; JAX aborts all others when
                # the first does.
                time.sleep((4 if self._rank == 0 else 2) * self._interval)
                return
        said = str(error).partition("\n")[0]
        self.end_run(
            f"{name_of(self._rank)} has an error that the others do not have: "
            f"{type(error).__name__}: {said}"
        )

    def _is_through(self, rank: int) -> bool:
        """Returns whether a process has an error, or is done."""
        with contextlib.suppress(OSError):
            told = self.signs.of(rank)
            return told is not None and (told["failed"] or told["counter"] == LEFT)
        return False

    @property
    def limit(self) -> float | None:
        """Seconds after which the current step or pause is stuck; None if nothing is timed."""
        pause = self._pause  # the other thread sets it
        if pause is not None:
            return pause[2]
        if self._last is None:
            return None
        if len(self._durations) < _LEAST_STEPS:
            return self._long
        factor, least = self._slow
        # Whose step takes long because another is dead or has an error is not stuck itself.
        least = max(least, _STUCK * self._dead_after)
        return max(least, factor * statistics.median(self._durations))

    @property
    def _long(self) -> float:
        return max(_LONG["slow_after"] * self._slow[1], _LONG["dead_after"] * self._dead_after)

    def _watch(self) -> None:
        counter = 0
        while not self._ended.wait(self._interval):
            counter += 1
            with self._on_storage():
                self._beat(counter)
            with self._on_storage():
                self._look()
            self._time()

    @contextlib.contextmanager
    def _on_storage(self) -> Iterator[None]:
        """Resets the time limits of others if storage is unavailable or full."""
        try:
            yield
        except OSError as error:
            for other in self._others.values():
                other.since = time.monotonic()
            # After an error a later start may have taken the folder. What is said once is known.
            if self._error is None and str(error) not in self._said:
                with contextlib.suppress(OSError):  # stderr may be on the same disk
                    print(f"watchdog: {self.signs.folder}: {error}", file=sys.stderr)
                    self._said.add(str(error))

    def _beat(self, counter: int) -> None:
        known = {"counter": counter, "step": self._number, "process": name_of(self._rank)}
        self.signs.tell(known | {"failed": self._error is not None})

    def _look(self) -> None:
        now = time.monotonic()
        verdict = self.signs.verdict
        if verdict is not None:
            self._end(verdict)
        for rank, other in self._others.items():
            other.look(self.signs.of(rank), now)
            both_failed = other.failed and self._error is not None
            gone = other.counter != LEFT and now - other.since > self._dead_after
            if gone and not both_failed:
                self.end_run(self._silent(rank, other, now - other.since))

    def _time(self) -> None:
        """Ends the run if this process's step or pause is stuck."""
        limit, last, pause, now = self.limit, self._last, self._pause, time.monotonic()
        since = last if pause is None else pause[0]
        if limit is None or since is None or now - since <= limit:
            return
        at = "before its first step" if self._number is None else f"after step {self._number}"
        what = "one step" if pause is None else pause[1]
        said = f"{name_of(self._rank)} has been stuck in {what} for {now - since:.0f} s, {at}"
        if pause is None and len(self._durations) >= _LEAST_STEPS:
            self.end_run(f"{said}; the median is {statistics.median(self._durations):.2g} s")
            return
        self.end_run(
            f"{said}; the limit is {limit:.0f} s. The stack traces show where. To allow more time, "
            "increase `dead_after` (train.py: --heartbeat-timeout-seconds)"
        )

    def _silent(self, rank: int, other: Other, seconds: float) -> str:
        if other.counter == Other.UNSEEN:
            return (
                f"{name_of(rank, host=False)} was not seen in {self.signs.folder} for "
                f"{seconds:.0f} s: it is dead, or the processes do not share that folder"
            )
        at = f", last seen at step {other.step}" if other.step is not None else ""
        silent = f"has sent no heartbeat for {seconds:.0f} s{at}"
        return f"{other.name} {silent}: it is dead or stopped"

    def lost(self, why: str) -> None:
        """Ends the run because a process is gone, with the shared verdict if there is one."""
        verdict = None
        with contextlib.suppress(OSError):
            verdict = self.signs.verdict
        at = f"; this process was at step {self._number}" if self._number is not None else ""
        self.end_run(verdict or why + at)

    def end_run(self, why: str) -> None:
        """Writes the reason for all processes, and ends this one."""
        self.signs.condemn(why)
        self._end(why)

    def _end(self, why: str) -> None:
        """Prints the reason and the stacks of all threads, and exits."""
        if self._ended.is_set():
            return
        self._ending.acquire()  # for good: one thread tells, and ends the process
        try:
            print(f"watchdog of {name_of(self._rank)}: {why}", file=sys.stderr, flush=True)
            if self._error is not None:
                traceback.print_exception(self._error)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
        finally:  # also where stderr is on the disk that is full
            if self._rank == 0:
                time.sleep(2 * self._interval)  # JAX aborts the others, unheard, when this one goes
            os._exit(ENDED)  # a usual exit waits for the other processes


def _agreed(number: int) -> int:
    """Returns the first process's number."""
    halves = np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
    high, low = np.asarray(multihost_utils.broadcast_one_to_all(halves)).tolist()
    return (high << 32) + low
