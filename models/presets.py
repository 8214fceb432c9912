"""Configs by name, and the one that a name that is none was meant for."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C", bound=Any)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])")


def chosen(
    presets: Mapping[str, C], name: str, num_params: Callable[[C], int], **overrides: Any
) -> C:
    """Returns the named config, with fields replaced.

    Raises:
      ValueError: No preset has that name.
    """
    if name not in presets:
        near = _nearest(presets, name.lower(), num_params)
        raise ValueError(
            f"no preset is called {name!r}; the nearest is {near!r}. Use one of "
            f"{', '.join(presets)}, or write a config of models/"
        )
    return dataclasses.replace(presets[name], **overrides)


def _nearest(presets: Mapping[str, C], name: str, num_params: Callable[[C], int]) -> str:
    """Of those that are called by a size the nearest in size, else what reads most like it."""
    size = _SIZE.fullmatch(name)
    sizes = [own for own in presets if _SIZE.fullmatch(own)]
    if size is None or not float(size[1]) or not sizes:
        return difflib.get_close_matches(name, presets, n=1, cutoff=0.0)[0]
    wanted = float(size[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[2]]
    return min(sizes, key=lambda own: abs(math.log(num_params(presets[own]) / wanted)))
