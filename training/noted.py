"""What a run notes of itself when it starts, for its page: versions, devices, and memory.

Bytes are those of one device. What is predicted is what the plan prints, before an array is there;
what is held is counted in the arrays of the run, by their own shapes and shardings.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import zero_jax
from zero_jax.offload.tiers import bytes_on
from zero_jax.plan.memory import Estimate

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def start(
    step: zero_jax.Plan, stages: Sequence[Estimate], marks: Mapping[str, float], unit: str
) -> dict[str, Any]:
    """The facts of a start.

    Args:
        step: The plan of the training step.
        stages: Model states at stages 0 to 3.
        marks: Losses to compare with.
        unit: What a loss is of.
    """
    return {
        "unit": unit,
        "levels": dict(marks),
        "stage": step.stage,
        "stages": [estimate.terms for estimate in stages],
        "predicted": {name: size for name, size in step.predicted.terms.items() if size},
        "predicted_total": step.predicted.total_bytes,
        "devices": _devices(),
        "versions": _versions(),
    }


def held(params: Any, opt_state: Any) -> dict[str, int]:
    """Bytes of a device that these arrays take between steps."""
    return {"parameters": bytes_on(params), "optimizer_state": bytes_on(opt_state)}


def _devices() -> dict[str, Any]:
    first = jax.local_devices()[0]
    pool = (first.memory_stats() or {}).get("bytes_limit")
    known = {"backend": jax.default_backend(), "kind": first.device_kind}
    known |= {"devices": jax.device_count(), "processes": jax.process_count()}
    return known | ({"memory_bytes": pool} if pool else {})


def _versions() -> dict[str, str]:
    known = {"zero_jax": zero_jax.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known | {"system": f"{platform.system()} {platform.machine()}"}
