"""Compilation of a run's step for its report: bytes, and the largest temporaries.

A run does not do this itself, because it would compile twice. The step is built again from the
settings of the run, on as many devices of the same kind. It must have the predicted bytes that the
run recorded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from training.config import Config
from training.plan import load
from training.run_folder import COMPILED, RunFolder


def settings_of(known: Mapping[str, Any]) -> Config:
    """The settings of a run, from its config.json.

    >>> settings_of({"max_steps": 3, "mesh": {"data": 2, "model": 2}, "psi": 834304}).mesh
    'data=2,model=2'
    """
    names = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in known.items() if name in names}
    if isinstance(given.get("mesh"), Mapping):
        given["mesh"] = ",".join(f"{axis}={size}" for axis, size in given["mesh"].items())
    # What the first two decided stands in stage, remat and grad_accum_steps; here is one process.
    left = ("paper_config", "memory_limit", "export_dir")
    left += ("coordinator_address", "num_processes", "process_id")
    return Config(**given | dict.fromkeys(left))


def compile_step(run: RunFolder) -> None:
    """Compiles the step of a run, and writes its memory use into the run's folder.

    Raises:
        ValueError: The files or devices do not give the step that the run trained with.
    """
    from training.main import join
    from training.trainer import Trainer

    noted = run.last("start").get("predicted_total")
    if noted is None:
        raise ValueError(
            f"{run.path}: events.jsonl has no `predicted_total` to compare with: give a run that "
            "recorded one"
        )
    config = settings_of(run.config)
    join(config)
    if jax.device_count() != config.devices:
        raise ValueError(
            f"{run.path} ran on {config.devices} devices, and {jax.device_count()} are available: "
            f"compile its step on {config.devices} devices"
        )
    step = Trainer(load(config)).predict(compile=True)
    if step.predicted.total_bytes != noted:
        raise ValueError(
            f"the settings of {run.path} give a step of {step.predicted.total_bytes:,} bytes, and "
            f"the run recorded {noted:,}: use the devices, the data and the release of the run"
        )
    assert step.compiled is not None
    found = {"predicted_total": noted, **step.compiled.as_dict()}
    Path(run.path, COMPILED).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
