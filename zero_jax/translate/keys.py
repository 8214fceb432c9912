"""Keys of a DeepSpeed JSON and an accelerate YAML; the table, and its description, is keys.yaml."""

import dataclasses
import importlib.resources
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

TRANSLATED, NOT_NEEDED, UNSUPPORTED, AUTO = "translated", "not needed", "unsupported", "auto"
NUMBER, COUNT = "number", "whole number of at least 1"
SWITCH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
Kind = str | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Key:
    """How a key is handled; keys.yaml explains the fields."""

    why: str
    verdict: str
    kind: Kind = ""
    default: Any = None
    trainer: str = ""
    auto: Any = None
    same: str = ""


def shown(value: object) -> str:
    """Returns a value as a JSON or YAML has it, shortened."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 40 else text[:37] + "..."


def parse(name: str, value: Any, kind: Kind) -> Any:
    """Returns a value as its kind has it; raises `ValueError` if it is of another kind."""
    if kind == "switch":
        kind = SWITCH
    if isinstance(kind, Mapping):
        if (text := shown(value).removesuffix(".0").lower()) in kind:
            return kind[text]
        raise ValueError(f"`{name}` is {shown(value)}: give one of {', '.join(kind)}")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and kind == NUMBER:
        return number
    if math.isfinite(number) and number % 1 == 0 and number >= (kind == COUNT):
        return int(number)
    raise ValueError(f"`{name}` is {shown(value)}: give a {kind}")


_FILE = importlib.resources.files(__package__) / "keys.yaml"
_TABLE = yaml.safe_load(_FILE.read_text("utf-8"))
ALIASES, OPTIMIZERS, SCHEDULES = (
    dict[str, str](_TABLE.pop(name)) for name in ("aliases", "optimizers", "schedules")
)
KEYS: dict[str, Key] = {}
for _verdict, _groups in _TABLE.items():
    for _group in _groups:
        _names = _group.pop("keys", [])
        for _block, _inner in _group.pop("blocks", {}).items():
            _names += [f"{_block}.{name}" for name in _inner]
        KEYS |= dict.fromkeys(_names, Key(verdict=_verdict, **_group))
