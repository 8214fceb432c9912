"""Scalar writers: TensorBoard files and Weights & Biases.

A writer works in a thread. One that fails or hangs neither blocks nor ends the training: it prints
one message and stops. tensorboardX's `SummaryWriter` would block after one failed write.
"""

import abc
import contextlib
import itertools
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WANDB_ID = "wandb-id"  # file with the id of the W&B run, in the folder of a run
WAITING = 1000  # maximum number of entries in the queue for W&B; ten times as many for files
INIT_SECONDS = 30.0  # timeout of W&B at the start
FINISH_SECONDS = 60.0  # timeout of W&B at the end

Entry = tuple[int, Mapping[str, float]]  # a step and its values


class ScalarWriter(abc.ABC):
    """Writes named numbers of steps to `name`; at most `waiting` entries wait."""

    def __init__(self, name: str, waiting: int):
        self._name, self._failed = name, False
        self._entries: queue.Queue[Entry | None] = queue.Queue(waiting)
        self._exit_code = 0  # of the run
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abc.abstractmethod
    def _write_all(self, entries: Iterator[Entry]) -> None:
        """Writes entries as they arrive, in the thread."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Queues finite values of one step."""
        if not self._failed:
            try:
                self._entries.put_nowait((step, values))
            except queue.Full:
                self._give_up(f"{self._entries.maxsize} entries are not written yet")

    def close(self, failed: bool) -> None:
        """Waits until all is written, up to a timeout; `failed` if the run had an error."""
        if not self._failed:
            self._exit_code = int(failed)
            with contextlib.suppress(queue.Full):
                self._entries.put_nowait(None)
            self._thread.join(2 * FINISH_SECONDS)
            if self._thread.is_alive():
                self._give_up("it takes too long")

    def _run(self) -> None:
        try:
            self._write_all(iter(self._entries.get, None))
        except BaseException as error:  # of any type: without its reader the queue would grow
            self._give_up(error)

    def _give_up(self, error: object) -> None:
        self._failed = True
        with contextlib.suppress(OSError):  # stdout may be on the same full disk
            why = str(error).partition("\n")[0].rstrip(".")
            print(
                f"Stopped writing {self._name}: {why}. Training continues, and metrics.jsonl has "
                "all numbers",
                flush=True,
            )


class TensorBoard(ScalarWriter):
    """Writes an event file into a folder; TensorBoard leaves out what a `resumed` run repeats."""

    def __init__(self, folder: Path, resumed: bool):
        super().__init__(f"TensorBoard files in {folder}", 10 * WAITING)
        self._folder, self._resumed = folder, resumed
        self._thread.start()

    def _write_all(self, entries: Iterator[Entry]) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        first = next(entries, None)
        if first is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        start = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        unique = uuid.uuid4().hex  # several files may start within a second
        path = self._folder / f"events.out.tfevents.{start}.{unique}"
        with contextlib.closing(RecordWriter(str(path))) as file:

            def write(**fields: Any) -> None:
                file.write(Event(wall_time=time.time(), **fields).SerializeToString())

            write(file_version="brain.Event:2")
            if self._resumed:
                write(step=first[0], session_log=SessionLog(status=SessionLog.START))
            for step, values in itertools.chain([first], entries):
                for name, value in values.items():
                    write(step=step, summary=scalar(name, value))
                file.flush()


def import_wandb(project: str) -> Any:
    """Returns the module wandb; raises ValueError if it is not installed."""
    with contextlib.suppress(ImportError):
        import wandb

        if hasattr(wandb, "init"):  # else a folder `wandb` beside the script
            return wandb
    raise ValueError(f"--wandb-project {project}: pip install wandb, or leave it out")


class WeightsAndBiases(ScalarWriter):
    """Sends scalars to Weights & Biases; a resumed run continues its W&B run."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]):
        super().__init__(f"Weights & Biases from {folder}", WAITING)
        # After these timeouts W&B leaves the data in the folder. Users may set other values.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{FINISH_SECONDS:g}")
        os.environ.setdefault("WANDB_INIT_TIMEOUT", f"{INIT_SECONDS:g}")
        wandb = import_wandb(project)
        try:
            id_file = folder / WANDB_ID
            if not id_file.exists():
                id_file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
            self._wandb = wandb.init(
                project=project,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off"),
            )
            # A resumed run repeats steps; W&B's own step count must not decrease.
            self._wandb.define_metric("*", step_metric="step")
        except Exception as error:  # wandb raises many types: no network, no API key, a full disk
            self._give_up(error)
        else:
            self._thread.start()

    def _write_all(self, entries: Iterator[Entry]) -> None:
        for step, values in entries:
            self._wandb.log({**values, "step": step})
        self._wandb.finish(exit_code=self._exit_code)
