"""Random losses on random trees of parameters, on meshes of up to eight devices and on one.

    python tests/fuzz.py --cases 2000 --seed 0 --jobs 2

A case is a tree, a loss that reads each leaf by two to five operations of fuzz_operations.py, and
settings; the first settings of each tree are stage 3. Loss, gradients and aux must equal those of
one device, and the elements sent those of a closed form, by the rules of docs/losses.md.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]
    import conftest  # noqa: F401  eight simulated devices

import fuzz_operations as ops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from problems import zero_on

from zero_jax.engine.compiler import MOST_BUCKETS
from zero_jax.hlo import collectives

SETTINGS_A_TREE = 4
SHAPES = [(), (1,), (3,), (7,), (8,), (13,), (0,), (0, 4), (4, 4), (7, 4), (8, 4), (5, 3), (16, 8)]
SHAPES += [(1, 1), (4, 64), (3, 4, 4), (6, 4, 4), (2, 7, 5), (8, 8, 8), (5, 2, 13), (64, 2, 2)]
SHAPES += [(2, 3, 4, 5), (3, 3, 4, 8), (1, 1, 1, 1)]
POLICIES = jax.checkpoint_policies
REMATS = {name: name for name in ("none", "dots", "block", "block_sqrt", "block@host")}
JAX_REMATS = {"everything": POLICIES.everything_saveable, "nothing": POLICIES.nothing_saveable}
JAX_REMATS["dots of JAX"] = POLICIES.dots_with_no_batch_dims_saveable
JAX_REMATS["offload"] = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")


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
                fun = ops.COUNTS[name] if name in ops.COUNTS else ops.wide(ops.OPS[name])
                value = jnp.tanh(fun(w, x).astype(jnp.float32))
                # Of another shape each time: no two stretches are alike, and taken for layers.
                count += 1
                total += jnp.broadcast_to(value, (count,)).mean()
        rows = jnp.tanh(x @ ops.square(leaves[self.first]).astype(x.dtype))
        return total, {"rows": rows, "mean": total, "count": jnp.int32(7), "stats": rows.mean(0)}


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def case_of(rng: np.random.Generator) -> Case:
    leaves, chosen = [], []
    for _ in range(rng.integers(2, 5)):
        shape = SHAPES[rng.integers(len(SHAPES))]
        kind = rng.choice(["float32"] * 7 + ["bfloat16", "int32", "bool"])
        if kind in ("int32", "bool"):
            leaves.append(rng.integers(0, 2 if kind == "bool" else 5, shape).astype(kind))
        else:
            leaves.append(jnp.asarray(rng.standard_normal(shape) * 0.5, kind))
    if not any(map(is_float, leaves)):
        leaves[0] = jnp.asarray(rng.standard_normal((4, 4)), jnp.float32)
    for x in leaves:
        known = list(ops.OPS if is_float(x) else ops.COUNTS)
        count = min(len(known), rng.integers(2, 6))
        chosen.append([str(name) for name in rng.choice(known, count, replace=False)])
    names = {f"p{i}": leaf for i, leaf in enumerate(leaves)}
    trees = [names, [leaves[0], {"a": leaves[1:], "a/b": ()}]]
    trees += [Pair({"inner": tuple(leaves[:2])}, leaves[2:])]
    trees += [nnx.State({name: nnx.Param(leaf) for name, leaf in names.items()})]
    trees += [{"a": leaves[0], "a/b": {"c": leaves[1:]}}]
    return Case(trees[rng.integers(5)], chosen)


def settings_of(rng: np.random.Generator, first: bool) -> dict[str, Any]:
    data = int(rng.integers(1, 9))
    replica = 2 if data <= 4 and rng.random() < 0.2 else 1
    model = 2 if data * replica <= 4 and rng.random() < 0.15 else 1
    remats = JAX_REMATS if rng.random() < 0.25 else REMATS
    found = {
        "mesh": (data, replica, model), "stage": 3 if first else int(rng.integers(4)),
        "grad_accum_steps": int(rng.integers(1, 3)), "remat": remats[str(rng.choice(list(remats)))],
        "bucket_bytes": 2**30 if rng.random() < 0.7 else 64,
        "precision": "bf16" if rng.random() < 0.15 else "fp32"}  # fmt: skip
    if rng.random() < 0.15:
        number = str(rng.integers(3))
        found["frozen"] = lambda path: number in path
    if replica > 1 and found["stage"] == 3 and rng.random() < 0.5:
        found["secondary_shards"] = True
    return found


def paths_of(params: Any) -> list[str]:
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Param))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def specs_of(params: Any) -> dict[str, Any] | None:
    """One leaf's spec for a model axis of two, or None if no leaf has an even dim."""
    for name, x in zip(paths_of(params), jax.tree.leaves(params), strict=True):
        if x.ndim > 1 and x.shape[-1] % 2 == 0 and x.size // x.shape[-1] >= 8:
            return {f"^{name}$": jax.P(*[None] * (x.ndim - 1), "model")}
    return None


# XLA for CPUs drops barriers, and would then merge the two gathers of a leaf. It does not run.
OPTIONS = {"xla_disable_hlo_passes": "cse,while-loop-invariant-code-motion,algsimp"}
OPTIONS |= {"xla_backend_optimization_level": 0}
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
SCALARS = np.array([0, 0, 16])  # at most, of the loss, its weight and the aux


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    ops: Sequence[str]
    trained: bool
    rows: bool  # the aux has rows of it
    elements: int  # stored
    dim: int | None  # that is sharded over `data`
    secondary_shards: bool  # and over `replica`
    kept: bool  # a slice fits in a bucket: of the last layers the last stays gathered
    prefetched: bool  # a slice fits in four
    last: str = ""  # the last loop over slices, if it is of this leaf
    head: int | None = None  # from this operation on it is the head of a loop: gathered once


def leaf_of(
    x: Any, array: jax.Array, names: Sequence[str], trained: bool, rows: bool, bucket: float
) -> Leaf:
    axes = [a if isinstance(a, tuple) else (a,) for a in array.sharding.spec]
    dim = next((d for d, names in enumerate(axes) if "data" in names), None)
    elements = array.size // (2 if ("model",) in axes else 1)
    both = dim is not None and "replica" in axes[dim]
    layer = x.size // max([1, *x.shape[:1]])
    sizes = layer <= bucket, layer <= MOST_BUCKETS * bucket
    return Leaf(x.shape, names, trained, rows, elements, dim, both, *sizes)


def _expected(leaf, mesh, stage, grad_accum_steps, remat) -> np.ndarray:
    """Elements that are gathered, reduce-scattered and twice those that are all-reduced."""
    gathered = scattered = summed = 0
    read = leaf.rows or any(ops.GATHERS.get(name, 1) for name in leaf.ops)
    if mesh["data"] > 1 and leaf.dim is None:
        summed = 2 * leaf.elements * leaf.trained
    elif mesh["data"] > 1 and stage < 3:
        gathered = leaf.elements * read
        scattered = leaf.elements * leaf.trained * (grad_accum_steps if stage == 2 else 1)
    elif mesh["data"] > 1:
        pairs = [_operation(name, leaf, remat) for name in leaf.ops[: leaf.head]]
        once = leaf.elements * (leaf.rows or leaf.head is not None)
        gathered = grad_accum_steps * (sum(g for g, _ in pairs) + once)
        # Rows of the aux have no gradient.
        trained = leaf.head is not None and leaf.head < len(leaf.ops)
        scattered = grad_accum_steps * (sum(s for _, s in pairs) + once * trained)
    if mesh.get("replica", 1) > 1:
        shard = leaf.elements // (1 if leaf.dim is None else mesh["data"])
        gathered += shard * leaf.secondary_shards * read
        scattered += shard * leaf.secondary_shards * leaf.trained
        summed += 2 * shard * (not leaf.secondary_shards) * leaf.trained
    return np.array([gathered, scattered, summed])


def _with_heads(leaves: Sequence[Leaf], bucket: float, remat: Any) -> list[Leaf]:
    """Matrices that are read after a loop with products are gathered once for that, up to a bucket
    of them for each loop; but those that are sliced outside of loops."""
    order = [(at, i, name) for at, leaf in enumerate(leaves) for i, name in enumerate(leaf.ops)]
    order += [(at, len(leaf.ops), "rows") for at, leaf in enumerate(leaves) if leaf.rows]
    loops = [p for p, (at, _, name) in enumerate(order) if is_loop(name, leaves[at])]
    able = [leaf.prefetched and leaf.shape[:1] > (0,) for leaf in leaves]
    places = [p for p in loops if order[p][2] in ops.PRODUCTS and able[order[p][0]]]
    places *= remat != "block_sqrt"
    uses = {at: p for p, (at, _, name) in enumerate(order) if _is_read(name, leaves[at])}
    found, left = list(leaves), dict.fromkeys(places, bucket)
    for at, use in sorted(uses.items(), key=lambda pair: pair[1]):
        leaf, loop = leaves[at], max((p for p in places if p < use), default=None)
        sliced = leaf.dim != 0 and {*ops.ROWS, *ops.UNROLLED}.intersection(leaf.ops)
        size = np.prod(leaf.shape)
        if loop is None or not leaf.trained or len(leaf.shape) < 2 or sliced or size > left[loop]:
            continue
        left[loop] -= size
        first = min(p for p, (own, *_) in enumerate(order) if own == at and p > loop)
        found[at] = leaf._replace(head=order[first][1])
    return found


def _is_read(name: str, leaf: Leaf) -> bool:
    """True for a read outside of layers, which are loops over slices and `jax.checkpoint`s."""
    own_layer = is_loop(name, leaf) or name.startswith("checkpoint")
    return not own_layer and ops.GATHERS.get(name, 1) > 0


def _operation(name: str, leaf: Leaf, remat: Any) -> tuple[float, float]:
    rows = leaf.shape[0]
    if name in ops.LOOPS:
        gathers, again, scatters = _loop(name, leaf, remat)
    elif name in ops.UNROLLED:  # a row of a leaf that is sharded along rows is of the full leaf
        # Iteration over an array is one `unstack` from jax 0.12 on.
        one = leaf.dim != 0 or (name == "iterated" and jax.__version_info__ >= (0, 12))
        again, gathers, scatters = 0, *[1 if one else rows] * 2
    else:
        gathers, scatters = ops.GATHERS.get(name, 1), ops.SCATTERS.get(name, 1)
        again = name in ops.BACKWARD
    elements = leaf.elements // (rows if name in ops.ROWS and leaf.dim != 0 else 1)
    return elements * (gathers + again * leaf.trained), elements * scatters * leaf.trained


def is_loop(name: str, leaf: Leaf) -> bool:
    """True for a scan that takes slices of the shards of a leaf. To swap a leaf's only dim does
    nothing."""
    sliced = ops.LOOPS.get(name) is not None or (name == "scan swapped" and len(leaf.shape) == 1)
    return leaf.shape[:1] > (0,) and leaf.dim != 0 and sliced


def _loop(name: str, leaf: Leaf, remat: Any) -> tuple[float, float, float]:
    """How often a leaf is gathered, again for gradients, and reduce-scattered."""
    keeps, own_remat = remat in ("none", JAX_REMATS["everything"]), name == "scan checkpoint"
    if not is_loop(name, leaf):  # read in each iteration, and gathered before the loop
        return 1, not keeps or own_remat or name in ops.CARRIED, 1
    (reads, carries), layers = ops.LOOPS[name], max(1, leaf.shape[0])
    if remat == "block_sqrt":
        groups = -(-layers // round(layers**0.5)) if layers > 3 else layers
        # Once more for each group but its last layer; without a carry for no layer.
        return 1, 1 + (1 - groups / layers) * carries * (layers > 3), 1
    # The first layer's input is data: where nothing is recomputed its gradient needs no parameter.
    # An iteration of a loop gathers it all the same; up to five prefetched layers are in none.
    first = layers < 6 and leaf.prefetched
    again = layers if own_remat or not keeps else (layers - first) * reads
    return 1, max(0, again - (name == leaf.last) * leaf.kept) / layers, 1


@functools.lru_cache(maxsize=4)
def _reference(loss: Any, compute: str) -> Any:
    dtype = jnp.bfloat16 if compute == "bf16" else jnp.float32

    def full(params: Any, parts: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, params)
        values, aux = jax.lax.map(lambda part: loss(params, part), parts)
        means = {k: jnp.mean(v, 0) if k in ("mean", "stats") else v for k, v in aux.items()}
        rows = means["rows"].reshape(-1, ops.FEATURES)
        return jnp.mean(values), means | {"rows": rows, "count": means["count"][0]}

    return jax.jit(jax.value_and_grad(full, has_aux=True, allow_int=True))


def check(case: Case, settings: dict[str, Any], seed: int) -> str | None:
    options = dict(settings)
    data, replica, model = options.pop("mesh")
    specs = specs_of(case.params) if model > 1 else None
    model = 1 if specs is None else model
    sizes = {"data": data, "replica": replica, "model": model}
    zero = zero_on(sizes, param_specs=specs, **options)
    mesh = zero.mesh.shape
    parts = data * replica * options["grad_accum_steps"]
    x = np.random.default_rng(seed).standard_normal((2 * parts, ops.FEATURES)).astype(np.float32)
    start = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32) if is_float(w) else w, case.params)
    stored = zero.shard(case.params)
    grad_fn = zero.value_and_grad(case.loss, has_aux=True)
    (value, aux), grads = grad_fn(stored, x)
    reference = _reference(case.loss, options["precision"])
    (wanted, other), gradients = reference(start, x.reshape(parts, 2, ops.FEATURES))
    frozen = options.get("frozen", lambda path: False)
    paths, leaves = paths_of(case.params), jax.tree.leaves(case.params)
    trained = [is_float(w) and not frozen(path) for path, w in zip(paths, leaves, strict=True)]
    pairs = {"loss": (value, wanted), **{f"aux {k}": (aux[k], other[k]) for k in other}}
    of_leaves = zip(*map(jax.tree.leaves, (zero.unshard(grads), gradients)), strict=True)
    pairs |= {f"gradient of leaf {i}": pair for i, pair in enumerate(of_leaves) if trained[i]}
    rounded = any(set(names) & set(ops.ROUNDS) for names in case.ops)
    loose = rounded or options["precision"] == "bf16"
    for what, (got, want) in pairs.items():
        if not _near(got, want, loose):
            return f"{what}: {np.ravel(got)[:4]} for {np.ravel(want)[:4]}"
    compiled = grad_fn.lower(stored, x).compile(compiler_options=OPTIONS)
    found = [c for c in collectives.collectives(compiled, dict(mesh)) if c.axis != "model"]
    sent = np.array([sum(c.sent_elements for c in found if c.kind == kind) for kind in KINDS])
    settled = mesh, *(options[name] for name in ("stage", "grad_accum_steps", "remat"))
    rows = [at == case.first for at in range(len(leaves))]
    bucket = options["bucket_bytes"] * model / (2 if options["precision"] == "bf16" else 4)
    more = case.ops, trained, rows, [bucket] * len(leaves)
    known = list(map(leaf_of, leaves, jax.tree.leaves(stored), *more))
    loops = [(i, name) for i, leaf in enumerate(known) for name in leaf.ops if is_loop(name, leaf)]
    for at, name in loops[-1:]:
        known[at] = known[at]._replace(last=name)
    known = _with_heads(known, bucket, options["remat"])
    want = sum(_expected(leaf, *settled) for leaf in known)
    ok = np.all(0.99 * want <= sent) and np.all(sent <= 1.01 * want + SCALARS)
    return None if ok else f"elements {sent} for {want}"


def _near(got: Any, want: Any, loose: bool) -> bool:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    # fp32 sums in another order; in bf16 three digits of the largest are right.
    relative, absolute = (5e-2, 0.1) if loose else (2e-4, 1e-2)
    most = relative * (np.abs(want).max(initial=0) + absolute)
    return got.shape == want.shape and np.all(np.abs(got - want) <= most)


def run(trees: range, seed: int) -> tuple[collections.Counter, list[str]]:
    """Returns counts of outcomes, operations and settings by (kind, name), and faults."""
    counts, faults = collections.Counter(), []
    for tree in trees:
        rng = np.random.default_rng([seed, tree])
        case = case_of(rng)
        for turn in range(SETTINGS_A_TREE):
            settings = settings_of(rng, first=turn == 0)
            remat = settings["remat"]
            remat = next((k for k, v in JAX_REMATS.items() if v is remat), remat)
            counts.update(("operation", name) for names in case.ops for name in names)
            own = {"cases": "", "stage": settings["stage"], "remat": remat}
            counts.update((own | {"N": settings["mesh"][0]}).items())
            where = f"tree {tree} turn {turn} {settings} {case.ops}"
            try:
                fault = check(case, settings, tree)
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error)[:300]}"
            faults += [f"{where}: {fault}"] if fault else []
        jax.clear_caches()
    return counts, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"cases": 200, "seed": 0, "jobs": 1, "first": 0}  # the first tree
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    last = args.first + -(-args.cases // SETTINGS_A_TREE)
    parts = [range(a, min(a + 5, last)) for a in range(args.first, last, 5)]
    spawn, counts, faults = multiprocessing.get_context("spawn"), collections.Counter(), []
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        for done, found in enumerate(pool.map(run, parts, [args.seed] * len(parts)), 1):
            counts += found[0]
            faults += found[1]
            print(f"{done} of {len(parts)}", file=sys.stderr, flush=True)
            print(*found[1], sep="\n", end="\n" * bool(found[1]), flush=True)
    print(f"{len(faults)} faults")
    for kind in dict.fromkeys(kind for kind, _ in counts):
        own = sorted((str(name), n) for (k, name), n in counts.items() if k == kind)
        print(f"{kind}: " + ", ".join(f"{name} {n}".strip() for name, n in own))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
