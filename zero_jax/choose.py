"""Picks the stage, the number of micro-batches and the remat policy that a memory limit allows.

Candidates are tried from the cheapest on: fewest words sent, then least recomputation, then fewest
micro-batches, then the higher stage, whose reductions can hide behind the backward pass. One that
is predicted to need clearly more than the limit is dropped; any other is compiled, and the first
whose compiled program fits is taken. Stage 0 is never one: stage 1 sends the same words and holds
less. Stages 1 to 3 rest alike, so the choice can be made after parameters were born.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from zero_jax import policies
from zero_jax.grouped import CannotGroup
from zero_jax.mesh import batch_shards
from zero_jax.planned import Plan, words_per_param
from zero_jax.targets import target as target_of

# Part of a device's memory left to what no plan shows: the runtime, its libraries, NCCL.
RESERVE = 0.08
# A prediction this far above the limit is believed without compiling. The largest seen were 19 %
# for GPUs and 21 % for a tiny model with padding on CPU devices: see docs/plan.md.
MARGIN = 0.25


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run the step."""

    stage: int
    micro_batches: int
    remat: str

    @property
    def cost(self) -> tuple[float, float, int, int]:
        """What candidates are ordered by."""
        words = words_per_param(self.stage, self.micro_batches, self.remat)
        return words, policies.parse(self.remat).passes, self.micro_batches, -self.stage

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.micro_batches} micro-batches, remat {self.remat}"


@dataclasses.dataclass(frozen=True)
class Considered:
    """A candidate with its plan and what became of it."""

    candidate: Candidate
    plan: Plan
    verdict: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and everything that was looked at on the way, in order."""

    chosen: Considered
    considered: tuple[Considered, ...]
    limit: int

    def __str__(self) -> str:
        return _listed(self.considered, self.limit)


def candidates(rows: int, *, micro_batches: int = 1, remat: str = "none") -> list[Candidate]:
    """All candidates, cheapest first.

    Args:
      rows: rows of the batch on one device; k must divide them.
      micro_batches: the least k, a divisor of every k.
      remat: the policy that keeps most. One with places or names of its own is the only one.

    >>> [str(c) for c in candidates(1)][:2]
    ['stage 2, 1 micro-batches, remat none', 'stage 1, 1 micro-batches, remat none']
    """
    counts = [k for k in range(1, rows + 1) if rows % k == 0 and k % micro_batches == 0]
    known = policies.POLICIES
    tried = known[known.index(remat) :] if remat in known else (remat,)
    found = [Candidate(s, k, p) for s in (1, 2, 3) for k in counts for p in tried]
    return sorted(found, key=lambda c: c.cost)


def choose(
    tried: Sequence[Candidate],
    plan: Callable[[Candidate, bool], Plan],
    limit: float,
    report: Callable[[str], Any] = print,
) -> Choice:
    """Takes the first candidate whose compiled program fits.

    Args:
      tried: in the order in which to try them.
      plan: plans a candidate; the second argument says whether to compile it.
      limit: bytes of one device that may be used.
      report: is told the outcome, and of each candidate why it was dropped.

    Raises:
      ValueError: nothing fits; names the smallest candidate, its bytes and what would help.
    """
    limit = int(limit)
    considered: list[Considered] = []
    for candidate in tried:
        try:
            planned = plan(candidate, False)
        except CannotGroup as error:
            report(f"left out {candidate}: {error}")
            continue
        size = planned.total_bytes
        if size <= limit * (1 + MARGIN):
            planned, verdict = _compiled(plan, candidate, planned)
            fits = not verdict and planned.total_bytes <= limit
            outcome = "fits, taken" if fits else "too much"
            verdict = verdict or f"compiled {gigabytes(planned.total_bytes)}: {outcome}"
        else:
            fits, verdict = False, f"predicted {gigabytes(size)}: too much"
        considered.append(Considered(candidate, planned, verdict))
        if fits:
            choice = Choice(considered[-1], tuple(considered), limit)
            report(f"chose {candidate}\n{choice}")
            return choice
    report(_listed(considered, limit))
    raise ValueError(_nothing_fits(considered, limit))


def _compiled(
    plan: Callable[[Candidate, bool], Plan], candidate: Candidate, planned: Plan
) -> tuple[Plan, str]:
    """The compiled plan; the predicted one and a verdict where the compiler itself refuses."""
    try:
        return plan(candidate, True), ""
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return planned, "does not compile: out of memory"


def _listed(considered: Sequence[Considered], limit: int) -> str:
    rows = [f"  {c.candidate.cost[0]:g}Ψ words  {c.candidate!s:44} {c.verdict}" for c in considered]
    return "\n".join([f"for at most {gigabytes(limit)} a device:", *rows])


def choice(
    zero: Any,
    loss_fn: Any,
    tx: Any,
    params: Any,
    batch: Any,
    *extras: Any,
    target: str | None = None,
    topology: str | None = None,
    report: Callable[[str], Any] | None = None,
    **options: Any,
) -> Choice:
    """Chooses for a `Zero`; what `Zero.choice` calls. Arguments as for `planned.of`.

    Raises:
      ValueError: nothing fits, or the device does not say how much memory it has.
    """

    def plan(candidate: Candidate, compile: bool) -> Plan:
        settled = dataclasses.replace(zero, **dataclasses.asdict(candidate))
        aim = {"compile": True, "target": target, "topology": topology} if compile else {}
        return settled.plan(loss_fn, tx, params, batch, *extras, **aim, **options)

    rows = min(np.shape(x)[0] for x in jax.tree.leaves(batch)) // batch_shards(zero.mesh)
    tried = candidates(rows, micro_batches=zero.micro_batches, remat=zero.remat)
    if report is None:
        report = print if jax.process_index() == 0 else lambda _: None
    return choose(tried, plan, _limit(zero, target), report)


def _limit(zero: Any, target: str | None) -> float:
    if zero.memory_limit is not None:
        return zero.memory_limit
    if target is not None:
        return default_limit(target_of(target).memory_bytes, target)
    if isinstance(zero.mesh, AbstractMesh):
        return default_limit(None, "a mesh without devices")
    device = zero.mesh.local_devices[0]
    pool = (device.memory_stats() or {}).get("bytes_limit")  # what JAX itself leaves to others
    return pool if pool else default_limit(None, str(device))


def default_limit(memory_bytes: int | None, what: str) -> int:
    """What may be used of a device's memory.

    Raises:
      ValueError: the device does not say how much it has.
    """
    if not memory_bytes:
        raise ValueError(
            f"{what} does not say how much memory it has: give memory_limit= in bytes a device, "
            "16e9 say (--memory-limit takes GB)"
        )
    return int(memory_bytes * (1 - RESERVE))


def gigabytes(size: float) -> str:
    """Bytes as text, 1e9 to the GB.

    >>> gigabytes(1.5e9), gigabytes(2.5e6), gigabytes(0)
    ('1.50 GB', '2.50 MB', '0')
    """
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size:.0f} B" if size else "0"


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
