"""Scalar writers: TensorBoard files and Weights & Biases.

A writer that fails neither blocks nor ends the training: it prints one message and stops.
tensorboardX's `SummaryWriter` writes from a thread behind a queue of ten entries. After one failed
write, or when the clock is set back by a month, that thread ends and the next call blocks
indefinitely. The training thread therefore writes the file itself, by its `RecordWriter`.
"""

from __future__ import annotations

import abc
import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WANDB_ID = "wandb-id"  # file with the id of the W&B run, in the folder of a run
WAITING = 1000  # maximum number of entries in the queue for W&B
INIT_SECONDS = 30.0  # timeout of W&B at the start
FINISH_SECONDS = 60.0  # timeout of W&B at the end


class ScalarWriter(abc.ABC):
    """Writes named numbers of steps.

    Args:
        name: Name of the output, for the message of a failure.
    """

    def __init__(self, name: str):
        self._name, self._failed = name, False

    @abc.abstractmethod
    def add(self, values: Mapping[str, float], step: int) -> None:
        """Writes finite values of one step."""

    @abc.abstractmethod
    def close(self, failed: bool) -> None:
        """Closes the writer; `failed` if an error ended the run."""

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        with contextlib.suppress(OSError):  # stdout may be on the same full disk
            why = str(error).partition("\n")[0].rstrip(".")
            print(
                f"Stopped writing {self._name}: {why}. Training continues, and metrics.jsonl has "
                "all numbers",
                flush=True,
            )


class TensorBoard(ScalarWriter):
    """Writes an event file of TensorBoard.

    Args:
        folder: Folder of the event file; created if missing.
        resumed: TensorBoard discards the first step here and later steps of earlier files.
    """

    def __init__(self, folder: Path, resumed: bool):
        super().__init__(f"TensorBoard files in {folder}")
        self._folder, self._resumed = folder, resumed
        self._file: Any = None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Writes values of one step; the first call opens the file."""
        if self._failed:
            return
        from tensorboardX.summary import scalar

        try:
            if self._file is None:
                self._open(step)
            for name, value in values.items():
                self._write(step=step, summary=scalar(name, value))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self, failed: bool) -> None:
        """Closes the file."""
        if self._failed or self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        super()._give_up(error)

    def _open(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        start = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        unique = uuid.uuid4().hex  # several files may start within a second
        self._file = RecordWriter(str(self._folder / f"events.out.tfevents.{start}.{unique}"))
        self._write(file_version="brain.Event:2")
        if self._resumed:
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **fields).SerializeToString())


def import_wandb(project: str) -> Any:
    """Returns the module wandb.

    Raises:
        ValueError: It is not installed.
    """
    with contextlib.suppress(ImportError):
        import wandb

        if hasattr(wandb, "init"):  # else a folder `wandb` beside the script
            return wandb
    raise ValueError(
        f"--wandb-project {project} requires the package wandb: pip install wandb, or leave "
        "--wandb-project out"
    )


class WeightsAndBiases(ScalarWriter):
    """Sends scalars to Weights & Biases from a thread; a resumed run continues its W&B run.

    Args:
        project: Name of the project.
        folder: Folder of the run.
        config: Settings of the run.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]):
        super().__init__(f"Weights & Biases from {folder}")
        self._entries: queue.Queue[dict[str, float] | None] = queue.Queue(WAITING)
        self._exit_code = 0  # of the run
        self._thread = threading.Thread(target=self._send, daemon=True)
        # After these timeouts W&B leaves the data in the folder. Users may set other values.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{FINISH_SECONDS:g}")
        os.environ.setdefault("WANDB_INIT_TIMEOUT", f"{INIT_SECONDS:g}")
        wandb = import_wandb(project)
        try:
            id_file = folder / WANDB_ID
            if not id_file.exists():
                id_file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
            self._run = wandb.init(
                project=project,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off"),
            )
            # A resumed run repeats steps; W&B's own step count must not decrease.
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # of wandb: no network, no API key, a full disk
            self._give_up(error)
        else:
            self._thread.start()

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Queues values of one step."""
        if not self._failed:
            try:
                self._entries.put_nowait({**values, "step": step})
            except queue.Full:
                self._give_up(TimeoutError(f"{WAITING} entries are not sent yet"))

    def close(self, failed: bool) -> None:
        """Sends the queued entries and waits for the upload, up to a timeout."""
        if not self._failed:
            self._exit_code = int(failed)
            with contextlib.suppress(queue.Full):
                self._entries.put_nowait(None)
            self._thread.join(2 * FINISH_SECONDS)
            if self._thread.is_alive():
                self._give_up(TimeoutError("the queue is full"))

    def _send(self) -> None:
        try:
            while (entry := self._entries.get()) is not None:
                self._run.log(entry)
            self._run.finish(exit_code=self._exit_code)
        except Exception as error:  # see above
            self._give_up(error)
