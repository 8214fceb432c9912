"""Memory and communication plan of a training run, before renting hardware.

    python -m zero_jax.plan --model 7.5b --stage 3 --devices 64 --batch-per-device 4 --compile
    python -m zero_jax.plan --model llama-3.1-70b --devices 8 --lora 16 --base nf4 --compile
    python -m zero_jax.plan meshes --model 1t --devices 1024 --batch-per-device 1 --reduce bf16

Predicts the bytes per device and the communication of a step; --compile checks them against the
program that XLA compiles ahead of time. No GPU is needed. The command `meshes` compiles the same
batch at each tensor-parallel size and compares the steps. To plan another model, call `Zero.plan`.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from zero_jax.collectives.buckets import BUCKET_BYTES
from zero_jax.hlo import prove, targets
from zero_jax.interchange import folder_config
from zero_jax.models import families, gpt, optimizers
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.names import unknown
from zero_jax.plan import candidates, expert_words, meshes, pictures, proof
from zero_jax.plan.advice import format_advice, least_seconds
from zero_jax.plan.case import Case
from zero_jax.plan.options import ROW, Adapters, Options, add_options, parsed_options
from zero_jax.plan.plans import Plan, format_layers, format_proof, format_stages
from zero_jax.sharding.mesh import abstract_mesh, axis_size, batch_shards, data_axis, experts_size
from zero_jax.zero import Zero

BATCH = "Sequences per step of each tensor-parallel group (default: 1)."
_CURVE = (1, 4, 16, 64, 256, 1024)
# The least and the most of each flag. The most is far beyond any machine or model, and within the
# 32 and 64 bits in which shapes and their bytes are counted.
_RANGES: dict[str, tuple[float, float]] = {
    "devices": (1, 2**20),
    "replica": (1, 2**20),
    "experts": (1, 2**20),
    "model_parallel": (1, 2**20),
    "batch_per_device": (1, 2**20),
    "micro_batches": (1, 2**20),
    "seq": (1, 2**24),
    "vocab": (1, 2**24),
    "lora": (1, 2**20),
    "lora_alpha": (0, 1e6),
    "capacity": (0, 1e6),
    "bucket_bytes": (1, 2**40),
    "memory_limit": (0, 1e9),
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    # Nothing is computed here, and a GPU that is there has better things to do.
    jax.config.update("jax_platforms", "cpu")
    given = list(sys.argv[1:] if args is None else args)
    commands = {"plan": _plan, "meshes": _meshes}
    name = given.pop(0) if given and not given[0].startswith("-") else "plan"
    try:
        if name not in commands:
            raise ValueError(unknown("command", name, commands))
        return commands[name](given)
    except (ValueError, RuntimeError, OSError, OverflowError, MemoryError) as error:
        print("error:", error, file=sys.stderr)
        return 2


def _plan(args: Sequence[str]) -> int:
    parsed = parser().parse_args(args)
    target = targets.target(parsed.target)
    case = case_of(parsed)
    memory_bytes = _limit(parsed, target)
    options = {"target": parsed.target, "topology": parsed.topology}
    if parsed.latencies is not None:
        if not parsed.compile or parsed.auto:
            raise ValueError(
                "--latencies are made of one compiled program: add --compile, and leave --auto out"
            )
        proof.check(parsed.latencies, target)
    if parsed.compile or parsed.auto:
        prove.check(target, case.zero.mesh.size, parsed.topology)
    if parsed.auto:
        case = case.choose(**options)
        plans = [case.plan(int(case.zero.stage), **options)]
        shown = plans[0]
    else:
        told = options | {"latencies": parsed.latencies}
        plans = [
            case.plan(s, **(told if parsed.compile and s == parsed.stage else {})) for s in range(4)
        ]
        shown = plans[parsed.stage]
    print(_title(case, parsed))
    print(format_stages(plans, memory_bytes))
    print(format_layers(shown))
    print(case.attention_on(target))
    if isinstance(case.config, DecoderConfig) and case.config.mixture is not None:
        print(_of_experts(case, case.config, case.config.mixture.experts, parsed.target), end="")
    if not parsed.auto and shown.compiled is None:
        products = case.model_flops / target.flops
        seconds = [least_seconds(plan, products, target) for plan in plans]
        print(format_advice(plans, memory_bytes, seconds), end="")
    if shown.compiled is not None:
        print("\n" + format_proof(shown, memory_bytes))
    if parsed.latencies is not None:
        print("\nSo that a run is scheduled like this: XLA_FLAGS=" + proof.flags(parsed.latencies))
    if parsed.json:
        known = {**_settings(case, parsed), **shown.as_dict()}
        known["stages"] = {str(p.stage): p.as_dict()["predicted"] for p in plans}
        pathlib.Path(parsed.json).write_text(json.dumps(known, indent=1) + "\n")
    if parsed.plot:
        curves = {s: [(n, case.states(n, s)) for n in _CURVE] for s in range(4)}
        pictures.plot(plans, curves, parsed.plot, _title(case, parsed), memory_bytes)
    return 0


def _limit(parsed: argparse.Namespace, target: targets.Target) -> int:
    """Bytes of a device that may be used; 0 if that is not known."""
    if parsed.memory_limit is not None:
        return int(parsed.memory_limit * 1e9)
    return candidates.usable(target) if target.memory_bytes else 0


def _meshes(args: Sequence[str]) -> int:
    """The same batch, `--batch-per-device` rows for each device, on every mesh."""
    parsed = parser().parse_args(args)
    _check_ranges(parsed)
    for name in ("model_parallel", "compile", "auto", "json", "plot", "latencies"):
        if getattr(parsed, name) != parser().get_default(name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is not for meshes, which compiles every MP: leave it out")
    target, each = targets.target(parsed.target), parsed.batch_per_device
    prove.check(target, parsed.devices, parsed.topology)
    limit = _limit(parsed, target)
    if not limit or target.platform != "cuda":
        raise ValueError(f"--target {target.name} has no figures to compare meshes by: take h100")
    options = {"target": parsed.target, "topology": parsed.topology}

    def plan(mp: int, compile: bool) -> Plan:
        own = {"model_parallel": mp, "batch_per_device": each * mp}
        case = case_of(argparse.Namespace(**{**vars(parsed), **own}))
        return case.plan(parsed.stage, **(options if compile else {}))

    counts = meshes.splits(parsed.devices, parsed.replica * (parsed.experts or 1))
    rows = list(meshes.compare(counts, plan, limit))
    print(_title(case_of(parsed), parsed))
    print(meshes.format_meshes(rows))
    return 0 if meshes.fastest(rows) else 1


def parser() -> argparse.ArgumentParser:
    """Of `plan`, the command without a name."""
    made = argparse.ArgumentParser(
        "python -m zero_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --batch is that of all devices elsewhere
    )
    add = made.add_argument
    add(
        "--model",
        default="7.5b",
        help="Model preset (default: 7.5b): " + ", ".join(families.PRESETS),
    )
    add("--hf", help="Folder with the config.json of a transformers model; replaces --model.")
    add(
        "--stage",
        type=int,
        default=3,
        choices=range(4),
        help="ZeRO stage to detail and compile (default: 3).",
    )
    add("--devices", type=int, default=8, help="Total devices (default: 8).")
    add("--replica", type=int, default=1, help="Copies of the sharded state (default: 1).")
    add(
        "--experts",
        type=int,
        help="Expert-parallel groups of devices; None is 1, or the fastest with --auto.",
    )
    add("--model-parallel", type=int, default=1, help="Tensor-parallel size (default: 1).")
    add("--batch-per-device", type=int, default=1, help=BATCH)
    add(
        "--seq",
        type=int,
        help=f"Sequence length in tokens; None is {ROW}, or the model's limit if lower.",
    )
    add("--vocab", type=int, help="Vocabulary size; None is the preset's.")
    add("--capacity", type=float, help="Expert capacity factor; None is the model's.")
    add(
        "--optimizer",
        default="adamw",
        help="Optimizer (default: adamw): " + ", ".join(optimizers.RATES),
    )
    add_options(made, compute="bf16")
    add_options(made, Adapters)
    add(
        "--bucket-bytes",
        type=int,
        default=BUCKET_BYTES,
        help="Maximum bytes per collective (default: %(default)s).",
    )
    add(
        "--target",
        default="h100",
        help="Device kind (default: h100): " + ", ".join(targets.COMPILED_FOR),
    )
    add("--topology", help="Such as 8x1x8 for 8 hosts of 8 GPUs; None is full NVLink hosts.")
    add("--compile", action="store_true", help="Compile ahead of time and check the plan.")
    add("--auto", action="store_true", help="Choose the stage and other settings, and compile.")
    add("--latencies", help="Output .pbtxt of latencies for XLA's scheduler; compiles twice.")
    add("--json", help="Output JSON file of the plan.")
    add("--plot", help="Output image of the plan (needs matplotlib).")
    return made


def case_of(parsed: argparse.Namespace) -> Case:
    """What `parser` was given.

    Raises:
      ValueError: a name is not known, or numbers do not go together.
    """
    if parsed.optimizer not in optimizers.RATES:
        raise ValueError(unknown("optimizer", parsed.optimizer, optimizers.RATES))
    _check_ranges(parsed)
    if parsed.batch_per_device % parsed.micro_batches:
        raise ValueError(
            f"--batch-per-device {parsed.batch_per_device} must be a multiple of "
            f"--micro-batches {parsed.micro_batches}"
        )
    config, tokens = _model(parsed)
    options = parsed_options(parsed, Options, stage="auto" if parsed.auto else parsed.stage)
    mesh = _mesh(parsed, config, tokens)
    zero = Zero(mesh, bucket_bytes=parsed.bucket_bytes, **options.settings())
    rows = parsed.batch_per_device * parsed.devices // parsed.model_parallel
    lora = parsed_options(parsed, Adapters).adapters()
    return Case(config, zero, parsed.optimizer, rows, tokens, lora)


def _check_ranges(parsed: argparse.Namespace) -> None:
    """Checks every number that was given.

    Raises:
      ValueError: one is out of its range, with its flag and the range.

    >>> _check_ranges(argparse.Namespace(seq=0))
    Traceback (most recent call last):
    ValueError: --seq 0: it must be at least 1 and at most 1.67772e+07
    """
    for name, (least, most) in _RANGES.items():
        given = getattr(parsed, name, None)
        if isinstance(given, int | float) and not least <= given <= most:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {given}: it must be at least {least:g} and at most {most:g}")


def _mesh(parsed: argparse.Namespace, config: families.Config, tokens: int) -> AbstractMesh:
    """The devices of the run."""
    others, experts = parsed.replica * parsed.model_parallel, parsed.experts or 1
    if parsed.auto and parsed.experts is None and parsed.lora is None and parsed.devices > 0:
        each = parsed.batch_per_device // parsed.micro_batches * tokens
        experts = expert_words.groups(
            *(config, parsed.devices // others, each, parsed.remat, targets.target(parsed.target))
        )
    split = others * experts
    if parsed.devices < 1 or parsed.devices % split:
        raise ValueError(
            f"--devices {parsed.devices} must be a multiple of replica {parsed.replica} x experts "
            f"{experts} x model-parallel {parsed.model_parallel} = {split}"
        )
    return abstract_mesh(
        parsed.devices // split,
        replica=parsed.replica,
        experts=experts,
        model=parsed.model_parallel,
    )


def _model(parsed: argparse.Namespace) -> tuple[families.Config, int]:
    """The model, and tokens of a row."""
    own = {} if parsed.vocab is None else {"vocab": parsed.vocab}
    config = families.preset(parsed.model) if parsed.hf is None else folder_config.config(parsed.hf)
    if parsed.hf is not None and own:
        raise ValueError(f"--vocab {parsed.vocab}: the folder {parsed.hf} says {config.vocab}")
    config = families.with_capacity(config, parsed.capacity)
    tokens = min(ROW, config.seq) if parsed.seq is None else parsed.seq
    if parsed.hf is None and isinstance(config, gpt.GPTConfig):
        own["seq"] = tokens  # its positions are parameters
    config = dataclasses.replace(config, **own)
    if tokens > config.seq:
        raise ValueError(f"--seq {tokens}: the model takes rows of at most {config.seq} tokens")
    return config, tokens


def _title(case: Case, parsed: argparse.Namespace) -> str:
    zero, config, lora = case.zero, case.config, case.lora
    beside = "" if lora is None else f", adapters of rank {lora.rank} beside {lora.base}"
    mixture = getattr(config, "mixture", None)
    if mixture is not None:
        room = "all tokens" if mixture.capacity is None else f"capacity {mixture.capacity:g}"
        beside += f", {mixture.chosen} of {mixture.experts} experts with room for {room}"
        groups = experts_size(zero.mesh)
        beside += f", in {groups} groups" if groups > 1 else ""
    return (
        f"{parsed.hf or parsed.model} ({config.layers} x {config.width}) on {parsed.devices} "
        f"{parsed.target}, {parsed.batch_per_device} x {case.row} tokens each, {parsed.compute}, "
        f"remat {zero.remat}, {zero.micro_batches} micro-batches, {case.optimizer}{beside}"
    )


def _of_experts(case: Case, config: DecoderConfig, experts: int, target: str) -> str:
    """Whether experts stay, and from how many tokens on gathering them is shorter on the wire."""
    mesh = case.zero.mesh
    devices = axis_size(mesh, data_axis(mesh))
    groups = experts_size(mesh)
    would = groups if groups > 1 else math.gcd(experts, devices)
    if would == 1:
        return ""
    wires = expert_words.wires(targets.target(target))
    even = expert_words.even(config, would, devices, case.zero.remat, wires)
    tokens = case.rows * case.row // (batch_shards(mesh) * case.zero.micro_batches)
    how = f"stay in {groups} groups"
    if groups == 1:
        how = f"are gathered; with --experts {would} they stay"
    return (
        f"experts {how}: shorter on the wire at stage 3 below {even:,.0f} tokens of a device and "
        f"micro-batch, of which there are {tokens:,} here\n"
    )


def _settings(case: Case, parsed: argparse.Namespace) -> dict[str, Any]:
    names = "model hf devices batch_per_device compute reduce gather scatter optimizer"
    names += " capacity lora lora_alpha lora_targets base"
    known = {name: getattr(parsed, name) for name in names.split()}
    known["experts"] = experts_size(case.zero.mesh)
    return {**known, "seq": case.row, "jax": jax.__version__}
