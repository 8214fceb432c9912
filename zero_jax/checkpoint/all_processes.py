"""Work that one process does for all of them, and sums over processes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zero_jax.checkpoint.checksum import MODULUS

T = TypeVar("T")


def by_the_first(work: Callable[[], T]) -> T | None:
    """Returns the result of `work`, run in the first process; if it fails, all processes raise."""
    trouble, result = None, None
    if jax.process_index() == 0:
        try:
            result = work()
        except (ValueError, OSError) as error:
            trouble = error
    if jax.process_count() > 1:
        failed = bool(multihost_utils.broadcast_one_to_all(np.bool_(trouble is not None)))
        if failed and trouble is None:
            trouble = OSError("process 0 can't write checkpoints: see the error that it prints")
    if trouble is not None:
        raise trouble
    return result


def over_processes(sums: Sequence[int]) -> list[int]:
    """Adds up each number over all processes, modulo 2^64."""
    if jax.process_count() == 1:
        return list(sums)
    halves = np.array([[s >> 32, s & 0xFFFFFFFF] for s in sums], np.uint32).reshape(-1, 2)
    every = multihost_utils.process_allgather(halves).astype(object)
    high, low = every[..., 0].sum(axis=0), every[..., 1].sum(axis=0)
    return [int(((h << 32) + w) % MODULUS) for h, w in zip(high, low, strict=True)]
