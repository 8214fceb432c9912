"""XLA options of a step for GPUs, and the jitted step with checks of its arguments."""

import collections
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zero_jax import releases
from zero_jax.sharding import paths

# Up to here XLA for GPUs merges by itself, and picks better sizes below: not to be overridden.
_XLA_MERGES = 30 * 2**20
# Gathering ahead holds two layers: not where one is more than so many buckets.
_AHEAD = 4


def options(
    bucket_bytes: int,
    devices: int,
    layer: tuple[int, int] | None = None,
    in_loops: bool = True,
) -> dict[str, Any]:
    """XLA's options for GPUs: what it may merge, and what it does ahead of time.

    Args:
      bucket_bytes: the most that a collective moves at once, measured on the full side.
      devices: N; XLA measures a reduce-scatter by its result, one N-th of that.
      layer: bytes of the largest layer, as it is gathered and as its gradients are sent, if layers
        are gathered one by one (stage 3). Its leaves travel together, those of several layers do
        not, and it is gathered while the one before it computes.
      in_loops: whether XLA is to gather in every loop for its next turn; layers that are not
        scanned are written so that they gather ahead.

    >>> options(2**30, 64)
    {'xla_gpu_reduce_scatter_combine_threshold_bytes': 16777216}
    """
    gathered, reduced = layer or (0, 0)
    known = {}
    for kind, own, parts in (
        ("all_gather", gathered, 1),
        ("all_reduce", 0, 1),
        ("reduce_scatter", min(reduced, releases.SUMMED_AT_ONCE), devices),
    ):
        large = own > _XLA_MERGES
        # A little more than a layer, for what is padded.
        most = min(bucket_bytes, 17 * own // 16) if large else bucket_bytes
        if large or most // parts < _XLA_MERGES:
            known[f"xla_gpu_{kind}_combine_threshold_bytes"] = most // parts
    if not gathers_ahead(bucket_bytes, layer):
        return known
    if in_loops:
        known |= first_known(releases.GATHER_AHEAD)
    return known | first_known(releases.AT_ONCE)


def gathers_ahead(bucket_bytes: int, layer: tuple[int, int] | None) -> bool:
    """Whether a layer is gathered while the one before it computes; arguments as for `options`."""
    return layer is not None and layer[0] <= _AHEAD * bucket_bytes


@functools.cache
def first_known(spellings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Returns the first of these options that the installed XLA supports; warns if none is."""
    for name, value in spellings:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            return {name: value}
    warnings.warn(
        f"jaxlib {jax.lib.__version__} supports none of the XLA options "
        f"{', '.join(name for name, _ in spellings)}: parameters of layers are gathered with more "
        "exposed communication. Use a jaxlib from 0.10 to 0.12",
        stacklevel=2,
    )
    return {}


class Program:
    """A function of arrays, jitted with compiler options for them. Inside another `jit` it
    takes that one's: JAX refuses options in a `jit` within a `jit`, as in a step of the user's own.

    Raises `ValueError` for an array that was donated to an earlier call, or is donated and given a
    second time in this one: jax 0.10 ends with a segmentation fault there.

    Args:
      fn: the function.
      options: the compiler's, of the same arguments; None for none.
      check: is given the arguments of every call, before anything else.
      **how: as for `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Callable[..., Mapping[str, Any]] | None = None,
        check: Callable[..., Any] = lambda *_, **__: None,
        **how: Any,
    ):
        functools.update_wrapper(self, fn)
        self._check = check
        self._donated = tuple(how.get("donate_argnums", ()))
        self._within = jax.jit(fn, **how)
        self._options = options
        self._jit = functools.partial(jax.jit, fn, **how)
        self._outermost: dict[Any, Any] = {}

    def _for(self, *args: Any, **named: Any) -> Any:
        """As it is jitted for arrays of these shapes."""
        if self._options is None:
            return self._within
        leaves, treedef = jax.tree.flatten((args, named))
        key = treedef, tuple((x.shape, x.dtype) if _is_array(x) else type(x) for x in leaves)
        if key not in self._outermost:
            options = dict(self._options(*args, **named))
            self._outermost[key] = self._jit(compiler_options=options)
        return self._outermost[key]

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._check(*args, **named)
        self._check_donation(args, named)
        try:
            return self._for(*args, **named)(*args, **named)
        except ValueError as error:
            if "top-level `jax.jit`" not in str(error):
                raise
        return self._within(*args, **named)

    def _check_donation(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raises ValueError if an argument was deleted, or is donated twice."""
        arrays = _arrays((args, named))
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return  # nothing is donated
        # 0.15 microseconds per array.
        if any(x.is_deleted() for x in arrays):
            first = self._names_of(args, named, lambda x: x.is_deleted())[0]
            raise ValueError(
                f"{first} was deleted: it was donated to an earlier call, which reused its "
                "memory. Use the results of that call, params, opt_state, metrics = step(params, "
                "opt_state, batch), or pass it a copy, jax.tree.map(jnp.copy, params)"
            )
        count = collections.Counter(map(id, arrays))
        if len(count) == len(arrays):
            return
        donated = _arrays([args[at] for at in self._donated if at < len(args)])
        twice = next((id(x) for x in donated if count[id(x)] > 1), None)
        if twice is not None:
            same = self._names_of(args, named, lambda x: id(x) == twice)
            raise ValueError(
                f"{' and '.join(same)} are the same array, and it is donated: pass a copy of one "
                "of them, x.copy()"
            )

    def _names_of(
        self, args: tuple[Any, ...], named: dict[str, Any], is_meant: Callable[[jax.Array], bool]
    ) -> list[str]:
        """The argument and the leaf of each array that is meant."""
        bound = inspect.signature(self.__wrapped__).bind(*args, **named)  # type: ignore[attr-defined]
        leaves = [
            pair for item in bound.arguments.items() for pair in paths.named_leaves(dict([item]))
        ]
        found = [name.partition("/") for name, x in leaves if _arrays(x) and is_meant(x)]
        return [f"{leaf!r} of `{name}`" if leaf else f"`{name}`" for name, _, leaf in found]

    def trace(self, *args: Any, **named: Any) -> Any:
        """As of `jax.jit`."""
        return self._for(*args, **named).trace(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """As of `jax.jit`."""
        return self._for(*args, **named).lower(*args, **named)


def _arrays(tree: Any) -> list[jax.Array]:
    """The arrays of a tree that have memory: no tracers, no shapes, no NumPy arrays."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
