"""What `stage="auto"` picks, beside a search over all its candidates compiled, on absent H100s.

    python benchmarks/auto_search.py --jobs 2    # three programs of forecasts.py, 20 minutes
    python benchmarks/auto_search.py full        # this one

The search knows nothing of predictions: of the compiled programs that fit it takes the one that
sends the fewest words (to a thousandth of Ψ), then multiplies least, then has the fewest
micro-batches, then the highest stage; and of those that differ from it in remat alone and send as
much the one with the shortest step of the roofline. Asked at every limit that makes a difference.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
from typing import Any

import forecasts
import jax

from zero_jax.plan.auto import search
from zero_jax.plan.candidates import Candidate, combinations
from zero_jax.plan.planning import Plan

NAMES = ("full", "frozen", "resnet")
REMAT = ("none", "dots", "block")
MOST_MICRO_BATCHES = 2


def by_search(plans: dict[Candidate, Plan], limit: int) -> Candidate:
    """The cheapest program that fits and of its like the quickest, by what was compiled alone."""

    def words(candidate: Candidate) -> float:
        plan = plans[candidate]
        assert plan.compiled is not None
        return round(plan.compiled.words_per_param(plan.num_params), 3)

    def cost(candidate: Candidate) -> tuple[float, ...]:
        compiled = plans[candidate].compiled
        flops = compiled.flops or 0 if compiled else 0
        return words(candidate), flops, candidate.micro_batches, -candidate.stage

    def seconds(candidate: Candidate) -> float:
        time = plans[candidate].time
        return time.seconds if time else 0.0

    fitting = [c for c, plan in plans.items() if plan.total_bytes <= limit]
    best = min(fitting, key=cost)
    alike = (c for c in fitting if dataclasses.replace(c, remat=best.remat) == best)
    return min((c for c in alike if words(c) == words(best)), key=seconds)


def compared(name: str, jobs: int) -> dict[str, Any]:
    """Both picks of a program at every limit; `jobs` candidates are compiled at once."""
    program = forecasts.PROGRAMS[name]()

    @functools.cache
    def plan(candidate: Candidate, compile: bool) -> Plan:
        settings = {**program.settings, **candidate.settings}
        target = program.target if compile else None
        return forecasts.planned(dataclasses.replace(program, settings=settings, target=target))

    tried = [
        c
        for c in combinations(MOST_MICRO_BATCHES)
        if c.remat in REMAT and c.micro_batches <= MOST_MICRO_BATCHES
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
        rows.append({"limit_gb": round(limit / 1e9, 2), "auto": str(picked), "search": str(best)})
        rows[-1] |= {"same": picked == best, "compiled": tested}
    known = {
        str(c): {
            "gb": round(p.total_bytes / 1e9, 3),
            "predicted_gb": round(p.predicted.total_bytes / 1e9, 3),
            "words": round(p.words_per_param, 4),
            "seconds": round(p.time.seconds, 4) if p.time else None,
            "flops": p.compiled.flops if p.compiled else None,
        }
        for c, p in plans.items()
    }
    return {"name": name, "same": sum(r["same"] for r in rows), "limits": rows, "programs": known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of " + ", ".join(forecasts.PROGRAMS))
    parser.add_argument("--jobs", type=int, default=1, help="how many are compiled at once")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name in given.names or NAMES:
        print(json.dumps(compared(name, given.jobs)), flush=True)


if __name__ == "__main__":
    main()
