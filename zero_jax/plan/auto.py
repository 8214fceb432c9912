"""`stage="auto"`: picks the stage, micro-batches, remat and host tiers that a memory limit allows.

Candidates are tried from the cheapest on (candidates.py). One that is predicted to need clearly
more than the limit is dropped; any other is compiled, and the first whose compiled program fits is
taken, or what recomputes more if that is quicker by the roofline. Stages 1 to 3 rest alike, so the
choice can be made after parameters were born, by an `AutoStep`; where they and the optimizer state
rest is then no part of it.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zero_jax.engine.grads import LossFn
from zero_jax.engine.offload_check import WrongHere
from zero_jax.engine.settings import Settings
from zero_jax.engine.step import TrainStep
from zero_jax.hlo.targets import Target
from zero_jax.offload.piecewise import CannotStream
from zero_jax.plan import candidates
from zero_jax.plan.candidates import Candidate
from zero_jax.plan.planning import AnyZero, Plan
from zero_jax.plan.tables import gigabytes
from zero_jax.remat import policies
from zero_jax.remat.layer_groups import CannotGroup
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import batch_shards
from zero_jax.sharding.paths import trained_part

# A prediction this far above the limit is believed without compiling. The largest seen were 19 %
# for GPUs and 21 % for a tiny model with padding on CPU devices: see docs/plan.md.
MARGIN = 0.25

PyTree = Any
# Plans a candidate; the second argument says whether to compile it.
Planner = Callable[[Candidate, bool], Plan]
Report = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Considered:
    """A candidate with its plan and what became of it."""

    candidate: Candidate
    plan: Plan
    verdict: str
    fits: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and everything that was looked at on the way, in order."""

    chosen: Considered
    considered: tuple[Considered, ...]
    limit: int
    trained: float = 1.0  # the part of Ψ that is not frozen

    def __str__(self) -> str:
        return _listed(self.considered, self.limit, self.trained)


def search(
    tried: Sequence[Candidate],
    plan: Planner,
    limit: float,
    report: Report = print,
    host_limit: float = math.inf,
    trained: float = 1.0,
) -> Choice:
    """Takes the cheapest candidate whose compiled program fits, and of its like the quickest.

    Args:
      tried: the candidates.
      plan: plans one of them.
      limit: bytes of one device that may be used.
      host_limit: bytes of host memory that may be used for one device.
      report: is told the outcome, and of each candidate why it was dropped.
      trained: the part of Ψ that is not frozen.

    Raises:
      ValueError: nothing fits; names the smallest candidate, its bytes and what would help.
    """
    limit = int(limit)
    considered: list[Considered] = []
    left_out: list[Exception] = []
    for candidate, planned in _by_cost(tried, plan, report, trained, left_out):
        considered.append(_judged(candidate, planned, plan, limit, host_limit))
        if considered[-1].fits:
            more = _quicker(considered.pop(), tried, plan, limit, host_limit)
            choice = Choice(more[0], (*considered, *more), limit, trained)
            report(f"chose {choice.chosen.candidate}\n{choice}")
            return choice
    report(_listed(considered, limit, trained))
    if left_out and not considered:
        raise ValueError(f"no candidate can be run; of the last: {left_out[-1]}") from left_out[-1]
    raise ValueError(_nothing_fits(considered, limit))


def _by_cost(
    tried: Sequence[Candidate],
    plan: Planner,
    report: Report,
    trained: float,
    left_out: list[Exception],
) -> Iterator[tuple[Candidate, Plan]]:
    """Candidates with their predicted plans, cheapest first.

    What crosses to host memory is known once a candidate was planned. Until then it stands where
    it would if that were free; after, it waits for its true turn. Why others cannot be run goes to
    `left_out`.
    """
    queue: list[tuple[Any, int, Plan | None]] = [
        (c.cost(trained=trained), i, None) for i, c in enumerate(tried)
    ]
    heapq.heapify(queue)
    while queue:
        _, at, planned = heapq.heappop(queue)
        candidate = tried[at]
        if planned is None:
            try:
                planned = plan(candidate, False)
            except (CannotGroup, CannotStream, WrongHere) as error:
                report(f"left out {candidate}: {error}")
                left_out.append(error)
                continue
            if candidate.uses_host:
                heapq.heappush(queue, (candidate.cost(planned, trained), at, planned))
                continue
        yield candidate, planned


def _judged(
    candidate: Candidate,
    planned: Plan,
    plan: Planner,
    limit: float,
    host_limit: float,
) -> Considered:
    size, host = planned.total_bytes, planned.predicted.host
    beside = f", {gigabytes(host)} in host memory" if host else ""
    if size > limit * (1 + MARGIN):
        return Considered(candidate, planned, f"predicted {gigabytes(size)}{beside}: too much")
    if host > host_limit:
        verdict = f"predicted{beside[1:]}: too much, a device's part is {gigabytes(host_limit)}"
        return Considered(candidate, planned, verdict)
    planned, verdict = _compiled(plan, candidate, planned)
    if verdict:
        return Considered(candidate, planned, verdict)
    fits = planned.total_bytes <= limit
    outcome = "fits, taken" if fits else "too much"
    verdict = f"compiled {gigabytes(planned.total_bytes)}{beside}: {outcome}"
    return Considered(candidate, planned, verdict, fits)


def _compiled(plan: Planner, candidate: Candidate, planned: Plan) -> tuple[Plan, str]:
    """The compiled plan; the predicted one and a verdict where the compiler itself refuses."""
    try:
        return plan(candidate, True), ""
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return planned, "does not compile: out of memory"


def _quicker(
    first: Considered,
    tried: Sequence[Candidate],
    plan: Planner,
    limit: float,
    host_limit: float,
) -> list[Considered]:
    """The quickest by the roofline, and then what it was compared with.

    What sends as much and recomputes more keeps less, which has to be written and read: of the
    policies after the one that fits each is compiled as long as it is quicker.
    """
    best, others = first, list[Considered]()
    for candidate in _recomputing_more(first.candidate, tried):
        if best.plan.time is None:
            break
        try:
            planned = plan(candidate, False)
        except CannotGroup:
            break
        found = _judged(candidate, planned, plan, limit, host_limit)
        if not found.fits:
            others.append(found)
            break
        quicker = found.plan.time is not None and found.plan.time.seconds < best.plan.time.seconds
        best, slower = (found, best) if quicker else (best, found)
        others.append(_slower(slower))
        if not quicker:
            break
    return [best, *others]


def _recomputing_more(chosen: Candidate, tried: Sequence[Candidate]) -> list[Candidate]:
    """The same with the policies after its own that send no more."""
    known = policies.POLICIES
    after = known[known.index(chosen.remat) + 1 :] if chosen.remat in known else ()
    others = (dataclasses.replace(chosen, remat=remat) for remat in after)
    return [c for c in others if c in tried and c.cost()[0] == chosen.cost()[0]]


def _slower(considered: Considered) -> Considered:
    time = considered.plan.time
    took = "not taken" if time is None else f"slower, {time.seconds:.4g} s a step"
    verdict = considered.verdict.replace("taken", took)
    return dataclasses.replace(considered, verdict=verdict)


def _listed(considered: Sequence[Considered], limit: int, trained: float) -> str:
    wide = max((len(str(c.candidate)) for c in considered), default=0)
    rows = [
        f"  {c.candidate.cost(c.plan, trained)[0]:.3g}Ψ words  {c.candidate!s:{wide}} {c.verdict}"
        for c in considered
    ]
    return "\n".join([f"for at most {gigabytes(limit)} a device:", *rows])


def decide(
    zero: AnyZero,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    batch: PyTree,
    *extras: Any,
    target: str | Target | None = None,
    topology: str | None = None,
    report: Report | None = None,
    born: bool | None = None,
    **options: Any,
) -> Choice:
    """Chooses for a `Zero`; what `Zero.choice` calls. Arguments as for `planned.of`.

    Args:
      report: is told the outcome; by default printed by the first process.
      born: parameters and optimizer state are there already, and stay in the memory they are in;
        by default whether `params` are arrays.

    Raises:
      ValueError: nothing fits, or the device does not say how much memory it has.
    """

    def plan(candidate: Candidate, compile: bool) -> Plan:
        settled = dataclasses.replace(zero, **candidate.settings)
        aim = {"compile": True, "target": target, "topology": topology} if compile else {}
        return settled.plan(loss_fn, tx, params, batch, *extras, **aim, **options)

    rows = min(np.shape(x)[0] for x in jax.tree.leaves(batch)) // batch_shards(zero.mesh)
    if born is None:
        born = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    tried = candidates.of_zero(zero, rows, target, born)
    if report is None:
        report = print if jax.process_index() == 0 else lambda _: None
    limit = candidates.device_limit(zero, target)
    host = candidates.host_limit(zero, target) or math.inf
    trained = trained_part(jax.eval_shape(layout.logical, params), zero.settings.frozen)
    return search(tried, plan, limit, report, host, trained)


def _nothing_fits(considered: Sequence[Considered], limit: int) -> str:
    if not considered:
        return "there is no candidate: the micro-batches must divide the rows of a device"
    least = min(considered, key=lambda c: c.plan.total_bytes)
    plan = least.plan
    terms = sorted(plan.predicted.terms.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{name} {gigabytes(size)}" for name, size in terms)
    at_rest = plan.predicted.alias_bytes
    shards = math.prod(plan.axes.values())
    if at_rest > limit:
        more = -(-at_rest // limit)
        advice = f"what rests alone is more than that: take at least {more} x {shards} devices"
    else:
        advice = "take more devices, shorter or fewer rows a device, or a smaller model"
    return (
        f"nothing fits in {gigabytes(limit)} a device. The smallest is {least.candidate}: "
        f"{gigabytes(plan.total_bytes)} ({largest}). To fit, {advice}"
    )


class AutoStep:
    """A `TrainStep` whose stage, micro-batches and remat are chosen when it first meets arrays.

    By then these have their place, so whether states rest in host memory is not chosen here.

    It has all that a `TrainStep` has. Made by `Zero.train_step`.
    """

    def __init__(self, made_for: Callable[..., TrainStep]):
        self._made_for = made_for
        self._step: TrainStep | None = None

    def _decided(self, args: tuple[Any, ...]) -> TrainStep:
        if self._step is None:
            self._step = self._made_for(*args)
        return self._step

    @property
    def settings(self) -> Settings:
        """The settings that were chosen.

        Raises:
          AttributeError: nothing was chosen yet.
        """
        if self._step is None:
            raise AttributeError("nothing is chosen before the first step: call it, or lower it")
        return self._step.settings

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._decided(args)(*args, **named)

    def trace(self, *args: Any, **named: Any) -> Any:
        """As `TrainStep.trace`."""
        return self._decided(args).trace(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """As `TrainStep.lower`."""
        return self._decided(args).lower(*args, **named)

    def first_bad_leaf(self, *args: Any) -> str | None:
        """As `TrainStep.first_bad_leaf`."""
        return self._decided(args).first_bad_leaf(*args)
