"""Standard output that outlasts its reader, its terminal and its encoding."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class _Lasting(io.FileIO):
    """A file descriptor whose output is dropped once nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def lasting_streams() -> None:
    """Prepares stdout and stderr of a command for whatever they are.

    - Closed (`>&-`): output is dropped.
    - A pipe whose reader has ended (`| head -1`): output is dropped from then on. The command
      finishes, and its exit code is that of its work.
    - An encoding that lacks a character: the character is written as its escape.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
            continue
        try:
            number = stream.fileno()
        except (OSError, AttributeError):  # not a file: a test's, or that of a notebook
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_Lasting(number, "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=name == "stderr" or stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a command with lasting streams, and exits with its code."""
    lasting_streams()
    sys.exit(main())
