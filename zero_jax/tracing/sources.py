"""Source lines of equations and the transformations that they come from, for error messages."""

import itertools
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.extend.core as jex
import optax

JAX, _FLAX, _LIBRARY = (
    f"{Path(str(file)).parent}/" for file in (jax.__file__, flax.__file__, Path(__file__).parent)
)


def line_of(eqn: jex.JaxprEqn) -> str:
    """Returns the user's line that an equation comes from; "" if JAX does not know."""
    frames: Any = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    lines = (f"{f.file_name}:{f.line_num}: " for f in frames if not is_library(f.file_name))
    return next(lines, "")


def is_library(file: str) -> bool:
    """Returns True for files of libraries, whose lines are not the user's; models are."""
    return file.startswith((JAX, _FLAX, _LIBRARY)) and not file.startswith(f"{_LIBRARY}models/")


def transformation_of(sources: Sequence[jex.JaxprEqn | BaseException]) -> str:
    """Returns the transformation that an equation or an exception is from, "" if unknown.

    Updates are closures; their names are those of the functions around them, from the innermost
    outwards: "clip_by_global_norm (in chain)".

    Args:
      sources: The equation, then the calls and loops that it is in; or the exception.
    """
    names = [optax.with_extra_args_support.__name__]  # around every part of a chain
    for source in sources:
        if isinstance(source, BaseException):
            codes = [frame.f_code for frame, _ in traceback.walk_tb(source.__traceback__)][::-1]
        else:
            frames = source.source_info.traceback
            codes = frames.raw_frames()[0] if frames else []
        inside = itertools.takewhile(lambda code: not code.co_filename.startswith(_LIBRARY), codes)
        names += [code.co_qualname for code in inside if not code.co_filename.startswith(JAX)]
    closures = (x.partition(".<locals>")[0] for x in names if x[0] != "<" and ".<locals>" in x)
    first, *outer = [x for x in dict.fromkeys(closures) if x != names[0]] or [""]
    return f"{first} (in {', '.join(outer)})" if outer else first
