"""Command lines made from dataclasses: a flag for each field, its help, and files of settings.

A class is a group of flags, titled by its docstring. `--config FILE` reads a YAML file of the same
names; flags override it.
"""

import argparse
import dataclasses
import functools
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml  # type: ignore[import-untyped]

from zero_jax.names import check_once, nearest

T = TypeVar("T")
_METAVARS: dict[object, str] = {int: "INT", float: "FLOAT", str: "TEXT"}
_HELP = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=100)


def flag(name: str) -> str:
    """Returns the flag of a setting.

    >>> flag("grad_accum_steps")
    '--grad-accum-steps'
    """
    return "--" + name.replace("_", "-")


def setting(
    default: T,
    help: str,
    *,
    metavar: str | None = None,
    alias: str | None = None,
    unit: str | None = None,
    least: float = 1,
    most: float = 2**31 - 1,
) -> T:
    """Returns a dataclass field with its help.

    Args:
      default: The default.
      help: One sentence.
      metavar: The name of the value in the help.
      alias: A second spelling of the flag.
      unit: The unit of a number whose name has none.
      least: The smallest number.
      most: The largest number; counts of devices have 32 bits.
    """
    about = {"help": help, "metavar": metavar, "alias": alias, "unit": unit}
    return dataclasses.field(default=default, metadata={**about, "least": least, "most": most})


def documented(value: object) -> dict[str, str]:
    """Returns the first sentence about each argument or attribute in a docstring.

    With it those that begin with "None", "The default" or "If".
    """
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", inspect.getdoc(value) or "", re.MULTILINE)
    texts = {}
    for name, text in found:
        first, *rest = re.split(r"(?<=\.) (?=[A-Z0-9\"])", " ".join(text.split()))
        more = [s for s in rest if s.startswith(("None ", "The default ", "If "))]
        texts[name] = " ".join([first, *more])
    return texts


def check_values(settings: Any) -> None:
    """Checks the values of a dataclass of settings.

    Raises:
      ValueError: A number is out of its range, or a text is empty.

    >>> @dataclasses.dataclass
    ... class Data:
    ...     seq_len: int = setting(64, "Sequence length.")
    >>> check_values(Data(seq_len=0))
    Traceback (most recent call last):
    ValueError: --seq-len 0: a number from 1 to 2,147,483,647 is required
    """
    for field in dataclasses.fields(settings):
        value, about = getattr(settings, field.name), field.metadata
        least, most = about["least"], about["most"]
        if value == "":
            raise ValueError(f"{flag(field.name)} is empty: give a value, or leave it out")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not least <= value <= most:
            raise ValueError(
                f"{flag(field.name)} {value}: a number from {least:g} to {int(most):,} is required"
            )


def parse(
    groups: Sequence[type],
    args: Sequence[str],
    *,
    prog: str,
    description: str,
    hidden: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the settings that a command line and its `--config` file give, by name.

    Settings that neither gives are absent. Prints help, or an error with the nearest flag, and
    exits.

    Args:
      groups: Dataclasses whose fields are the flags.
      args: The command line, without the program's name.
      prog: The program's name.
      description: First paragraphs of the help.
      hidden: Settings that help does not show: the command raises an error for them.

    >>> @dataclasses.dataclass
    ... class Data:
    ...     seq_len: int = setting(64, "Sequence length.")
    >>> parse([Data], ["--seq-len", "8"], prog="train.py", description="")
    {'seq_len': 8}
    """
    parser = _Parser(
        prog=prog,
        description=description,
        formatter_class=_HELP,
        usage="%(prog)s [OPTIONS]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    about = "YAML file of these settings; flags override it (default: none)"
    parser.add_argument("--config", metavar="FILE", help=about, action="append")
    for group in groups:
        _add(parser, group, hidden)
    given = parser.settings(args)
    files = given.pop("config", [])
    if len(files) > 1:
        parser.error(f"--config is given {len(files)} times: give one file")
    return {**parser.settings_of_file(files[0]), **given} if files else given


def run(
    functions: Sequence[Callable[..., int]],
    args: Sequence[str] | None,
    *,
    prog: str,
    description: str | None,
) -> int:
    """Runs one of several functions, by its name, and returns its result.

    The parameters of a function are the arguments of its command, flags if they have a default.
    Their help is in its docstring.
    """
    parser = argparse.ArgumentParser(prog, description=description, formatter_class=_HELP)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in functions:
        about, help = (function.__doc__ or "").partition("\n")[0], documented(function)
        command = commands.add_parser(function.__name__.strip("_"), help=about, description=about)
        command.set_defaults(run=function)
        hints = typing.get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            kind, default = _kind(hints[name])[0], parameter.default
            word = name if default is parameter.empty else flag(name)
            command.add_argument(word, type=kind, default=default, help=help.get(name))
    given = vars(parser.parse_args(args))
    return int(given.pop("run")(**given))


class _Parser(argparse.ArgumentParser):
    file: str | None = None  # that settings are read from

    def settings(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the settings that words of a command line give, by name."""
        given, unknown = self.parse_known_args(words)
        for word in unknown:
            if word.startswith("--") and word != "--":
                self.unknown(word.partition("=")[0])
        if unknown:
            self.error(f"{unknown[0]!r} follows no flag: write --name value")
        return vars(given)

    def settings_of_file(self, file: str) -> dict[str, Any]:
        """Returns the settings of a YAML file."""
        self.file = file
        try:
            known = yaml.load(pathlib.Path(file).read_text(encoding="utf-8"), _Yaml)
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.error(" ".join(str(error).split()))
        if known is not None and not isinstance(known, dict):
            self.error("a mapping is required, such as max_steps: 100")
        words, flags = [], self.known()
        for name, value in (known or {}).items():
            positive = flag(str(name))
            if positive not in flags:
                self.unknown(positive)
            negative = "--no-" + positive[2:]
            is_switch = negative in self._option_string_actions
            on = _SWITCH.get(str(value).lower())
            if not isinstance(value, str) or (is_switch and on is None):
                kind = "true or false" if is_switch else "text or a number"
                self.error(f"{name} is {value!r:.80}: {kind} is required")
            if is_switch:
                words.append(positive if on else negative)
            elif value not in _ABSENT:
                words.append(f"{positive}={value}")
        return self.settings(words)

    def known(self) -> list[str]:
        """Returns all flags; for a file those that have a value, and switches once."""
        known = [word for word in self._option_string_actions if word.startswith("--")]
        left_out = () if self.file is None else ("--config", "--help", "--no-")
        return [word for word in known if not word.startswith(left_out)]

    def unknown(self, name: str) -> NoReturn:
        known = self.known()
        near = nearest(name, known)
        if not near.startswith(name):
            part = name.removeprefix("--")
            near = next((word for word in known if part in word[2:].split("-")), near)
        if self.file is not None:
            name, near = (word[2:].replace("-", "_") for word in (name, near))
        self.error(f"{name} is unknown; the nearest is {near}. --help lists all flags")

    def error(self, message: str) -> NoReturn:
        where = "" if self.file is None else f"--config {self.file}: "
        self.exit(2, f"error: {where}{message}\n")


def _add(parser: argparse.ArgumentParser, cls: type, hidden: Collection[str]) -> None:
    """Adds the fields of a dataclass as one group."""
    group = parser.add_argument_group((cls.__doc__ or "").partition("\n")[0].rstrip("."))
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, default, about = flag(field.name), field.default, field.metadata
        kind, choices = _kind(hints[field.name])
        text = about["help"].rstrip(".").replace("`", "").replace("%", "%%")
        if kind is bool:
            for switch, value in ((name, True), ("--no-" + name[2:], False)):
                shown = argparse.SUPPRESS if value == default else f"{text} (default: off)"
                action = "store_true" if value else "store_false"
                group.add_argument(switch, dest=field.name, action=action, help=shown)
            continue
        if "(default" not in text:
            text += f" (default: {'none' if default is None else default})"
        group.add_argument(
            *filter(None, [name, about["alias"]]),
            dest=field.name,
            help=argparse.SUPPRESS if field.name in hidden else text,
            metavar=about["metavar"] or _METAVARS.get(kind),
            type=kind,
            choices=choices,
        )


def _kind(hint: object) -> tuple[Callable[[str], Any], list[Any] | None]:
    """Returns a function that reads a value of a type from text, and the choices of a `Literal`."""
    is_union = get_origin(hint) in (types.UnionType, typing.Union)
    kinds = [k for k in (get_args(hint) if is_union else (hint,)) if k is not types.NoneType]
    choices = [value for k in kinds if get_origin(k) is Literal for value in get_args(k)]
    if choices:
        known = {str(value): value for value in choices}
        return lambda text: known.get(text, text), choices
    return str if str in kinds else kinds[0], None


_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ABSENT = ("", "~", "null", "None")


class _Yaml(yaml.BaseLoader):
    """Reads scalars as they are written, such as `output_dir: 001`; refuses repeated names."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> object:
        check_once(str(key.value) for key, _ in node.value)
        return super().construct_mapping(node, deep=deep)
