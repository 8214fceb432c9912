"""Trees of parameters, losses of them and settings, drawn at random; what fuzz.py compares."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fuzz_operations import COUNTS, OPS, REFUSED, square, wide

SHAPES = [(), (1,), (3,), (7,), (8,), (13,), (0,), (0, 4), (4, 4), (7, 4), (8, 4), (5, 3), (16, 8)]
SHAPES += [(1, 1), (4, 64), (3, 4, 4), (6, 4, 4), (2, 7, 5), (8, 8, 8), (5, 2, 13), (64, 2, 2)]
SHAPES += [(2, 3, 4, 5), (3, 3, 4, 8), (1, 1, 1, 1)]
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
                fun = known[name] if name in COUNTS else wide(known[name])
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
