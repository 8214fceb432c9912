"""Diagnostic report of this machine for bug reports.

    python -m zero_jax.doctor          # a few seconds, with the offload check
    python -m zero_jax.doctor --quick  # without the offload check

Prints versions, devices, device memory, the default mesh, environment variables and limits of host
memory, and checks CPU offload. A failed probe is printed in its row, and the report continues.
Exits with 1 if the offload check fails. `python -m zero_jax.offload --check` is a part of it.
"""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import resource
import shutil
from collections.abc import Callable, Sequence

import jax

from zero_jax._version import __version__
from zero_jax.engine import offload_check
from zero_jax.plan.tables import gigabytes, table
from zero_jax.sharding.mesh import make_mesh
from zero_jax.streams import run

Rows = list[tuple[str, str]]
# Prefixes of packages.
_PACKAGES = ("jax", "flax", "optax", "numpy", "chex", "orbax", "nvidia-nccl", "nvidia-cudnn")
# Prefixes of variables for JAX, XLA, NCCL, and launchers. No other variable is read: reports are
# public.
_SETTINGS = tuple("JAX_ XLA_ NCCL_ CUDA_VISIBLE TF_ ZERO_JAX_ SLURM_NTASKS OMPI_COMM".split())
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def main(args: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if the offload check fails, else 0."""
    parser = argparse.ArgumentParser("python -m zero_jax.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="Skip the offload check.")
    quick = parser.parse_args(args).quick
    return _report([_versions, _devices, _mesh, _settings, _host] + [_offload] * (not quick))


def check_offload(args: Sequence[str] | None = None) -> int:
    """Checks CPU offload: a small step on the first local device, with and without it."""
    parser = argparse.ArgumentParser("python -m zero_jax.offload")
    parser.description = check_offload.__doc__
    help = "Run the check; exits with 1 if results differ."
    parser.add_argument("--check", action="store_true", required=True, help=help)
    parser.parse_args(args)
    return _report([_versions, _devices, _offload])


def _report(parts: Sequence[Callable[[], Rows]]) -> int:
    rows = [("zero_jax", __version__), *(row for part in parts for row in _found(part))]
    print(table([[name, text.partition("\n")[0]] for name, text in rows], "<<"))
    return int(not all(text.startswith("passed") for name, text in rows if name == "offload"))


def _found(part: Callable[[], Rows]) -> Rows:
    """Returns the rows of a probe, or the error that it raised."""
    try:
        return part()
    except Exception as error:  # whatever it is, the rest is worth having
        said = str(error).partition("\n")[0]
        return [(part.__name__.strip("_"), f"unknown: {type(error).__name__}: {said}")]


def _versions() -> Rows:
    known = {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version
        for dist in importlib.metadata.distributions()
    }
    own = sorted(name for name in known if name.startswith(_PACKAGES))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return [("python", f"{platform.python_version()} on {system}")] + [
        (name, known[name]) for name in own
    ]


def _devices() -> Rows:
    devices, local = jax.devices(), jax.local_devices()[0]
    pool = (local.memory_stats() or {}).get("bytes_limit")
    return [
        ("backend", jax.default_backend()),
        ("devices", f"{len(devices)} x {devices[0].device_kind}"),
        ("processes", f"{jax.process_count()}, this is {jax.process_index()}"),
        ("device memory", gigabytes(pool) + " for JAX" if pool else "unknown"),
        ("memories", ", ".join(memory.kind for memory in local.addressable_memories())),
    ]


def _mesh() -> Rows:
    sizes = make_mesh().shape
    return [("make_mesh()", ", ".join(f"{name} {size}" for name, size in sizes.items()))]


def _settings() -> Rows:
    own = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    return [(name, os.environ[name] or "(empty)") for name in own]


def _host() -> Rows:
    page = os.sysconf("SC_PAGE_SIZE")
    whole, free = (page * os.sysconf(f"SC_{name}_PAGES") for name in ("PHYS", "AVPHYS"))
    rows = [("host memory", f"{gigabytes(whole)}, {gigabytes(free)} free")]
    for path in map(pathlib.Path, _CGROUPS):
        if path.exists():
            said = path.read_text().strip()
            limited = said.isdigit() and int(said) < whole
            rows.append(("cgroup memory", gigabytes(int(said)) if limited else "no limit"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    rows.append(("locked memory", "no limit" if unlimited else f"at most {gigabytes(locked)}"))
    shared = pathlib.Path("/dev/shm")
    if shared.exists():
        rows.append(("/dev/shm", f"{gigabytes(shutil.disk_usage(shared).free)} free"))
    return rows


def _offload() -> Rows:
    return [("offload", str(o)) for o in offload_check.check(jax.local_devices()[0])]


if __name__ == "__main__":
    run(main)
