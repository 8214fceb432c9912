"""`python -m zero_jax.plan pipelines`: when a pipeline would be worth it beside ZeRO.

python -m zero_jax.plan pipelines --model 1t --devices 1024 --pipeline 64 --micro-batches 128
"""

import argparse
import dataclasses
from collections.abc import Sequence

from zero_jax.hlo import targets
from zero_jax.models import families
from zero_jax.models.gpt_config import GPTConfig
from zero_jax.plan import pipeline_table, ranges
from zero_jax.plan.options import ROW


def main(args: Sequence[str]) -> int:
    """Prints the table; returns the exit code.

    Raises:
      ValueError: a name is not known, or numbers do not go together.
    """
    parsed = _parser().parse_args(args)
    setting = _setting(parsed)
    print(
        f"{parsed.model} ({setting.layers} x {setting.width}, {setting.psi / 1e9:.1f}B) on "
        f"{setting.devices} {setting.device.name}"
    )
    print(pipeline_table.format_table(setting))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zero_jax.plan pipelines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="7.5b", help="one of " + ", ".join(families.PRESETS))
    add("--devices", type=int, default=64, help="of the whole run")
    add("--pipeline", type=int, default=8, help="p, stages of a pipeline")
    add("--micro-batches", type=int, default=32, help="m, of a pipeline; a multiple of p")
    add("--chunks", type=int, default=2, help="v, of a device's layers, interleaved")
    add(
        "--batch-per-device",
        type=int,
        help="rows of the whole batch, over devices; as many as make a micro-batch one row",
    )
    add("--seq", type=int, help=f"tokens of a row; {ROW}, or what the model takes, unless given")
    add("--target", default="h100", help="one of " + ", ".join(targets.TARGETS))
    return parser


def _setting(parsed: argparse.Namespace) -> pipeline_table.Setting:
    ranges.check(parsed)
    config = families.preset(parsed.model)
    seq = min(ROW, config.seq) if parsed.seq is None else parsed.seq
    if isinstance(config, GPTConfig):
        config = dataclasses.replace(config, seq=seq)  # its positions are parameters
    elif seq > config.seq:
        raise ValueError(f"--seq {seq}: the model takes rows of at most {config.seq} tokens")
    return pipeline_table.Setting(
        psi=families.num_params(config),
        layers=config.layers,
        width=config.width,
        seq=seq,
        flops_per_token=families.flops_per_token(config, seq),
        device=targets.target(parsed.target),
        devices=parsed.devices,
        stages=parsed.pipeline,
        micro_batches=parsed.micro_batches,
        chunks=parsed.chunks,
        rows=_rows(parsed),
    )


def _rows(parsed: argparse.Namespace) -> int:
    """Of a micro-batch."""
    each, p, m = parsed.batch_per_device, parsed.pipeline, parsed.micro_batches
    if each is None or m < 1:
        return 1
    if each < 1 or each * p % m:
        raise ValueError(
            f"--batch-per-device {each} on --pipeline {p} is {each * p} rows of a pipeline: they "
            f"must be a multiple of --micro-batches {m}"
        )
    return each * p // m
