"""Comparison of settings: processes that differ hang, or silently compute different numbers."""

import collections
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero_jax._version import __version__

_TEXT_BYTES = 1 << 16
# Settings of JAX that may differ between processes: locations, logs and timeouts.
_LOCAL_SETTINGS = re.compile(
    "cache_dir|_dump_|_log_|logging|address|visible_devices|traceback|timeout|explain|color|"
    "mtls_[a-z]+_file|default_device|num_cpu_devices|platform_name|source_url|^xla_dump|dump_to$"
)


def check_agreement(settings: Mapping[str, object]) -> None:
    """Compares settings between all processes; does nothing in a run of one process.

    Args:
      settings: Values by name; their `str` is compared.

    Raises:
      ValueError: A setting differs; the message has its name, both values and their processes.
    """
    if jax.process_count() == 1:
        return
    counts = collections.Counter(device.process_index for device in jax.devices())
    _compare([{"number of devices": str(count)} for _, count in sorted(counts.items())])
    texts = gather_texts(json.dumps({name: str(value) for name, value in settings.items()}))
    _compare([json.loads(text) for text in texts])


def _compare(settings: Sequence[Mapping[str, str]]) -> None:
    """Raises ValueError if the settings of a process, by rank, differ from those of process 0."""
    for rank, other in enumerate(settings):
        if message := difference(settings[0], other, rank):
            raise ValueError(message)


def difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str | None:
    """Describes the first setting that differs between process 0 and `rank`; None if equal."""
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            return (
                f"the processes disagree on {name}: process 0 has {first.get(name)!r}, "
                f"process {rank} has {other.get(name)!r}. Start all with the same settings"
            )
    return None


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes, by rank; each has at most 65536 bytes."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise ValueError(f"settings take {len(data)} bytes, and the limit is {_TEXT_BYTES}")
    padded = np.frombuffer(data.ljust(_TEXT_BYTES, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def jax_settings() -> dict[str, str]:
    """Returns the versions, JAX settings and XLA flags that affect a program and its numbers."""
    packages = ("jax", "jaxlib", "flax", "optax")
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in packages}
    versions["the version of zero_jax"] = __version__
    values = jax.config.values.items()
    shared = {name: str(value) for name, value in values if not _LOCAL_SETTINGS.search(name)}
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [x for x in flags if not _LOCAL_SETTINGS.search(x.partition("=")[0].lstrip("-"))]
    return {**versions, **shared, "XLA_FLAGS": " ".join(sorted(flags))}
