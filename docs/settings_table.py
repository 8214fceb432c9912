"""The tables of docs/settings.md: settings of `Zero`, of `train.py` and of the planner.

    PYTHONPATH=. python docs/settings_table.py  # rewrites the page between its two markers

Names, types, defaults, units and help come from the code: the arguments of `Zero`, the fields of
`Precision`, and the dataclasses that the command lines are made from.
"""

import dataclasses
import inspect
import json
import pathlib
import sys
import types
import typing
from typing import Any, Literal, NamedTuple

from training import config
from zero_jax import Precision, Zero
from zero_jax.commands import plan
from zero_jax.commands.command_line import documented, flag

PAGE = pathlib.Path(__file__).parent / "settings.md"
BEGIN, END = "<!-- made by docs/settings_table.py -->\n", "<!-- end -->\n"
UNITS = ("steps", "bytes", "seconds", "hours", "tokens", "batches", "processes")  # in names
# The pages that explain a setting or a group.
LINKS = {
    "mesh": "parallelism.md",
    "context_parallel": "long-context.md",
    "context_exchange": "long-context.md#exchanges",
    "mlp_chunk": "long-context.md#memory-of-very-long-rows",
    "stage": "plan.md#let-zero_jax-choose",
    "precision": "mixed-precision.md",
    "grad_accum_steps": "gradient-accumulation.md",
    "remat": "activation-checkpointing.md",
    "frozen": "optimizers.md#freeze-parameters",
    "param_specs": "parallelism.md#tensor-parallelism-by-patterns",
    "logical_axis_rules": "parallelism.md#tensor-parallelism-by-annotation",
    "sequence_parallel": "parallelism.md#sequence-parallelism",
    "bucket_bytes": "parallelism.md#bucket-size",
    "memory_limit": "plan.md#let-zero_jax-choose",
    "offload": "offload.md",
    "secondary_shards": "parallelism.md#hybrid-sharding",
    "skip_nonfinite": "mixed-precision.md#nan-and-infinite-gradients-skipped-steps",
    "optimizer_state_dtype": "states.md",
    "expert_capacity_factor": "experts.md",
    "init_from": "interchange.md",
    "lora_rank": "finetuning.md#lora-settings",
    "data": "chat-data.md",
    "long_documents": "chat-data.md#packing",
    "profile": "profiling.md",
    "wandb_project": "train-py.md#tensorboard-and-weights--biases",
    "save_steps": "checkpoints.md#trainpy",
    "resume": "checkpoints.md#settings-that-may-change-when-resuming",
    "supervise": "multi-node.md#signals-to-a-supervised-run",
    "coordinator_address": "multi-node.md",
    "target": "plan.md",
}


class Source(NamedTuple):
    """A setting in one place: "Zero", "Precision", "train.py", or a command of the planner."""

    place: str
    name: str
    kind: Any
    default: Any
    unit: str | None
    help: str


def sources() -> list[Source]:
    """Returns every setting of every place."""
    kinds = typing.get_type_hints(Zero.__init__)
    arguments = list(inspect.signature(Zero.__init__).parameters.values())[1:]
    help = documented(Zero)
    found = [
        Source("Zero", a.name, kinds[a.name], a.default, None, help[a.name]) for a in arguments
    ]
    groups = [("train.py", group) for group in config.GROUPS]
    groups += [(command, group) for command in plan.LACKING for group in plan.GROUPS]
    for place, group in [("Precision", Precision), *groups]:
        kinds = typing.get_type_hints(group)
        help = documented(group) if group is Precision else {}
        for field in dataclasses.fields(group):
            if field.name in plan.LACKING.get(place, ()):
                continue
            about = field.metadata
            text = help.get(field.name) or about["help"]
            kind, unit = kinds[field.name], about.get("unit")
            found.append(Source(place, field.name, kind, field.default, unit, text))
    return found


def members(kind: Any) -> list[Any]:
    """Returns the values of a `Literal` and the types of a union, without None."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union, Literal):
        return [member for k in typing.get_args(kind) for member in members(k)]
    return [] if kind is types.NoneType else [kind]


def faults(known: list[Source]) -> list[str]:
    """Returns the names with different types or defaults, and the numbers without a unit."""
    found = []
    for name in dict.fromkeys(source.name for source in known):
        first, *flags = own = [source for source in known if source.name == name]
        kinds = members(first.kind)
        for source in flags if name != "mesh" else ():  # in Python an object, as a flag text
            if source.default != first.default:
                found.append(f"{name}: default {first.default!r} and {source.default!r}")
            others = [k for k in members(source.kind) if k not in kinds]
            if others and not (kinds == [str] and all(isinstance(k, str) for k in others)):
                found.append(f"{name}: type {first.kind} and {source.kind}")
        lines = [source for source in own if source.place not in ("Zero", "Precision")]
        if len({str(source[2:]) for source in lines}) > 1:
            found.append(f"{name}: different flags in {[source.place for source in lines]}")
        if {int, float} & set(kinds) and not unit_of(own):
            found.append(f"{name}: no unit")
    return found


def tables() -> str:
    """Returns the Markdown of all tables."""
    known: dict[str, list[Source]] = {}
    for source in sources():
        known.setdefault(source.name, []).append(source)
    groups = [*config.GROUPS, *plan.GROUPS]
    names = [name for name, own in known.items() if own[0].place == "Zero"]
    parts = [_table("Arguments of Zero", [known.pop(name) for name in names])]
    names = [name for name, own in known.items() if own[0].place == "Precision"]
    parts += [_table("Fields of Precision", [known.pop(name) for name in names])]
    for group in groups:
        names = [f.name for f in dataclasses.fields(group) if f.name in known]
        if names:
            title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
            parts.append(_table(title, [known.pop(name) for name in names]))
    return "\n".join(parts)


def page() -> str:
    """Returns the page with new tables."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return head + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


def unit_of(own: list[Source]) -> str:
    """Returns the unit of a number, from its metadata or its name."""
    given = next((source.unit for source in own if source.unit), "")
    last = own[0].name.rpartition("_")[2]
    return given or (last if last in UNITS else "")


def _table(title: str, rows: list[list[Source]]) -> str:
    head = "| name | where | type | default | unit | meaning |"
    return "\n".join([f"## {title}", "", head, "|---" * 6 + "|", *map(_row, rows), ""])


def _row(own: list[Source]) -> str:
    first, places = own[0], [source.place for source in own]
    name = f"`{first.name}`"
    if first.name in LINKS:
        name = f"[{name}]({LINKS[first.name]})"
    commands = [command for command in plan.LACKING if command in places]
    where = [place for place in ("Zero", "Precision", "train.py") if place in places]
    if commands:
        where.append(
            "plan" if len(commands) == len(plan.LACKING) else f"plan {', '.join(commands)}"
        )
    cells = [name, ", ".join(where), _kind(own), _default(own), unit_of(own), _meaning(own)]
    return "| " + " | ".join(cells).replace("  ", " ") + " |"


def _meaning(own: list[Source]) -> str:
    text = own[0].help.rstrip(".") + "."
    negative = own[0].place == "train.py" and own[0].default is True
    return f"`{flag('no_' + own[0].name)}`: {text}" if negative else text


def _kind(own: list[Source]) -> str:
    kinds = members(own[0].kind)
    if kinds == [str]:
        kinds = members(own[-1].kind)
    shown = [_member(kind) for kind in kinds]
    if own[0].name == "mesh":
        shown.append("text as a flag")
    return ", ".join(shown)


def _member(kind: Any) -> str:
    if typing.get_origin(kind) is not None:
        kind = typing.get_origin(kind)
    name = getattr(kind, "__name__", None)
    return f"`{name or json.dumps(kind)}`".replace("`Callable`", "function")


def _default(own: list[Source]) -> str:
    if own[0].default is not inspect.Parameter.empty:
        return _value(own[0].default)
    return "required" + (f"; as a flag {_value(own[-1].default)}" if len(own) > 1 else "")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"`{json.dumps(value)}`"
    whole = int(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if whole >= 2**16 and whole.bit_count() == 1:
        return f"2^{whole.bit_length() - 1}"
    return f"`{value}`" if value != Precision() else "`Precision()`"


if __name__ == "__main__":
    if wrong := faults(sources()):
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(), encoding="utf-8")
