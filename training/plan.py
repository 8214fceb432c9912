"""The plan of a run, made before any device memory is allocated.

`load` reads the data and decides open settings; `print_plan` prints the settings and the predicted
bytes per device at all four stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

import zero_jax
from training import corpus, show
from training.config import Config, resolve
from training.corpus import Corpus
from zero_jax import interchange
from zero_jax.commands.settings import ROW
from zero_jax.models import families, gpt, hf
from zero_jax.offload.tiers import bytes_on
from zero_jax.plan import memory
from zero_jax.plan.text_model import TextModel
from zero_jax.sharding import mesh, paths

PyTree = Any
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Complete settings, with the model and the data.

    Attributes:
        config: The settings; none is left open.
        model: The model, and its trained parameters.
        corpus: Training and held-out data.
    """

    config: Config
    model: TextModel
    corpus: Corpus


def load(config: Config) -> RunPlan:
    """Reads the data and decides the open settings.

    Raises:
        ValueError: A setting is out of range or not a known name, or the data does not fit.
        FileNotFoundError: There is no data at `config.data`.
    """
    config = resolve(config)
    known: families.Config
    if config.init_from is None:
        known = families.preset(config.model)
    else:
        known = interchange.config(config.init_from)
        if config.vocab_size not in (None, known.vocab):
            raise ValueError(
                f"--vocab-size {config.vocab_size}: the model in {config.init_from} has "
                f"{known.vocab}; leave --vocab-size out"
            )
        interchange.check(config.init_from)  # before a size of config.json takes memory
    known = families.with_capacity(known, config.expert_capacity_factor)
    seq_len = min(known.seq, ROW) if config.seq_len is None else config.seq_len
    data = corpus.load(config, config.vocab_size or known.vocab, seq_len)
    if config.init_from is None:
        vocab = config.vocab_size or (256 if data.byte_level else known.vocab)
        positions = {"seq": seq_len} if isinstance(known, gpt.GPTConfig) else {}
        known = dataclasses.replace(known, vocab=vocab, **positions)
    if seq_len > known.seq:
        raise ValueError(f"--seq-len {seq_len}: the model supports at most {known.seq} tokens")
    config = dataclasses.replace(config, seq_len=seq_len, vocab_size=known.vocab)
    return RunPlan(config, TextModel(known, config.adapters(config.seed)), data)


def check_batch(batch: int, devices: int, grad_accum_steps: int) -> None:
    """Raises ValueError if the batch does not divide evenly.

    >>> check_batch(16, devices=4, grad_accum_steps=2)
    """
    unit = devices * grad_accum_steps
    if batch % unit:
        below = batch // unit * unit
        raise ValueError(
            f"--global-batch-size {batch} must be a multiple of {devices} devices x "
            f"{grad_accum_steps} micro-batches = {unit}: use "
            + (f"{below} or " if below else "")
            + f"{below + unit}"
        )


def facts(plan: RunPlan, zero: zero_jax.Zero, shapes: PyTree) -> dict[str, Any]:
    """Returns all settings and derived numbers, for `config.json` and `print_plan`."""
    model = plan.model.config
    frozen = paths.frozen_leaves(shapes, zero.config.frozen)
    leaves = zip(jax.tree.leaves(shapes), frozen, strict=True)
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
        "tokens_per_step": plan.config.global_batch_size * plan.config.seq_len,
        "jax": jax.__version__,
        "zero_jax": zero_jax.__version__,
    }


def by_stage(
    zero: zero_jax.Zero, shapes: PyTree, tx: optax.GradientTransformation, window: int
) -> list[memory.Estimate]:
    """Returns the bytes of model states per device at stages 0 to 3, other settings as in this run.

    Args:
        zero: Mesh and settings of the run.
        shapes: Full parameters, as ShapeDtypeStructs.
        tx: The optimizer, not sharded.
        window: Elements gathered at once.
    """
    return [
        memory.estimate(
            shapes,
            shards=mesh.axis_size(zero.mesh, mesh.data_axis(zero.mesh)),
            parts=zero.config.parts,
            stage=stage,
            tx=tx,
            precision=zero.config.precision,
            grad_accum_steps=zero.config.grad_accum_steps,
            frozen=zero.config.frozen,
            model_axis=zero.config.model_axis,
            experts=mesh.experts_size(zero.mesh),
            window=window,
            optimizer_state_dtype=zero.config.optimizer_state_dtype,
        )
        for stage in range(4)
    ]


def print_plan(
    known: dict[str, Any],
    zero: zero_jax.Zero,
    stages: Sequence[memory.Estimate],
    step: zero_jax.Plan,
) -> None:
    """Prints the settings of the run and its predicted memory.

    Args:
        known: From `facts`.
        zero: The mesh, the precision and the stage of the run.
        stages: From `by_stage`.
        step: The plan of the training step.
    """
    psi, clip = known["psi"], known["max_grad_norm"]
    rows = {
        "psi": f"{psi:,} ({show.human_count(psi)} parameters)",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in known["mesh"].items()),
        "hf_config": known["hf_config"]["model_type"],
        "trained": "all" if known["trained"] == psi else f"{known['trained']:,}",
        "max_grad_norm": f"{clip:g}" if clip else "off",
    }
    first = dict.fromkeys(("psi", "mesh"))  # the size of both, before all settings
    rows = {
        name: rows.get(name, "-" if known[name] is None else known[name]) for name in first | known
    }
    show.print_table("This run", ["setting", "value"], list(rows.items()))

    shards = mesh.axis_size(zero.mesh, mesh.data_axis(zero.mesh))
    parts, experts = zero.config.parts, mesh.experts_size(zero.mesh)
    split = f" x {zero.config.model_axis.size} (model)" if zero.config.model_axis.size > 1 else ""
    split += f", at stage 3 x {parts} (replica)" if parts > 1 else ""
    split += f", in {experts} expert-parallel groups" if experts > 1 else ""
    table = {name: [s.terms[name] for s in stages] for name in stages[0].terms}
    table["between steps"] = [s.at_rest for s in stages]
    table["temporary"] = [s.in_flight for s in stages]
    table["total"] = [s.total for s in stages]
    show.print_table(
        f"Predicted bytes per device on {shards}{split}, by ZeRO stage (no activations)",
        ["", *(f"stage {n}{', this run' if n == zero.config.stage else ''}" for n in range(4))],
        [[name, *map(show.human_bytes, sizes)] for name, sizes in table.items()],
    )
    predicted = step.predicted.terms | {"total": step.predicted.total_bytes}
    show.print_table(
        "Predicted peak per device",
        ["term", "bytes"],
        [[name.replace("_", " "), show.human_bytes(n)] for name, n in predicted.items() if n],
    )


def start_event(
    step: zero_jax.Plan,
    stages: Sequence[memory.Estimate],
    levels: Mapping[str, float],
    unit: str,
) -> dict[str, Any]:
    """Returns the facts that a run records at its start, for its report.

    Args:
        step: The plan of the training step.
        stages: From `by_stage`.
        levels: Losses to compare with.
        unit: The loss is per this unit, for example a token.
    """
    device, versions = jax.local_devices()[0], {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of a system package
            versions[name] = importlib.metadata.version(name)
    limit = (device.memory_stats() or {}).get("bytes_limit")
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
            **({"memory_bytes": limit} if limit else {}),
        },
        "versions": {
            "zero_jax": zero_jax.__version__,
            "python": platform.python_version(),
            **versions,
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def held_bytes(params: PyTree, opt_state: PyTree) -> dict[str, int]:
    """Returns the bytes per device of parameters and optimizer state, from their shardings."""
    return {"parameters": bytes_on(params), "optimizer_state": bytes_on(opt_state)}
