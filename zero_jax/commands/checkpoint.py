"""Inspects and verifies checkpoints, and converts them to and from Hugging Face models.

All commands run on the CPU. docs/interchange.md lists the supported models.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax

from zero_jax.checkpoint import inspection
from zero_jax.checkpoint.checkpoints import Checkpoints
from zero_jax.checkpoint.manifest import SEAL
from zero_jax.interchange import folder_config, hugging_face
from zero_jax.interchange.exporter import MAX_FILE_BYTES
from zero_jax.models import families
from zero_jax.sharding.mesh import make_mesh
from zero_jax.zero import Zero

Command = Callable[[argparse.Namespace], int]


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 1 for damage, 2 for an error."""
    jax.config.update("jax_platforms", "cpu")  # leaves GPUs to others
    parsed = _parser().parse_args(args)
    try:
        return int(parsed.run(parsed))
    except (ValueError, OSError, OverflowError) as error:
        print("error:", error, file=sys.stderr)
        return 2


def _inspect(args: argparse.Namespace) -> int:
    folders = inspection.folders(args.dir)
    shown = max(folders) if args.step is None else args.step
    inspection.folders(args.dir, shown)  # raises if it does not exist
    summaries = {step: inspection.summary(folder) for step, folder in folders.items()}
    for step, summary in summaries.items():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.seconds or 0))
        complete = "complete" if summary.sealed else f"complete, without {SEAL}"
        print(
            f"step {step}  {when if summary.seconds else 'no time'}  "
            f"{summary.nbytes / 1e6:,.3f} MB  {'INCOMPLETE' if summary.problems else complete}"
        )
        print(*(f"  {problem}\n" for problem in summary.problems), sep="", end="")
    for name in inspection.unfinished(args.dir):
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


def _verify(args: argparse.Namespace) -> int:
    is_damaged = False
    for step, folder in inspection.folders(args.dir, args.step).items():
        problems = inspection.summary(folder, read=True).problems
        print(f"step {step}: {'DAMAGED' if problems else 'undamaged'}")
        print(*(f"  {problem}\n" for problem in problems), sep="", end="", flush=True)
        is_damaged = is_damaged or bool(problems)
    return int(is_damaged)


def _export(args: argparse.Namespace) -> int:
    files = hugging_face.export(
        args.dir,
        args.out,
        step=args.step,
        max_file_bytes=args.max_file_bytes,
        heads=args.heads,
        prefix=args.prefix,
        like=args.like,
    )
    size = sum(path.stat().st_size for path in files)
    print(f"{args.out}: {len(files)} files, {size / 1e6:,.3f} MB")
    return 0


def _import(args: argparse.Namespace) -> int:
    from flax import nnx

    if args.step < 0:
        raise ValueError(f"`step`={args.step}: at least 0 is required")
    config = hugging_face.config(args.folder)
    if args.dir.is_dir() and Checkpoints(args.dir, read_only=True).steps:
        raise ValueError(f"{args.dir} already holds checkpoints: use another folder")

    def make() -> object:
        return nnx.state(families.build(config, nnx.Rngs(0)), nnx.Param)

    params = hugging_face.load(args.folder, Zero(make_mesh(), stage=3).eval_shape(make))
    with Checkpoints(args.dir) as checkpoints:
        recorded = {"hf_config": folder_config.read(args.folder)}  # from which `export` rebuilds it
        checkpoints.save(args.step, (params,), config=recorded)
    print(f"{args.dir}: step {args.step}, {config}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m zero_jax.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Command, help: str, *paths: tuple[str, str | None, str]
    ) -> Callable[..., argparse.Action]:
        """Adds a command with some (destination, metavar, help); returns its `add_argument`."""
        subparser = commands.add_parser(name, help=help, description=help)
        subparser.set_defaults(run=run)
        for dest, metavar, about in paths:
            subparser.add_argument(dest, type=pathlib.Path, metavar=metavar, help=about)
        return subparser.add_argument

    folder = ("dir", None, "Checkpoint folder.")
    about = "List steps, sizes, versions, arrays and damage; exits 1 on damage."
    add = command("inspect", _inspect, about, folder)
    add("--step", type=int, help="Step to list the arrays of (default: the latest).")

    about = "Read all files and compare checksums; exits 1 on a mismatch."
    add = command("verify", _verify, about, folder)
    add("--step", type=int, help="Step to verify (default: all).")

    about = "Write the parameters as a transformers model."
    add = command("export", _export, about, folder, ("out", "OUT", "Folder to write."))
    add("--step", type=int, help="Step to export (default: the latest).")
    about = "Maximum bytes of tensors per file (default: %(default)g)."
    add("--max-file-bytes", type=float, default=MAX_FILE_BYTES, help=about)
    about = "Folder to copy config.json and the tokenizer from."
    add("--like", type=pathlib.Path, metavar="DIR", help=about)
    add("--heads", type=int, help="Attention heads (default: from the checkpoint).")
    add("--prefix", help="Prefix of parameter paths (default: 0/, none or params/).")

    about = "Make a checkpoint of a transformers model to train from."
    source = ("folder", "IN", "Folder with config.json and safetensors.")
    add = command("import", _import, about, source, ("dir", None, "Checkpoint folder to write."))
    add("--step", type=int, default=0, help="Step of the checkpoint (default: 0).")
    return parser
