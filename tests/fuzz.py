"""Random losses on random trees of parameters, on meshes of up to eight devices and on one.

    python tests/fuzz.py --cases 2000 --seed 0 --jobs 2

A case is a tree (nested containers, NNX states, dataclasses; scalars, empty, primes, dims below N,
ranks 0 to 4; fp32, bf16, integers, booleans), a loss that reads each leaf by two to five of the
operations of fuzz_operations.py, and settings. Loss, gradients and aux must be those of one device,
and the words that are sent those of fuzz_words.py; nothing may fail but by a refusal that the docs
state. The first setting of each tree is stage 3.
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
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [
        os.path.dirname(os.path.abspath(__file__)),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    ]
    import conftest  # noqa: F401  eight fake devices

import fuzz_words
import jax
import jax.numpy as jnp
import numpy as np
from fuzz_cases import JAX_REMATS, Case, case_of, settings_of, specs_of
from fuzz_operations import FEATURES, ROUNDS

import zero_jax

SETTINGS_A_TREE = 4
# What a refusal says: the docs state each.
REFUSALS = {
    "a loop of unknown length": "while over a trained leaf",
    "can't be cut into groups": "block_sqrt of a prime number of layers",
}


@functools.lru_cache(maxsize=4)
def _reference(loss: Any, compute: str) -> Any:
    def whole(params: Any, parts: Any) -> Any:
        values, aux = jax.lax.map(lambda part: loss(_cast(params, compute), part), parts)
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
    grad_fn = zero.value_and_grad(case.loss, has_aux=True)
    (value, aux), grads = grad_fn(own, x)
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
    return fuzz_words.fault(zero, case.loss, grad_fn, own, x)


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
