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
import functools
import multiprocessing
import sys
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]
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
    """Returns what is wrong, or None."""
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
    reference = _reference(case.loss, options["precision"])
    (wanted, other), gradients = reference(start, x.reshape(parts, 2, FEATURES))
    frozen = options.get("frozen", lambda path: False)
    paths, leaves = paths_of(case.params), jax.tree.leaves(case.params)
    trained = [is_float(w) and not frozen(path) for path, w in zip(paths, leaves, strict=True)]
    pairs = {"loss": (value, wanted), **{f"aux {k}": (aux[k], other[k]) for k in other}}
    of_leaves = zip(*map(jax.tree.leaves, (zero.full(grads), gradients)), strict=True)
    pairs |= {f"gradient of leaf {i}": pair for i, pair in enumerate(of_leaves) if trained[i]}
    loose = options["precision"] == "bf16" or any(set(ROUNDS) & set(names) for names in case.ops)
    for what, (got, want) in pairs.items():
        if not _near(got, want, loose):
            return f"{what}: {np.ravel(got)[:4]} for {np.ravel(want)[:4]}"
    sent = fuzz_words.sent(grad_fn.lower(stored, x), dict(mesh.shape))
    known = fuzz_words.leaves_of(case, trained, jax.tree.leaves(stored))
    options = {name: options[name] for name in ("stage", "micro_batches", "remat")}
    return fuzz_words.fault(sent, known, mesh.shape, **options)


def _near(got: Any, want: Any, loose: bool) -> bool:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    # fp32 sums in another order; in bf16 three digits of the largest are right.
    most = np.abs(want).max(initial=0) + (0.1 if loose else 1e-2)
    return got.shape == want.shape and np.all(
        np.abs(got - want) <= (5e-2 if loose else 2e-4) * most
    )


def run(trees: range, seed: int) -> tuple[collections.Counter, list[str]]:
    """Runs the cases of these trees, which follow from their number and the seed alone.

    Returns numbers of cases by (kind, name): outcomes, operations and settings; and faults.
    """
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
            except CannotGroup:  # a prime number of layers
                fault = None if remat == "block_sqrt" else "cannot group layers"
                counts["refused", remat] += 1
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
