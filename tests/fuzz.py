"""Random losses on random trees of parameters, on meshes of up to eight devices and on one.

    python tests/fuzz.py --cases 2000 --seed 0 --jobs 2

A case is a tree (nested containers, NNX states, dataclasses; scalars, empty, primes, dims below N,
ranks 0 to 4; fp32, bf16, integers, booleans), a loss that reads each leaf by two to five of the
operations of fuzz_operations.py, and settings; the first settings of each tree are stage 3. Loss,
gradients and aux must equal those of one device, and the elements sent those of fuzz_words.py.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import sys
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, os.path.dirname(here)]
    import conftest  # noqa: F401  eight simulated devices

import fuzz_words
import jax
import jax.numpy as jnp
import numpy as np
from fuzz_cases import JAX_REMATS, Case, case_of, is_float, paths_of, settings_of, specs_of
from fuzz_operations import FEATURES, ROUNDS

import zero_jax
from zero_jax.remat.layer_groups import CannotGroup

SETTINGS_A_TREE = 4


@functools.lru_cache(maxsize=4)
def _reference(loss: Any, compute: str) -> Any:
    dtype = jnp.bfloat16 if compute == "bf16" else jnp.float32

    def full(params: Any, parts: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, params)
        values, aux = jax.lax.map(lambda part: loss(params, part), parts)
        means = {k: jnp.mean(v, 0) if k in ("mean", "stats") else v for k, v in aux.items()}
        rows = means["rows"].reshape(-1, FEATURES)
        return jnp.mean(values), means | {"rows": rows, "count": means["count"][0]}

    return jax.jit(jax.value_and_grad(full, has_aux=True, allow_int=True))


def check(case: Case, settings: dict[str, Any], seed: int) -> str | None:
    """Returns what is wrong, or None.

    Raises:
      Exception: zero_jax raises it.
    """
    options = dict(settings)
    data, replica, model = options.pop("mesh")
    specs = specs_of(case.params) if model > 1 else None
    model = 1 if specs is None else model
    devices = jax.devices()[: data * replica * model]
    mesh = zero_jax.make_mesh(data, replica=replica, model=model, devices=devices)
    zero = zero_jax.Zero(mesh, model_specs=specs, **options)
    parts = data * replica * options["micro_batches"]
    x = np.random.default_rng(seed).standard_normal((2 * parts, FEATURES)).astype(np.float32)
    start = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32) if is_float(w) else w, case.params)
    stored = zero.shard(case.params)
    grad_fn = zero.value_and_grad(case.loss, has_aux=True)
    (value, aux), grads = grad_fn(stored, x)
    (wanted, other), gradients = _reference(case.loss, options["precision"])(
        start, x.reshape(parts, 2, FEATURES)
    )
    rounded = any(name in ROUNDS for names in case.ops for name in names)
    loose = options["precision"] == "bf16" or rounded
    if not _near(value, wanted, loose):
        return f"loss {value} for {wanted}"
    for name in other:
        if not _near(aux[name], other[name], loose):
            return f"aux {name}"
    frozen = options.get("frozen", lambda path: False)
    leaves = zip(paths_of(case.params), jax.tree.leaves(case.params), strict=True)
    trained = [is_float(w) and not frozen(path) for path, w in leaves]
    pairs = zip(*map(jax.tree.leaves, (zero.full(grads), gradients)), trained, strict=True)
    for at, (a, b, moves) in enumerate(pairs):
        if moves and not _near(a, b, loose):
            return f"gradient of leaf {at}: {np.ravel(a)[:4]} for {np.ravel(b)[:4]}"
    sent = fuzz_words.sent(grad_fn.lower(stored, x), dict(mesh.shape))
    known = fuzz_words.leaves_of(case, trained, jax.tree.leaves(stored))
    options = {name: options[name] for name in ("stage", "micro_batches", "remat")}
    return fuzz_words.fault(sent, known, mesh.shape, **options)


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
    """Numbers of cases by (kind, name): outcomes, operations and settings; and what is wrong."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.faults)} faults"]
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            own = sorted((str(name), n) for (k, name), n in self.counts.items() if k == kind)
            lines.append(f"{kind}: " + ", ".join(f"{name} {n}".strip() for name, n in own))
        return "\n".join(lines)


def run(trees: range, seed: int) -> Report:
    """Cases of these trees, which follow from their number and the seed alone."""
    report = Report()
    for tree in trees:
        rng = np.random.default_rng([seed, tree])
        case = case_of(rng)
        for turn in range(SETTINGS_A_TREE):
            settings = settings_of(rng, first=turn == 0)
            remat = settings["remat"]
            remat = next((k for k, v in JAX_REMATS.items() if v is remat), remat)
            report.counts.update(("operation", name) for names in case.ops for name in names)
            size = settings["mesh"][0]
            report.counts.update(
                [("cases", ""), ("stage", settings["stage"]), ("remat", remat), ("N", size)]
            )
            where = f"tree {tree} turn {turn} {settings} {case.ops}"
            try:
                fault = check(case, settings, tree)
            except CannotGroup:  # a prime number of layers
                fault = None if remat == "block_sqrt" else "cannot group layers"
                report.counts.update([("refused", remat)])
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error)[:300]}"
            report.faults += [f"{where}: {fault}"] if fault else []
        jax.clear_caches()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first tree")
    args = parser.parse_args()
    last = args.first + -(-args.cases // SETTINGS_A_TREE)
    parts = [range(a, min(a + 5, last)) for a in range(args.first, last, 5)]
    report = Report()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        for done, part in enumerate(pool.map(run, parts, [args.seed] * len(parts)), 1):
            report.counts.update(part.counts)
            report.faults += part.faults
            print(f"{done} of {len(parts)}", file=sys.stderr, flush=True)
            print(*part.faults, sep="\n", end="\n" * bool(part.faults), flush=True)
    print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
