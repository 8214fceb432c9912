"""The account of a file: every setting of it, and what became of each. Nothing is left out.

A reader says of some settings what they are here; for the others `words` knows whether they are
needed, and what it doesn't know is said to be unknown.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zero_jax.names import nearest

TRANSLATED = "translated"
NOT_NEEDED = "not needed"
NO_EQUAL = "no equal"
UNKNOWN = "unknown"
AUTO = "auto"
# By which files say that something is left out.
_OFF: tuple[Any, ...] = (False, None, "no", "none", "", "false", "False", {})


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting, what it was given as, and what became of it in one sentence."""

    key: str
    given: str
    verdict: str
    why: str


@dataclasses.dataclass(frozen=True)
class Word:
    """What is known of a setting that no reader has to look at.

    Attributes:
      verdict: what becomes of it.
      why: in one sentence.
      alone: whether 1, the size of something that is not split, leaves it out.
    """

    verdict: str
    why: str
    alone: bool = False


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted names; a list is one value, an empty mapping too.

    >>> flat({"fp16": {"enabled": True}, "steps": 3, "more": {}})
    {'fp16.enabled': True, 'steps': 3, 'more': {}}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def words(table: Mapping[tuple[str, str], str], alone: str = "") -> dict[str, Word]:
    """Words by the names of settings, from a table of names by verdict and reason.

    Args:
      table: names with spaces between; one that ends with .* stands for all that is below it.
      alone: names of sizes that 1 leaves out.
    """
    single = set(alone.split())
    return {
        name: Word(verdict, why, name in single)
        for (verdict, why), names in table.items()
        for name in names.split()
    }


class Account:
    """The settings of one file, and what has been said of them so far.

    Args:
      values: settings by name.
      known: words for those that no reader looks at.
      flag: how the project writes a name, "--{}" say.
    """

    def __init__(self, values: Mapping[str, Any], known: Mapping[str, Word], flag: str = "{}"):
        self.values = values
        self.known = known
        self._flag = flag
        self._said: dict[str, Row] = {}
        self._notes: dict[str, list[str]] = {}
        self._looked_for = dict[str, None]()

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """A setting as it is given."""
        self._looked_for[key] = None
        return self.values.get(key, default)

    def asks(self, key: str) -> bool:
        """Whether something is switched on."""
        value = self.get(key, False)
        if isinstance(value, str) and value.lower() in ("true", "yes", "1"):
            return True
        if value == AUTO or value in (0, 1) or value in _OFF:
            return bool(value == 1)
        raise ValueError(f"{self._flag.format(key)} is {value!r}: true or false is needed")

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; the default where there is none, or "auto".

        Raises:
          ValueError: it is something else.
        """
        value = self.get(key)
        if value in (None, AUTO):
            return default
        try:
            if isinstance(value, bool):
                raise TypeError
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            name = self._flag.format(key)
            raise ValueError(f"{name} is {value!r}: a number is needed") from None
        return int(number) if number == int(number) and "." not in str(value) else number

    def count(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1.

        Raises:
          ValueError: it is something else.
        """
        value = self.number(key, default)
        if value is not None and (value != int(value) or value < 1):
            name = self._flag.format(key)
            raise ValueError(f"{name} is {self.get(key)!r}: a whole number of at least 1 is needed")
        return None if value is None else int(value)

    def translated(self, keys: str, why: str) -> None:
        """Says what settings are here; those that the file does not have are passed by."""
        self.say(keys, TRANSLATED, why)

    def not_needed(self, keys: str, why: str) -> None:
        """Says that settings have nothing to do here."""
        self.say(keys, NOT_NEEDED, why)

    def no_equal(self, keys: str, why: str) -> None:
        """Says that settings can't be had here."""
        self.say(keys, NO_EQUAL, why)

    def say(self, keys: str, verdict: str, why: str) -> None:
        """Says what becomes of settings, names with spaces between; the first word stands."""
        for key in keys.split():
            if key in self.values:
                row = Row(self._flag.format(key), _shown(self.values[key]), verdict, why)
                self._said.setdefault(key, row)

    def note(self, key: str, text: str) -> None:
        """Adds something to what is said of a setting."""
        self._notes.setdefault(key, []).append(text)

    def rows(self) -> tuple[Row, ...]:
        """The whole account, in the order of the file."""
        rows: dict[Row, None] = {}  # each once: a block of settings that is known as a whole is one
        for key, value in self.values.items():
            row = self._said.get(key) or self._looked_up(key, value)
            why = "; ".join([row.why, *self._notes.get(key, [])])
            rows[dataclasses.replace(row, why=why)] = None
        return tuple(rows)

    def _looked_up(self, key: str, value: Any) -> Row:
        name, shown = self._flag.format(key), _shown(value)
        word, block = self._word(key)
        if word is None:
            names = {**self.known, **self._looked_for}
            near = nearest(key, [k for k in names if not k.endswith(".*")])
            near = self._flag.format(near)
            return Row(name, shown, UNKNOWN, f"nothing is known of it; the nearest name is {near}")
        if block is not None:
            name, value = f"{block}.*", self.get(f"{block}.enabled", True)
            shown = f"enabled: {_shown(value)}" if f"{block}.enabled" in self else "a block"
        if word.verdict == NO_EQUAL and (value in _OFF or (word.alone and str(value) == "1")):
            return Row(name, shown, NOT_NEEDED, "off, as here")
        return Row(name, shown, word.verdict, word.why)

    def _word(self, key: str) -> tuple[Word | None, str | None]:
        """What is known of a setting, and of which block it is if all of that is known alike."""
        if key in self.known:
            return self.known[key], None
        parts = key.split(".")
        blocks = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
        block = next((name for name in blocks if f"{name}.*" in self.known), None)
        return (None, None) if block is None else (self.known[f"{block}.*"], block)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
