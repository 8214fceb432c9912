"""The choice of `stage="auto"` beside a search over all its candidates compiled, on absent H100s.

    python benchmarks/auto_search.py --jobs 2 --quick    # six programs
    python benchmarks/auto_search.py full                # this one

The search uses no predictions: of the compiled programs that fit it takes the one with the shortest
modelled step, and of steps within 1 % of that the one that holds least. Both are asked at every
limit that lets one more program in. With --quick XLA fuses no norms and softmax into kernels of its
own, which takes a seventh of the time: collectives stay the same, kernels read and write more.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import forecasts
import jax

from zero_jax.hlo import aot
from zero_jax.plan.auto import Candidate, combinations, search
from zero_jax.plan.plans import Plan

PROGRAMS: dict[str, Callable[[], forecasts.Program]] = {
    **{name: forecasts.PROGRAMS[name] for name in ("full", "frozen", "resnet")},
    "1.5b-8": lambda: forecasts.preset("1.5b", 8, rows=4),
    "7.5b-64": lambda: forecasts.preset("7.5b", 64, rows=4, precision=forecasts.BF16),
    "qwen3-1.7b-8": lambda: forecasts.preset("qwen3-1.7b", 8, rows=4),
}
REMAT = ("none", "dots", "block")
MOST_MICRO_BATCHES = 2


def by_search(plans: dict[Candidate, Plan], limit: int) -> Candidate:
    """The shortest modelled step of the programs that fit, within 1 % the smallest program."""
    fitting = {c: plan for c, plan in plans.items() if plan.total_bytes <= limit}
    least = min(_seconds(plan) for plan in fitting.values())
    short = {c: plan for c, plan in fitting.items() if _seconds(plan) <= 1.01 * least}
    return min(short, key=lambda c: short[c].total_bytes)


def _seconds(plan: Plan) -> float:
    assert plan.time is not None
    return plan.time.seconds


def compared(name: str, jobs: int) -> dict[str, Any]:
    """Both picks of a program at every limit; `jobs` candidates are compiled at once."""
    program = PROGRAMS[name]()

    @functools.cache
    def plan(candidate: Candidate, compile: bool) -> Plan:
        settings = {**program.settings, **candidate.settings}
        target = program.target if compile else None
        return forecasts.planned(dataclasses.replace(program, settings=settings, target=target))

    tried = [
        c
        for c in combinations(MOST_MICRO_BATCHES)
        if c.remat in REMAT and c.grad_accum_steps <= MOST_MICRO_BATCHES
    ]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        plans = dict(zip(tried, pool.map(lambda c: plan(c, True), tried), strict=True))
    trained = next(iter(plans.values())).trained
    rows = []
    for limit in sorted({p.total_bytes for p in plans.values()}):
        choice = search(tried, plan, limit, report=lambda _: None, trained=trained)
        best = by_search(plans, limit)
        picked = choice.chosen.candidate
        tested = sum("compiled" in c.verdict for c in choice.considered)
        longer = _seconds(plans[picked]) / _seconds(plans[best]) - 1
        rows.append({"limit_gb": round(limit / 1e9, 2), "auto": str(picked), "search": str(best)})
        rows[-1] |= {"same": picked == best, "longer": round(longer, 4), "compiled": tested}
    known = {
        str(c): {
            "gb": round(p.total_bytes / 1e9, 3),
            "predicted_gb": round(p.predicted.total_bytes / 1e9, 3),
            "words": round(p.elements_per_param, 4),
            "seconds": round(p.time.seconds, 4) if p.time else None,
            "flops": p.compiled.flops if p.compiled else None,
        }
        for c, p in plans.items()
    }
    return {"name": name, "same": sum(r["same"] for r in rows), "limits": rows, "programs": known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of " + ", ".join(PROGRAMS))
    parser.add_argument("--jobs", type=int, default=1, help="how many are compiled at once")
    parser.add_argument(
        "--quick", action="store_true", help="compile without fused softmax kernels"
    )
    given = parser.parse_args()
    if given.quick:
        aot.FLAGS += " --xla_disable_hlo_passes=triton-softmax-rewriter"
    jax.config.update("jax_platforms", "cpu")
    for name in given.names or PROGRAMS:
        print(json.dumps(compared(name, given.jobs)), flush=True)


if __name__ == "__main__":
    main()
