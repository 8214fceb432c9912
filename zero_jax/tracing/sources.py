"""Names of the transformations that equations come from, for error messages."""

import itertools
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.extend.core as jex
import optax

_JAX, _LIBRARY = (f"{Path(file).parent}/" for file in (jax.__file__, Path(__file__).parent))


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
        names += [code.co_qualname for code in inside if not code.co_filename.startswith(_JAX)]
    closures = (x.partition(".<locals>")[0] for x in names if x[0] != "<" and ".<locals>" in x)
    first, *outer = [x for x in dict.fromkeys(closures) if x != names[0]] or [""]
    return f"{first} (in {', '.join(outer)})" if outer else first
