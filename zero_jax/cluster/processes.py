"""Processes: how one joins a run, which GPUs are its own, and whether all were started alike.

One process per GPU is the reliable layout.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SETTINGS_BYTES = 1 << 16


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins this process to the run; does nothing for a run of one process.

    SLURM and OpenMPI 4 are recognised; otherwise give all three arguments. Call it before
    anything that touches a device. Under a launcher each process takes one GPU, its local rank's;
    if the others are hidden (`--gpus-per-task`), it takes the one it sees, and if it is the only
    process of its host, all of them. Started by hand, it takes those of JAX_LOCAL_DEVICE_IDS, by
    default all that it sees: give each process of a host its own.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: how many processes take part.
      process_id: this process's rank.

    Raises:
      ValueError: if only some of the arguments are given.
    """
    given = (coordinator, num_processes, process_id)
    if jax.distributed.is_initialized():
        return
    if any(g is not None for g in given):
        if any(g is None for g in given):
            raise ValueError(
                f"coordinator={coordinator!r}, num_processes={num_processes!r}, "
                f"process_id={process_id!r}: give all three, or none under SLURM or OpenMPI"
            )
        if num_processes and num_processes > 1:
            jax.distributed.initialize(coordinator, num_processes, process_id, _own_gpus())
    elif launched_processes() > 1:
        jax.distributed.initialize(local_device_ids=_own_gpus())


def launched_processes() -> int:
    """How many processes SLURM or OpenMPI started; 1 where neither did."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return max(int(os.environ.get(name, "1")) for name in names)


def _own_gpus() -> list[int] | None:
    """Which of the GPUs that it sees this process takes; None: JAX_LOCAL_DEVICE_IDS, or all."""
    env = os.environ
    if env.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    seen = len([name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
    steps = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_STEP_NUM_NODES")
    alone = steps[0] is not None and steps[0] == steps[1]
    # By itself JAX takes number LOCALID: it does not exist where the launcher shows each task its
    # own GPU only, and is one of many where a host has one task.
    if seen == 1 or alone or env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1":
        return list(range(seen)) or None
    local = env.get("SLURM_LOCALID", env.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    return None if local is None else [int(local)]


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Compares settings between all processes; costs nothing in a run of one.

    A setting that differs would otherwise show as a hang inside a collective.

    Args:
      settings: names to values that `str` tells apart.

    Raises:
      ValueError: naming the setting, both values and their processes.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps({k: str(v) for k, v in settings.items()}).encode()
    if len(text) > _SETTINGS_BYTES:
        raise ValueError(f"settings take {len(text)} bytes, at most {_SETTINGS_BYTES} are compared")
    mine = np.zeros(_SETTINGS_BYTES, np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = multihost_utils.process_allgather(mine)
    parsed = [json.loads(bytes(row).rstrip(b"\0").decode()) for row in everyone]
    first = parsed[0]
    for rank, other in enumerate(parsed[1:], start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"the processes disagree on {name}: process 0 has {first.get(name)!r}, "
                    f"process {rank} has {other.get(name)!r}. Start all with the same settings."
                )
