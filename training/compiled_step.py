"""The step of a run, compiled once more to look at: what it holds, and its largest temporaries.

A run does not do this: it would compile twice. Its settings make the step anew, on as many devices
of the same kind; a step that is foretold other bytes than the run noted is another, and refused.
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
    """Compiles the step of a run, and writes what it holds into the run's folder.

    Raises:
        ValueError: The step can't be made from what is in the folder, on these devices.
    """
    from training.main import join
    from training.trainer import Trainer

    noted = run.last("start").get("predicted_total")
    if noted is None:
        raise ValueError(
            f"{run.path} does not say what was predicted of its step: see events.jsonl"
        )
    config = settings_of(run.config)
    join(config)
    if jax.device_count() != config.devices:
        raise ValueError(
            f"{run.path} ran on {config.devices} devices, and here are {jax.device_count()}: "
            "compile its step where there are as many"
        )
    step = Trainer(load(config)).predict(compile=True)
    if step.predicted.total_bytes != noted:
        raise ValueError(
            f"the settings of {run.path} make a step of {step.predicted.total_bytes:,} bytes here, "
            f"and the run noted {noted:,}: go where its devices, its data and its release are"
        )
    assert step.compiled is not None
    found = {"predicted_total": noted, **step.compiled.as_dict()}
    Path(run.path, COMPILED).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
