"""Environment variables of SLURM and Open MPI: how many processes, and which GPUs are whose."""

import os

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# The whole numbers that JAX and this module read to join a run, each with the least it can be.
_NUMBERS = {
    "SLURM_NTASKS": 1,
    "SLURM_STEP_NUM_TASKS": 1,
    "SLURM_STEP_NUM_NODES": 1,
    "SLURM_JOB_ID": 0,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "OMPI_COMM_WORLD_SIZE": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 1,
    "OMPI_COMM_WORLD_RANK": 0,
    "OMPI_COMM_WORLD_LOCAL_RANK": 0,
}
_RANKS = {"SLURM_PROCID": "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
_MOST = 2**32 - 1  # SLURM's job ids are unsigned


def launched_processes() -> int:
    """Returns how many processes SLURM or Open MPI started; 1 where neither did.

    Raises:
      ValueError: the variable that says so is not a whole number of at least 1.
    """
    return max(_number(name) for name in _COUNTS)


def check_launcher(*, ranks: bool = True) -> None:
    """Checks the variables from which a process learns its place among the others.

    Args:
      ranks: also check that ranks are below the number of processes.

    Raises:
      ValueError: one is not a whole number in its range.
    """
    for name in _NUMBERS:
        _number(name)
    for rank, count in _RANKS.items() if ranks else ():
        if rank in os.environ and count in os.environ and _number(rank) >= _number(count):
            raise ValueError(
                f"{rank}={_number(rank)} of {count}={_number(count)}: the rank must be below the "
                "count. Unset both, or start the processes with the launcher"
            )


def own_gpus() -> list[int] | None:
    """Returns the GPUs that this process takes of those it sees.

    None leaves the choice to JAX: JAX_LOCAL_DEVICE_IDS, or all.
    """
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
    for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in env:
            return [_number(name)]
    return None


def _number(name: str) -> int:
    least = _NUMBERS[name]
    text = os.environ.get(name, str(least))
    whole = text.isascii() and text.isdecimal() and len(text) <= 10
    if not whole or not least <= int(text) <= _MOST:
        raise ValueError(
            f"the environment variable {name}={text!r} must be an integer of at least {least}: "
            "unset it to start without a launcher"
        )
    return int(text)
