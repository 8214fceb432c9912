"""Process start-up: joining a run, and assigning GPUs to processes.

One process per GPU is the reliable layout.
"""

import os
import socket
import sys
from typing import Any

import jax

from zero_jax.cluster import addresses, credentials, roll
from zero_jax.cluster.addresses import JoinError
from zero_jax.cluster.agreement import check_agreement, of_the_first, settings_of_jax
from zero_jax.cluster.launchers import check_launcher, launched_processes, own_gpus
from zero_jax.cluster.roll import Roll

JOIN_SECONDS = 300.0
_LINK_SECONDS = 30.0
_links: list[Roll] = []  # at most one


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    wait_seconds: float = JOIN_SECONDS,
) -> None:
    """Joins this process to the run; does nothing for a run of one process.

    SLURM and Open MPI 4 are recognised; otherwise give all three arguments. Call it before anything
    that uses a device.

    Under a launcher, each process takes the GPU of its local rank. It takes the only GPU that it
    sees if the launcher hides the others (`--gpus-per-task`). It takes all GPUs if it is the only
    process of its host. Without a launcher, a process takes the GPUs of JAX_LOCAL_DEVICE_IDS, by
    default all visible ones: give each process of a host different ones.

    The processes compare versions, JAX's settings and XLA's flags. If a process dies later, all
    others print its name and exit with code 76. Without a launcher, process 0 listens at the
    coordinator's address only, or at JAX_COORDINATOR_BIND_ADDRESS if that is set.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: Number of processes.
      process_id: Rank of this process.
      wait_seconds: Seconds to wait for the others.

    Raises:
      ValueError: Only some of the arguments are given, one is invalid, or the processes were
        started with different settings.
      JoinError: Processes do not find each other; the message has missing and duplicate ranks.
    """
    given = (coordinator, num_processes, process_id)
    if jax.distributed.is_initialized():
        return
    if any(g is not None for g in given):
        if coordinator is None or num_processes is None or process_id is None:
            raise ValueError(
                f"coordinator={coordinator!r}, num_processes={num_processes!r}, "
                f"process_id={process_id!r}: give all three, or none under SLURM or Open MPI"
            )
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id={process_id} of num_processes={num_processes}: the rank must be from "
                f"0 to {num_processes - 1}"
            )
        if not wait_seconds > 0:
            raise ValueError(f"wait_seconds={wait_seconds!r}: it must be a positive number")
        host, port = addresses.address_of(coordinator)
        if num_processes > 1:
            at, asked = (host, port), os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
            if process_id == 0 and asked:
                at = addresses.address_of(asked)
            elif process_id == 0:
                at = addresses.bind_address(host, port, wait_seconds)
            credentials.check()
            check_launcher(ranks=False)  # they are given, and may be others than the launcher's
            told = settings_of_jax()
            _links.append(roll.call(at, process_id, num_processes, wait_seconds, told))
            _join(
                wait_seconds,
                coordinator_address=coordinator,
                num_processes=num_processes,
                process_id=process_id,
                coordinator_bind_address=addresses.written(*at),
            )
    elif launched_processes() > 1:
        credentials.check()
        check_launcher()
        _join(wait_seconds)
        check_agreement(settings_of_jax())
        _link(min(wait_seconds, _LINK_SECONDS))


def _join(wait_seconds: float, **given: Any) -> None:
    """Joins JAX's process group.

    Raises:
      JoinError: JAX failed to join; the message has JAX's error.
    """
    try:
        jax.distributed.initialize(
            **given,
            local_device_ids=own_gpus(),
            initialization_timeout=max(1, round(wait_seconds)),
        )
    except jax.errors.JaxRuntimeError as error:
        while _links:
            _links.pop().drop()
        raise JoinError(f"JAX can't join the processes: {error}") from error


def _link(seconds: float) -> None:
    """Opens connections between processes that a launcher has joined."""
    rank, count = jax.process_index(), jax.process_count()
    at, own = None, ""
    try:
        if rank == 0:
            host, port = socket.gethostname(), addresses.free_port()
            at, own = addresses.bind_address(host, port), f"{host}:{port}"
    except JoinError as error:
        print(f"warning: the address of process 0 is unknown: {error}", file=sys.stderr)
    own = of_the_first(own)
    if not own:
        return
    try:
        at = at or addresses.address_of(own)
        _links.append(roll.call(at, rank, count, seconds, {}))
    except JoinError as error:
        print(
            f"warning: process {rank} is not connected to the others. If one dies, only its "
            f"missing heartbeats show it: {error}",
            file=sys.stderr,
        )


def the_roll() -> Roll | None:
    """Returns the connections to other processes, or None."""
    return _links[0] if _links else None


def leave() -> None:
    """Leaves the process group; waits for all other processes."""
    for own in _links:
        own.leave()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
