"""Recommendations: of a stage, by an estimate from a plan alone, and of a tensor-parallel size.

Compiling gives a better figure (`hlo.roofline`); the estimate orders the stages before that. A step
is the sum of

  products    FLOPs of forward and backward at the target's peak, recomputation included
  update      reading and writing parameters and optimizer state at the target's memory bandwidth
  exposed     stages 1 and 2: the all-gather of all parameters, which precedes the first
              product. Reductions overlap with the backward pass, at stage 3 all-gathers with both
              passes; exposed is what is longer. At stage 1 with several micro-batches the one
              reduce-scatter comes after the last product.

A mesh that fits need not be fast: tensor parallelism saves memory, and its sums between layers are
exposed communication. So of meshes for the same devices and the same batch, those that may fit are
compiled, and the one with the shortest modelled step is recommended.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from zero_jax.hlo.targets import Target
from zero_jax.plan.auto import MARGIN, TIE
from zero_jax.plan.plans import Plan
from zero_jax.plan.tables import gigabytes, table
from zero_jax.remat import policies
from zero_jax.sharding.mesh import MODEL

_SIZES = (1, 2, 4, 8, 16)  # of MP: beyond, matmuls are too small for a device


def least_seconds(plan: Plan, products: float, target: Target) -> float:
    """Returns an estimate of a step's seconds, mostly below the modelled time of its program.

    `products` are seconds of forward and backward products at the target's peak, once each. The
    result is nan if the target's memory bandwidth or interconnect is unknown.
    """
    if not (products > 0 and target.slow_wire > 0 and target.memory_bandwidth > 0):
        return math.nan
    devices = math.prod(plan.axes.values()) // plan.axes.get(MODEL, 1)
    wire = target.ring_wire(devices, min(devices, target.host_devices)) if devices > 1 else math.inf
    seconds = {k: sent.bytes * (1 - 1 / devices) / wire for k, sent in plan.sent.items()}
    gather = seconds.pop("all-gather", 0.0)
    reduce = sum(seconds.values())
    passes = policies.parse(plan.remat).passes
    compute, backward = products * passes / 3, products * (passes - 1) / 3
    states = plan.predicted.parameters + plan.predicted.optimizer_state
    update = 2 * states / target.memory_bandwidth
    if plan.stage == 3:
        exposed = max(0.0, gather + reduce - compute)
    elif plan.stage == 1 and plan.grad_accum_steps > 1:
        exposed = gather + reduce
    else:
        exposed = gather + max(0.0, reduce - backward)
    return compute + update + exposed


def format_advice(plans: Sequence[Plan], memory_bytes: int, seconds: Sequence[float]) -> str:
    """Formats the recommended stage, given the available bytes and `least_seconds` of each."""
    fitting = [p for p in range(len(plans)) if plans[p].total_bytes <= memory_bytes]
    if memory_bytes and not fitting:
        return (
            "no stage fits: use more devices, --grad-accum-steps, --remat, --offload or --mesh "
            "model=2 "
            "(`auto` tries all but the first and last)\n"
        )
    if not memory_bytes:
        return ""
    if any(math.isnan(seconds[p]) for p in fitting):
        stages = ", ".join(f"--stage {plans[p].stage}" for p in fitting)
        return f"fits: {stages}; this target has no peak rates to estimate step times from\n"
    least = min(seconds[p] for p in fitting)
    short = [p for p in fitting if seconds[p] <= least * (1 + TIE)]
    best = min(short, key=lambda p: plans[p].total_bytes)
    others = [f"{seconds[p]:.3g} s at stage {plans[p].stage}" for p in fitting if p != best]
    reason = "the shortest estimated step that fits" if others else "no other stage fits"
    return (
        f"use --stage {plans[best].stage}: {reason}. Estimates from matmuls and communication: "
        f"{', '.join([f'{seconds[best]:.3g} s', *others])}. `plan compile` models the compiled "
        "step, which takes 1.1 to 3.4 times as long\n"
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One mesh."""

    model_parallel: int
    plan: Plan | None  # compiled if it may fit; None if the model cannot be split so
    why: str = ""  # reason against it

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of a step; None if it was not compiled."""
        return None if self.plan is None or self.plan.time is None else self.plan.time.seconds


def splits(devices: int, replica: int = 1) -> list[int]:
    """Returns the possible values of MP.

    >>> splits(48), splits(8, replica=2)
    ([1, 2, 4, 8, 16], [1, 2, 4])
    """
    return [mp for mp in _SIZES if devices % (mp * replica) == 0]


def compare(counts: Sequence[int], plan: Callable[[int, bool], Plan], limit: int) -> Iterator[Row]:
    """Plans a mesh for each MP, compiled if the second argument of `plan` is True."""
    for mp in counts:
        try:
            planned, why = plan(mp, False), "does not fit, as predicted"
            if planned.total_bytes <= limit * (1 + MARGIN):
                planned = plan(mp, True)
                why = "" if planned.total_bytes <= limit else "does not fit"
            yield Row(mp, planned, why)
        except ValueError as error:
            yield Row(mp, None, str(error))


def fastest(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest row that fits; None if none fits."""
    fitting = [row for row in rows if row.seconds is not None and not row.why]
    return min(fitting, key=lambda row: row.seconds or 0.0, default=None)


def format_meshes(rows: Sequence[Row]) -> str:
    """Formats the table and the recommended mesh."""
    lines = [["MP", "N", "GB", "elements / Ψ", "overlapped", "step s", "exposed", ""]]
    best = fastest(rows)
    for row in rows:
        plan, why = row.plan, "fastest that fits" if row is best else row.why
        cells = [str(row.model_parallel)]
        if plan is not None:
            cells += [str(plan.axes.get("data", 1)), gigabytes(plan.total_bytes)]
            if (time := plan.time) is not None:
                elements = f"{plan.elements_per_param:.3f}" if plan.countable else "?"
                exposed = f"{time.exposed_seconds / time.seconds:.0%}"
                cells += [elements, f"{time.overlapped:.0%}", f"{time.seconds:.3f}", exposed]
        lines.append([*cells, *[""] * (7 - len(cells)), why])
    none = "none fits: use more devices, or `plan auto` to find settings with less memory"
    return table(lines) + "\n" + (f"use --mesh model={best.model_parallel}" if best else none)
