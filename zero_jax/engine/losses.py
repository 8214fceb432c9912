"""Loss functions: the forms they return, and sums over micro-batches and devices.

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

from zero_jax.sharding.mesh import CONTEXT
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

    def one(kind: str, x: jax.Array) -> jax.Array:
        if kind == ROWS and CONTEXT in axes and jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, CONTEXT)  # of means over a part of each row
        return jax.lax.pmean(x, axes) if kind == MEAN else x

    return list(map(one, kinds, aux))


# Gradient accumulation over micro-batches, and the keys and rows of each.


class Micro(NamedTuple):
    """The results of one micro-batch, or of several.

    Attributes:
      total: Scalar, the sum of the loss.
      weight: Scalar, its weight.
      undo: Scalar by which the gradients are still to be multiplied.
      aux: Leaves of the aux.
    """

    total: jax.Array
    weight: jax.Array
    undo: jax.Array
    aux: list[jax.Array]


# Runs a micro-batch, given with its index; returns its results and its gradients.
RunMicro = Callable[[PyTree, jax.Array | int], tuple[Micro, list[jax.Array]]]


def accumulate(
    one: RunMicro, batch: PyTree, k: int, kinds: Sequence[str]
) -> tuple[Micro, list[jax.Array]]:
    """Adds up k micro-batches of this device's rows; gradients accumulate in fp32."""
    if k == 1:
        return one(batch, 0)
    micros = jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)

    def up(grad: jax.Array, undo: jax.Array) -> jax.Array:
        return grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) * undo

    def parted(aux: Sequence[jax.Array], rows: bool) -> list[jax.Array | None]:
        """Returns the leaves that are rows, or all others; None for the rest."""
        pairs = zip(aux, kinds, strict=True)
        return [x if (kind == ROWS) == rows else None for x, kind in pairs]

    def begin(micro: PyTree) -> PyTree:
        (total, weight, _, aux), grads = one(micro, 0)
        wide = jax.tree.map(lambda x: up(x, jnp.float32(1)), grads)
        return (total, weight, parted(aux, False)), wide

    def body(acc: PyTree, xs: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        (total, weight, undo, aux), grads = one(*xs)
        (acc_total, acc_weight, acc_aux), acc_grads = acc
        means = added(kinds, acc_aux, parted(aux, False), k)
        grads = jax.tree.map(lambda a, b: a + up(b, undo), acc_grads, grads)
        return ((acc_total + total, acc_weight + weight, means), grads), parted(aux, True)

    start = jax.eval_shape(begin, jax.tree.map(lambda x: x[0], micros))
    # Not `jnp.zeros`: an aux may be a typed key.
    zeros = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), start)
    ((total, weight, means), grads), rows = jax.lax.scan(body, zeros, (micros, jnp.arange(k)))
    pairs = zip(means, rows, strict=True)
    aux = [mean if x is None else x.reshape(-1, *x.shape[2:]) for mean, x in pairs]
    return Micro(total, weight, jnp.float32(1), aux), grads


def fold_keys(extras: PyTree, index: jax.Array) -> PyTree:
    """Folds typed PRNG keys with the index of a device and micro-batch."""

    def one(x: jax.Array) -> jax.Array:
        typed = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if not typed:
            return x
        fold = jax.random.fold_in
        for _ in range(x.ndim):
            fold = jax.vmap(fold, (0, None))
        return fold(x, index)

    return jax.tree.map(one, extras)


def check_batch(batch: PyTree, n: int, k: int) -> None:
    """Raises ValueError if n devices x k micro-batches do not divide the rows of an array."""
    flat = jax.tree_util.tree_flatten_with_path(batch)[0]
    shapes = {jax.tree_util.keystr(path): tuple(getattr(x, "shape", ())) for path, x in flat}
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) != 1 or () in counts:
        told = ", ".join(f"{name or 'array'} {shape}" for name, shape in list(shapes.items())[:6])
        raise ValueError(
            f"the batch has {told or 'no arrays'}: it requires arrays with the same number of rows "
            "along dim 0, which is sharded over the devices. Pass a scalar, or any value that all "
            "devices share, as an extra argument after the batch. For graphs, stack devices x "
            "micro-batches padded graphs along a new dim 0, and use x[0] in the loss"
        )
    ((count,),) = counts
    if count == 0 or count % (n * k):
        below = count // (n * k) * n * k
        raise ValueError(
            f"{next(iter(shapes)) or 'the batch'} has {count} rows, but {n} devices x {k} "
            f"micro-batches must divide them: use {below or n * k} or {below + n * k}"
        )
