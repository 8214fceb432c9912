"""The settings and the predicted memory of a run, printed and recorded before it allocates any."""

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import zero_jax
from training.show import human_bytes, human_count
from training.trainer import Trainer
from zero_jax.models import families, hf
from zero_jax.plan import model_states
from zero_jax.plan.tables import table
from zero_jax.sharding import paths
from zero_jax.sharding.mesh import batch_shards, context_size

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def facts(trainer: Trainer, contents: Mapping[str, str]) -> dict[str, Any]:
    """Returns all settings and derived numbers, for `config.json`, checkpoints and `print_plan`.

    `contents` are checksums of the data, the tokenizer, its template and the frozen model, by name.
    """
    plan, zero, shapes = trainer.plan, trainer.zero, trainer.shapes()
    model = plan.model.config
    frozen = paths.frozen_leaves(shapes, zero.config.frozen)
    leaves = zip(jax.tree.leaves(shapes), frozen, strict=True)
    tokens = plan.config.global_batch_size * plan.config.seq_len
    return {
        **dataclasses.asdict(plan.config),
        **{name: getattr(zero.config, name) for name in ("stage", "grad_accum_steps", "remat")},
        "devices": zero.mesh.size,
        "device": zero.mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "mesh": dict(zero.mesh.shape),
        "psi": families.num_params(model),
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "hf_config": hf.json_of(model, "float32"),
        "trained": sum(leaf.size for leaf, is_frozen in leaves if not is_frozen),
        "corpus": plan.corpus.name,
        **plan.corpus.facts,
        "eos_token_id": plan.corpus.ends,
        "tokens_per_step": tokens,
        "tokens_per_device": tokens // (batch_shards(zero.mesh) * context_size(zero.mesh)),
        "jax": jax.__version__,
        "zero_jax": zero_jax.__version__,
        "order": plan.corpus.order,
        "contents": contents,
    }


def by_stage(trainer: Trainer, window: int) -> list[model_states.Estimate]:
    """Returns the bytes of model states per device at stages 0 to 3, other settings as in this run.

    `window` is the number of elements that are gathered at once.
    """
    config, shapes = trainer.zero.config, trainer.shapes()
    return [
        model_states.estimate(shapes, config.at_stage(stage), trainer.plain_tx, window=window)
        for stage in model_states.STAGES
    ]


def print_plan(
    known: Mapping[str, Any], stages: Sequence[model_states.Estimate], step: zero_jax.Plan
) -> None:
    """Prints the settings of the run, from `facts`, and its predicted memory."""
    psi = known["psi"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in known["mesh"].items())
    readable = {
        "psi": f"{psi:,} ({human_count(psi)} parameters)",
        "mesh": mesh,
        "hf_config": known["hf_config"]["model_type"],
    }
    left_out = {*readable, "order", "contents"}
    shown = readable | {k: "-" if v is None else v for k, v in known.items() if k not in left_out}
    _print_table("This run", ["setting", "value"], list(shown.items()))
    rows = [[name, *(estimate.terms[name] for estimate in stages)] for name in stages[0].terms]
    rows.append(["between steps", *(estimate.at_rest for estimate in stages)])
    rows.append(["temporary", *(estimate.in_flight for estimate in stages)])
    rows.append(["total", *(estimate.total for estimate in stages)])
    _print_table(
        f"Predicted bytes per device on {mesh}, by ZeRO stage (no activations)",
        ["", *(f"stage {n}{', this run' if n == step.stage else ''}" for n in range(4))],
        [[name, *map(human_bytes, sizes)] for name, *sizes in rows],
    )
    print(f"\nPredicted peak per device\n\n{step}\n")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"\n{title}\n\n{table([columns, *rows])}\n")


def start_event(
    step: zero_jax.Plan,
    stages: Sequence[model_states.Estimate],
    levels: Mapping[str, float],
    unit: str,
) -> dict[str, Any]:
    """Returns the facts that a run records at its start, for its report.

    `levels` are losses to compare with, in nats per `unit`.
    """
    device, versions = jax.local_devices()[0], {"zero_jax": zero_jax.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of a system package
            versions[name] = importlib.metadata.version(name)
    return {
        "unit": unit,
        "levels": dict(levels),
        "stage": step.stage,
        "stages": [estimate.terms for estimate in stages],
        "predicted": {name: size for name, size in step.predicted.terms.items() if size},
        "predicted_total": step.predicted.total_bytes,
        "devices": {
            "backend": jax.default_backend(),
            "kind": device.device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
        },
        "versions": {
            **versions,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }
