"""`stage="auto"`: picks the stage, micro-batches, remat and host tiers that a memory limit allows.

Candidates are considered in this order: fewest elements sent, to other devices or to host memory
and back; then least recomputation, full saved activations before those partitioned over the model
axis, fewest micro-batches, and the higher stage, whose reductions overlap with the backward pass.
Stage 0 is never a candidate: stage 1 sends as much and holds less. Nor is stage 1 with one
micro-batch: it is stage 2.

One that is predicted to need clearly more than the limit is dropped, and so is one that no program
that fits can be slower than. Any other is compiled. Of the programs that fit the one with the
shortest modelled step is chosen, of steps within `TIE` of it the smallest one. On devices without a
modelled step time the first that fits is chosen. Stages 1 to 3 store the same shards, so a
`TrainStep` can choose after initialisation; the place of state is then no part of the choice.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh

from zero_jax.engine.config import Config
from zero_jax.engine.grads import LossFn
from zero_jax.hlo.targets import Target
from zero_jax.hlo.targets import target as target_of
from zero_jax.offload.host import HOST, NONE, CannotStream, Offload, parse
from zero_jax.plan import planning
from zero_jax.plan.model_states import elements_per_param
from zero_jax.plan.plans import Plan
from zero_jax.plan.tables import gigabytes
from zero_jax.remat import policies
from zero_jax.sharding import layout
from zero_jax.sharding.mesh import MODEL, batch_shards, model_size
from zero_jax.sharding.named_dims import SEQUENCE
from zero_jax.sharding.paths import PyTree, trained_part

# Steps this near to each other count as equal, modelled and estimated: kernels differ more.
TIE = 0.01
# A prediction this far above the limit is believed without compiling. The largest seen was 36 %,
# for 4 layers of width 4096 with activations and all state in host memory (docs/plan-accuracy.md).
MARGIN = 0.4
RESOURCE_EXHAUSTED = 8  # absl::StatusCode, in `JaxRuntimeError.error_code`
# Tiers of the optimizer state, fewest bytes in host memory first.
STATES = tuple(map(parse, ("none", "optimizer", "optimizer,params")))
# Fraction of device memory reserved for the runtime, its libraries and NCCL, which no plan shows.
RESERVE = 0.08
# Fraction of host memory to use; the rest is for the data, the system and the program.
HOST_SHARE = 0.8
# A process may see one device of a host, and the hosts of GPU clusters have eight.
_HOST_DEVICES = 8
# Plans a candidate; the second argument says whether to compile it.
Planner = Callable[["Candidate", bool], Plan]
Report = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the step; its fields are those of `Zero`."""

    stage: int
    grad_accum_steps: int
    remat: str
    offload: Offload = NONE

    @property
    def settings(self) -> dict[str, Any]:
        """The fields by name, for `Zero.replace`."""
        return dict(vars(self))

    def cost(self, plan: Plan | None = None, trained: float = 1.0) -> tuple[float, ...]:
        """Returns the sort key of a candidate; without its plan host transfers count as free.

        The first number is elements sent over Ψ / MP: those of the paper, and host transfers. A
        fraction `trained` of Ψ is not frozen.
        """
        words, *order, _ = self._demands(trained)
        crossing = plan.host_elements_per_param if plan is not None else 0.0
        return (words + crossing, *order, -self.stage)

    def _demands(self, trained: float) -> tuple[float, ...]:
        policy = policies.parse(self.remat)
        words = elements_per_param(self.stage, self.grad_accum_steps, self.remat, trained)
        order = (policy.passes, policy.partitioned, self.grad_accum_steps)
        return (words, *order, any(place.host for place in policy.places))

    def recomputing_more(self) -> "list[Candidate]":
        """Returns those with a policy that recomputes more, and that sends as many elements."""
        known = policies.POLICIES
        later = known[known.index(self.remat) + 1 :] if self.remat in known else ()
        others = [dataclasses.replace(self, remat=remat) for remat in later]
        return [other for other in others if other.cost()[0] == self.cost()[0]]

    def no_worse(self, other: "Candidate", trained: float = 1.0) -> bool:
        """Returns whether the other cannot have the shorter step, if this one fits.

        It is at the same stage and sends, accumulates, recomputes and moves to host memory no less.
        Stages are compared by compiling them: what sends more may be quicker, where its collectives
        overlap with matrix products.
        """
        alike = self.stage == other.stage and self.offload in (NONE, other.offload)
        demands = zip(self._demands(trained), other._demands(trained), strict=True)
        return alike and all(mine <= theirs for mine, theirs in demands)

    def __str__(self) -> str:
        stored = f", {self.offload} in host memory" if self.offload.streams else ""
        return (
            f"stage {self.stage}, {self.grad_accum_steps} micro-batches, remat {self.remat}{stored}"
        )


def combinations(
    rows: int,
    *,
    grad_accum_steps: int = 1,
    remat: str = "none",
    places: tuple[str, ...] = (),
    states: tuple[Offload, ...] = STATES[:1],
) -> list[Candidate]:
    """Returns all candidates, ordered by their cost without a plan.

    Args:
      rows: Rows of the batch on one device; k must divide them.
      grad_accum_steps: The smallest k, a divisor of every k.
      remat: The policy that saves most. One with places or names is the only one.
      places: Places other than the device where layer inputs may be saved.
      states: Tiers of the optimizer state and the fp32 master parameters.

    >>> [str(c) for c in combinations(1)][:2]
    ['stage 2, 1 micro-batches, remat none', 'stage 2, 1 micro-batches, remat dots']
    """
    counts = [k for k in range(1, rows + 1) if rows % k == 0 and k % grad_accum_steps == 0]
    known = policies.POLICIES
    ways = list(known[known.index(remat) :]) if remat in known else [remat]
    ways += [f"{way}@{at}" for way in ways if way in known[2:] for at in places]
    each = itertools.product((1, 2, 3), counts, ways, states)
    return sorted((Candidate(*way) for way in each if way[:2] != (1, 1)), key=Candidate.cost)


def of_config(
    config: Config, rows: int, target: str | Target | None, initialized: bool
) -> list[Candidate]:
    """Returns the candidates in place of stage="auto", for so many rows on one device.

    Offload, if set, and remat with a place are kept. With `initialized`, parameters and optimizer
    state stay in their memory.
    """
    host = limits(config, target)[1] > 0
    split = config.model_axis.axis_of(SEQUENCE[0][0]) == MODEL  # what is kept is split already
    parts = model_size(config.mesh) > 1 and not split
    pairs = itertools.product((False, True)[: 1 + host], (False, True)[: 1 + parts])
    _, *places = (str(policies.Place(*pair)) for pair in pairs)
    stay = initialized or not host or config.offload != NONE
    return combinations(
        rows,
        grad_accum_steps=config.grad_accum_steps,
        remat=config.remat,
        places=tuple(places),
        states=(config.offload,) if stay else STATES,
    )


def limits(config: Config, target: str | Target | None) -> tuple[int, int]:
    """Returns the bytes of device memory and of host memory that a device may use; 0 if unknown.

    A simulated CPU device has no memory but the host's, so a move there gains nothing.
    """
    if target is not None:
        aim = target_of(target)
        return usable(aim), int(aim.host_memory * HOST_SHARE) if aim.platform == "cuda" else 0
    if isinstance(config.mesh, AbstractMesh):
        return 0, 0
    device = config.mesh.local_devices[0]
    pool = (device.memory_stats() or {}).get("bytes_limit", 0)  # what JAX itself leaves to others
    kinds = [memory.kind for memory in device.addressable_memories()]
    if device.platform == "cpu" or HOST not in kinds:
        return pool, 0
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return pool, int(whole * HOST_SHARE / max(_HOST_DEVICES, jax.local_device_count()))


def usable(target: Target) -> int:
    """Returns the bytes of a target's memory that a step may use; 0 if unknown."""
    return int(target.memory_bytes * (1 - RESERVE))


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
        time = self.plan.time
        return math.inf if time is None else time.seconds + self.plan.host_seconds


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
      limit, host_limit: Bytes per device, in its memory and in host memory, that may be used.
      report: Called with the outcome, and with the reason why each candidate was dropped.
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
    tried = of_config(config, rows, target, initialized)
    if report is None:
        report = print if jax.process_index() == 0 else lambda _: None
    size, host = limits(config, target)
    limit = config.memory_limit or size
    if not limit:
        name = "the devices of the mesh" if target is None else target_of(target).name
        raise ValueError(
            f'the memory of {name} is unknown: set `memory_limit`, such as "16GB" per device '
            "(--memory-limit 16GB)"
        )
    trained = trained_part(jax.eval_shape(layout.unpad, params), config.frozen)
    choice = search(tried, plan, limit, report, host or math.inf, trained)
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
