"""Output and errors of a run in several processes."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import zero_jax


def say(*words: object, sep: str = " ") -> None:
    """Prints in process 0."""
    if jax.process_index() == 0:
        print(*words, sep=sep, flush=True)


@contextlib.contextmanager
def together(name: str, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Runs the block in all processes; if it fails in one of them, all processes raise.

    They also raise if their `settings` differ.
    """
    failure: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        failure = error
    zero_jax.check_agreement({**(settings or {}), name: failure or "fine"})
    if failure is not None:
        raise failure
