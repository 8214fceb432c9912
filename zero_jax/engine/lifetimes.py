"""How long gathered copies and full gradients live: of each stage, and of each leaf of a trace.

The stage is asked here and nowhere else. What is known of a leaf is found once, by `param_plan.py`;
gradients, the planner and the compiler's options read it.
Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.sharding.partition import Partition

STEP, MICRO_BATCH, TOUCH = "step", "micro-batch", "touch"


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """What a stage is.

    Attributes:
      copy: how long a gathered copy lives: STEP or TOUCH; None where nothing is cut.
      gradient: when the full local gradient of a leaf is summed over devices: after the STEP, or
        as it appears, at its TOUCH. See `lifetime`.
      others: the same of a leaf that is not read by layers alone.
    """

    copy: str | None
    gradient: str
    others: str


LIFETIMES = {
    0: Lifetime(None, STEP, STEP),
    1: Lifetime(STEP, STEP, STEP),
    # A leaf that is used twice, as a tied embedding, is sent once: when its gradient is complete.
    2: Lifetime(STEP, TOUCH, MICRO_BATCH),
    3: Lifetime(TOUCH, TOUCH, TOUCH),
}


def lifetime(stage: int, grad_accum_steps: int) -> Lifetime:
    """What a stage is with so many micro-batches. Where there is one, no gradient waits for others:
    it is summed as it appears, behind the backward pass of other layers.

    >>> lifetime(1, 4).gradient, lifetime(1, 1) == LIFETIMES[2]
    ('step', True)
    """
    known = LIFETIMES[stage]
    if grad_accum_steps > 1 or known.gradient != STEP:
        return known
    return dataclasses.replace(LIFETIMES[2], copy=known.copy)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of one leaf of the parameters during a step.

    Attributes:
      path: its name.
      cut: how it is cut; `stacked` if a loop takes it slice by slice.
      frozen: whether it has no gradient.
      opens: whether the loss is given its shard, and opens it where it is read; else it is given a
        copy that lives as long as the step.
      summed: when its gradient is summed over devices: STEP, MICRO_BATCH or TOUCH.
      in_layer: whether layers alone read it.
      waits_in: the dtype in which its gradient waits for the update, where that is not the
        shard's: what its gradient is taken with respect to has it.
      by_rows: whether it is never gathered, but its rows are sent to those who read them.
    """

    path: str
    cut: Partition
    frozen: bool
    opens: bool
    summed: str
    in_layer: bool
    waits_in: Any = None
    by_rows: bool = False


def summed_by_jax(leaf: Leaf) -> Leaf:
    """The same leaf where JAX differentiates from outside what reads it.

    `shard_map` sums the gradient of a leaf that every device holds: it must not be summed where the
    leaf is read too, but once at the end of the step.
    """
    twice = leaf.cut.dim is None and leaf.summed == TOUCH
    return dataclasses.replace(leaf, summed=STEP, waits_in=None) if twice else leaf


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers that are alike.

    Attributes:
      count: how many.
      elements: elements that one of them gathers on a device.
      scanned: whether a loop runs them.
      policy: what they keep, as written; a `jax.checkpoint` of the model's own has its own.
      fallback: Why the explicit passes of `layers.py` do not run them, or "".
    """

    count: int
    elements: int
    scanned: bool
    policy: str
    fallback: str = ""


@dataclasses.dataclass(frozen=True)
class Positions:
    """Where the layers of a program are, by the positions of equations.

    Attributes:
      unrolled: For each run of unrolled layers, the equations of each layer.
      last: The first equation of the last layers, -1 if there are none.
      heads: For the last equation of layers, the parameters that are gathered during the last of
        them, by their positions among the inputs.
    """

    unrolled: Sequence[Sequence[Sequence[int]]] = ()
    last: int = -1
    heads: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
