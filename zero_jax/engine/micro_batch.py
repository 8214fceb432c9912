"""Gradient accumulation over micro-batches, and the keys and rows of each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.engine import losses
from zero_jax.sharding.paths import PyTree


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
        return [x if (kind == losses.ROWS) == rows else None for x, kind in pairs]

    def begin(micro: PyTree) -> PyTree:
        (total, weight, _, aux), grads = one(micro, 0)
        wide = jax.tree.map(lambda x: up(x, jnp.float32(1)), grads)
        return (total, weight, parted(aux, False)), wide

    def body(acc: PyTree, xs: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        (total, weight, undo, aux), grads = one(*xs)
        (acc_total, acc_weight, acc_aux), acc_grads = acc
        means = losses.added(kinds, acc_aux, parted(aux, False), k)
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
