"""Writers of a run's scalars: TensorBoard's files, and a run of Weights & Biases.

A writer that fails neither blocks nor ends the training: it says so once and writes nothing more.
tensorboardX's `SummaryWriter` has a thread behind a queue of ten. After one failed write, or when
the clock is set back by a month, that thread ends, and the next call waits indefinitely. Here the
training thread writes TensorBoard's file itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

WANDB_ID = "wandb-id"  # file in the folder of a run: the id of its run at W&B
WAITING = 1000  # entries that W&B may be behind
INIT_SECONDS = 30.0  # for W&B to answer at the start
FINISH_SECONDS = 60.0  # for W&B to take the last entries at the end


class Scalars(Protocol):
    """Takes named numbers of steps."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Writes finite values of one step."""

    def close(self, failed: bool) -> None:
        """Ends the writing; `failed` if an error ended the run."""


class TensorBoard:
    """Writes an event file of TensorBoard.

    Args:
        folder: For the event file; made if need be.
        resumed: TensorBoard drops what earlier files have of the first step here and later ones.
    """

    def __init__(self, folder: Path, resumed: bool):
        self._folder, self._resumed = folder, resumed
        self._file: Any = None
        self._failed = False

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Writes values of one step; the first call opens the file."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._open(step)
            from tensorboardX.summary import scalar

            for name, value in values.items():
                self._write(step=step, summary=scalar(name, value))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self, failed: bool) -> None:
        """Closes the file."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _open(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        number = 0
        while (path := self._folder / f"{name}.{number}").exists():
            number += 1
        self._file = RecordWriter(str(path))
        self._write(file_version="brain.Event:2")
        if self._resumed:
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        _say_given_up(f"TensorBoard files in {self._folder}", error)


def import_wandb(project: str) -> Any:
    """Returns the module wandb.

    Raises:
        ValueError: It is not installed.
    """
    with contextlib.suppress(ImportError):
        import wandb

        if hasattr(wandb, "init"):  # a folder `wandb` beside the script is imported as a module too
            return wandb
    raise ValueError(
        f"--wandb-project {project} requires the package wandb: pip install wandb, or leave "
        "--wandb-project out"
    )


class WeightsAndBiases:
    """Sends scalars to Weights & Biases, from a thread that the training never waits for.

    A resumed run continues the run of W&B whose id is in its folder.

    Args:
        project: Name of the project.
        folder: Folder of the run.
        config: Settings to show.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]):
        self._entries: queue.Queue[dict[str, float] | None] = queue.Queue(WAITING)
        self._failed = False  # of this writer
        self._exit_code = 0  # of the run
        self._folder = folder
        self._thread = threading.Thread(target=self._send, daemon=True)
        # W&B gives up then; what was not uploaded stays in the folder. Users may set other values.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{FINISH_SECONDS:g}")
        os.environ.setdefault("WANDB_INIT_TIMEOUT", f"{INIT_SECONDS:g}")
        wandb = import_wandb(project)
        try:
            known = folder / WANDB_ID
            if not known.exists():
                known.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
            self._run = wandb.init(
                project=project,
                id=known.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off"),
            )
            # A resumed run repeats steps, and W&B's own count of steps may not fall.
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # any of wandb's: no network, no API key, a full disk
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
        """Waits for what is queued and for the upload, both for a limited time."""
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

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        _say_given_up(f"Weights & Biases from {self._folder}", error)


def _say_given_up(what: str, error: Exception) -> None:
    with contextlib.suppress(OSError):  # stdout may be on the same disk
        why = str(error).partition("\n")[0].rstrip(".")
        print(
            f"Stopped writing {what}: {why}. Training continues, and metrics.jsonl has all numbers",
            flush=True,
        )
