"""Names and sizes that users write, and the message for an unknown name."""

import collections
import difflib
import re
from collections.abc import Iterable, Sequence

# Scope of the loop over documents of a packed row after the first ones; compiled programs have it.
FURTHER_DOCUMENTS = "further_documents"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name with this prefix, or else the most similar one.

    >>> nearest("v100", ["h100", "v100-32gb"]), nearest("Lyon", ["adamw", "lion"])
    ('v100-32gb', 'lion')
    """
    word, names = name.lower(), list(known)
    begin = [other for other in names if other.startswith(word)]
    return (begin or difflib.get_close_matches(word, names, n=1, cutoff=0.0))[0]


def unknown(what: str, name: str, known: Iterable[str], ask: str = "Known:") -> str:
    """Returns the message for an unknown name.

    >>> unknown("command", "mesh", ["plan", "meshes"])
    "no command is called 'mesh'; the nearest is 'meshes'. Known: plan, meshes"
    """
    names = list(known)
    near = nearest(name, names)
    return f"no {what} is called {name!r}; the nearest is {near!r}. {ask} {', '.join(names)}"


def check_once(names: Iterable[str]) -> None:
    """Raises ValueError if a name is given twice, as YAML, JSON and pytrees allow."""
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise ValueError(f"{', '.join(twice)} is given twice: remove one")


def few(items: Sequence[str], separator: str = "; ") -> str:
    """Joins the first five items, and counts the others.

    >>> few([*"abcdefg"], ", ")
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return separator.join(items[:5]) + more


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**i for i, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**i for i, prefix in enumerate("kmgt", 1)}


def parse_bytes(given: float | str, name: str) -> int:
    """Returns a number of bytes from a number, or from text with a unit.

    Args:
      given: Bytes, or text like "80GB" (10^9 bytes) or "64GiB" (2^30 bytes).
      name: Name of the argument, for the error.

    Raises:
      ValueError: It is not a finite number of at least 1 byte, or the unit is unknown.

    >>> parse_bytes("80GB", "memory_limit"), parse_bytes("1.5 GiB", "memory_limit")
    (80000000000, 1610612736)
    """
    text = "" if isinstance(given, bool) else str(given).strip().lower()
    found = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d+)?) ?([kmgt]?i?b|)", text)
    size = float(found[1]) * _UNITS.get(found[2], 0) if found else 0.0
    if not 1 <= size < 2**63:
        raise ValueError(f'`{name}`={given!r}: a number of bytes is required, or text like "80GB"')
    return int(size)
