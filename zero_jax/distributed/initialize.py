"""Start-up of a process: variables of SLURM and Open MPI, joining the other processes, its GPUs."""

import os
import pathlib
import re

import jax

from zero_jax.distributed.agreement import jax_settings
from zero_jax.distributed.rendezvous import JoinError, Peer, bind_address, parse_address, rendezvous
from zero_jax.releases import MUTUAL_TLS

_TLS_FILES = ("JAX_MTLS_CA_FILE", "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
# Connections by rank: to all others in process 0, to process 0 in the others. Like JAX's process
# group, they last as long as the process.
peers: dict[int, Peer] = {}


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    wait_seconds: float = 300.0,
) -> None:
    """Joins this process to the run; does nothing for a run of one process.

    SLURM and Open MPI 4 are recognised; otherwise give all three arguments. Call it before anything
    that uses a device. The processes compare versions, JAX's settings and XLA's flags.

    Under a launcher, each process takes the GPU of its local rank, or all visible GPUs if it sees
    one or is the only process of its host. Without a launcher, a process takes the GPUs of
    JAX_LOCAL_DEVICE_IDS, by default all visible ones: give each process of a host different ones.
    Process 0 listens at the coordinator's address, or at JAX_COORDINATOR_BIND_ADDRESS if it is set.

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
        if launched_processes() == 1:
            return
        coordinator, num_processes, process_id = launcher_arguments()
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"{coordinator=}, {num_processes=}, {process_id=}: give all, or none under a launcher"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(f"{process_id=} of {num_processes=}: ranks begin at 0")
    if not wait_seconds > 0:
        raise ValueError(f"wait_seconds={wait_seconds!r}: it must be a positive number")
    host, port = parse_address(coordinator)
    if num_processes == 1:
        return
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if process_id == 0:
        host, port = parse_address(bind) if bind else bind_address(host, port, wait_seconds)
    if not MUTUAL_TLS and any(map(os.environ.get, _TLS_FILES)):  # it would send plain text
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in _TLS_FILES)}: mutual TLS needs jax 0.12 or later, "
            f"and this is {jax.__version__}. Install jax 0.12 (Python 3.12), or unset the variables"
        )
    for name in map(str.lower, _TLS_FILES):  # JAX names missing files, and aborts with others
        path = pathlib.Path(jax.config.values.get(name) or os.devnull)
        if path.is_file() and b"-----BEGIN " not in path.read_bytes():
            raise ValueError(f"`{name}`={str(path)!r} is not a PEM file: give a certificate or key")
    gpus, settings = local_gpus(), jax_settings()
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


def launched_processes() -> int:
    """Returns the number of processes that SLURM or Open MPI started; 1 without a launcher."""
    return max(_read(_SLURM[1]), _read(_OPEN_MPI[1]))


def launcher_arguments() -> tuple[str, int, int]:
    """Returns the coordinator's address, the number of processes, and the rank of this one.

    As in `jax.distributed.initialize`, process 0 is on the first node of a SLURM step, or on the
    host of mpirun, and its port follows from the number of the job.
    """
    env, is_open_mpi = os.environ, _read(_OPEN_MPI[1]) > 1
    names = _OPEN_MPI if is_open_mpi else _SLURM
    rank, count = map(_read, names)
    if is_open_mpi:  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1]:43370
        name, pattern = "OMPI_MCA_orte_hnp_uri", r"\d+\..*?tcp6?://\[?([^],]+?)([],]|:\d+$)"
    else:  # node[001-015],host2
        name, pattern = "SLURM_STEP_NODELIST", r"([^,[]+)(?:\[(\w+))?"
    match = re.match(pattern, env.get(name, ""))
    if match is None:
        raise ValueError(
            f"the environment variable {name}={env.get(name)!r} has no address of process 0: give "
            "`coordinator`, `num_processes` and `process_id`"
        )
    if is_open_mpi:
        host, job = match[1], int(env[name].partition(".")[0]) >> 12
    else:
        host, job = match[1] + (match[2] or ""), _read("SLURM_JOB_ID")
    port = env.get("JAX_COORDINATOR_PORT") or 61440 + job % 4096
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", count, rank


def local_gpus() -> list[int] | None:
    """Returns indices of this process's GPUs among the visible ones; None if JAX chooses."""
    env = os.environ
    if env.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = len([name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
    tasks = env.get("SLURM_STEP_NUM_TASKS")
    one_per_node = tasks is not None and tasks == env.get("SLURM_STEP_NUM_NODES")
    # GPU number LOCALID does not exist if the launcher shows each task only one GPU, and is one of
    # many if a node has one task.
    if visible == 1 or one_per_node or env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1":
        return list(range(visible)) or None
    for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in env:
            return [_read(name)]
    return None


def _read(name: str) -> int:
    least = 0 if name.endswith(("ID", "RANK")) else 1
    text = os.environ.get(name, str(least))
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) < least:
        raise ValueError(f"{name}={text!r} is no integer from {least} on: unset this variable")
    return int(text)
