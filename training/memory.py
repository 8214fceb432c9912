"""Free memory of devices and host, and the message for a run that needs more."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

LESS_MEMORY = (
    ". To use less memory per device: --grad-accum-steps, --remat, --offload (not if host memory "
    "is full), or more devices; `python -m zero_jax.plan memory` estimates the memory of each"
)


def host_memory() -> int:
    """Returns the free bytes of host memory; 2**36, XLA's default limit, where unknown."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
    except OSError:
        return 2**36
    match = re.search(r"MemAvailable: +(\d+) kB", text)
    return 1024 * int(match[1]) if match else 2**36


def peak_bytes() -> int | None:
    """Returns the peak bytes of the devices of this process; None if they do not report it."""
    known = [stats for d in jax.local_devices() if (stats := d.memory_stats())]
    return max((s["peak_bytes_in_use"] for s in known), default=None)


def room_for(size: int, what: str, say: Callable[..., Any]) -> bool:
    """Returns whether every device of every process has enough free memory; equal in all.

    Args:
        size: Bytes needed on each device.
        what: Their use, for the message.
        say: Called with a message if memory is short.
    """
    known = [stats for d in jax.local_devices() if (stats := d.memory_stats())]
    left = min((s["bytes_limit"] - s["bytes_in_use"] for s in known), default=size)
    # A ratio, because jax would round int64 byte counts to 32 bits.
    shares = multihost_utils.process_allgather(np.float32(left / size))
    if np.min(shares) >= 1:
        return True
    say(f"no {what}: it needs {size / 1e9:.1f} GB of a device, and less is free")
    return False
