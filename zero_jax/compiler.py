"""What XLA's GPU compiler is told of a step, and how `jax.jit` is told."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Up to here XLA for GPUs merges by itself, and picks better sizes below: not to be overridden.
_XLA_MERGES = 30 * 2**20
# A loop over layers gathers the next one's weights while this one computes. By version of jaxlib:
# from 0.12 on, before.
_GATHER_AHEAD: tuple[tuple[str, Any], ...] = (
    ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON"),
    ("xla_gpu_enable_pipelined_all_gather", True),
)
# By default one collective is under way at a time, and those of a layer wait for each other in the
# open. (Merged into one they would not, but XLA would merge gathers of the forward and the backward
# pass as well, and hold them for long.) docs/performance.md has what each option does.
_AT_ONCE: tuple[tuple[str, Any], ...] = (
    ("xla_gpu_experimental_parallel_collective_overlap_limit", 4),
)


def options(bucket_bytes: int, devices: int, ahead: bool = False) -> dict[str, Any]:
    """XLA's options for GPUs: what it may merge, and what it does ahead of time.

    Args:
      bucket_bytes: the most that a collective moves at once, measured on the full side.
      devices: N; XLA measures a reduce-scatter by its result, one N-th of that.
      ahead: whether layers are gathered one by one (stage 3): then each while the one before it
        computes.

    >>> options(2**30, 64)
    {'xla_gpu_reduce_scatter_combine_threshold_bytes': 16777216}
    """
    sizes = {"all_gather": 1, "all_reduce": 1, "reduce_scatter": devices}
    merging = {
        f"xla_gpu_{kind}_combine_threshold_bytes": bucket_bytes // parts
        for kind, parts in sizes.items()
        if bucket_bytes // parts < _XLA_MERGES
    }
    return merging | (_first_known(_GATHER_AHEAD) | _first_known(_AT_ONCE) if ahead else {})


@functools.cache
def _first_known(spellings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The first of these options that the installed XLA has; a warning and none if it has none."""
    for name, value in spellings:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            return {name: value}
    warnings.warn(
        f"the XLA of jaxlib {jax.lib.__version__} knows none of "
        f"{', '.join(name for name, _ in spellings)}: weights of layers are gathered more in the "
        "open than they could be; use a jaxlib from 0.10 to 0.12",
        stacklevel=2,
    )
    return {}


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
