"""The command line of train.py: settings, `jax.distributed`, the run, errors and exit codes."""

import contextlib
import math
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Sequence

import jax

import zero_jax
from training.config import Config, parse
from training.memory import LESS_MEMORY, host_memory
from training.preemption import Stopped
from training.run import run
from training.supervise import FAILED, INTERRUPTED, NOT_JOINED, VARIABLE, WRONG, supervise
from zero_jax.commands.command_line import flag
from zero_jax.commands.settings import DEVICES, mesh_text
from zero_jax.distributed.initialize import launched_processes
from zero_jax.distributed.rendezvous import JoinError
from zero_jax.distributed.watchdog import EXIT_CODE
from zero_jax.plan.auto import RESOURCE_EXHAUSTED
from zero_jax.streams import lasting_streams

MAX_SIMULATED = 1024  # CPU devices of a process; each has a thread pool


def cpu_devices(config: Config) -> int:
    """Returns the number of CPU devices to simulate on a machine without GPUs."""
    sizes = config.axes()
    return config.devices or (math.prod(sizes.values()) if sizes else DEVICES)


def join(config: Config) -> None:
    """Configures simulated CPU devices and initialises `jax.distributed`."""
    count = config.num_processes or launched_processes()
    devices = cpu_devices(config)
    # Without `data` in --mesh, that axis takes the remaining devices.
    known = config.devices is not None or "data" in config.axes()
    if known and devices % count:
        more = (devices // count + 1) * count
        raise ValueError(f"{devices} devices in {count} processes: use --devices {more}")
    each = max(1, devices // count)
    if each > MAX_SIMULATED:
        axes = f"--mesh {mesh_text(config.axes())}"
        asked = f"--devices {config.devices}" if config.devices else axes
        raise ValueError(
            f"{asked} is {each} devices for each of {count} processes: use at most {MAX_SIMULATED}"
        )
    # XLA pins at most 64 GiB of host memory by default.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_memory() >> 30))
    jax.config.update("jax_num_cpu_devices", each)
    zero_jax.initialize(
        *(config.coordinator_address, config.num_processes, config.process_id),
        wait_seconds=config.join_timeout_seconds,
    )
    available = jax.device_count()
    if config.devices not in (None, available) and jax.default_backend() != "cpu":
        raise ValueError(
            f"--devices {config.devices} simulates CPU devices only, and this run has {available} "
            "others: leave it out, and choose GPUs by CUDA_VISIBLE_DEVICES"
        )


def print_error(*texts: object, sep: str = " ") -> None:
    """Prints to stderr; on a full disk, only the exit code reports the error."""
    with contextlib.suppress(OSError):
        print(*texts, sep=sep, file=sys.stderr, flush=True)


def supervised(config: Config, args: Sequence[str]) -> int:
    """Starts this command again in several processes, with `VARIABLE` in their environment."""
    assert config.supervise is not None
    for name in ("coordinator_address", "num_processes", "process_id"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{flag(name)} {getattr(config, name)}: --supervise numbers the processes itself: "
                "leave one of them out"
            )
    launched = launched_processes()
    if config.supervise > 1 and launched > 1:
        raise ValueError(
            f"--supervise {config.supervise} in each of {launched} processes of a launcher: leave "
            "--supervise out"
        )
    if config.output_dir is None:
        raise ValueError("--supervise requires --output-dir, the folder to resume in")
    command = [sys.executable, str(pathlib.Path(__file__).parent.parent / "train.py"), *args]
    grace = 3 * config.heartbeat_timeout_seconds + 10
    known = {"restarts": config.max_restarts, "divides": cpu_devices(config)}
    return supervise(command, config.supervise, grace=grace, **known)


def entry() -> int:
    """Runs `main` with signal handlers and exits of a program."""
    lasting_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    if code == INTERRUPTED and jax.distributed.is_initialized():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # `sys.exit` waits for the other processes, which wait for this one
    return code


def main(args: Sequence[str] | None = None) -> int:
    """Runs with these arguments, by default those of the command line; returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    config = Config()
    is_supervised = os.environ.pop(VARIABLE, None) is not None
    try:
        config = parse(args)
        if config.supervise is not None and not is_supervised:
            return supervised(config, args)
        join(config)
        run(config)
    except Stopped as stopped:
        if jax.process_index() == 0:
            print_error(stopped)
        return stopped.code
    except JoinError as error:
        print_error("error:", error)
        return NOT_JOINED
    except KeyboardInterrupt:
        print_error("stopped before training started")
        return INTERRUPTED
    except jax.errors.JaxRuntimeError as error:
        if config.debug and jax.process_count() == 1:
            raise
        out_of_memory = error.error_code == RESOURCE_EXHAUSTED
        if not out_of_memory:
            print_error(*traceback.format_exception(error), sep="")
        message = str(error).partition("\n")[0].rstrip(".")
        print_error("error:", message + LESS_MEMORY * out_of_memory)
        code = WRONG if out_of_memory else EXIT_CODE  # a restart helps with other errors only
        if jax.process_count() == 1:
            return code
        os._exit(code)  # `sys.exit` waits for the other processes, one of which is gone
    except (MemoryError, ValueError, OSError, OverflowError, zero_jax.NonFiniteError) as error:
        if config.debug:
            raise
        message = str(error).replace("\n", " ")
        if isinstance(error, MemoryError):
            message = f"out of host memory: {message}{LESS_MEMORY}"
        print_error("error:", message)
        return FAILED if isinstance(error, zero_jax.NonFiniteError) else WRONG
    return 0
