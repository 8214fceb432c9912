"""What a device works off at once: rows of a batch, a loss, keys of its own, sums.

Note [global weight]: each device and micro-batch gives a sum and a weight (for a mean: the mean
and 1). Sums, weights and gradients are added up, and divided once by the global weight, so
unequal token counts are exact.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def accumulate(one: Callable[..., Any], batch: PyTree, k: int) -> Any:
    """Sums of k micro-batches, gradients in fp32; aux floats are averaged, others the last's."""
    if k == 1:
        return one(batch, 0)
    micros = jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)

    def up(grad: jax.Array) -> jax.Array:
        return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))

    def add(acc: Any, new: Any) -> Any:
        (total, weight, aux), grads = new
        (acc_total, acc_weight, acc_aux), acc_grads = acc
        aux = jax.tree.map(lambda a, b: a + b / k if is_float(b) else b, acc_aux, aux)
        grads = jax.tree.map(lambda a, b: a + up(b), acc_grads, grads)
        return (acc_total + total, acc_weight + weight, aux), grads

    def body(acc: Any, xs: Any) -> Any:
        return add(acc, one(*xs)), None

    first = jax.tree.map(lambda x: x[0], micros)
    (total, weight, aux), grads = jax.eval_shape(lambda m: one(m, 0), first)
    start = ((total, weight, aux), jax.eval_shape(lambda g: jax.tree.map(up, g), grads))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), start)
    return jax.lax.scan(body, zeros, (micros, jnp.arange(k)))[0]


def sum_and_weight(out: Any, has_aux: bool, exponent: int = 0) -> tuple[Any, Any, Any]:
    """(sum, weight, (aux, exponent)) in fp32 from what a loss function returned.

    See [global weight]. A pair comes back times 2^-exponent, which rounds nothing and cancels in
    every quotient: fp16 gradients of a sum over thousands of tokens would overflow. The exponent
    comes back as an int32 scalar, 0 for a mean.
    """
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"has_aux=True, but the loss function returned {type(out).__name__}: return "
            "(loss, aux) or ((sum, weight), aux)"
        )
    value, aux = out if has_aux else (out, None)
    parts = value if isinstance(value, tuple) else (value, jnp.ones((), jnp.float32))
    shapes = [getattr(p, "shape", None if not isinstance(p, (int, float)) else ()) for p in parts]
    if len(parts) != 2 or any(s != () for s in shapes):
        hint = "" if has_aux or not isinstance(value, tuple) else ", or pass has_aux=True for aux"
        raise ValueError(
            f"the loss function returned {type(value).__name__} of shapes {shapes}: return a "
            f"scalar mean, or a pair of scalars (sum, weight){hint}"
        )
    exponent = exponent if isinstance(value, tuple) else 0
    total, weight = (jnp.asarray(p, jnp.float32) * 2.0**-exponent for p in parts)
    return total, jax.lax.stop_gradient(weight), (aux, jnp.asarray(exponent, jnp.int32))


def is_float(x: Any) -> bool:
    """Whether an array holds floating point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def fold_keys(extras: Any, index: Any) -> Any:
    """Gives typed PRNG keys a value of their own on every device and micro-batch."""

    def one(x: Any) -> Any:
        typed = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if not typed:
            return x
        fold = functools.partial(jax.random.fold_in, data=index)
        for _ in range(x.ndim):
            fold = jax.vmap(fold)
        return fold(x)

    return jax.tree.map(one, extras)


def check_batch(batch: PyTree, n: int, k: int) -> None:
    """Raises unless n devices x k micro-batches divide the rows of every array of the batch."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise ValueError("the batch has no arrays: pass at least one array with the batch as dim 0")
    sizes = set()
    for path, x in leaves:
        name = jax.tree_util.keystr(path) or "the batch"
        shape = tuple(getattr(x, "shape", ()))
        if not shape:
            raise ValueError(
                f"{name} is a scalar: every array of the batch needs the batch as dim 0. Pass what "
                "all devices share as an extra argument after the batch"
            )
        sizes.add(shape[0])
        if shape[0] == 0 or shape[0] % (n * k):
            below = shape[0] // (n * k) * n * k
            raise ValueError(
                f"{name} has {shape[0]} rows, but {n} devices x {k} micro-batches must divide "
                f"them: use {below or n * k} or {below + n * k}"
            )
    if len(sizes) > 1:
        raise ValueError(f"the arrays of the batch have {sorted(sizes)} rows: give all the same")
