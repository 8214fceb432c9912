"""The flags of a command line, or of a shell script that has one. The script is read, never run.

Both branches of an `if` are read. Variables that the script sets stand for their value, with the
default in ${NAME:-default}; of one that it sets to several values the first is taken, and that is
said.
"""

import dataclasses
import itertools
import re
from collections.abc import Container, Mapping

_SET = re.compile(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|\S*)\s*$")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^{}]*)\}")
_NAME = re.compile(r"\$\{?(\w+)\}?")
_FLAG = re.compile(r"--[A-Za-z][\w-]*(?:=\S*)?$")
# Where the values of a flag end: another word of the shell, a redirection, all arguments.
_SHELL = re.compile(
    r"^(\)|\(|\\|\|.*|&.*|;|\d*[<>].*|fi|then|else|done|esac|\w+\+?=.*|\$\{\w+\[@\]\}|\$[@*]|\$\w+)$"
)
# What stands before the first flag of a variable: NAME="--flag, NAME+=(--flag.
_BEGINS = re.compile(r"\b\w+\+?=[\"'(]+\s*(?=--)")


@dataclasses.dataclass(frozen=True)
class Script:
    """What a command line says.

    Attributes:
      flags: by name, with their value; True for a flag that has none.
      twice: flags that are given twice, with all their values.
      several: variables that are set to several values, with these.
    """

    flags: Mapping[str, str | bool]
    twice: Mapping[str, tuple[str, ...]]
    several: Mapping[str, tuple[str, ...]]


def read(text: str, switches: Container[str] = ()) -> Script:
    """Reads the flags.

    Args:
      text: of the script.
      switches: flags that never have a value, whatever follows them.

    >>> read('SIZE=8\\ntorchrun train.py --tensor-model-parallel-size $SIZE --bf16 # --fp16').flags
    {'tensor-model-parallel-size': '8', 'bf16': True}
    """
    lines = [_comment_off(line) for line in text.splitlines()]
    names, several = _variables(lines)
    flags: dict[str, str | bool] = {}
    all_values: dict[str, list[str]] = {}
    for name, value in _flags("\n".join(lines), names, switches):
        flags[name] = value
        all_values.setdefault(name, []).append(str(value))
    twice = {name: tuple(v) for name, v in all_values.items() if len(set(v)) > 1}
    return Script(flags, twice, several)


def _comment_off(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _variables(lines: list[str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    names: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    for line in lines:
        found = _SET.match(line)
        if found and "--" not in found[2]:
            value = _filled(found[2].strip("\"'"), names)
            names.setdefault(found[1], value)
            given.setdefault(found[1], []).append(value)
    return names, {name: tuple(v) for name, v in given.items() if len(set(v)) > 1}


def _filled(text: str, names: Mapping[str, str]) -> str:
    """A text with the variables that are known, and defaults for the others."""
    text = _DEFAULT.sub(lambda m: names.get(m[1], m[2].strip("\"'")), text)
    return _NAME.sub(lambda m: names.get(m[1], m[0]), text)


def _flags(
    text: str, names: Mapping[str, str], switches: Container[str]
) -> list[tuple[str, str | bool]]:
    """Flags and their values, which end with the line unless that goes on."""
    lines = re.sub(r"\\\s*\n", " ", text).split("\n")
    found: list[tuple[str, str | bool]] = []
    for line in lines:
        words = [_word(word) for word in re.sub(r";(?=\s|$)", " ;", _BEGINS.sub("", line)).split()]
        starts = [at for at, word in enumerate(words) if _FLAG.match(word)]
        for at, end in itertools.pairwise([*starts, len(words)]):
            name, sign, value = words[at][2:].partition("=")
            values = [value] if sign else []
            for word in words[at + 1 : end] if not sign and name not in switches else ():
                if _SHELL.match(word) and not _is_value(word, values):
                    break
                values.append(_filled(word, names))
            found.append((name, " ".join(values) if values else True))
    return found


def _word(word: str) -> str:
    """Without quotes, and without the bracket that ends a list."""
    word = word.strip("\"'")
    return word.rstrip(")").strip("\"'") if word.endswith(")") and "(" not in word else word


def _is_value(word: str, values: list[str]) -> bool:
    """Whether a word of the shell is the value of a flag: a variable that comes first."""
    return not values and re.match(r"\$[\w{(]", word) is not None and "[@]" not in word
