"""Loss functions: the forms they return, and their reduction over devices and micro-batches.

Note [global weight]: each device and micro-batch returns a sum and a weight (for a mean: the mean
and 1). Sums, weights and gradients are added up, and divided once by the global weight, so
unequal token counts are exact. The weight counts rows or tokens. A gradient through it would need
the global loss before the first backward pass, so a weight that depends on parameters raises.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from zero_jax.sharding.paths import PyTree

# `loss(params, batch, *extras)` returns a scalar or a `Weighted`, or with `has_aux` (loss, aux).
LossFn = Callable[..., PyTree]
# An aux leaf is the mean over devices and micro-batches, or the rows of the global batch, in order,
# or equal everywhere already.
MEAN, ROWS, EQUAL = "mean", "rows", "equal"


class Weighted(NamedTuple):
    """A loss as a sum and its weight, for weights that differ between devices, as token counts do.

    Attributes:
      sum: Scalar.
      weight: Scalar, independent of the parameters. A negative weight on any device makes the loss
        NaN, and the step is skipped.

    >>> mask = jnp.array([1.0, 1.0, 0.0])
    >>> Weighted(jnp.sum(mask * 3.0), jnp.sum(mask)).weight.item()
    2.0
    """

    sum: ArrayLike
    weight: ArrayLike


def taken_apart(out: PyTree, has_aux: bool) -> tuple[jax.Array, jax.Array, PyTree, bool]:
    """Returns (sum, weight, aux, is_weighted) of the result of a loss, sum and weight in fp32.

    Raises ValueError for anything else.
    """
    is_pair = isinstance(out, tuple) and len(out) == 2 and not isinstance(out, Weighted)
    value, aux = out if has_aux and is_pair else (out, None)
    is_weighted = isinstance(value, Weighted)
    parts = value if is_weighted else Weighted(value, jnp.ones((), jnp.float32))
    if (has_aux and not is_pair) or not all(map(_is_real_scalar, parts)):
        arrays = [f"{getattr(x, 'dtype', 'number')}{np.shape(x)}" for x in jax.tree.leaves(out)]
        raise ValueError(
            f"with `has_aux`={has_aux}, the loss function returned {type(out).__name__} with "
            f"{len(arrays)} arrays ({', '.join(arrays[:4])}): return a scalar mean, or "
            "zero_jax.Weighted(sum, weight) of two scalars for a mean whose weights differ between "
            "devices. Scalars are real numbers; with has_aux=True return (loss, aux)"
        )
    total, weight = (jnp.asarray(p, jnp.float32) for p in parts)
    if is_weighted:
        weight = jnp.where(weight < 0, jnp.nan, weight)
    return total, weight, aux, is_weighted


def _is_real_scalar(x: PyTree) -> bool:
    is_number = isinstance(x, (int, float)) or hasattr(x, "dtype")
    return is_number and jnp.shape(x) == () and not jnp.iscomplexobj(x)


def kinds_of(
    aux: PyTree, differs: Sequence[bool], rows: int, longer: Callable[[], PyTree]
) -> list[str]:
    """Returns how each leaf of the aux is combined over devices.

    Rows cannot be followed through every operation, and those that are missed would be averaged. So
    if a leaf is as long as a micro-batch, `longer` gives its shape for twice as many rows. Raises
    ValueError if that fails, or if a leaf that differs is not a float, so that it has no mean.
    """
    leaves = jax.tree_util.tree_flatten_with_path(aux)[0]
    named = [(jax.tree_util.keystr(path), like) for path, like in leaves]
    unsure = [path for path, like in named if like.shape[:1] == (rows,)]
    try:
        grown = jax.tree.leaves(longer() if unsure else aux)
    except Exception as error:  # any that the user's loss raises
        raise ValueError(
            f"aux {', '.join(unsure)}: dim 0 is as long as a micro-batch ({rows} rows), but the "
            f"loss cannot be traced with {2 * rows} rows. Write the loss for any number of rows, "
            f"or return values other than rows as aux[None]. The error of that trace: {error}"
        ) from error
    kinds = []
    for (path, like), differ, long in zip(named, differs, grown, strict=True):
        if path in unsure and long.shape[:1] == (2 * rows,):
            kinds.append(ROWS)
        elif jnp.issubdtype(like.dtype, jnp.inexact):
            kinds.append(MEAN)
        elif not differ:
            kinds.append(EQUAL)
        else:
            raise ValueError(
                f"aux {path or 'of the loss'} is {like.dtype}{list(like.shape)} and differs "
                "between devices and micro-batches, but is neither a float, which is averaged, "
                "nor rows of the batch. Return a float for its mean, or make it equal on all "
                "devices: jax.lax.psum(x, zero.batch_axes)"
            )
    return kinds


def added(kinds: Sequence[str], acc: PyTree, new: PyTree, k: int) -> list[jax.Array | None]:
    """Adds the aux leaves of one of k micro-batches; rows are None."""
    parts = zip(kinds, acc, new, strict=True)
    return [a + b / k if kind == MEAN else b for kind, a, b in parts]


def over_devices(
    kinds: Sequence[str], aux: Sequence[jax.Array], axes: Sequence[str]
) -> list[jax.Array]:
    """Combines the aux leaves of one device over all devices; `shard_map` concatenates rows."""
    pairs = zip(kinds, aux, strict=True)
    return [jax.lax.pmean(x, axes) if kind == MEAN else x for kind, x in pairs]
