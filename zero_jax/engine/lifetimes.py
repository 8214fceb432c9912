"""Lifetimes of gathered copies and of full gradients, for each stage and each parameter of a trace.

Only this file asks for the stage. `param_plan.py` finds the plan of every parameter; the gradients,
the planner and the compiler options read it.
Source: ZeRO (arXiv:1910.02054), sections 5 and 7.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from zero_jax.sharding.layout import Partition

STEP, MICRO_BATCH, TOUCH = "step", "micro-batch", "touch"


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """The lifetimes of a stage.

    Attributes:
      copy: How long a gathered copy lives: STEP or TOUCH; None where parameters are not sharded.
      gradient: When the full local gradient of a parameter is reduced: after the STEP or the
        MICRO_BATCH, or as soon as it is computed, at its TOUCH.
      others: The same for a parameter that is not read by layers alone.
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
    """Returns the lifetimes of a stage. With one micro-batch no gradient waits for others: it is
    reduced as soon as it is computed, during the backward pass of other layers.

    >>> lifetime(1, 4).gradient, lifetime(1, 1) == LIFETIMES[2]
    ('step', True)
    """
    known = LIFETIMES[stage]
    if grad_accum_steps > 1 or known.gradient != STEP:
        return known
    return dataclasses.replace(LIFETIMES[2], copy=known.copy)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The plan of one parameter.

    Attributes:
      path: Its name.
      cut: Its partition; `stacked` if a loop takes it slice by slice.
      frozen: True if it has no gradient.
      opens: True if the loss is given its shard, and gathers it where it is read; otherwise the
        loss is given a copy that lives as long as the step.
      summed: When its gradient is reduced: STEP, MICRO_BATCH or TOUCH.
      in_layer: True if layers alone read it.
      waits_in: The dtype in which its gradient waits for the update, None for that of the shard.
        The gradient is taken with respect to zeros of that dtype.
      by_rows: True if it is never gathered, but its rows are sent to the devices that read them.
      is_stand_in: True if its codes in fp8 are read in its place. It only has a gradient.
    """

    path: str
    cut: Partition
    frozen: bool
    opens: bool
    summed: str
    in_layer: bool
    waits_in: Any = None
    by_rows: bool = False
    is_stand_in: bool = False


def summed_by_jax(leaf: Leaf) -> Leaf:
    """Returns the plan of a parameter where JAX differentiates the loss from outside.

    `shard_map` reduces the gradient of a parameter that every device holds: it must not be reduced
    where it is read too, but once at the end of the step.
    """
    twice = leaf.cut.dim is None and leaf.summed == TOUCH
    return dataclasses.replace(leaf, summed=STEP, waits_in=None) if twice else leaf


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers that are alike.

    Attributes:
      count: Their number.
      elements: Elements that one of them gathers on a device.
      scanned: True if a loop runs them.
      policy: Their remat policy; a `jax.checkpoint` of the model has its own.
      fallback: Why the explicit passes of `layers.py` do not run them, or "".
      unrolled: True if the program has each layer of a scan, see `scans.unrolls`.
      fp8_elements: Elements among those that are gathered as codes in fp8.
    """

    count: int
    elements: int
    scanned: bool
    policy: str
    fallback: str = ""
    unrolled: bool = False
    fp8_elements: int = 0


@dataclasses.dataclass(frozen=True)
class Positions:
    """Where the layers of a program are, by the positions of equations.

    Attributes:
      unrolled: For each run of unrolled layers, the equations of each layer.
      scans: Scans whose layers are unrolled, see `scans.unrolls`.
      last: The first equation of the last layers, -1 if there are none.
      heads: For the last equation of layers, the parameters that are gathered during the last of
        them, by their positions among the inputs.
    """

    unrolled: Sequence[Sequence[Sequence[int]]] = ()
    last: int = -1
    heads: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    scans: Container[int] = ()
