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
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
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
from zero_jax.remat import policies
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

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of a step with transfers to host memory; None if unknown."""
        return None if self.plan.time is None else self.plan.time.seconds + self.plan.host_seconds


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
        if self.chosen.seconds is None:
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
    return _Search(tried, plan, int(limit), report, host_limit, trained).run()


@dataclasses.dataclass
class _Search:
    """The candidates considered so far, and errors of those that cannot run; see `search`."""

    tried: Sequence[Candidate]
    plan: Planner
    limit: int
    report: Report
    host_limit: float
    trained: float
    considered: list[Considered] = dataclasses.field(default_factory=list)
    left_out: list[Exception] = dataclasses.field(default_factory=list)

    def run(self) -> Choice:
        for candidate, planned in self._by_cost():
            judged = self._judged(candidate, planned)
            if judged.fits and judged.seconds is None:
                break
            if judged.fits:
                self._recompute_more(judged)
        if any(c.fits for c in self.considered):
            choice = self._choice()
            self.report(f"chose {choice.chosen.candidate}\n{choice}")
            return choice
        self.report(_listed(self.considered, self.limit, self.trained))
        if self.left_out and not self.considered:
            last = self.left_out[-1]
            raise ValueError(f"no candidate can run. The last error: {last}") from last
        raise ValueError(_nothing_fits(self.considered, self.limit))

    def _by_cost(self) -> Iterator[tuple[Candidate, Plan]]:
        """Yields candidates with their predicted plans, cheapest first.

        Bytes that cross to host memory are known once a candidate was planned. Until then it has
        the place that it would have if they were free, afterwards its true one. Candidates that are
        considered already, or slower than a program that fits, are left out.
        """
        queue: list[tuple[tuple[float, ...], int, Plan | None]] = [
            (c.cost(trained=self.trained), i, None) for i, c in enumerate(self.tried)
        ]
        heapq.heapify(queue)
        while queue:
            _, at, planned = heapq.heappop(queue)
            candidate = self.tried[at]
            if any(
                c.candidate == candidate
                or (c.fits and c.candidate.no_worse(candidate, self.trained))
                for c in self.considered
            ):
                continue
            if planned is None:
                try:
                    planned = self.plan(candidate, False)
                except CannotStream as error:
                    self.report(f"skipped {candidate}: {error}")
                    self.left_out.append(error)
                    continue
                if candidate.uses_host:
                    heapq.heappush(queue, (candidate.cost(planned, self.trained), at, planned))
                    continue
            yield candidate, planned

    def _judged(self, candidate: Candidate, planned: Plan) -> Considered:
        """Considers a candidate; it is compiled unless its prediction is too much."""
        size, host, fits = planned.total_bytes, planned.predicted.host, False
        beside = f", {gigabytes(host)} in host memory" if host else ""
        if size > self.limit * (1 + MARGIN):
            verdict = f"predicted {gigabytes(size)}{beside}: too much"
        elif host > self.host_limit:
            available = f"too much, {gigabytes(self.host_limit)} available per device"
            verdict = f"predicted{beside[1:]}: {available}"
        else:
            try:
                planned = self.plan(candidate, True)
            except jax.errors.JaxRuntimeError as error:
                if error.error_code != RESOURCE_EXHAUSTED:
                    raise
                verdict = "does not compile: out of memory"
            else:
                fits = planned.total_bytes <= self.limit
                verdict = f"compiled {gigabytes(planned.total_bytes)}{beside}"
                verdict += "" if fits else ": too much"
        self.considered.append(Considered(candidate, planned, verdict, fits))
        return self.considered[-1]

    def _recompute_more(self, last: Considered) -> None:
        """Considers the policies after that of a candidate, while steps get shorter.

        A policy that recomputes more saves less, which has to be written and read: on an H200
        `dots` is quicker than `none` (docs/performance.md). Those that send more are left out.
        """
        known, words = policies.POLICIES, last.candidate.cost()[0]
        remat = last.candidate.remat
        for later in known[known.index(remat) + 1 :] if remat in known else ():
            candidate = dataclasses.replace(last.candidate, remat=later)
            if candidate not in self.tried or candidate.cost()[0] != words:
                continue
            judged = self._judged(candidate, self.plan(candidate, False))
            before, now = last.seconds, judged.seconds
            if not judged.fits or before is None or now is None or now >= before:
                break
            last = judged

    def _choice(self) -> Choice:
        """Returns the shortest step that fits, the smallest of those as short; adds outcomes."""
        fitting = [(c, c.seconds) for c in self.considered if c.fits]
        least = min((t for _, t in fitting if t is not None), default=0.0) * (1 + TIE)
        short = [c for c, t in fitting if t is None or t <= least]
        best = min(short, key=lambda c: c.plan.total_bytes)

        def told(c: Considered) -> Considered:
            if not c.fits:
                return c
            outcome = "chosen" if c is best else "as fast, larger" if c in short else "slower"
            step = "" if c.seconds is None else f", {c.seconds:.4g} s a step"
            return dataclasses.replace(c, verdict=f"{c.verdict}: fits, {outcome}{step}")

        others = len(self.tried) - len(self.considered) - len(self.left_out)
        considered = tuple(map(told, self.considered))
        return Choice(told(best), considered, self.limit, trained=self.trained, others=others)


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
    plan = least.plan
    terms = sorted(plan.predicted.terms.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {gigabytes(size)}" for name, size in terms)
    stored = plan.predicted.alias_bytes
    shards = math.prod(plan.axes.values())
    if stored > limit:
        more = -(-stored // limit)
        advice = f"stored state alone is larger: use at least {more} x {shards} devices"
    else:
        advice = "use more devices, fewer or shorter rows per device, or a smaller model"
    return (
        f"nothing fits in {gigabytes(limit)} per device. The smallest is {least.candidate}: "
        f"{gigabytes(plan.total_bytes)} ({largest}). {advice.capitalize()}"
    )
