"""Inspects and verifies checkpoints, and converts them to and from Hugging Face models.

All commands run on the CPU. docs/interchange.md lists the supported models.
"""

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from zero_jax.checkpoint import directory
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import SEAL
from zero_jax.commands import command_line
from zero_jax.interchange import folder_config, hugging_face
from zero_jax.interchange.safetensor_files import MAX_FILE_BYTES
from zero_jax.models import families
from zero_jax.sharding.mesh import make_mesh
from zero_jax.zero import Zero


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 1 for damage, 2 for an error."""
    jax.config.update("jax_platforms", "cpu")  # leaves GPUs to others
    commands = (_inspect, _verify, _export, _import)
    try:
        return command_line.run(
            commands, args, prog="python -m zero_jax.checkpoint", description=__doc__
        )
    except (ValueError, OSError, OverflowError) as error:
        print("error:", error, file=sys.stderr)
        return 2


def _inspect(dir: pathlib.Path, step: int | None = None) -> int:
    """List steps, sizes, versions, arrays and damage; exits 1 on damage.

    Args:
      dir: Checkpoint folder.
      step: Step to list the arrays of (default: the latest).
    """
    folders = directory.folders(dir)
    shown = max(folders) if step is None else step
    directory.folders(dir, shown)  # raises if it does not exist
    summaries = {step: directory.summary(folder) for step, folder in folders.items()}
    for step, summary in summaries.items():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.seconds or 0))
        complete = "complete" if summary.sealed else f"complete, without {SEAL}"
        print(
            f"step {step}  {when if summary.seconds else 'no time'}  "
            f"{summary.nbytes / 1e6:,.3f} MB  {'INCOMPLETE' if summary.problems else complete}"
        )
        print(*(f"  {problem}\n" for problem in summary.problems), sep="", end="")
    for name in directory.unfinished(dir):
        print(f"{name}  is left by an interrupted save; the next run removes it")
    if (manifest := summaries[shown].manifest) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        print(f"\nstep {manifest.step}, written by {versions}")
        print(f"config {json.dumps(manifest.config)}")
        print(f"extra {json.dumps(manifest.extra)}")
        width = max(map(len, manifest.arrays), default=0)
        for name, entry in manifest.arrays.items():
            print(f"  {name:{width}}  {entry.dtype:8}  {entry.shape}")
    return int(any(summary.problems for summary in summaries.values()))


def _verify(dir: pathlib.Path, step: int | None = None) -> int:
    """Read all files and compare checksums; exits 1 on a mismatch.

    Args:
      dir: Checkpoint folder.
      step: Step to verify (default: all).
    """
    is_damaged = False
    for number, folder in directory.folders(dir, step).items():
        problems = directory.summary(folder, read=True).problems
        print(f"step {number}: {'DAMAGED' if problems else 'undamaged'}")
        print(*(f"  {problem}\n" for problem in problems), sep="", end="", flush=True)
        is_damaged = is_damaged or bool(problems)
    return int(is_damaged)


def _export(
    dir: pathlib.Path,
    out: pathlib.Path,
    step: int | None = None,
    max_file_bytes: float = MAX_FILE_BYTES,
    like: pathlib.Path | None = None,
    heads: int | None = None,
    prefix: str | None = None,
) -> int:
    """Write the parameters as a transformers model.

    Args:
      dir: Checkpoint folder.
      out: Folder to write.
      step: Step to export (default: the latest).
      max_file_bytes: Maximum bytes of tensors per file (default: 2e9).
      like: Folder to copy config.json and the tokenizer from.
      heads: Attention heads (default: from the checkpoint).
      prefix: Prefix of parameter paths (default: 0/, none or params/).
    """
    options: dict[str, Any] = {
        "max_file_bytes": max_file_bytes,
        "like": like,
        "heads": heads,
        "prefix": prefix,
    }
    files = hugging_face.export(dir, out, step=step, **options)
    size = sum(path.stat().st_size for path in files)
    print(f"{out}: {len(files)} files, {size / 1e6:,.3f} MB")
    return 0


def _import(folder: pathlib.Path, dir: pathlib.Path, step: int = 0) -> int:
    """Make a checkpoint of a transformers model to train from.

    Args:
      folder: Folder with config.json and safetensors.
      dir: Checkpoint folder to write.
      step: Step of the checkpoint (default: 0).
    """
    if step < 0:
        raise ValueError(f"`step`={step}: at least 0 is required")
    config = hugging_face.config(folder)
    if dir.is_dir() and Checkpoints(dir, read_only=True).steps:
        raise ValueError(f"{dir} already holds checkpoints: use another folder")

    def make() -> object:
        return nnx.state(families.build(config, nnx.Rngs(0)), nnx.Param)

    params = hugging_face.load(folder, Zero(make_mesh(), stage=3).eval_shape(make))
    with Checkpoints(dir) as checkpoints:
        recorded = {"hf_config": folder_config.read(folder)}  # from which `export` rebuilds it
        checkpoints.save(step, (params,), config=recorded)
    print(f"{dir}: step {step}, {config}")
    return 0
