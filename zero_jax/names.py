"""The names that users write: which known one is nearest to one that is not."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that begins so, else the one that reads most like it.

    >>> nearest("v100", ["h100", "v100-32gb"]), nearest("Lyon", ["adamw", "lion"])
    ('v100-32gb', 'lion')
    """
    word, names = name.lower(), list(known)
    begin = [other for other in names if other.startswith(word)]
    return (begin or difflib.get_close_matches(word, names, n=1, cutoff=0.0))[0]


def unknown(what: str, name: str, known: Iterable[str], ask: str = "Known:") -> str:
    """The message that no `what` has that name.

    >>> unknown("command", "mesh", ["plan", "meshes"])
    "no command is called 'mesh'; the nearest is 'meshes'. Known: plan, meshes"
    """
    names = list(known)
    near = nearest(name, names)
    return f"no {what} is called {name!r}; the nearest is {near!r}. {ask} {', '.join(names)}"
