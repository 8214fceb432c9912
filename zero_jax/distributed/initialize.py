"""Start-up of a process: joining the other processes, and assigning GPUs."""

import os
import pathlib

import jax

from zero_jax.distributed import launchers
from zero_jax.distributed.agreement import jax_settings
from zero_jax.distributed.rendezvous import JoinError, Peer, bind_address, parse_address, rendezvous
from zero_jax.releases import MUTUAL_TLS

JOIN_SECONDS = 300.0
_TLS_FILES = ("jax_mtls_ca_file", "jax_mtls_cert_file", "jax_mtls_key_file")
# Connections by rank: to all others in process 0, to process 0 in the others. Like JAX's process
# group, they last as long as the process.
peers: dict[int, Peer] = {}


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    wait_seconds: float = JOIN_SECONDS,
) -> None:
    """Joins this process to the run; does nothing for a run of one process.

    SLURM and Open MPI 4 are recognised; otherwise give all three arguments. Call it before anything
    that uses a device. The processes compare versions, JAX's settings and XLA's flags.

    Under a launcher, each process takes the GPU of its local rank, or all visible GPUs if it sees
    one or is the only process of its host. Without a launcher, a process takes the GPUs of
    JAX_LOCAL_DEVICE_IDS, by default all visible ones: give each process of a host different ones.

    Process 0 listens at the coordinator's address only, or at JAX_COORDINATOR_BIND_ADDRESS if that
    is set.

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
    if jax.distributed.is_initialized():
        return
    if (coordinator, num_processes, process_id) == (None, None, None):
        if launchers.launched_processes() == 1:
            return
        coordinator, num_processes, process_id = launchers.launcher_arguments()
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
    host, port = parse_address(coordinator)
    if num_processes == 1:
        return
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if process_id == 0:
        host, port = parse_address(bind) if bind else bind_address(host, port, wait_seconds)
    _check_tls_files()
    gpus, settings = launchers.local_gpus(), jax_settings()
    peers.update(rendezvous((host, port), process_id, num_processes, wait_seconds, settings))
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",  # everything is given
            initialization_timeout=max(1, round(wait_seconds)),
            coordinator_bind_address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        )
    except jax.errors.JaxRuntimeError as error:
        while peers:
            peers.popitem()[1].close()
        raise JoinError(f"JAX can't join the processes: {error}") from error


def _check_tls_files() -> None:
    """Checks the files of mutual TLS, settings of JAX, before any process waits for another.

    Older releases of JAX ignore the environment variables, and would send everything in plain text.
    """
    variables = ", ".join(f"`{name.upper()}`" for name in _TLS_FILES)
    if not MUTUAL_TLS and any(os.environ.get(name.upper()) for name in _TLS_FILES):
        raise ValueError(
            f"{variables}: mutual TLS needs jax 0.12 or later, and this is {jax.__version__}. "
            "Install jax 0.12 (Python 3.12), or unset the variables"
        )
    paths = {name: jax.config.values.get(name) for name in _TLS_FILES}
    for name, path in paths.items() if any(paths.values()) else ():
        file = pathlib.Path(path or "")
        if not file.is_file() or b"-----BEGIN " not in file.read_bytes():
            raise ValueError(f"`{name}`={path!r} is not a PEM file: set all of {variables}")
