"""What XLA's GPU compiler is told of a step, and how `jax.jit` is told."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Up to here XLA for GPUs merges by itself, and picks better sizes below: not to be overridden.
_XLA_MERGES = 30 * 2**20


def options(bucket_bytes: int, devices: int) -> dict[str, int]:
    """XLA's options for GPUs that keep it from merging collectives into more than a bucket.

    Args:
      bucket_bytes: of the full side of a collective.
      devices: N; XLA measures a reduce-scatter by its result, one N-th of that.

    >>> options(2**30, 64)
    {'xla_gpu_reduce_scatter_combine_threshold_bytes': 16777216}
    """
    sizes = {"all_gather": 1, "all_reduce": 1, "reduce_scatter": devices}
    return {
        f"xla_gpu_{kind}_combine_threshold_bytes": bucket_bytes // parts
        for kind, parts in sizes.items()
        if bucket_bytes // parts < _XLA_MERGES
    }


class Program:
    """A function jitted with compiler options. Inside another `jit` it takes that one's.

    JAX refuses options in a `jit` within a `jit`, as in a step of the user's own around gradients.

    Args:
      fn: the function.
      options: of the compiler; None for none.
      **how: as for `jax.jit`.
    """

    def __init__(
        self, fn: Callable[..., Any], options: Mapping[str, Any] | None = None, **how: Any
    ):
        functools.update_wrapper(self, fn)
        self._within = jax.jit(fn, **how)
        self._outermost = jax.jit(fn, compiler_options=dict(options), **how) if options else None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._outermost is not None:
            try:
                return self._outermost(*args, **named)
            except ValueError as error:
                if "top-level `jax.jit`" not in str(error):
                    raise
        return self._within(*args, **named)

    def trace(self, *args: Any, **named: Any) -> Any:
        """As of `jax.jit`."""
        return (self._outermost or self._within).trace(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """As of `jax.jit`."""
        return (self._outermost or self._within).lower(*args, **named)
