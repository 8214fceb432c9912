"""Memory and communication plan of a training run, before renting hardware.

    python -m zero_jax.plan memory --model 7.5b --devices 64 --global-batch-size 256
    python -m zero_jax.plan compile --model llama-3.1-70b --devices 8 --lora-rank 16
    python -m zero_jax.plan auto --model 1t --devices 1024 --global-batch-size 1024

Commands, whose options `python -m zero_jax.plan COMMAND --help` lists:
  memory   Predicts bytes per device and communication of a step at stages 0 to 3, from shapes.
  compile  Compiles the step of --stage ahead of time, without a GPU. Prints its memory,
           collectives and modelled time beside the prediction.
  auto     Chooses the stage, accumulation steps, remat and offload that fit in --memory-limit, by
           compiling candidates. --remat and --grad-accum-steps are lower bounds.
  meshes   Compiles the step at each tensor-parallel size and compares the modelled seconds.

No GPU is needed. Names and defaults of settings are those of train.py and `Zero`. To plan another
model, call `Zero.plan`.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from zero_jax import releases
from zero_jax.commands import command_line
from zero_jax.commands.case import Case
from zero_jax.commands.command_line import setting
from zero_jax.commands.settings import (
    DEVICES,
    ROW,
    SHARED,
    DeviceSettings,
    LoraSettings,
    ModelSettings,
    ZeroSettings,
    check_context,
    mesh_sizes,
    mesh_text,
    with_paper_config,
)
from zero_jax.engine.config import AUTO
from zero_jax.hlo import aot, targets
from zero_jax.hlo.kernel_table import format_kernels, kernel_groups
from zero_jax.interchange import folder_config
from zero_jax.models import families, gpt
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.names import unknown
from zero_jax.plan import advice, auto, expert_elements, pictures
from zero_jax.plan.model_states import STAGES
from zero_jax.plan.plans import Plan, format_layers, format_proof, format_stages
from zero_jax.sharding.mesh import (
    CONTEXT,
    abstract_mesh,
    axis_size,
    batch_shards,
    context_size,
    data_axis,
    experts_size,
)
from zero_jax.zero import Zero

_CURVE = (1, 4, 16, 64, 256, 1024)
_PROG = "python -m zero_jax.plan"


@dataclasses.dataclass(frozen=True)
class TargetSettings:
    """Device to plan for, and files to write."""

    target: str = setting(
        "h100", "Device kind: h100, h200, a100, b200, v5p or cpu.", metavar="DEVICE"
    )
    topology: str | None = setting(
        None,
        "NVLink domains x hosts x GPUs, such as 8x1x8 (default: full hosts).",
        metavar="DxHxG",
    )
    json: str | None = setting(None, "JSON file of the plan.", metavar="FILE")
    plot: str | None = setting(None, "Image of the plan (requires matplotlib).", metavar="FILE")
    latencies: str | None = setting(
        None, "Modelled latencies to write (.pbtxt); compiles twice.", metavar="FILE"
    )
    kernels: bool = setting(False, "List the kernels by their modelled time beyond matmuls.")


@dataclasses.dataclass(frozen=True)
class PlanSettings(ModelSettings, DeviceSettings, ZeroSettings, LoraSettings, TargetSettings):
    """All settings of a plan."""


GROUPS = (*SHARED, TargetSettings)
# The settings that a command lacks.
LACKING = {
    "memory": ("latencies", "kernels"),
    "compile": (),
    "auto": ("latencies", "stage", "paper_config"),
    "meshes": ("latencies", "kernels", "json", "plot", "context_parallel"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    # Nothing is computed here: GPUs are left to other programs.
    jax.config.update("jax_platforms", "cpu")
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    name = words.pop(0)
    try:
        if name.startswith("-"):
            raise ValueError(f"write a command before {name}: one of {', '.join(LACKING)}")
        if name not in LACKING:
            raise ValueError(unknown("command", name, LACKING))
        settings = parse(name, words)
        return _meshes(settings) if name == "meshes" else _plan(name, settings)
    except (ValueError, RuntimeError, OSError, OverflowError, MemoryError) as error:
        print("error:", error, file=sys.stderr)
        return 2


def parse(command: str, args: Sequence[str]) -> PlanSettings:
    """Returns the settings of a command's command line; prints help or an error, and exits.

    Raises:
      ValueError: A number is out of range, or settings contradict each other.

    >>> parse("memory", ["--model", "124m", "--devices", "8"]).devices
    8
    """
    prog, lacking = f"{_PROG} {command}", LACKING[command]
    given = command_line.parse(GROUPS, args, prog=prog, description=__doc__, hidden=lacking)
    for name in lacking:
        if name in given and (name, given[name]) != ("stage", AUTO):
            raise ValueError(f"{command_line.flag(name)} is no flag of {prog}: leave it out")
    if command == "auto":
        given["stage"] = AUTO
    settings = PlanSettings(**with_paper_config(given))
    command_line.check_values(settings)
    if command != "auto" and settings.stage == AUTO:
        raise ValueError(f"--stage auto is chosen by compiling candidates: {_PROG} auto")
    return settings


def _plan(command: str, settings: PlanSettings) -> int:
    target, case = targets.target(settings.target), case_of(settings)
    memory_bytes = _limit(case, target)
    if command != "memory":
        aot.check(target, case.zero.mesh.size, settings.topology, settings.latencies)
    if command == "auto":
        case = case.choose(**_aim(settings))
        plans = [case.plan(case.zero.stage, **_aim(settings))]
        shown = plans[0]
    else:
        aim = _aim(settings) | {"latencies": settings.latencies} if command == "compile" else {}
        plans = [case.plan(s, **(aim if s == settings.stage else {})) for s in STAGES]
        shown = next(plan for plan in plans if plan.stage == settings.stage)
    print(_title(case, settings))
    print(format_stages(plans, memory_bytes))
    print(format_layers(shown))
    print(case.attention_on(target))
    if isinstance(case.config, DecoderConfig) and case.config.mixture is not None:
        print(_of_experts(case, case.config, case.config.mixture.experts, target), end="")
    if command == "memory":
        products = case.model_flops / target.flops
        seconds = [advice.least_seconds(plan, products, target) for plan in plans]
        print(advice.format_advice(plans, memory_bytes, seconds), end="")
    if shown.compiled is not None:
        print("\n" + format_proof(shown, memory_bytes))
    groups = []
    if settings.kernels and shown.compiled is not None:
        if shown.time is None:
            raise ValueError(f"--kernels: {target.name} has no modelled step time: use h100")
        groups = kernel_groups(shown.compiled.program, target)
        print("\n" + format_kernels(groups))
    if settings.latencies is not None:
        path = pathlib.Path(settings.latencies).absolute()
        print(f"\nTo run with this schedule, set XLA_FLAGS=--{releases.LATENCIES}={path}")
    if settings.json:
        mesh, stages = case.zero.mesh, {str(p.stage): p.as_dict()["predicted"] for p in plans}
        chosen = {"devices": mesh.size, "experts": experts_size(mesh), "seq_len": case.row}
        known = {**dataclasses.asdict(settings), **chosen, "jax": jax.__version__}
        known |= {**shown.as_dict(), "stages": stages}
        known["kernels"] = list(map(dataclasses.asdict, groups))
        pathlib.Path(settings.json).write_text(json.dumps(known, indent=1) + "\n")
    if settings.plot:
        curves = {s: [(n, case.states(n, s)) for n in _CURVE] for s in STAGES}
        pictures.plot(plans, curves, settings.plot, _title(case, settings), memory_bytes)
    return 0


def _limit(case: Case, target: targets.Target) -> int:
    """Returns the bytes of device memory that a step may use; 0 if unknown."""
    return case.zero.memory_limit or auto.usable(target)


def _meshes(settings: PlanSettings) -> int:
    """Compares tensor-parallel sizes with the same batch; returns 1 if none fits."""
    sizes = mesh_sizes(settings.mesh)
    if sizes.keys() & {"model", "data", CONTEXT}:
        raise ValueError(
            f"--mesh {settings.mesh}: meshes chooses model and data, and has no context: leave all "
            "three out"
        )
    target, devices = targets.target(settings.target), devices_of(settings)
    settings = dataclasses.replace(settings, devices=devices)
    aot.check(target, devices, settings.topology)
    whole = case_of(settings)
    limit = _limit(whole, target)
    if not limit or target.platform != "cuda":
        raise ValueError(f"--target {target.name} has no modelled step time: use h100")

    def plan(mp: int, compile: bool) -> Plan:
        mesh = mesh_text({**sizes, "model": mp})
        case = case_of(dataclasses.replace(settings, mesh=mesh))
        return case.plan(settings.stage, **(_aim(settings) if compile else {}))

    counts = advice.splits(devices, sizes.get("replica", 1) * sizes.get("experts", 1))
    rows = list(advice.compare(counts, plan, limit))
    print(_title(whole, settings))
    print(advice.format_meshes(rows))
    return 0 if advice.fastest(rows) else 1


def _aim(settings: PlanSettings) -> dict[str, str | None]:
    """Returns the options of a plan that compile it."""
    return {"target": settings.target, "topology": settings.topology}


def devices_of(settings: PlanSettings) -> int:
    """Returns the number of devices: --devices, the product of axes, or as train.py simulates."""
    if settings.devices is not None:
        return settings.devices
    sizes = settings.axes()
    return math.prod(sizes.values()) if sizes else DEVICES


def case_of(settings: PlanSettings) -> Case:
    """Returns the model and its training step.

    Raises:
      ValueError: A name is unknown, or settings contradict each other.
    """
    config, tokens = _model(settings)
    check_context(settings.axes().get(CONTEXT, 1), config, tokens)
    mesh = _mesh(settings, config, tokens)
    zero = Zero(mesh, **settings.zero_settings())
    rows, unit = settings.global_batch_size, batch_shards(mesh) * settings.grad_accum_steps
    if rows % unit:
        raise ValueError(
            f"--global-batch-size {rows} must be a multiple of {batch_shards(mesh)} devices x "
            f"{settings.grad_accum_steps} micro-batches = {unit}: use {-(-rows // unit) * unit}"
        )
    return Case(config, zero, settings.optimizer, rows, tokens, settings.adapters())


def _mesh(settings: PlanSettings, config: families.Config, tokens: int) -> AbstractMesh:
    """Returns the mesh; with `auto`, also chooses the groups of experts that --mesh leaves open."""
    sizes: dict[str, Any] = settings.axes()
    asked, devices = mesh_text(sizes), devices_of(settings)
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    chooses = settings.stage == AUTO and settings.lora_rank is None and "experts" not in sizes
    if chooses and devices % others == 0:
        rows = settings.global_batch_size // (devices // sizes.get("model", 1))
        each = rows // settings.grad_accum_steps * tokens
        sizes["experts"] = expert_elements.groups(
            config, devices // others, each, settings.remat, targets.target(settings.target)
        )
        others *= sizes["experts"]
    data = sizes.pop("data", None)
    if devices % others or data not in (None, devices // others):
        raise ValueError(
            f"--devices {devices} with --mesh {asked}: the product of the axes is "
            f"{others * (data or 1)}, and must divide the devices, or equal them if it has data"
        )
    return abstract_mesh(devices // others, **sizes)


def _model(settings: PlanSettings) -> tuple[families.Config, int]:
    """Returns the model, and the tokens of a row."""
    folder, vocab = settings.init_from, settings.vocab_size
    config = families.preset(settings.model) if folder is None else folder_config.config(folder)
    config = families.with_capacity(config, settings.expert_capacity_factor)
    config = dataclasses.replace(config, mlp_chunk=settings.mlp_chunk)
    tokens = settings.seq_len or min(ROW, config.seq)
    if folder is None:
        config = dataclasses.replace(config, vocab=vocab or config.vocab)
        if isinstance(config, gpt.GPTConfig):  # its positions are parameters
            config = dataclasses.replace(config, seq=tokens)
    elif vocab not in (None, config.vocab):
        raise ValueError(f"--vocab-size {vocab}: {folder} has {config.vocab}; leave it out")
    if tokens > config.seq:
        raise ValueError(f"--seq-len {tokens}: the model has at most {config.seq} positions")
    return config, tokens


def _title(case: Case, settings: PlanSettings) -> str:
    zero, config, lora = case.zero, case.config, case.lora
    beside = "" if lora is None else f", LoRA of rank {lora.rank} on a {lora.base} model"
    mixture = getattr(config, "mixture", None)
    if mixture is not None:
        room = "no limit" if mixture.capacity is None else f"capacity factor {mixture.capacity:g}"
        beside += f", {mixture.chosen} of {mixture.experts} experts, {room}"
        groups = experts_size(zero.mesh)
        beside += f", in {groups} groups" if groups > 1 else ""
    shared = context_size(zero.mesh)
    rows = f"{case.rows} x {case.row} tokens"
    if shared > 1:
        own = case.rows // batch_shards(zero.mesh) * case.row // shared
        rows += f" ({own} tokens per device)"
    return (
        f"{settings.init_from or settings.model} ({config.layers} x {config.width}) on "
        f"{zero.mesh.size} {settings.target}, global batch {rows}, "
        f"{settings.compute_dtype}, remat {zero.remat}, {zero.grad_accum_steps} "
        f"micro-batches, {case.optimizer}{beside}"
    )


def _of_experts(case: Case, config: DecoderConfig, experts: int, target: targets.Target) -> str:
    """Formats the token count above which gathering experts takes less communication time."""
    zero, mesh = case.zero, case.zero.mesh
    devices, groups = axis_size(mesh, data_axis(mesh)), experts_size(mesh)
    would = groups if groups > 1 else math.gcd(experts, devices)
    if would == 1:
        return ""
    wires = expert_elements.wires(target)
    even = expert_elements.even(config, would, devices, zero.remat, wires)
    tokens = case.rows * case.row // (batch_shards(mesh) * zero.grad_accum_steps)
    how = f"experts are parallel in {groups} groups"
    if groups == 1:
        how = f"experts are gathered; --mesh experts={would} makes them parallel"
    return (
        f"{how}. Expert parallelism takes less communication time at stage 3 below {even:,.0f} "
        f"tokens per device and micro-batch; this step has {tokens:,}\n"
    )
