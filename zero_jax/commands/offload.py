"""Checks CPU offload on this machine.

Runs a small step with and without offload on the first local device, compares and prints the
results. docs/offload.md describes CPU and NVMe offload.
"""

import argparse
import importlib.metadata
from collections.abc import Sequence

import jax

from zero_jax.engine.offload_check import check


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser("python -m zero_jax.offload", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--check",
        action="store_true",
        required=True,
        help="Run the check; exits 1 if results differ.",
    )
    parser.parse_args(args)
    device, jaxlib = jax.local_devices()[0], importlib.metadata.version("jaxlib")
    outcomes = check(device)
    print(f"jax {jax.__version__}, jaxlib {jaxlib}, {device.device_kind}:", *outcomes, sep="\n  ")
    return 0 if all(outcome.passed for outcome in outcomes) else 1
