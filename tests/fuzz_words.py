"""The elements that a step of the fuzz must send, in closed form, and those that it sends.

A leaf of n stored elements sends n for a gather or a reduce-scatter, and 2·n for an all-reduce
where it is not sharded. At stages 0 to 2 it is gathered once if it is read, and its gradient is
reduced once, at stage 2 once a micro-batch. At stage 3 an operation gathers it, gathers it again if
its backward pass reads it, and reduce-scatters its gradient; a layer does each once. Rules:
docs/guide.md; the numbers of each operation: fuzz_operations.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from fuzz_cases import JAX_REMATS, Case
from fuzz_operations import BACKWARD, GATHERS, LOOPS, ROWS, SCATTERS, UNROLLED

from zero_jax.hlo import traffic

# XLA for CPUs drops barriers, and would then merge the two gathers of a leaf.
OPTIONS = {
    "xla_disable_hlo_passes": "cse,while-loop-invariant-code-motion,algsimp",
    "xla_backend_optimization_level": 0,  # it does not run
}
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
SCALARS = np.array([0, 0, 16])  # at most, of the loss, its weight and the aux


def sent(lowered: Any, mesh: Mapping[str, int]) -> np.ndarray:
    """Elements that a program sends along the axes of the data, by kind."""
    compiled = lowered.compile(compiler_options=OPTIONS)
    found = [c for c in traffic.collectives(compiled, mesh) if c.axis != "model"]
    return np.array([sum(c.words for c in found if c.kind == kind) for kind in KINDS])


class Leaf(NamedTuple):
    """A leaf: its shape and operations, whether it is trained and whether the aux has rows of it;
    stored elements, the dim that is sharded over `data`, and whether that is so over `replica`."""

    shape: tuple[int, ...]
    ops: Sequence[str]
    trained: bool
    rows: bool
    elements: int
    dim: int | None
    hierarchical: bool


def leaves_of(case: Case, trained: Sequence[bool], arrays: Sequence[jax.Array]) -> list[Leaf]:
    found = []
    for at, (x, array) in enumerate(zip(jax.tree.leaves(case.params), arrays, strict=True)):
        axes = [a if isinstance(a, tuple) else (a,) for a in array.sharding.spec]
        dim = next((d for d, names in enumerate(axes) if "data" in names), None)
        hierarchical = dim is not None and "replica" in axes[dim]
        elements = array.size // (2 if ("model",) in axes else 1)
        read = (x.shape, case.ops[at], trained[at], at == case.first)
        found.append(Leaf(*read, elements, dim, hierarchical))
    return found


def fault(
    found: np.ndarray, leaves: Sequence[Leaf], mesh: Mapping[str, int], **settings: Any
) -> str | None:
    """How the elements that are sent differ from those that must be, or None."""
    want = sum(_expected(leaf, mesh, **settings) for leaf in leaves)
    ok = np.all(0.99 * want <= found) and np.all(found <= 1.01 * want + SCALARS)
    return None if ok else f"elements {found} for {want}"


def _expected(
    leaf: Leaf, mesh: Mapping[str, int], stage: int, micro_batches: int, remat: Any
) -> np.ndarray:
    """Elements that are gathered, reduce-scattered and twice those that are all-reduced."""
    gathered = scattered = summed = 0
    read = leaf.rows or any(GATHERS.get(name, 1) for name in leaf.ops)
    if mesh["data"] > 1 and leaf.dim is None:
        summed = 2 * leaf.elements * leaf.trained
    elif mesh["data"] > 1 and stage < 3:
        gathered = leaf.elements * read
        scattered = leaf.elements * leaf.trained * (micro_batches if stage == 2 else 1)
    elif mesh["data"] > 1:
        pairs = [_operation(name, leaf, remat) for name in leaf.ops]
        gathered = micro_batches * (sum(g for g, _ in pairs) + leaf.elements * leaf.rows)
        scattered = micro_batches * sum(s for _, s in pairs)
    if mesh.get("replica", 1) > 1:
        shard = leaf.elements // (1 if leaf.dim is None else mesh["data"])
        gathered += shard * leaf.hierarchical * read
        scattered += shard * leaf.hierarchical * leaf.trained
        summed += 2 * shard * (not leaf.hierarchical) * leaf.trained
    return np.array([gathered, scattered, summed])


def _operation(name: str, leaf: Leaf, remat: Any) -> tuple[int, int]:
    """Elements that an operation gathers and reduce-scatters in a micro-batch of stage 3."""
    rows = leaf.shape[0]
    if name in LOOPS:
        gathers, again, scatters = _loop(name, leaf, remat)
    elif name in UNROLLED:  # a row of a leaf that is sharded along rows is taken of the full leaf
        again, gathers, scatters = 0, *[rows if leaf.dim == 0 else 1] * 2
    else:
        gathers, again, scatters = GATHERS.get(name, 1), name in BACKWARD, SCATTERS.get(name, 1)
    elements = leaf.elements // (rows if name in ROWS and leaf.dim != 0 else 1)
    return elements * (gathers + again * leaf.trained), elements * scatters * leaf.trained


def _loop(name: str, leaf: Leaf, remat: Any) -> tuple[int, int, int]:
    """How often a loop over rows gathers each, gathers it again, and scatters its gradient."""
    loop, keeps = LOOPS[name], remat in ("none", JAX_REMATS["everything"])
    own_remat = name == "scan checkpoint"
    if loop is None or leaf.dim == 0:  # read in each iteration, and gathered before the loop
        return 1, not keeps or own_remat, 1
    if remat == "none":
        return loop.none, own_remat, loop.none
    groups = any(leaf.shape[0] % size == 0 for size in range(2, leaf.shape[0]))
    grouped = remat == "block_sqrt" and loop.carries and groups
    return 1, (loop.everything if keeps else 1) + grouped, 1
