"""Progress of a run and human-readable numbers. Units follow the paper: GB = 1e9 bytes."""

import collections
import contextlib
import math
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

WINDOW = 20  # steps over which a speed is measured
# Controls but tab and newline, surrogates, and characters that reorder bidirectional text.
_UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class Meter(contextlib.ExitStack):
    """Measures the speed, and shows step, loss, tokens per second and time left.

    It is a bar, or where stdout is not a terminal (a file, a pipe, a batch job) a plain line about
    every tenth of the run. A resumed run has `start` steps already; all processes except the first
    are not `enabled`.
    """

    def __init__(self, total: int, tokens: int, *, start: int = 0, enabled: bool = True):
        super().__init__()
        self._total, self._tokens, self._printed = total, tokens, start
        has_bar = enabled and sys.stdout.isatty() and not Console().is_dumb_terminal
        self._prints = enabled and not has_bar
        bar = Progress(BarColumn(16), TextColumn("{task.description}"), disable=not has_bar)
        self._bar = self.enter_context(bar)
        self._task = bar.add_task("", total=total, completed=start)
        self._times = collections.deque([time.monotonic()], WINDOW + 1)

    def step(self, number: int, loss: float) -> float:
        """Shows a step that is done; returns tokens per second without pauses."""
        self._times.append(time.monotonic())
        elapsed = max(self._times[-1] - self._times[0], 1e-9)
        rate = self._tokens * (len(self._times) - 1) / elapsed
        left = timedelta(seconds=round((self._total - number) * self._tokens / rate))
        text = f"step {number}/{self._total}  loss {loss:.4f}  {human_count(rate)} tokens/s"
        text += f"  {left} left"
        self._bar.update(self._task, completed=number, description=text)
        if self._prints and number * 10 // self._total > self._printed * 10 // self._total:
            self._printed = number
            print(text, flush=True)
        return rate

    def restart(self) -> None:
        """Leaves earlier steps out of the speed, after a compilation or an evaluation."""
        self._times.clear()
        self._times.append(time.monotonic())


def human_bytes(n: float) -> str:
    """Returns bytes to three digits, such as 1.54 kB for 1536."""
    return _human(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def human_count(n: float) -> str:
    """Returns a count to three digits, such as 124M for 124,439,808."""
    return _human(n, ("", "K", "M", "B", "T"))


def _human(n: float, units: Sequence[str]) -> str:
    if not math.isfinite(n):
        return f"{n}{units[0]}"
    n = float(f"{n:.3g}")  # rounded first: 999_999 is 1 MB, not 1000 kB
    power = min(len(units) - 1, max(0, math.floor(math.log10(abs(n)) / 3))) if n else 0
    scaled = n / 1000**power
    return f"{scaled:.3g}{units[power]}" if abs(scaled) < 1000 else f"{scaled:.0f}{units[power]}"


def printable(text: str) -> str:
    """Returns a text that is safe to print, with escapes for characters that control a terminal.

    >>> printable("\\x1b]0;title\\x07 ü\\n")
    '\\\\x1b]0;title\\\\x07 ü\\n'
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
