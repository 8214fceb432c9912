"""Random losses on random trees of parameters, on meshes of up to eight devices and on one.

    python tests/fuzz.py --cases 2000 --seed 0 --jobs 2

A case is a tree (nested containers, NNX states, dataclasses; scalars, empty, primes, dims below N,
ranks 0 to 4; fp32, bf16, integers, booleans), a loss that reads each leaf by two to five of the
operations below, and settings. Loss, gradients and aux must be those of one device; nothing may
fail but by a refusal that the docs state. The first setting of each tree is stage 3.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [
        os.path.dirname(os.path.abspath(__file__)),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    ]
    import conftest  # noqa: F401  eight fake devices

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import zero_jax

FEATURES = 4
SETTINGS_A_TREE = 4
# What a refusal says: the docs state each.
REFUSALS = {
    "a loop of unknown length": "while over a trained leaf",
    "can't be cut into groups": "block_sqrt of a prime number of layers",
}
SHAPES = [(), (1,), (3,), (7,), (8,), (13,), (0,), (0, 4), (4, 4), (7, 4), (8, 4), (5, 3), (16, 8)]
SHAPES += [(1, 1), (4, 64), (3, 4, 4), (6, 4, 4), (2, 7, 5), (8, 8, 8), (5, 2, 13), (64, 2, 2)]
SHAPES += [(2, 3, 4, 5), (3, 3, 4, 8), (1, 1, 1, 1)]


def vector(w: Any) -> Any:
    return jnp.reshape(w, (-1,))


def square(w: Any, n: int = FEATURES) -> Any:
    """A matrix (n, n) of what there is."""
    flat = vector(w)
    return jnp.resize(flat, (n, n)) if flat.size else jnp.zeros((n, n), w.dtype)


def head(w: Any, x: Any) -> Any:
    """A number that depends on all of w and all rows of x."""
    flat = vector(w).astype(jnp.float32)
    if flat.size == 0:
        return jnp.mean(x) * 0
    return jnp.mean(jnp.tanh(x @ jnp.linspace(-1, 1, FEATURES)) * jnp.cos(flat).mean())


@jax.custom_vjp
def _own_product(x, w):
    return x @ w


_own_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, c: (c @ r[1].T, r[0].T @ c))


@jax.custom_jvp
def _own_tanh(w):
    return jnp.tanh(w)


_own_tanh.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * (1 - jnp.tanh(p[0]) ** 2)))


def _first(w: Any) -> Any:
    """With a leading dim of at least one."""
    return w if w.ndim and w.shape[0] else jnp.reshape(jnp.resize(w, (1,)), (1,)) + 0


def _cond(w, x, predicate):
    return lax.cond(predicate, lambda x: jnp.mean(x @ square(w)), lambda x: jnp.mean(x), x)


def _scan_xs(w, x, wrap=lambda f: f, re=lambda w: w):
    def body(c, v):
        m = square(v).astype(c.dtype)
        return jnp.tanh(c @ m + vector(v).sum().astype(c.dtype)), v.sum()

    c, sums = lax.scan(wrap(body), x, re(_first(w)))
    return jnp.mean(c) + 0.1 * jnp.mean(sums)


def _unrolled(w, x):
    for i in range(_first(w).shape[0]):
        x = x + jnp.tanh(x @ square(_first(w)[i]).astype(x.dtype))
    return jnp.mean(x)


def _iterated(w, x):
    return sum(jnp.tanh(v.sum() * x.mean()) for v in _first(w))


def _nested_scan(w, x):
    return jnp.mean(lax.scan(lambda c, _: (c + _scan_xs(w, x), None), 0.0, None, length=2)[0])


def _scan_metric(w, x):
    """A metric in the carry whose derivative is infinite, which the loss does not read."""

    def body(c, v):
        c, seen = jnp.tanh(c[0] + v.sum().astype(c[0].dtype)), c[1]
        return (c, seen + jnp.sqrt(jnp.sum((c - c) ** 2))), None

    return jnp.mean(lax.scan(body, (x, jnp.float32(0)), _first(w))[0][0])


def _scan_beside(w, x):
    """Data beside the activations, read by a loop that has no gradient."""

    def body(c, v):
        c, data = c
        turned = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, data))
        return (jnp.tanh(c * v.sum().astype(c.dtype) + turned[1]), data * 0.5), None

    return jnp.mean(lax.scan(body, (x, 2 * x), _first(w))[0][0])


def _wide(f):
    return lambda w, x: f(jnp.asarray(w).astype(jnp.float32), x)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "penalty": lambda w, x: jnp.sum(w**2) * jnp.mean(x),
    "equals": lambda w, x: head(jnp.where(w == 0, 2.0, w), x),
    "differs": lambda w, x: head(jnp.where(w != 0, w, 1.0), x) + jnp.mean(x) * (w != 0).sum(),
    "transpose": lambda w, x: jnp.mean(x @ square(w.T)),
    "flip": lambda w, x: jnp.mean(x @ square(jnp.flip(w))) if w.ndim else head(w, x),
    "flip rows": lambda w, x: (
        head(jnp.flip(w, 0) * jnp.arange(w.shape[0]).reshape(-1, *[1] * (w.ndim - 1)), x)
        if w.ndim
        else head(w, x)
    ),
    "broadcast": lambda w, x: (
        head(jnp.broadcast_to(w[:1], w.shape), x) if w.ndim and w.size else head(w, x)
    ),
    "strided": lambda w, x: head(vector(w)[::2], x),
    "first row": lambda w, x: head(_first(w)[0], x),
    "last row": lambda w, x: head(_first(w)[-1], x),
    "column": lambda w, x: head(w[..., 0], x) if w.ndim and w.size else head(w, x),
    "vmap norm": lambda w, x: (
        jnp.max(jax.vmap(lambda v: jnp.sqrt(1 + jnp.sum(v**2)), in_axes=w.ndim - 1)(w))
        * jnp.mean(x)
        if w.ndim and w.size
        else head(w, x)
    ),
    "scan": _scan_xs,
    "scan swapped": lambda w, x: _scan_xs(jnp.swapaxes(w, 0, 1) if w.ndim > 1 else w, x),
    "scan flipped": functools.partial(_scan_xs, re=lambda w: jnp.flip(w, 0)),
    "scan cast": lambda w, x: _scan_xs(w.astype(jnp.bfloat16).astype(jnp.float32), x),
    "scan checkpoint": functools.partial(_scan_xs, wrap=jax.checkpoint),
    "scan reverse": lambda w, x: jnp.mean(
        lax.scan(lambda c, v: (jnp.tanh(c + v.sum()), None), x, _first(w), reverse=True)[0]
    ),
    "scan constant": lambda w, x: jnp.mean(
        lax.scan(lambda c, _: (jnp.tanh(c @ square(w)), None), x, None, length=3)[0]
    ),
    "scan carry": lambda w, x: jnp.mean(
        lax.scan(lambda c, v: (jnp.tanh(c + v), None), square(w), x)[0]
    ),
    "scan of scan": _nested_scan,
    "scan metric": _scan_metric,
    "scan beside": _scan_beside,
    "unrolled": _unrolled,
    "iterated": _iterated,
    "fori": lambda w, x: jnp.mean(lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ square(w)), x)),
    "while stopped": lambda w, x: (
        lax.while_loop(
            lambda c: c < 3.0, lambda c: c + 1 + lax.stop_gradient(jnp.tanh(head(w, x))), 0.0
        )
        * 0.1
        + head(w, x)
    ),
    "cond on top": lambda w, x: _cond(w, x, x.sum() > -1e9),
    "cond by device": lambda w, x: _cond(w, x, x.sum() > 0),
    "switch": lambda w, x: lax.switch(
        jnp.abs(x.sum()).astype(jnp.int32) % 3,
        [lambda: jnp.mean(x @ square(w)), lambda: head(w, x), lambda: jnp.mean(x)],
    ),
    "associative scan": lambda w, x: (
        jnp.mean(jnp.tanh(lax.associative_scan(jnp.add, vector(w)))) * jnp.mean(x)
        if w.size
        else head(w, x)
    ),
    "custom_vjp": lambda w, x: jnp.mean(_own_product(x, square(w))),
    "custom_jvp": lambda w, x: head(_own_tanh(w), x),
    "checkpoint": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.tanh(x @ square(w)) @ square(w))
    )(w, x),
    "checkpoint dots": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.sin(x @ square(w)) @ square(w).T),
        policy=jax.checkpoint_policies.dots_saveable,
    )(w, x),
    "checkpoint everything": lambda w, x: jax.checkpoint(
        lambda w, x: jnp.mean(jnp.sin(x @ square(w * 2))),
        policy=jax.checkpoint_policies.everything_saveable,
    )(w, x),
    "jit": lambda w, x: jax.jit(lambda w, x: jnp.mean(jax.jit(jnp.tanh)(x @ square(w))))(w, x),
    "inner grad": lambda w, x: (
        jnp.mean(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ square(w)) ** 2))(w) ** 2)
        if w.size
        else head(w, x)
    ),
    "inner jvp": lambda w, x: jax.jvp(
        lambda w: jnp.mean(jnp.tanh(x @ square(w))), (w,), (jnp.ones_like(w),)
    )[1],
    "einsum": lambda w, x: jnp.mean(jnp.einsum("bi,ij,bj->b", x, square(w), x)),
    "convolution": lambda w, x: jnp.mean(
        lax.conv_general_dilated(x[None, None], square(w)[None, None], (1, 1), "SAME")
    ),
    "segment sum": lambda w, x: (
        jnp.mean(jnp.tanh(jax.ops.segment_sum(vector(w), jnp.arange(w.size) % 3, 3))) * jnp.mean(x)
    ),
    "take": lambda w, x: head(jnp.take(_first(w), jnp.array([0, 0]), axis=0), x),
    "rows by data": lambda w, x: head(
        _first(w)[jnp.abs(x[:, 0] * 10).astype(jnp.int32) % _first(w).shape[0]], x
    ),
    "scatter": lambda w, x: head(jnp.zeros(7).at[jnp.arange(w.size) % 7].add(vector(w)), x),
    "ragged dot": lambda w, x: jnp.mean(
        lax.ragged_dot(x, jnp.stack([square(w), 2 * square(w)]), jnp.array([1, x.shape[0] - 1]))
    ),
    "numpy left": lambda w, x: (
        jnp.mean(np.ones((2, FEATURES), np.float32) @ square(w)) * jnp.mean(x)
    ),
    "number left": lambda w, x: head(2.0 * w + 1, x),
    "dot": lambda w, x: jnp.mean(lax.dot(x, square(w))),
    "weight norm": lambda w, x: jnp.mean(x @ (square(w) / jnp.sqrt(1e-3 + jnp.sum(w**2)))),
    "cumulative": lambda w, x: head(jnp.cumsum(vector(w)), x),
    "sort": lambda w, x: (
        jnp.vdot(jnp.sort(vector(w)), jnp.arange(w.size, dtype=jnp.float32)) * jnp.mean(x)
    ),
    "argmax": lambda w, x: head(w, x) + (jnp.argmax(w) if w.size else 0) * jnp.mean(x),
    "top k": lambda w, x: lax.top_k(vector(w), 1)[0].sum() * jnp.mean(x) if w.size else head(w, x),
    "concatenate": lambda w, x: head(jnp.concatenate([vector(w), vector(w) * 2, jnp.ones(1)]), x),
    "stack": lambda w, x: head(jnp.stack([w, -w, w * w]), x),
    "pad": lambda w, x: head(jnp.pad(w, 1), x) if w.ndim else head(w, x),
    "roll": lambda w, x: jnp.mean(x @ square(jnp.roll(w, 1))),
    "map": lambda w, x: jnp.mean(lax.map(lambda v: jnp.tanh(v.sum() * x.mean()), _first(w))),
    "dynamic slice": lambda w, x: head(
        lax.dynamic_slice_in_dim(
            _first(w), jnp.abs(x.sum()).astype(jnp.int32) % _first(w).shape[0], 1
        ),
        x,
    ),
    "update": lambda w, x: head(_first(w).at[0].set(3.0), x),
    "half and back": lambda w, x: head(w.astype(jnp.bfloat16).astype(jnp.float32), x),
    "size": lambda w, x: jnp.sum(w**2) / max(w.size, 1) * jnp.mean(x) * len(w.shape),
    "like": lambda w, x: head(w + jnp.ones_like(w) * jnp.full_like(w, 0.5), x),
    "outer": lambda w, x: jnp.mean(jnp.outer(vector(w), x[0])) if w.size else head(w, x),
    "logsumexp": lambda w, x: jax.nn.logsumexp(vector(w)) * jnp.mean(x) if w.size else head(w, x),
    "softmax": lambda w, x: jnp.mean(jax.nn.softmax(x @ square(w))[:, 0]),
    "relu": lambda w, x: jnp.mean(jax.nn.relu(x @ square(w) + 0.01)),
    "named": lambda w, x: jnp.mean(checkpoint_name(jnp.tanh(x @ square(w)), "h")),
    "donated": lambda w, x: head(jax.jit(lambda v: v + 1, donate_argnums=0)(w * 1.0), x),
    "python": lambda w, x: head(w, x) if bool(w.ndim) and w.shape[0] else head(w, x) * 2,
    "tied": lambda w, x: jnp.mean(jnp.tanh(x @ square(w)) @ square(w).T),
}
# Of integers and booleans.
COUNTS: dict[str, Callable[[Any, Any], Any]] = {
    "mask": lambda m, x: (
        jnp.mean(jnp.where(m != 0, 1.0, 0.5)) * jnp.mean(x) if m.size else jnp.mean(x)
    ),
    "index": lambda m, x: (
        jnp.mean(x[:, jnp.abs(vector(m).astype(jnp.int32)) % FEATURES]) if m.size else jnp.mean(x)
    ),
    # Means: the tanh over a large sum would hide what is wrong with it.
    "halves": lambda m, x: (
        ((3 * jnp.ones_like(m.astype(jnp.int32))) // 2).mean() * jnp.mean(x)
        if m.size
        else jnp.mean(x)
    ),
    "full": lambda m, x: (
        jnp.full_like(m, 2.7).astype(jnp.float32).mean() * jnp.mean(x) if m.size else jnp.mean(x)
    ),
    "by dtype": lambda m, x: jnp.mean(x) * jnp.dtype(m.dtype).itemsize,
}
# Cotangents are rounded to bf16 on their way.
ROUNDS = ("scan cast", "half and back")
REFUSED = {
    "while trained": lambda w, x: lax.while_loop(
        lambda c: c.sum() < 1.0, lambda c: c + jnp.tanh(w).sum() ** 2 + 1, head(w, x)
    ),
}
REMATS = ["none", "dots", "block", "block_sqrt", "block@host"]
POLICIES = jax.checkpoint_policies
JAX_REMATS = {
    "everything": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_with_no_batch_dims_saveable,
    "offload": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


@dataclasses.dataclass
class Case:
    """A tree, a loss of it and of rows, and what its leaves are read by."""

    params: Any
    loss: Callable[[Any, Any], Any]
    ops: list[list[str]]
    refused: bool


def leaf_of(rng: np.random.Generator) -> Any:
    shape = SHAPES[rng.integers(len(SHAPES))]
    kind = rng.choice(["float32"] * 7 + ["bfloat16", "int32", "bool"])
    if kind == "int32":
        return rng.integers(0, 5, shape).astype(np.int32)
    if kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return jnp.asarray(rng.standard_normal(shape) * 0.5, kind)


def tree_of(rng: np.random.Generator, leaves: list[Any]) -> Any:
    """The leaves in containers of one kind or another."""
    names = {f"p{i}": leaf for i, leaf in enumerate(leaves)}
    match rng.integers(5):
        case 0:
            return names
        case 1:
            return [leaves[0], {"a": leaves[1:], "a/b": ()}]
        case 2:
            return Pair({"inner": tuple(leaves[:2])}, leaves[2:])
        case 3:
            return nnx.State({name: nnx.Param(leaf) for name, leaf in names.items()})
    return {"a": leaves[0], "a/b": {"c": leaves[1:]}}


def case_of(rng: np.random.Generator, refused: bool = False) -> Case:
    leaves = [leaf_of(rng) for _ in range(rng.integers(2, 5))]
    if all(not jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        leaves[0] = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    ops = []
    for x in leaves:
        known = OPS if jnp.issubdtype(x.dtype, jnp.floating) else COUNTS
        ops.append(
            [
                str(n)
                for n in rng.choice(list(known), min(len(known), rng.integers(2, 6)), replace=False)
            ]
        )
    if refused:
        ops[_first_float(leaves)].append("while trained")
    case = case_of_ops(leaves, ops)
    return dataclasses.replace(case, params=tree_of(rng, leaves), refused=refused)


def _first_float(leaves: list[Any]) -> int:
    return next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))


def case_of_ops(leaves: list[Any], ops: list[list[str]]) -> Case:
    """A list of leaves that are read by these operations."""
    at = _first_float(leaves)

    def loss(params: Any, x: Any) -> Any:
        total = jnp.float32(0)
        for w, names in zip(jax.tree.leaves(params), ops, strict=True):
            for name in names:
                known = OPS | COUNTS | REFUSED
                fun = known[name] if name in COUNTS else _wide(known[name])
                total = total + jnp.tanh(fun(w, x).astype(jnp.float32))
        rows = jnp.tanh(x @ square(jax.tree.leaves(params)[at]).astype(x.dtype))
        aux = {"rows": rows, "mean": total, "count": jnp.int32(7), "stats": rows.mean(0)}
        return total, aux

    return Case(leaves, loss, ops, False)


def settings_of(rng: np.random.Generator, case: Case, first: bool) -> dict[str, Any]:
    data = int(rng.integers(1, 9))
    replica = 2 if data <= 4 and rng.random() < 0.2 else 1
    model = 2 if data * replica <= 4 and rng.random() < 0.15 else 1
    jaxs = rng.random() < 0.25
    remat: Any = str(rng.choice(list(JAX_REMATS))) if jaxs else str(rng.choice(REMATS))
    found = {
        "mesh": (data, replica, model),
        "stage": 3 if first else int(rng.integers(4)),
        "micro_batches": int(rng.integers(1, 3)),
        "remat": JAX_REMATS[remat] if jaxs else remat,
        "bucket_bytes": 2**30 if rng.random() < 0.7 else 64,
        "precision": "bf16" if rng.random() < 0.15 else "fp32",
    }
    if rng.random() < 0.15 and not case.refused:
        found["frozen"] = functools.partial(_is_frozen, int(rng.integers(3)))
    if replica > 1 and found["stage"] == 3 and rng.random() < 0.5:
        found["hierarchical"] = True
    return found


def _is_frozen(number: int, path: str) -> bool:
    return str(number) in path


def specs_of(params: Any) -> dict[str, Any] | None:
    """One leaf's spec for a model axis of two, or None if no dim is even."""
    from zero_jax.sharding import paths

    for name, leaf in paths.named_leaves(params):
        even = leaf.ndim > 1 and leaf.shape[-1] % 2 == 0
        if even and leaf.size // leaf.shape[-1] >= 8:
            return {f"^{name}$": jax.P(*[None] * (leaf.ndim - 1), "model")}
    return None


@functools.lru_cache(maxsize=4)
def _reference(loss: Any, compute: str) -> Any:
    def whole(params: Any, parts: Any) -> Any:
        values, aux = lax.map(lambda part: loss(_cast(params, compute), part), parts)
        means = {k: jnp.mean(v, 0) if k in ("mean", "stats") else v for k, v in aux.items()}
        rows = means["rows"].reshape(-1, FEATURES)
        return jnp.mean(values), means | {"rows": rows, "count": means["count"][0]}

    return jax.jit(jax.value_and_grad(whole, has_aux=True, allow_int=True))


def _cast(params: Any, compute: str) -> Any:
    dtype = jnp.bfloat16 if compute == "bf16" else jnp.float32
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def check(case: Case, settings: dict[str, Any], seed: int) -> str | None:
    """What is wrong, or None.

    Raises:
      Exception: what zero_jax raises.
    """
    given = dict(settings)
    data, replica, model = given.pop("mesh")
    specs = specs_of(case.params) if model > 1 else None
    if specs is None:
        model = 1
    else:
        given["model_specs"] = specs
    devices = jax.devices()[: data * replica * model]
    mesh = zero_jax.make_mesh(data, replica=replica, model=model, devices=devices)
    zero = zero_jax.Zero(mesh, **given)
    parts = data * replica * given["micro_batches"]
    x = np.random.default_rng(seed).standard_normal((2 * parts, FEATURES)).astype(np.float32)
    start = jax.tree.map(
        lambda w: jnp.asarray(w, jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w,
        case.params,
    )
    own = zero.shard(case.params)
    (value, aux), grads = zero.value_and_grad(case.loss, has_aux=True)(own, x)
    (wanted, other), gradients = _reference(case.loss, given["precision"])(
        start, x.reshape(parts, 2, FEATURES)
    )
    rounded = any(name in ROUNDS for names in case.ops for name in names)
    loose = given["precision"] == "bf16" or rounded
    if not _near(value, wanted, loose):
        return f"loss {value} for {wanted}"
    for name in other:
        if not _near(aux[name], other[name], loose):
            return f"aux {name}"
    from zero_jax.sharding import paths

    frozen = paths.frozen_leaves(case.params, given.get("frozen"))
    found = jax.tree.leaves(zero.full(grads))
    for (name, a), b, still in zip(paths.named_leaves(gradients), found, frozen, strict=True):
        if not still and not _near(b, a, loose):
            return (
                f"gradient of {name}: {np.asarray(b).ravel()[:4]} for {np.asarray(a).ravel()[:4]}"
            )
    return None


def _near(got: Any, want: Any, loose: bool) -> bool:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return False
    if not want.size:
        return True
    # fp32 sums in another order; in bf16 three digits of the largest are right.
    most = (5e-2 if loose else 2e-4) * (np.abs(want).max() + (0.1 if loose else 1e-2))
    return bool(np.abs(got - want).max() <= most)


@dataclasses.dataclass
class Report:
    """What happened, by kind."""

    cases: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    ops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    settings: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Report") -> None:
        self.cases += other.cases
        self.wrong += other.wrong
        self.failed += other.failed
        self.refused += other.refused
        self.ops += other.ops
        self.settings += other.settings

    def __str__(self) -> str:
        def listed(counts: collections.Counter) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))

        return (
            f"{self.cases} cases: {len(self.wrong)} wrong, {len(self.failed)} failed, "
            f"{sum(self.refused.values())} refused\nrefused: {listed(self.refused)}\n"
            f"operations ({len(self.ops)}): {listed(self.ops)}\nsettings: {listed(self.settings)}"
        )


def run(trees: range, seed: int, verbose: bool = False) -> Report:
    """Cases of these trees, which follow from their number and the seed alone."""
    report = Report()
    for tree in trees:
        rng = np.random.default_rng([seed, tree])
        case = case_of(rng, refused=tree % 50 == 49)
        for turn in range(SETTINGS_A_TREE):
            settings = settings_of(rng, case, first=turn == 0)
            report.cases += 1
            report.ops.update(name for names in case.ops for name in names)
            remat = settings["remat"]
            told = (
                remat
                if isinstance(remat, str)
                else next(k for k, v in JAX_REMATS.items() if v is remat)
            )
            report.settings.update(
                [f"stage {settings['stage']}", f"remat {told}", f"N {settings['mesh'][0]}"]
            )
            where = f"tree {tree} turn {turn} {settings} {case.ops}"
            try:
                fault = check(case, settings, tree)
            except Exception as error:
                said = next((v for k, v in REFUSALS.items() if k in str(error)), None)
                if said is not None:
                    report.refused[said] += 1
                else:
                    report.failed.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
                    if verbose:
                        traceback.print_exc()
                continue
            if case.refused:
                report.failed.append(f"{where}: not refused")
            elif fault:
                report.wrong.append(f"{where}: {fault}")
        jax.clear_caches()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first tree")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    last = given.first + -(-given.cases // SETTINGS_A_TREE)
    parts = [range(a, min(a + 5, last)) for a in range(given.first, last, 5)]
    told = [[given.seed] * len(parts), [given.verbose] * len(parts)]
    report = Report()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
        for done, part in enumerate(pool.map(run, parts, *told), 1):
            report.add(part)
            print(f"{done} of {len(parts)}", file=sys.stderr, flush=True)
            for line in [*part.wrong, *part.failed]:
                print(line, flush=True)
    print(report)
    return 1 if report.wrong or report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
