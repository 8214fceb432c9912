"""Free memory of devices and host, and the message for a run that needs more."""

import pathlib
import re

import jax
import numpy as np
from jax.experimental import multihost_utils

LESS_MEMORY = (
    ". To use less memory per device: --grad-accum-steps, --remat, --offload (not if host memory "
    "is full), or more devices; `python -m zero_jax.plan memory` estimates each"
)


def host_memory() -> int:
    """Returns the free bytes of host memory; 2**36, XLA's default limit, where unknown."""
    path = pathlib.Path("/proc/meminfo")
    match = path.exists() and re.search(r"MemAvailable: +(\d+) kB", path.read_text())
    return 1024 * int(match[1]) if match else 2**36


def peak_bytes() -> int | None:
    """Returns the peak bytes of the devices of this process; None if they do not report it."""
    known = [stats for d in jax.local_devices() if (stats := d.memory_stats())]
    return max((s["peak_bytes_in_use"] for s in known), default=None)


def lack_of_room(size: int, what: str) -> str:
    """Returns a message, equal in all processes, if a device has fewer free bytes; else ""."""
    known = [stats for d in jax.local_devices() if (stats := d.memory_stats())]
    left = min((s["bytes_limit"] - s["bytes_in_use"] for s in known), default=size)
    # A ratio, because jax would round int64 byte counts to 32 bits.
    if np.min(multihost_utils.process_allgather(np.float32(left / size))) >= 1:
        return ""
    return f"no {what}: it needs {size / 1e9:.1f} GB of a device, and less is free"
