"""Random trees of parameters, losses and settings for fuzz.py."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fuzz_operations import COUNTS, OPS, square, wide

SHAPES = [(), (1,), (3,), (7,), (8,), (13,), (0,), (0, 4), (4, 4), (7, 4), (8, 4), (5, 3), (16, 8)]
SHAPES += [(1, 1), (4, 64), (3, 4, 4), (6, 4, 4), (2, 7, 5), (8, 8, 8), (5, 2, 13), (64, 2, 2)]
SHAPES += [(2, 3, 4, 5), (3, 3, 4, 8), (1, 1, 1, 1)]
POLICIES = jax.checkpoint_policies
REMATS = {name: name for name in ("none", "dots", "block", "block_sqrt", "block@host")}
JAX_REMATS = {
    "everything": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "dots of JAX": POLICIES.dots_with_no_batch_dims_saveable,
    "offload": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A tree of parameters and a loss of it and of rows; operations of each leaf, in tree order."""

    params: Any
    ops: Sequence[Sequence[str]]

    @property
    def first(self) -> int:
        """The first leaf of floats: the aux has rows that are made of it."""
        return next(i for i, x in enumerate(jax.tree.leaves(self.params)) if is_float(x))

    def loss(self, params: Any, x: Any) -> Any:
        leaves, total, count = jax.tree.leaves(params), jnp.float32(0), 0
        for w, names in zip(leaves, self.ops, strict=True):
            for name in names:
                fun = COUNTS[name] if name in COUNTS else wide(OPS[name])
                value = jnp.tanh(fun(w, x).astype(jnp.float32))
                # Of another shape each time: no two stretches are alike, and taken for layers.
                count += 1
                total += jnp.broadcast_to(value, (count,)).mean()
        rows = jnp.tanh(x @ square(leaves[self.first]).astype(x.dtype))
        return total, {"rows": rows, "mean": total, "count": jnp.int32(7), "stats": rows.mean(0)}


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def leaf_of(rng: np.random.Generator) -> Any:
    shape = SHAPES[rng.integers(len(SHAPES))]
    kind = rng.choice(["float32"] * 7 + ["bfloat16", "int32", "bool"])
    if kind in ("int32", "bool"):
        return rng.integers(0, 2 if kind == "bool" else 5, shape).astype(kind)
    return jnp.asarray(rng.standard_normal(shape) * 0.5, kind)


def tree_of(rng: np.random.Generator, leaves: list[Any]) -> Any:
    """The leaves in containers of one kind or another."""
    names = {f"p{i}": leaf for i, leaf in enumerate(leaves)}
    trees = [names, [leaves[0], {"a": leaves[1:], "a/b": ()}]]
    trees += [Pair({"inner": tuple(leaves[:2])}, leaves[2:])]
    trees += [nnx.State({name: nnx.Param(leaf) for name, leaf in names.items()})]
    return [*trees, {"a": leaves[0], "a/b": {"c": leaves[1:]}}][rng.integers(5)]


def case_of(rng: np.random.Generator) -> Case:
    leaves = [leaf_of(rng) for _ in range(rng.integers(2, 5))]
    if not any(map(is_float, leaves)):
        leaves[0] = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    ops = []
    for x in leaves:
        known = list(OPS if is_float(x) else COUNTS)
        count = min(len(known), rng.integers(2, 6))
        ops.append([str(name) for name in rng.choice(known, count, replace=False)])
    return Case(tree_of(rng, leaves), ops)


def settings_of(rng: np.random.Generator, first: bool) -> dict[str, Any]:
    """Arguments of `Zero`, and the sizes of the mesh: data, replica, model."""
    data = int(rng.integers(1, 9))
    replica = 2 if data <= 4 and rng.random() < 0.2 else 1
    model = 2 if data * replica <= 4 and rng.random() < 0.15 else 1
    remats = JAX_REMATS if rng.random() < 0.25 else REMATS
    found = {
        "mesh": (data, replica, model),
        "stage": 3 if first else int(rng.integers(4)),
        "micro_batches": int(rng.integers(1, 3)),
        "remat": remats[str(rng.choice(list(remats)))],
        "bucket_bytes": 2**30 if rng.random() < 0.7 else 64,
        "precision": "bf16" if rng.random() < 0.15 else "fp32",
    }
    if rng.random() < 0.15:
        number = str(rng.integers(3))
        found["frozen"] = lambda path: number in path
    if replica > 1 and found["stage"] == 3 and rng.random() < 0.5:
        found["hierarchical"] = True
    return found


def paths_of(params: Any) -> list[str]:
    """The path of each leaf."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Param))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def specs_of(params: Any) -> dict[str, Any] | None:
    """One leaf's spec for a model axis of two, or None if no leaf has an even dim."""
    for name, x in zip(paths_of(params), jax.tree.leaves(params), strict=True):
        if x.ndim > 1 and x.shape[-1] % 2 == 0 and x.size // x.shape[-1] >= 8:
            return {f"^{name}$": jax.P(*[None] * (x.ndim - 1), "model")}
    return None
