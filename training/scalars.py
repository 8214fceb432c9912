"""TensorBoard's files of a run, written in the thread that trains.

tensorboardX's `SummaryWriter` hands events to a thread through a queue of ten. After one failed
write, or when the clock is set back by a month, that thread is gone, and the next call waits for it
indefinitely. Here a write that fails ends TensorBoard's file alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Scalars:
    """Writes scalars to an event file; nothing more after one that can't be written.

    Args:
        folder: For the event file; made if need be.
        purge_step: TensorBoard drops what earlier files say of this step and later ones.
    """

    def __init__(self, folder: Path, purge_step: int | None = None):
        self._folder, self._file = folder, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            from tensorboardX.proto.event_pb2 import SessionLog
            from tensorboardX.record_writer import RecordWriter

            name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}"
            number = 0
            while (path := folder / (name + f".{os.getpid()}.{number}")).exists():
                number += 1
            self._file = RecordWriter(str(path))
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Writes named values of one step."""
        if self._file is None:
            return
        from tensorboardX.summary import scalar

        try:
            for name, value in values.items():
                self._write(step=step, summary=scalar(name, value))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the file; more calls do nothing."""
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._give_up(error)

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        assert self._file is not None
        self._file.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        with contextlib.suppress(OSError):  # stdout may be on the same disk
            print(
                f"no more TensorBoard files in {self._folder}: {error}. The run continues, with "
                "all numbers in metrics.jsonl",
                flush=True,
            )
