"""Translates a DeepSpeed JSON or an `accelerate config` YAML to zero_jax.

Prints Python code, a train.py command, and the handling of each key.
"""

import argparse
import json
import pathlib
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence

import yaml  # type: ignore[import-untyped]

from zero_jax.names import check_once
from zero_jax.translate import settings
from zero_jax.translate.settings import VERDICTS, Arguments, File, Row

_MEGATRON = "docs/coming-from.md has a table of the arguments of Megatron-LM"
_DIFFERS = "(train.py has its own betas and schedule; fp16 starts at a loss scale of 2^16)"
_COMMENT = r"//[^\n]*|\#[^\n]*|/\*.*?\*/"
# A string, or a comment, or a comma before the end of a block, with the comments between.
_TOLERATED = re.compile(
    rf'("(?:\\.|[^"\\\n])*")|{_COMMENT}|,(?:\s|{_COMMENT})*+(?=[}}\]])', re.DOTALL
)
# Values that are not printed.
_DEFAULTS = {"compute_dtype": "fp32", "reduce_dtype": "fp32", "grad_accum_steps": 1}
_DEFAULTS |= {"secondary_shards": False, "precision": "zero_jax.Precision()"}
_DEFAULTS |= {"replica": 1, "model": 1, "remat": "none"}
_DTYPES = "compute_dtype reduce_dtype matmul_dtype param_comm_dtype grad_comm_dtype"
_FLAGS = f"stage mesh global_batch_size grad_accum_steps {_DTYPES} remat offload secondary_shards "
_FLAGS += "optimizer weight_decay learning_rate max_steps warmup_steps max_grad_norm"


def load(text: str, name: str) -> dict[str, object]:
    """Returns the values of a YAML, or of a JSON that may have comments, by dotted names."""
    plain = _TOLERATED.sub(lambda match: match[1] or "\n" * match[0].count("\n") or " ", text)
    is_json, error = plain.lstrip().startswith("{") or name.endswith(".json"), ""
    try:
        if is_json:  # YAML reads 010 as 8, and 1e5 as text
            tree = json.loads(plain, object_pairs_hook=_once)
        else:
            tree = yaml.load(text, _UniqueKeys)
    except (json.JSONDecodeError, yaml.YAMLError) as reason:
        tree, error = None, f" ({reason})"
    if not isinstance(tree, Mapping) or not (is_json or "distributed_type" in tree):
        raise ValueError(f"no DeepSpeed JSON and no YAML of accelerate config{error}; {_MEGATRON}")
    return _flat(tree)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    check_once(name for name, _ in pairs)
    return dict(pairs)


class _UniqueKeys(yaml.SafeLoader):
    # Before merge keys are resolved.
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        check_once(str(key.value) for key, _ in node.value)
        return node


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= _flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
        if len(values) > 10_000:
            raise ValueError("more than 10000 keys: give a configuration")
    return values


def _read(path: pathlib.Path) -> str:
    if path.exists() and not (path.is_file() and path.stat().st_size < 1_000_000):
        raise ValueError("`FILE` is no regular file below 1 MB: give one, or - for standard input")
    return path.read_text(encoding="utf-8")


def translate(text: str, name: str, devices: int | None = None) -> tuple[Arguments, list[Row]]:
    """Returns the arguments that a file asks for, and how each of its keys is handled.

    `name` is its path, `devices` the number of devices, where the file has none or another.
    """
    file, kind = File(load(text, name)), "DEEPSPEED"
    if "distributed_type" not in file.values:
        file.renamed()
    else:
        if str(file.values["distributed_type"]).upper() == "MEGATRON_LM":
            raise ValueError(f"`distributed_type` MEGATRON_LM is unsupported; {_MEGATRON}")
        kind = file["distributed_type"]
        for other in {"DEEPSPEED", "FSDP"} - {kind}:
            file.say(f"{other.lower()}_config", f"only {other} reads it", settings.NOT_NEEDED)
    if kind == "DEEPSPEED" and "distributed_type" in file.values:
        named = str(file["deepspeed_config.deepspeed_config_file"] or "")
        near = pathlib.Path(name).parent / named
        if (path := near if near.is_file() else pathlib.Path(named)).is_file():
            file.join(named, File(load(_read(path), "a.json")).renamed())
        else:
            why = "not found: translate that file by itself"
            file.say("deepspeed_config.deepspeed_config_file", why, settings.UNSUPPORTED)
            file.renamed().values.setdefault("zero_optimization.stage", 2)
    made = settings.arguments(file, kind, devices)
    rows = [file.row(*key, made) for key in file.keys]
    if all(verdict == settings.UNKNOWN for _, _, verdict, _ in rows):
        raise ValueError(f"no key is one of DeepSpeed or of accelerate; {_MEGATRON}")
    return made, rows


def _call(name: str, words: list[str], made: Arguments, names: str) -> str:
    for key in names.split():
        if (value := made[key]) != _DEFAULTS.get(key):
            is_code = key in ("grad_accum_steps", "replica", "precision")
            quoted = isinstance(value, str) and not is_code
            words = [*words, f"{key}={json.dumps(value) if quoted else value}"]
    line = f"{name}({', '.join(words)})"
    return line if len(line) < 90 else f"{name}(\n    " + ",\n    ".join(words) + ",\n)"


def python(made: Arguments) -> str:
    """Returns lines that make the mesh, the Zero, the optimizer and the step."""
    names = f"{_DTYPES} initial_scale growth_interval"
    made = {**made, "precision": _call("zero_jax.Precision", [], made, names)}
    devices = f"{made['devices'] or 'all'} devices"
    lines = [f"mesh = {_call('zero_jax.make_mesh', [], made, 'replica model')}  # {devices}"]
    if "D" in str(made["grad_accum_steps"]):
        lines += [f"D = mesh.size // {made['model']}  # devices that share the batch"]
    names = "stage precision grad_accum_steps remat offload secondary_shards"
    lines += [f"zero = {_call('zero_jax.Zero', ['mesh'], made, names)}", *(made["lr"] or ())]
    lines += ["# The file has no known optimizer: put yours here."] * (made["call"] is None)
    tx = made["call"] or f"optax.adamw({'lr' if made['lr'] else 1e-4})"
    if norm := made["max_grad_norm"]:
        tx = _call("optax.chain", [f"optax.clip_by_global_norm({norm})", tx], {}, "")
    batch = made["global_batch_size"]
    rows = f"  # a batch of {batch} rows over all devices" if batch else ""
    lines += [f"tx = {tx}", "optimizer = zero.optimizer(tx)"]
    lines += [f"step = zero.train_step(loss_fn, optimizer){rows}"]
    lines += ["# params = zero.init(...); opt_state = optimizer.init(params)"]
    uses = {"math": "math.", "jax": "jax.devices", "jax.numpy as jnp": "jnp.", "optax": "tx"}
    used = [name for name, use in uses.items() if use in "\n".join(lines)]
    return "\n".join([*(f"import {name}" for name in [*used, "zero_jax"]), "", *lines])


def train(made: Arguments) -> str:
    """Returns the command line of train.py."""
    axes = [axis for axis in ("replica", "data", "model") if made.get(axis) != 1]
    sizes = f"{made['global_batch_size']} {made['grad_accum_steps']}"
    if "D" in sizes or (axes[1:] and not made["devices"]):
        return "python train.py: give --devices N, because sizes depend on it"
    steps = made["max_steps"]
    warmup = min(made["warmup_steps"] or 0, steps - 1) if steps else None
    made = {**made, "mesh": None, "warmup_steps": warmup}
    if made["devices"]:
        made["data"] = made["devices"] // (made["replica"] * made["model"])
        made["mesh"] = ",".join(f"{axis}={made[axis]}" for axis in axes)
    line = "python train.py"
    for name in _FLAGS.split():
        if (value := made[name]) != _DEFAULTS.get(name):
            value = "" if value is True else f" {shlex.quote(str(value))}"
            line += f" --{name.replace('_', '-')}{value}"
    return line


def account(rows: list[Row]) -> str:
    """Returns the keys by verdict and sentence."""
    lines, wrap = list[str](), textwrap.TextWrapper(100, "#   ", "#     ")
    wrap.break_long_words = wrap.break_on_hyphens = False
    for verdict in VERDICTS:
        group = [row for row in rows if row[2] == verdict]
        lines += ["", f"# {verdict} ({len(group)})"] * bool(group)
        for why in dict.fromkeys(row[3] for row in group):
            names = ", ".join(f"{key} {given}" for key, given, _, of in group if of == why)
            lines += wrap.wrap(f"{names}: {why}")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 if the file can't be translated."""
    parser = argparse.ArgumentParser("python -m zero_jax.translate", description=__doc__)
    about = "DeepSpeed JSON or accelerate YAML; - reads standard input."
    parser.add_argument("file", metavar="FILE", help=about)
    parser.add_argument("--devices", type=int, help="Number of devices (default: as in FILE).")
    given = parser.parse_args(args)
    try:
        if given.devices is not None and not 1 <= given.devices < 2**31:
            raise ValueError(f"--devices {given.devices}: give at least 1 and at most 2147483647")
        text = sys.stdin.read() if given.file == "-" else _read(pathlib.Path(given.file))
        made, rows = translate(text, given.file, given.devices)
    except (ValueError, OSError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        print(f"error: {' '.join(why.split())} ({given.file})", file=sys.stderr)
        return 2
    print(f"{python(made)}\n\n# {train(made)}\n#   {_DIFFERS}\n{account(rows)}")
    return 0
