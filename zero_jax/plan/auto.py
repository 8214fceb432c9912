"""`stage="auto"`: picks the stage, micro-batches, remat and host tiers that a memory limit allows.

Candidates are tried in the order of `candidates.py`. One that is predicted to need clearly more
than the limit is dropped, and so is one that no program that fits can be slower than
(`Candidate.no_worse`). Any other is compiled. Of the programs that fit the one with the shortest
modelled step is chosen, of steps within `TIE` of it the smallest one. On devices without a modelled
step time the first program that fits is chosen. Stages 1 to 3 store the same
shards, so a `TrainStep` can choose after initialisation; where parameters and optimizer state are
stored is then no part of the choice.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zero_jax.engine.config import Config
from zero_jax.engine.grads import LossFn
from zero_jax.hlo.targets import Target
from zero_jax.offload.host import CannotStream
from zero_jax.plan import candidates, planning
from zero_jax.plan.advice import TIE
from zero_jax.plan.candidates import Candidate
from zero_jax.plan.plans import Plan
from zero_jax.plan.tables import gigabytes
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import batch_shards
from zero_jax.sharding.paths import PyTree, trained_part

# A prediction this far above the limit is believed without compiling. The largest seen was 37 %,
# for 4 layers of width 4096 with activations and all state in host memory (docs/plan-accuracy.md).
MARGIN = 0.4
RESOURCE_EXHAUSTED = 8  # absl::StatusCode, in `JaxRuntimeError.error_code`
# Plans a candidate; the second argument says whether to compile it.
Planner = Callable[[Candidate, bool], Plan]
Report = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Considered:
    """A candidate with its plan and the outcome."""

    candidate: Candidate
    plan: Plan
    verdict: str
    fits: bool = False

    def rules_out(self, other: Candidate, trained: float) -> bool:
        """Returns whether another is this one, or cannot be faster than this one, which fits."""
        return other == self.candidate or (self.fits and self.candidate.no_worse(other, trained))

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step with transfers to host memory; infinite if unknown."""
        return (
            math.inf if self.plan.time is None else self.plan.time.seconds + self.plan.host_seconds
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen candidate, and all candidates considered, in order."""

    chosen: Considered
    considered: tuple[Considered, ...]
    limit: int
    config: Config | None = None  # with the chosen settings
    trained: float = 1.0  # the part of Ψ that is not frozen
    others: int = 0  # candidates that were not tried

    def __str__(self) -> str:
        listed = _listed(self.considered, self.limit, self.trained)
        if not self.others:
            return listed
        why = "cannot be faster than one that fits"
        if self.chosen.plan.time is None:
            why = "follow in the order: without a modelled step time the first that fits is chosen"
        return f"{listed}\n  not compiled: {self.others} others, which {why}"


def search(
    tried: Sequence[Candidate],
    plan: Planner,
    limit: float,
    report: Report = print,
    host_limit: float = math.inf,
    trained: float = 1.0,
) -> Choice:
    """Returns the candidate with the shortest modelled step among compiled programs that fit.

    Candidates are considered cheapest first. A policy that recomputes more saves less, which has to
    be written and read: on an H200 `dots` is quicker than `none` (docs/performance.md). So after a
    candidate that fits, the policies after its own that send as much follow, while steps get
    shorter.

    Args:
      tried: The candidates.
      plan: Function that plans one of them.
      limit: Bytes per device that may be used.
      report: Called with the outcome, and with the reason why each candidate was dropped.
      host_limit: Bytes of host memory per device that may be used.
      trained: Fraction of Ψ that is not frozen.

    Raises:
      ValueError: No candidate fits; the message has the smallest, its bytes and a way out.
    """
    limit, considered, errors = int(limit), list[Considered](), list[CannotStream]()

    def consider(candidate: Candidate, planned: Plan) -> Considered:
        considered.append(_considered(candidate, planned, plan, limit, host_limit))
        return considered[-1]

    costs = {candidate: candidate.cost(trained=trained) for candidate in tried}
    plans: dict[Candidate, Plan] = {}
    while costs:
        candidate = min(costs, key=costs.__getitem__)
        if any(c.rules_out(candidate, trained) for c in considered):
            del costs[candidate]
        elif candidate not in plans:
            try:
                plans[candidate] = plan(candidate, False)
            except CannotStream as error:
                report(f"skipped {candidate}: {error}")
                errors.append(error)
                del costs[candidate]
            else:  # from now on with the bytes that cross to host memory
                costs[candidate] = candidate.cost(plans[candidate], trained)
        else:
            last = consider(candidate, plans[candidate])
            if last.fits and last.plan.time is None:
                break
            for more in candidate.recomputing_more() if last.fits else ():
                if more in tried:
                    before, last = last, consider(more, plan(more, False))
                    if not last.fits or last.seconds >= before.seconds:
                        break
    if not any(c.fits for c in considered):
        report(_listed(considered, limit, trained))
        if errors and not considered:
            raise ValueError(f"no candidate can run. The last error: {errors[-1]}") from errors[-1]
        raise ValueError(_nothing_fits(considered, limit))
    least = min(c.seconds for c in considered if c.fits) * (1 + TIE)
    short = [c for c in considered if c.fits and c.seconds <= least]
    best = min(short, key=lambda c: c.plan.total_bytes)

    def told(c: Considered) -> Considered:
        if not c.fits:
            return c
        outcome = "chosen" if c is best else "as fast, larger" if c in short else "slower"
        step = "" if c.plan.time is None else f", {c.seconds:.4g} s a step"
        return dataclasses.replace(c, verdict=f"{c.verdict}: fits, {outcome}{step}")

    others = len(tried) - len(considered) - len(errors)
    choice = Choice(told(best), (*map(told, considered),), limit, None, trained, others)
    report(f"chose {best.candidate}\n{choice}")
    return choice


def _considered(
    candidate: Candidate, planned: Plan, plan: Planner, limit: int, host_limit: float
) -> Considered:
    """Considers a candidate; it is compiled unless its prediction is too much."""
    size, host = planned.total_bytes, planned.predicted.host
    beside = f", {gigabytes(host)} in host memory" if host else ""
    if size > limit * (1 + MARGIN):
        return Considered(candidate, planned, f"predicted {gigabytes(size)}{beside}: too much")
    if host > host_limit:
        available = f"too much, {gigabytes(host_limit)} available per device"
        return Considered(candidate, planned, f"predicted{beside[1:]}: {available}")
    try:
        planned = plan(candidate, True)
    except jax.errors.JaxRuntimeError as error:
        if error.error_code != RESOURCE_EXHAUSTED:
            raise
        return Considered(candidate, planned, "does not compile: out of memory")
    fits = planned.total_bytes <= limit
    verdict = f"compiled {gigabytes(planned.total_bytes)}{beside}{'' if fits else ': too much'}"
    return Considered(candidate, planned, verdict, fits)


def _listed(considered: Sequence[Considered], limit: int, trained: float) -> str:
    wide = max((len(str(c.candidate)) for c in considered), default=0)
    rows = [
        f"  {c.candidate.cost(c.plan, trained)[0]:.3g}Ψ elements  {c.candidate!s:{wide}}  "
        f"{c.verdict}"
        for c in considered
    ]
    return "\n".join([f"candidates in {gigabytes(limit)} per device:", *rows])


def decide(
    config: Config,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    batch: PyTree,
    *extras: PyTree,
    target: str | Target | None = None,
    topology: str | None = None,
    report: Report | None = None,
    initialized: bool | None = None,
    **options: Any,
) -> Choice:
    """Chooses the settings in place of stage="auto"; `Zero.choose` calls it.

    Other arguments as for `planning.of`, without `compile` and `latencies`.

    Args:
      report: Called with the outcome; by default the first process prints it.
      initialized: If True, parameters and optimizer state exist already and stay in their memory.
        The default is True if `params` has arrays.

    Raises:
      ValueError: No candidate fits, or the device does not report its memory.
    """

    def plan(candidate: Candidate, compile: bool) -> Plan:
        settled = dataclasses.replace(config, **candidate.settings)
        aim: dict[str, Any] = {"compile": True, "target": target, "topology": topology}
        own = {**options, **(aim if compile else {})}
        return planning.of(settled, loss_fn, tx, params, batch, *extras, **own)

    rows = min(np.shape(x)[0] for x in jax.tree.leaves(batch)) // batch_shards(config.mesh)
    if initialized is None:
        initialized = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    tried = candidates.of_config(config, rows, target, initialized)
    if report is None:
        report = print if jax.process_index() == 0 else lambda _: None
    limit = candidates.device_limit(config, target)
    host = candidates.host_limit(config, target) or math.inf
    trained = trained_part(jax.eval_shape(layout.unpad, params), config.frozen)
    choice = search(tried, plan, limit, report, host, trained)
    chosen = dataclasses.replace(config, **choice.chosen.candidate.settings)
    return dataclasses.replace(choice, config=chosen)


def _nothing_fits(considered: Sequence[Considered], limit: int) -> str:
    if not considered:
        return "there is no candidate: `grad_accum_steps` must divide the rows of a device"
    least = min(considered, key=lambda c: c.plan.total_bytes)
    predicted, devices = least.plan.predicted, math.prod(least.plan.axes.values())
    terms = sorted(predicted.terms.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {gigabytes(size)}" for name, size in terms)
    advice = "Use more devices, fewer or shorter rows per device, or a smaller model"
    if predicted.alias_bytes > limit:
        more = -(-predicted.alias_bytes // limit)
        advice = f"Stored state alone is larger: use at least {more} x {devices} devices"
    return (
        f"nothing fits in {gigabytes(limit)} per device. The smallest is {least.candidate}: "
        f"{gigabytes(least.plan.total_bytes)} ({largest}). {advice}"
    )
