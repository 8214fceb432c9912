"""Environment variables of SLURM and Open MPI: coordinator, number of processes, rank, and GPUs."""

import os
import re

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


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
    if rank >= count:
        raise ValueError(
            f"{names[0]}={rank} of {names[1]}={count}: the rank must be below the count. Unset "
            "both, or start the processes with the launcher"
        )
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
    """Returns the indices of this process's GPUs among the visible ones.

    None leaves the choice to JAX: JAX_LOCAL_DEVICE_IDS, or all.
    """
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
    is_integer = text.isascii() and text.isdecimal() and len(text) <= 10
    if not is_integer or int(text) < least:
        raise ValueError(
            f"the environment variable {name}={text!r} must be an integer of at least {least}: "
            "unset it to start without a launcher"
        )
    return int(text)
