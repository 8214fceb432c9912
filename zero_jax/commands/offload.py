"""Checks CPU offload on this machine.

Runs a small step with and without offload on the first local device, compares and prints the
results, and saves the outcome. docs/offload.md describes CPU and NVMe offload.
"""

import argparse
from collections.abc import Sequence

import jax

from zero_jax.engine.offload_check import check, marker_of, remember, versions


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
    device = jax.local_devices()[0]
    outcomes = check(device)
    print(f"{versions(device)}:", *outcomes, sep="\n  ")
    if all(outcome.passed for outcome in outcomes):
        remember(marker_of(device))
        return 0
    marker_of(device).unlink(missing_ok=True)
    return 1
