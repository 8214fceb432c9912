"""Progress bars, tables and human-readable numbers. Units follow the paper: GB = 1e9 bytes."""

import collections
import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import rich.box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Show = Callable[[int, float, float], None]  # with finished steps, loss and tokens per second
# Controls but tab and newline, surrogates, and characters that reorder bidirectional text.
_UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


@contextlib.contextmanager
def progress(total: int, *, start: int = 0, enabled: bool = True) -> Iterator[Show]:
    """Shows step, loss, tokens per second and time left, as a bar or as lines.

    Where stdout is not a terminal (a file, a pipe, a batch job), a plain line is printed about
    every tenth of the run. Call the function that it yields after each step. A resumed run has
    `start` steps already; all processes except the first are not `enabled`.
    """
    if not enabled:
        yield lambda step, loss, tokens_per_second: None
    elif not sys.stdout.isatty() or Console().is_dumb_terminal:
        yield _lines(total, start)
    else:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            task = bar.add_task("", total=total, completed=start)

            def show(step: int, loss: float, tokens_per_second: float) -> None:
                if not bar.tasks[task].description:  # the first step included compilation
                    bar.reset(task, completed=step)
                text = f"loss {loss:.4f}  {human_count(tokens_per_second)} tokens/s"
                bar.update(task, completed=step, description=text)

            yield show


def _lines(total: int, start: int) -> Show:
    began: tuple[int, float] | None = None  # after the first step, which includes compilation

    def show(step: int, loss: float, tokens_per_second: float) -> None:
        nonlocal start, began
        begin, since = began = began or (step, time.monotonic())
        if step * 10 // total <= start * 10 // total:
            return
        start = step
        text = f"step {step}/{total}  loss {loss:.4f}  {human_count(tokens_per_second)} tokens/s"
        if step > begin:
            left = round((time.monotonic() - since) / (step - begin) * (total - step))
            text += f"  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        print(text, flush=True)

    return show


class Speed:
    """Tokens per second over the last `window` steps, without pauses."""

    def __init__(self, tokens_per_step: int, window: int = 20) -> None:
        self.tokens_per_step = tokens_per_step
        self._times = collections.deque([time.monotonic()], window + 1)

    def tick(self) -> float:
        """Records the end of a step; returns tokens per second."""
        self._times.append(time.monotonic())
        elapsed = self._times[-1] - self._times[0]
        return self.tokens_per_step * (len(self._times) - 1) / max(elapsed, 1e-9)

    def restart(self) -> None:
        """Discards earlier steps, after a compilation or an evaluation."""
        self._times.clear()
        self._times.append(time.monotonic())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table to stdout, numbers right-aligned; not truncated in a file."""
    table = Table(title=Text(title, "bold"), box=rich.box.SIMPLE_HEAD, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        wide = Console(width=10_000)
        console = Console(width=max(console.width, wide.measure(table).maximum))
    console.print(table)


def human_bytes(n: float) -> str:
    """Bytes to three digits, in powers of 1000 as in the paper.

    >>> human_bytes(1.2e11), human_bytes(1536)
    ('120 GB', '1.54 kB')
    """
    return _human(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def human_count(n: float) -> str:
    """A count to three digits: thousands K, millions M, billions B, trillions T.

    >>> human_count(7.5e9), human_count(124_439_808), human_count(512)
    ('7.5B', '124M', '512')
    """
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
