"""Recommendation of a stage, by an estimate of the step time from a plan alone.

Compiling gives a better figure (`hlo.roofline`); this one orders the stages before that. A step is
the sum of

  products    FLOPs of forward and backward at the target's peak, recomputation included
  update      reading and writing parameters and optimizer state at the target's memory bandwidth
  exposed     stages 1 and 2: the all-gather of all parameters, which precedes the first
              product. Reductions overlap with the backward pass, at stage 3 all-gathers with both
              passes; exposed is what is longer. At stage 1 with several micro-batches the one
              reduce-scatter comes after the last product.
"""

import math
from collections.abc import Sequence

from zero_jax.hlo.targets import Target
from zero_jax.plan.plans import Plan
from zero_jax.remat import policies
from zero_jax.sharding.mesh import MODEL

# Steps this near to each other count as equal, modelled and estimated: kernels differ more.
TIE = 0.01


def least_seconds(plan: Plan, products: float, target: Target) -> float:
    """Returns an estimate of a step's seconds, mostly below the modelled time of its program.

    Args:
      plan: Predicted or compiled; only its closed forms are used.
      products: Seconds of forward and backward products at the target's peak, once each.
      target: Gives memory bandwidth and interconnect; the result is nan if they are unknown.
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
    """Formats the recommended stage and the estimated step times.

    Args:
      plans: One plan per stage.
      memory_bytes: Available bytes; 0 if unknown.
      seconds: Seconds of each by `least_seconds`; nan if unknown.
    """
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
