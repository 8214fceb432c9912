"""Comparison of settings between the processes of a run.

A difference would hang, or silently train on other numbers.
"""

import collections
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero_jax._version import __version__
from zero_jax.cluster.roll_call import differing

_SETTINGS_BYTES = 1 << 16
# Settings of JAX that may differ: where a process is, what it prints and where to, how long it
# waits.
_OWN = re.compile(
    "cache_dir|_dump_|_log_|logging|address|visible_devices|traceback|timeout|explain|color|"
    "mtls_[a-z]+_file|default_device|num_cpu_devices|platform_name|source_url|^xla_dump|dump_to$"
)


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Compares settings between all processes; does nothing in a run of one process.

    Without it, a difference would show as a hang inside a collective.

    Args:
      settings: Values by name; their `str` is compared.

    Raises:
      ValueError: A setting differs; the message has its name, both values and their processes.
    """
    if jax.process_count() == 1:
        return
    _check_devices()
    text = json.dumps({k: str(v) for k, v in settings.items()}).encode()
    if len(text) > _SETTINGS_BYTES:
        raise ValueError(f"settings take {len(text)} bytes, and the limit is {_SETTINGS_BYTES}")
    mine = np.zeros(_SETTINGS_BYTES, np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = multihost_utils.process_allgather(mine)
    parsed = [json.loads(bytes(row).rstrip(b"\0").decode()) for row in everyone]
    for rank, other in enumerate(parsed[1:], start=1):
        fault = differing(parsed[0], other, rank)
        if fault is not None:
            raise ValueError(fault)


def of_the_first(text: str) -> str:
    """Returns process 0's text in all processes.

    Raises:
      ValueError: It has more than 4096 bytes, in process 0 alone.
    """
    letters = np.zeros(4096, np.uint8)
    given = np.frombuffer(text.encode(), np.uint8)
    letters[: given.size] = given
    shared = multihost_utils.broadcast_one_to_all(letters)
    return bytes(np.asarray(shared)).rstrip(b"\0").decode()


def settings_of_jax() -> dict[str, str]:
    """Returns the versions, JAX settings and XLA flags that affect a program and its numbers."""
    packages = ("jax", "jaxlib", "flax", "optax")
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in packages}
    versions["the version of zero_jax"] = __version__
    known = {name: str(value) for name, value in jax.config.values.items() if not _OWN.search(name)}
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in given if not _OWN.search(flag.partition("=")[0].lstrip("-"))]
    return {**versions, **known, "XLA_FLAGS": " ".join(sorted(flags))}


def _check_devices() -> None:
    counts = collections.Counter(device.process_index for device in jax.devices())
    for rank, count in sorted(counts.items()):
        if count != counts[0]:
            raise ValueError(
                f"the processes disagree on devices: process 0 has {counts[0]}, process {rank} has "
                f"{count}. Give every process {counts[0]} devices"
            )
