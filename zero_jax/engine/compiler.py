"""XLA options of a step for GPUs, and the jitted step with checks of its arguments."""

import collections
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable
from typing import TypeGuard

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax import releases
from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

XlaOptions = dict[str, str | float]

# Up to here XLA for GPUs merges by itself, and picks better sizes below: not to be overridden.
_XLA_MERGES = 30 * 2**20
# Prefetching holds two layers and the gradients of one: not where a layer is larger than that.
MOST_BUCKETS = 4
# No transformation is being traced: then nothing is computed to find out about `jit`.
_OUTSIDE = jex.get_opaque_trace_state()
INVALID_ARGUMENT = 3  # absl::StatusCode of an unknown option, in `JaxRuntimeError.error_code`


def options(
    bucket_bytes: int,
    devices: int,
    layer: tuple[int, int] | None = None,
) -> XlaOptions:
    """Returns XLA's options for GPUs: combination of collectives, and how many run at once.

    Args:
      bucket_bytes: Maximum bytes per collective, of the full array.
      devices: N; XLA measures a reduce-scatter by its result, one N-th of the full array.
      layer: Bytes of the largest layer, as gathered and as its gradients are sent, if layers are
        gathered one by one (stage 3). The leaves of a layer are sent together, those of several
        layers are not, and a layer is gathered while the layer before it computes.

    >>> options(2**30, 64)
    {'xla_gpu_reduce_scatter_combine_threshold_bytes': 16777216}
    """
    gathered, reduced = layer or (0, 0)
    known: XlaOptions = {}
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
    if layer is not None and gathered <= MOST_BUCKETS * bucket_bytes:
        known |= if_known(releases.AT_ONCE, releases.COLLECTIVES_AT_ONCE)
    return known


@functools.cache
def if_known(name: str, value: int) -> XlaOptions:
    """Returns the option; warns and returns nothing if the installed XLA does not support it."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: str(value)})
    except jax.errors.JaxRuntimeError as error:
        if error.error_code != INVALID_ARGUMENT:
            raise
    else:
        return {name: value}
    warnings.warn(
        f"jaxlib {jax.lib.__version__} does not support the XLA option {name}: parameters of "
        "layers are gathered with more exposed communication. Use a jaxlib from 0.10 to 0.12",
        stacklevel=2,
    )
    return {}


class CheckedJit:
    """A jitted function of arrays with compiler options for them, which checks its arguments.

    Inside another `jit` it has the compiler options of that one: JAX refuses options there.

    Raises `ValueError` for an array that was donated to an earlier call, or is donated and given a
    second time in this one: jax 0.10 ends with a segmentation fault there.

    Args:
      fn: The function.
      options: Returns the compiler options, given the arguments of `fn`; None for no options.
      check: Called with the arguments of every call, before anything else.
      donate_argnums: See `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        options: Callable[..., XlaOptions] | None = None,
        check: Callable[..., None] = lambda *_, **__: None,
        donate_argnums: tuple[int, ...] = (),
    ):
        functools.update_wrapper(self, fn)
        self._check, self._options, self._donated = check, options, donate_argnums
        self._jit = functools.partial(jax.jit, fn, donate_argnums=donate_argnums)
        self._without_options = self._jit()
        self._by_signature: dict[Hashable, jax.stages.Wrapped] = {}

    def _for(self, args: tuple[PyTree, ...], named: dict[str, PyTree]) -> jax.stages.Wrapped:
        """Returns the function, jitted for arrays of these shapes."""
        if self._options is None or _is_inside_jit():
            return self._without_options
        leaves, treedef = jax.tree.flatten((args, named))
        key = treedef, tuple((x.shape, x.dtype) if _is_array(x) else type(x) for x in leaves)
        if key not in self._by_signature:
            options = self._options(*args, **named)
            self._by_signature[key] = self._jit(compiler_options=options)
        return self._by_signature[key]

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        self._check(*args, **named)
        self._check_donation(args, named)
        return self._for(args, named)(*args, **named)

    def _check_donation(self, args: tuple[PyTree, ...], named: dict[str, PyTree]) -> None:
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
        self,
        args: tuple[PyTree, ...],
        named: dict[str, PyTree],
        is_meant: Callable[[jax.Array], bool],
    ) -> list[str]:
        """Returns the argument and the leaf of each array that is meant."""
        bound = inspect.signature(self.__wrapped__).bind(*args, **named)  # type: ignore[attr-defined]
        leaves = [
            pair for item in bound.arguments.items() for pair in paths.named_leaves(dict([item]))
        ]
        found = [name.partition("/") for name, x in leaves if _arrays(x) and is_meant(x)]
        return [f"{leaf!r} of `{name}`" if leaf else f"`{name}`" for name, _, leaf in found]

    def trace(self, *args: PyTree, **named: PyTree) -> jax.stages.Traced:
        """Returns the traced program, for arrays or ShapeDtypeStructs."""
        return self._for(args, named).trace(*args, **named)

    def lower(self, *args: PyTree, **named: PyTree) -> jax.stages.Lowered:
        """Returns the lowered program, for arrays or ShapeDtypeStructs."""
        return self._for(args, named).lower(*args, **named)


def _is_inside_jit() -> bool:
    """Returns whether a `jit` is being traced; under `grad` or `vmap` alone arrays are concrete."""
    outside = jex.get_opaque_trace_state() == _OUTSIDE
    return not outside and isinstance(jnp.zeros(()), jax.core.Tracer)


def _arrays(tree: PyTree) -> list[jax.Array]:
    """Returns the arrays of a tree that have memory: no tracers, no shapes, no NumPy arrays."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]


def _is_array(x: object) -> TypeGuard[jax.Array | jax.ShapeDtypeStruct]:
    return hasattr(x, "shape") and hasattr(x, "dtype")
