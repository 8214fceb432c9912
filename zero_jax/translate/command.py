"""`python -m zero_jax.translate FILE`: a configuration of others, in the words of zero_jax.

    python -m zero_jax.translate ds_config.json --devices 8
    python -m zero_jax.translate accelerate.yaml
    python -m zero_jax.translate pretrain.sh
    grep -- -- pretrain.sh | python -m zero_jax.translate -

FILE is a DeepSpeed JSON, a YAML of `accelerate config`, or a command line of Megatron-LM (a
script or any text that has its flags). It prints the equal lines of Python, the equal command
line of train.py, and of each setting what became of it: without an equal, unknown, not needed,
translated. Nothing is run.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from zero_jax.translate import accelerate, deepspeed, files, megatron, printed, script
from zero_jax.translate.account import UNKNOWN, Row
from zero_jax.translate.asked import Asked


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a file asks for, what became of each setting, and of which project it is."""

    kind: str
    asked: Asked
    rows: tuple[Row, ...]


def translate(text: str, name: str, devices: int | None = None) -> Translation:
    """Translates the text of a file.

    Args:
      text: of the file.
      name: of the file, for messages, and to find one that it names.
      devices: N, if the file does not say.

    Raises:
      ValueError: it can't be read, is of no known project, or its numbers do not fit together.

    >>> translate('{"zero_optimization": {"stage": 3}}', "a.json").asked.stage
    3
    """
    kind = files.kind(text, name)
    if kind == files.MEGATRON:
        asked, account = megatron.read(script.read(text, megatron.SWITCHES), devices)
        accounts = [("", account)]
    elif kind == files.DEEPSPEED:
        asked, account = deepspeed.read(files.parse_json(text, name), devices)
        accounts = [("", account)]
    else:
        opened = accelerate.opener(pathlib.Path(name).parent)
        parse = files.parse_json if text.lstrip().startswith("{") else files.parse_yaml
        asked, accounts = accelerate.read(parse(text, name), devices, opened)
    asked.micro_batches(), dataclasses.replace(asked)  # both refuse numbers that do not fit
    rows = tuple(
        dataclasses.replace(row, key=f"{where}: {row.key}" if where else row.key)
        for where, account in accounts
        for row in account.rows()
    )
    if all(row.verdict == UNKNOWN for row in rows):
        raise ValueError(f"none of the settings of {name} is known: is it a file of {kind}?")
    return Translation(kind, asked, rows)


def shown(found: Translation) -> str:
    """A translation as text: Python, with all else as comments but the command line."""
    line, differs = printed.command(found.asked)
    lines = [f"# {found.kind}, in the words of zero_jax", "", printed.python(found.asked), ""]
    lines += [f"# {line}" if line else "# python train.py:"]
    lines += [f"#   {text}" for text in differs]
    return "\n".join([*lines, "", printed.account(found.rows)])


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 if the file can't be translated."""
    parser = argparse.ArgumentParser("python -m zero_jax.translate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the file, or - for the standard input")
    parser.add_argument("--devices", type=int, help="how many there are, where FILE does not say")
    given = parser.parse_args(args)
    try:
        if given.devices is not None and not 1 <= given.devices <= 2**31 - 1:
            raise ValueError(f"--devices {given.devices}: give at least 1 and at most 2147483647")
        text = sys.stdin.read() if given.file == "-" else files.read_text(pathlib.Path(given.file))
        print(shown(translate(text, given.file, given.devices)))
    except RecursionError:
        print(f"error: {given.file} is nested too deep to be settings", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
