"""Whether a transformation may run on shards: it is tried, on full leaves and on two pieces.

Inside `shard_map` an optimizer sees this device's shards and nothing else, so a norm, a mean or
a factored moment is taken over the wrong numbers and nobody notices. A transformation is safe
there if the update and the state of a shard are the shard of the update and of the state. That
is tried here on small arrays with the tree, the names and the ranks of the user's own
parameters, cut along the dims along which theirs are cut. Sends nothing; under a second, once.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero_jax.offload.blame import name_of, parts_of
from zero_jax.sharding import layout, paths

PyTree = Any

# Small, usual and large gradients, so that every clipping is active in one step; then one that
# holds a NaN, so that whatever looks at the whole tree before it acts shows itself.
_SCALES = (1e-2, 1.0, 1e4, float("nan"))
_LARGE, _TINY = 256, 4  # above the sizes from which optimizers factor a moment; and below
_TOLERANCE = 1e-5  # of a leaf's largest value; elementwise ones agree to the bit on XLA's CPU

Trial = tuple[PyTree, PyTree, PyTree]  # the full tree and two trees of pieces


def require_elementwise(
    tx: optax.GradientTransformation, params: PyTree, cuts: Sequence[layout.Split]
) -> None:
    """Raises unless `tx` does the same on two pieces as on full leaves.

    Args:
      tx: the transformation.
      params: the parameters it is for; only their tree, shapes and dtypes are looked at.
      cuts: how they are split.

    Raises:
      ValueError: naming the transformation, within a chain the one that is to blame.
    """
    # A thread of its own, because here `init` is being traced under a mesh, and what runs under
    # jax.ensure_compile_time_eval is traced too when shard_map is not inside jit (0.10 to 0.12).
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    with ThreadPoolExecutor(1) as thread:
        fault = thread.submit(_examine, tx, abstract, cuts).result()
    if fault is not None:
        verdict = "could not be shown to be" if fault.raised else "is not"
        raise ValueError(
            f"{fault.name} {verdict} elementwise, and inside shard_map it sees only this device's "
            f"shards. Tried on small arrays, {fault.why}. Use tx = zero.optimizer(tx) outside "
            "shard_map, which is exact for every transformation"
        )


def _examine(
    tx: optax.GradientTransformation, params: PyTree, cuts: Sequence[layout.Split]
) -> "_Fault | None":
    with jax.debug_nans(False), _on_host():
        return _fault(tx, [_sample(params, cuts, seed) for seed in range(1 + len(_SCALES))])


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        yield
    else:
        with jax.default_device(device):
            yield


def _sample(params: PyTree, cuts: Sequence[layout.Split], seed: int) -> Trial:
    """Small parameters (seed 0), or the gradients of step `seed`."""
    rng, scale = np.random.default_rng(seed), (1.0, *_SCALES)[seed]
    leaves, treedef = jax.tree.flatten(params)
    shapes = _small_shapes(params, cuts)
    drawn = [
        _draw(rng, shape, leaf.dtype, cut, scale)
        for shape, leaf, cut in zip(shapes, leaves, cuts, strict=True)
    ]
    full, first, second = (jax.tree.unflatten(treedef, [x[i] for x in drawn]) for i in range(3))
    return full, first, second


def _small_shapes(params: PyTree, cuts: Sequence[layout.Split]) -> list[tuple[int, ...]]:
    """Large in the two largest dims for one leaf of each name and shape, tiny for the rest."""
    seen: set[Any] = set()
    shapes = []
    for (name, leaf), cut in zip(paths.named_leaves(params), cuts, strict=True):
        kind = (re.sub(r"\d+", "", name), leaf.shape)
        large = () if kind in seen else np.argsort(leaf.shape)[-2:]
        seen.add(kind)
        shape = [min(d, _LARGE if i in large else _TINY) for i, d in enumerate(leaf.shape)]
        if cut.dim is not None:
            shape[cut.dim] -= shape[cut.dim] % 2
        shapes.append(tuple(shape))
    return shapes


def _draw(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, cut: layout.Split, scale: float
) -> tuple[Any, Any, Any]:
    """One leaf in full and in two pieces, the second with a larger mean and spread."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        full = np.zeros(shape, dtype)
        return (full, *(np.split(full, 2, cut.dim) if cut.dim is not None else (full, full)))
    # In fp32 at least: what bf16 rounds off is no difference.
    dtype = np.dtype(jnp.promote_types(dtype, jnp.float32))
    size = dtype.type(1 if np.isnan(scale) else scale)
    full = size * (rng.standard_normal(shape, np.float32).astype(dtype) + dtype.type(0.5))
    if cut.dim is None:
        return full, full, full
    first, second = np.split(full, 2, cut.dim)
    second = second * dtype.type(3)
    if np.isnan(scale):
        first.flat[0] = scale
    return np.concatenate((first, second), cut.dim), first, second


class _Fault(NamedTuple):
    """Which transformation is not elementwise, and what it did when it was tried."""

    name: str
    why: str
    raised: bool


def _fault(tx: optax.GradientTransformation, trial: Sequence[Trial]) -> _Fault | None:
    """What is not elementwise within `tx`; None if all is well."""
    own, moved = None, False
    try:
        why, moved = _try(tx, trial)
        own = _Fault(name_of(tx), why, False) if why else None
    except Exception as error:
        said = str(error).partition("\n")[0]
        own = _Fault(name_of(tx), f"it raised {type(error).__name__}: {said}", True)
    if own is None and moved:
        return None
    # To name the one to blame; and where nothing moved yet (it accumulates, say), to see more.
    faults = (_fault(part, trial) for part in parts_of(tx))
    raised = []
    for fault in faults:
        if fault and not fault.raised:
            return fault
        raised += [fault] if fault else []
    # A part may raise only because it is tried without the mask that belongs to it.
    return own._replace(name=raised[0].name) if own and raised else own


def _try(tx: optax.GradientTransformation, trial: Sequence[Trial]) -> tuple[str | None, bool]:
    """What differs, if anything, and whether any update was other than zero."""
    tx = optax.with_extra_args_support(tx)
    init = jax.jit(tx.init)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, value=jnp.float32(1.0)))
    params, *steps = trial
    states = [init(p) for p in params]
    moved = False
    for scale, grads in zip(_SCALES, steps, strict=True):
        out = [update(*x) for x in zip(grads, states, params, strict=True)]
        updates, states = [u for u, _ in out], [s for _, s in out]
        for what, trees in (("update", updates), ("state", states)):
            where = _difference(*trees)
            if where is not None:
                given = "one NaN in a gradient" if np.isnan(scale) else f"gradients near {scale:g}"
                return f"with {given}, the {what} {where}", moved
        moved |= any(np.any(np.asarray(u) != 0) for u in jax.tree.leaves(updates[0]))
    return None, moved


def _difference(full: PyTree, first: PyTree, second: PyTree) -> str | None:
    """Where two pieces are not the pieces of the full tree."""
    if len({jax.tree.structure(tree) for tree in (full, first, second)}) > 1:
        return "has another structure on a shard"
    pieces = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    for (name, leaf), pair in zip(paths.named_leaves(full), pieces, strict=True):
        whole = _as_numpy(leaf)
        joined = _join(whole.shape, *map(_as_numpy, pair))
        name = name or "the only leaf"
        if not joined:
            return f"of {name} {leaf.shape} is {pair[0].shape} and {pair[1].shape} on two shards"
        gap = max(_gap(whole, j) for j in joined)
        if gap > max(_TOLERANCE, 2 * _eps(leaf.dtype)):
            off = f"is off by {gap:.2g} of its largest value" if np.isfinite(gap) else "differs"
            return f"of {name} {off}"
    return None


def _join(shape: tuple[int, ...], first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    """What must equal the full leaf: the pieces put together, or each if none is smaller."""
    if first.shape == second.shape == shape:
        return [first, second]
    for dim in range(len(shape)):
        half = (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])
        if first.shape == second.shape == half:
            return [np.concatenate((first, second), dim)]
    return []


def _gap(full: np.ndarray, other: np.ndarray) -> float:
    """The largest difference as a share of the full leaf's largest value."""
    finite = np.isfinite(full)
    if not np.array_equal(finite, np.isfinite(other)):
        return float("inf")
    if not np.array_equal(full[~finite], other[~finite], equal_nan=True):
        return float("inf")
    gap = np.max(np.abs(full[finite] - other[finite]), initial=0)
    largest = np.max(np.abs(full[finite]), initial=0)
    return 0.0 if gap == 0 else float(gap / largest) if largest else float("inf")


def _as_numpy(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    out = np.asarray(leaf)
    return out if np.iscomplexobj(out) else out.astype(np.float64)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
