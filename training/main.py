"""From a command line to an exit code: settings, joining the others, the run, and its errors."""

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
from training.config import Config, check_numbers, flag, mesh_sizes, parse
from training.room import LESS_MEMORY, host_memory
from training.run import run
from training.stop import FAILED, INTERRUPTED, NOT_JOINED, Stopped, without
from training.supervise import WRONG, supervise
from zero_jax.commands.settings import DEVICES
from zero_jax.distributed.launchers import launched_processes
from zero_jax.distributed.rendezvous import JoinError
from zero_jax.distributed.watchdog import EXIT_CODE
from zero_jax.streams import lasting_streams

MOST_DEVICES = 1024  # simulated ones of a process: each has a thread pool of its own


def cpu_devices(config: Config) -> int | None:
    """How many devices a machine without GPUs is asked to have."""
    named = math.prod(mesh_sizes(config.mesh).values()) if config.mesh else None
    return config.devices or named


def join(config: Config) -> None:
    """Makes the devices of a machine without GPUs, and joins the other processes."""
    count = config.num_processes or launched_processes()
    devices = cpu_devices(config)
    # A mesh that does not name `data` leaves the rest of the devices to it, however many.
    known = config.devices is not None or "data" in mesh_sizes(config.mesh)
    if devices is not None and known and devices % count:
        raise ValueError(
            f"{devices} devices must be a multiple of {count} processes: use --devices "
            f"{(devices // count + 1) * count}"
        )
    each = max(1, (devices or DEVICES) // count)
    if each > MOST_DEVICES:
        asked = f"--devices {config.devices}" if config.devices else f"--mesh {config.mesh}"
        raise ValueError(
            f"{asked} is {each} devices for each of {count} processes, and a process simulates "
            f"at most {MOST_DEVICES}: use fewer devices, or more processes"
        )
    # Of states in host memory XLA pins no more than 64 GiB by itself.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_memory() >> 30))
    jax.config.update("jax_num_cpu_devices", each)
    zero_jax.initialize(
        *(config.coordinator_address, config.num_processes, config.process_id),
        wait_seconds=config.join_timeout_seconds,
    )
    there = jax.device_count()
    if config.devices not in (None, there) and jax.default_backend() != "cpu":
        raise ValueError(
            f"--devices {config.devices}: this run has {there} devices, and --devices simulates "
            "CPU devices only. Leave it out, and choose GPUs by CUDA_VISIBLE_DEVICES"
        )


def say_error(*words: object) -> None:
    """Prints an error to stderr; where stderr is on a full disk only the exit code reports it."""
    with contextlib.suppress(OSError):
        print(*words, file=sys.stderr, flush=True)


def supervised(config: Config, given: Sequence[str]) -> int:
    """Starts this command again, in as many processes as `--supervise` says."""
    assert config.supervise is not None
    for name in ("coordinator_address", "num_processes", "process_id"):
        if getattr(config, name) is not None:
            say_error(
                f"error: {flag(name)} {getattr(config, name)}: --supervise starts and numbers the "
                f"processes itself: leave {flag(name)} out, or --supervise"
            )
            return WRONG
    launched = launched_processes()
    if config.supervise > 1 and launched > 1:
        say_error(
            f"error: --supervise {config.supervise} under a launcher would start {launched} runs "
            "in one folder: leave --supervise out, the launcher starts the processes"
        )
        return WRONG
    own = without(given, {"--supervise": 1})
    if parse(own).supervise is not None:
        say_error(
            f"error: --config sets supervise: {config.supervise}, which each of the processes "
            "would read: write --supervise on the command line, and remove it from the file"
        )
        return WRONG
    if config.output_dir is None:
        say_error("error: --supervise requires --output-dir, the folder to resume in")
        return WRONG
    command = [sys.executable, str(pathlib.Path(__file__).parent.parent / "train.py"), *own]
    return supervise(
        command,
        config.supervise,
        restarts=config.max_restarts,
        grace=3 * config.heartbeat_timeout_seconds + 10,
        divides=cpu_devices(config) or DEVICES,
    )


def entry() -> int:
    """`main`, as a program."""
    lasting_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except KeyboardInterrupt:  # while settings are read, or the supervisor waits
        say_error("stopped")
        return INTERRUPTED
    if code == INTERRUPTED and jax.distributed.is_initialized():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # a usual exit waits for the other processes, which wait for this one
    return code


def main(args: Sequence[str] | None = None) -> int:
    """Runs with these arguments, by default those of the command line; returns the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        config = parse(given)
    except ValueError as error:
        say_error("error:", error)
        return WRONG
    try:
        check_numbers(config)
        if config.supervise is not None:
            return supervised(config, given)
        join(config)
        run(config)
    except Stopped as asked:
        if jax.process_index() == 0:
            say_error(asked.said(given))
        return asked.code
    except JoinError as error:
        say_error("error:", error)
        return NOT_JOINED
    except KeyboardInterrupt:
        say_error("stopped before training started")
        return INTERRUPTED
    except jax.errors.JaxRuntimeError as error:
        full = "RESOURCE_EXHAUSTED" in str(error)
        if config.debug and jax.process_count() == 1:
            raise
        said = str(error).partition("\n")[0] + LESS_MEMORY * (
            full and "host memory" not in str(error)
        )
        if not full:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
        say_error("error:", said)
        code = WRONG if full else EXIT_CODE  # to start again would help against the latter only
        if jax.process_count() == 1:
            return code
        os._exit(code)  # a usual exit waits for the other processes, and one of them is gone
    except MemoryError as error:
        if config.debug:
            raise
        say_error(f"error: out of host memory: {error}{LESS_MEMORY}")
        return WRONG
    except (ValueError, OSError, OverflowError, zero_jax.NonFiniteError) as error:
        if config.debug:
            raise
        say_error("error:", str(error).replace("\n", " "))
        return FAILED if isinstance(error, zero_jax.NonFiniteError) else WRONG
    return 0
