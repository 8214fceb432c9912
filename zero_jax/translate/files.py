"""The text of a file: of which project it is, and what it holds. A name twice is an error."""

import json
import pathlib
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

DEEPSPEED, ACCELERATE, MEGATRON = "DeepSpeed", "accelerate", "Megatron-LM"
_ACCELERATE = re.compile(
    r"(^|[{,])\s*\"?(distributed_type|compute_environment|fsdp_config)\"?\s*:", re.M
)
_FLAG = re.compile(r"(^|[\s\"'(])--[A-Za-z]")
# A string, or a comment, or a comma before the end of a block, with the comments between.
_COMMENT = r"//[^\n]*|\#[^\n]*|/\*.*?\*/"
_TOLERATED = re.compile(
    rf'("(?:\\.|[^"\\\n])*")|{_COMMENT}|,(?:\s|{_COMMENT})*+(?=[}}\]])', re.DOTALL
)


def without_comments(text: str) -> str:
    """JSON without comments (`//`, `#`, `/* */`) and without commas at the end of a block.

    DeepSpeed reads its configuration with hjson, which allows both. Lines keep their numbers.

    >>> without_comments('{"a": "//,}", /* two */ "b": [1, 2,]} # one')
    '{"a": "//,}",   "b": [1, 2 ]}  '
    """

    def kept(match: re.Match[str]) -> str:
        return match[1] or "\n" * match[0].count("\n") or " "

    return _TOLERATED.sub(kept, text)


def read_text(path: pathlib.Path) -> str:
    """The text of a regular file.

    Raises:
      ValueError: it is a pipe, a socket or a device, which may never end.
      OSError: it can't be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"`FILE` {path} is not a regular file: give one, or - to read the standard input"
        )
    return path.read_text()


def kind(text: str, name: str) -> str:
    """Of which project a file is, by what it holds.

    Raises:
      ValueError: it is of none.

    >>> kind('{"zero_optimization": {}}', "a"), kind("distributed_type: FSDP", "b")
    ('DeepSpeed', 'accelerate')
    >>> kind('{"mixed_precision": "bf16", "distributed_type": "FSDP"}', "c")
    'accelerate'
    """
    if _ACCELERATE.search(text):
        return ACCELERATE
    if without_comments(text).lstrip().startswith("{") or name.endswith(".json"):
        return DEEPSPEED
    if _FLAG.search(text):
        return MEGATRON
    raise ValueError(
        f"{name} is no DeepSpeed JSON, no file of accelerate config (no distributed_type) and "
        "no command line of Megatron-LM (no --flag)"
    )


def parse_json(text: str, name: str) -> Mapping[str, Any]:
    """A JSON object; comments and commas at the end of a block are allowed, as DeepSpeed does.

    Raises:
      ValueError: it is none, or a name stands twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _once([key for key, _ in pairs], name)
        return dict(pairs)

    try:
        tree = json.loads(without_comments(text), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{name} is not JSON: {error.msg} at {where}") from None
    return _mapping(tree, name)


def parse_yaml(text: str, name: str) -> Mapping[str, Any]:
    """A YAML mapping.

    Raises:
      ValueError: it is none, or a name stands twice.
    """
    try:
        _check_twice(yaml.compose(text, yaml.SafeLoader), name)
        return _mapping(yaml.safe_load(text), name)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{name} is not YAML: {said}") from None


def _check_twice(node: Any, name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        _once([key.value for key, _ in node.value if isinstance(key.value, Hashable)], name)
        for _, value in node.value:
            _check_twice(value, name)


def _once(keys: list[Any], name: str) -> None:
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(
            f"{name} has {', '.join(twice)} twice in one block: leave one of the two out"
        )


def _mapping(tree: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping) or not tree:
        raise ValueError(f"{name} holds {type(tree).__name__}, not settings by name")
    if not all(isinstance(key, str) for key in tree):
        raise ValueError(f"{name} has names that are no text")
    return tree
