"""Operations by which the fuzz reads a leaf: each returns a number, of the leaf and of rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

FEATURES = 4


def vector(w: Any) -> Any:
    return jnp.reshape(w, (-1,))


def square(w: Any, n: int = FEATURES) -> Any:
    flat = vector(w)
    return jnp.resize(flat, (n, n)) if flat.size else jnp.zeros((n, n), w.dtype)


def head(w: Any, x: Any) -> Any:
    """A number that depends on all of w and all rows of x."""
    flat = vector(w).astype(jnp.float32)
    if flat.size == 0:
        return jnp.mean(x) * 0
    return jnp.mean(jnp.tanh(x @ jnp.linspace(-1, 1, FEATURES)) * jnp.cos(flat).mean())


_own_product = jax.custom_vjp(lambda x, w: x @ w)
_own_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, c: (c @ r[1].T, r[0].T @ c))
_own_tanh = jax.custom_jvp(lambda w: jnp.tanh(w))
_own_tanh.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * (1 - jnp.tanh(p[0]) ** 2)))


def _first(w: Any) -> Any:
    return w if w.ndim and w.shape[0] else jnp.reshape(jnp.resize(w, (1,)), (1,)) + 0


def _scan_xs(w, x, wrap=lambda f: f, re=lambda w: w):
    def body(c, v):
        m = square(v).astype(c.dtype)
        return jnp.tanh(c @ m + vector(v).sum().astype(c.dtype)), v.sum()

    c, sums = lax.scan(wrap(body), x, re(_first(w)))
    return jnp.mean(c) + 0.1 * jnp.mean(sums)


def _scan_metric(w, x):
    """A metric in the carry whose derivative is infinite, which the loss does not read."""

    def body(c, v):
        c, seen = jnp.tanh(c[0] + v.sum().astype(c[0].dtype)), c[1]
        return (c, seen + jnp.sqrt(jnp.sum((c - c) ** 2))), None

    return jnp.mean(lax.scan(body, (x, jnp.float32(0)), _first(w))[0][0])


def _scan_beside(w, x):
    def body(c, v):
        c, data = c
        turned = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, data))
        return (jnp.tanh(c * v.sum().astype(c.dtype) + turned[1]), data * 0.5), None

    return jnp.mean(lax.scan(body, (x, 2 * x), _first(w))[0][0])


def wide(f):
    return lambda w, x: f(jnp.asarray(w).astype(jnp.float32), x)


def filled(f):
    return lambda w, x: f(w, x) if w.ndim and w.size else head(w, x)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "penalty": lambda w, x: jnp.sum(w**2) * jnp.mean(x),
    "equals": lambda w, x: head(jnp.where(w == 0, 2.0, w), x),
    "differs": lambda w, x: head(jnp.where(w != 0, w, 1.0), x) + jnp.mean(x) * (w != 0).sum(),
    "transpose": lambda w, x: jnp.mean(x @ square(w.T)),
    "flip": lambda w, x: jnp.mean(x @ square(jnp.flip(w))) if w.ndim else head(w, x),
    "flip rows": lambda w, x: head(
        (jnp.flip(w, 0).T * jnp.arange(w.shape[0])).T if w.ndim else w, x),
    "broadcast": filled(lambda w, x: head(jnp.broadcast_to(w[:1], w.shape), x)),
    "strided": lambda w, x: head(vector(w)[::2], x),
    "first row": lambda w, x: head(_first(w)[0], x),
    "last row": lambda w, x: head(_first(w)[-1], x),
    "column": filled(lambda w, x: head(w[..., 0], x)),
    "vmap norm": filled(lambda w, x: jnp.max(jax.vmap(
        lambda v: jnp.sqrt(1 + jnp.sum(v**2)), in_axes=w.ndim - 1)(w)) * jnp.mean(x)),
    "scan": _scan_xs,
    "scan swapped": lambda w, x: _scan_xs(jnp.swapaxes(w, 0, 1) if w.ndim > 1 else w, x),
    "scan flipped": functools.partial(_scan_xs, re=lambda w: jnp.flip(w, 0)),
    "scan cast": lambda w, x: _scan_xs(w.astype(jnp.bfloat16).astype(jnp.float32), x),
    "scan checkpoint": functools.partial(_scan_xs, wrap=jax.checkpoint),
    "scan reverse": lambda w, x: jnp.mean(
        lax.scan(lambda c, v: (jnp.tanh(c + v.sum()), None), x, _first(w), reverse=True)[0]),
    "scan constant": lambda w, x: jnp.mean(
        lax.scan(lambda c, _: (jnp.tanh(c @ square(w)), None), x, None, length=3)[0]),
    "scan carry": lambda w, x: jnp.mean(
        lax.scan(lambda c, v: (jnp.tanh(c + v), None), square(w), x)[0]),
    "scan of scan": lambda w, x: jnp.mean(
        lax.scan(lambda c, _: (c + _scan_xs(w, x), None), 0.0, None, length=2)[0]),
    "scan metric": _scan_metric, "scan beside": _scan_beside,
    "unrolled": lambda w, x: jnp.mean(functools.reduce(
        lambda x, i: x + jnp.tanh(x @ square(_first(w)[i]).astype(x.dtype)),
        range(_first(w).shape[0]), x)),
    "iterated": lambda w, x: sum(jnp.tanh(v.sum() * x.mean()) for v in _first(w)),
    "fori": lambda w, x: jnp.mean(lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ square(w)), x)),
    "while stopped": lambda w, x: lax.while_loop(
        lambda c: c < 3.0, lambda c: c + 1 + lax.stop_gradient(jnp.tanh(head(w, x))), 0.0
    ) * 0.1 + head(w, x),
    "cond on top": lambda w, x: lax.cond(
        x.sum() > -1e9, lambda x: jnp.mean(x @ square(w)), lambda x: jnp.mean(x), x),
    "cond by device": lambda w, x: lax.cond(
        x.sum() > 0, lambda x: jnp.mean(x @ square(w)), lambda x: jnp.mean(x), x),
    "switch": lambda w, x: lax.switch(
        jnp.abs(x.sum()).astype(jnp.int32) % 3,
        [lambda: jnp.mean(x @ square(w)), lambda: head(w, x), lambda: jnp.mean(x)]),
    "associative scan": filled(
        lambda w, x: jnp.mean(jnp.tanh(lax.associative_scan(jnp.add, vector(w)))) * jnp.mean(x)),
    "custom_vjp": lambda w, x: jnp.mean(_own_product(x, square(w))),
    "custom_jvp": lambda w, x: head(_own_tanh(w), x),
    "checkpoint": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.tanh(x @ square(w)) @ square(w)))(w, x),
    "checkpoint dots": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.sin(x @ square(w)) @ square(w).T),
        policy=jax.checkpoint_policies.dots_saveable)(w, x),
    "checkpoint everything": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.sin(x @ square(w * 2))),
        policy=jax.checkpoint_policies.everything_saveable)(w, x),
    "jit": lambda w, x: jax.jit(lambda w, x: jnp.mean(jax.jit(jnp.tanh)(x @ square(w))))(w, x),
    "inner grad": filled(
        lambda w, x: jnp.mean(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ square(w)) ** 2))(w) ** 2)),
    "inner jvp": lambda w, x: jax.jvp(
        lambda w: jnp.mean(jnp.tanh(x @ square(w))), (w,), (jnp.ones_like(w),))[1],
    "einsum": lambda w, x: jnp.mean(jnp.einsum("bi,ij,bj->b", x, square(w), x)),
    "convolution": lambda w, x: jnp.mean(
        lax.conv_general_dilated(x[None, None], square(w)[None, None], (1, 1), "SAME")),
    "segment sum": lambda w, x: jnp.mean(
        jnp.tanh(jax.ops.segment_sum(vector(w), jnp.arange(w.size) % 3, 3)) * jnp.mean(x)),
    "take": lambda w, x: head(jnp.take(_first(w), jnp.array([0, 0]), axis=0), x),
    "rows by data": lambda w, x: jax.vmap(head, (0, 0))(
        _first(w)[jnp.abs(x[:, 0] * 10).astype(jnp.int32) % _first(w).shape[0]], x[:, None]).mean(),
    "scatter": lambda w, x: head(jnp.zeros(7).at[jnp.arange(w.size) % 7].add(vector(w)), x),
    "ragged dot": lambda w, x: jnp.mean(
        lax.ragged_dot(x, jnp.stack([square(w), 2 * square(w)]), jnp.array([1, x.shape[0] - 1]))),
    "numpy left": lambda w, x: jnp.mean(np.ones((2, 4), np.float32) @ square(w)) * jnp.mean(x),
    "number left": lambda w, x: head(2.0 * w + 1, x),
    "weight norm": lambda w, x: jnp.mean(x @ (square(w) / jnp.sqrt(1e-3 + jnp.sum(w**2)))),
    "cumulative": lambda w, x: head(jnp.cumsum(vector(w)), x),
    "sort": lambda w, x: jnp.vdot(jnp.sort(vector(w)), jnp.arange(w.size) * 1.0) * jnp.mean(x),
    "argmax": filled(lambda w, x: head(w, x) + jnp.argmax(w) * jnp.mean(x)),
    "top k": filled(lambda w, x: lax.top_k(vector(w), 1)[0].sum() * jnp.mean(x)),
    "concatenate": lambda w, x: head(jnp.concatenate([vector(w), vector(w) * 2, jnp.ones(1)]), x),
    "stack": lambda w, x: head(jnp.stack([w, -w, w * w]), x),
    "pad": lambda w, x: head(jnp.pad(w, 1) if w.ndim else w, x),
    "roll": lambda w, x: jnp.mean(x @ square(jnp.roll(w, 1))),
    "map": lambda w, x: jnp.mean(lax.map(lambda v: jnp.tanh(v.sum() * x.mean()), _first(w))),
    "dynamic slice": lambda w, x: head(lax.dynamic_slice_in_dim(
        _first(w), jnp.abs(x.sum()).astype(jnp.int32) % _first(w).shape[0], 1), x),
    "update": lambda w, x: head(_first(w).at[0].set(3.0), x),
    "half and back": lambda w, x: head(w.astype(jnp.bfloat16).astype(jnp.float32), x),
    "logsumexp": filled(lambda w, x: jax.nn.logsumexp(vector(w)) * jnp.mean(x)),
    "named": lambda w, x: jnp.mean(checkpoint_name(jnp.tanh(x @ square(w)), "h")),
    "donated": lambda w, x: head(jax.jit(lambda v: v + 1, donate_argnums=0)(w * 1.0), x),
    "tied": lambda w, x: jnp.mean(jnp.tanh(x @ square(w)) @ square(w).T)}  # fmt: skip
COUNTS: dict[str, Callable[[Any, Any], Any]] = {
    "mask": filled(lambda m, x: jnp.mean(jnp.where(m != 0, 1.0, 0.5)) * jnp.mean(x)),
    "index": filled(lambda m, x: jnp.mean(x[:, jnp.abs(vector(m).astype(jnp.int32)) % FEATURES])),
    # Means: the tanh of a large sum would hide what is wrong with it.
    "halves": filled(
        lambda m, x: ((3 * jnp.ones_like(m.astype(jnp.int32))) // 2).mean() * jnp.mean(x)),
    "full": filled(lambda m, x: jnp.full_like(m, 2.7).astype("float32").mean() * jnp.mean(x)),
    "by dtype": lambda m, x: jnp.mean(x) * jnp.dtype(m.dtype).itemsize}  # fmt: skip
# How often an operation gathers a leaf at stage 3 and reduce-scatters its gradient, if not once.
GATHERS = {"equals": 2, "differs": 3, "while stopped": 2, "associative scan": 3, "ragged dot": 2,
           "weight norm": 2, "argmax": 2, "concatenate": 2, "stack": 3, "logsumexp": 2, "tied": 2,
           "halves": 0, "full": 0, "by dtype": 0}  # fmt: skip
SCATTERS = {"associative scan": 3, "ragged dot": 2, "weight norm": 2, "concatenate": 2, "stack": 3,
            "tied": 2}  # fmt: skip
BACKWARD = {"penalty", "broadcast", "strided", "first row", "last row", "column", "vmap norm",
            "while stopped", "switch", "custom_jvp", "checkpoint", "checkpoint dots", "weight norm",
            "sort", "argmax", "top k", "stack", "half and back"}  # fmt: skip
ROWS = {"broadcast", "first row", "last row"}  # these read one row
UNROLLED = {"unrolled", "iterated"}  # these read row by row


# Loops over rows: whether gradients of inputs read the row; whether there is a carry (groups of
# `block_sqrt`). None: it reads the full leaf.
FULL = ("scan swapped", "scan flipped", "scan constant", "scan of scan", "fori")
LOOPS: dict[str, tuple[bool, bool] | None] = dict.fromkeys(FULL)
LOOPS |= dict.fromkeys(("scan", "scan cast", "scan checkpoint", "scan beside"), (True, True))
LOOPS |= dict.fromkeys(("scan reverse", "scan metric"), (False, True))
LOOPS["map"] = (False, False)
PRODUCTS = {"scan", "scan cast", "scan checkpoint", "scan swapped"}  # have products
CARRIED = {"scan constant", "fori"}  # products of a full leaf: XLA for CPUs merges no gathers
ROUNDS = ("scan cast", "half and back")
