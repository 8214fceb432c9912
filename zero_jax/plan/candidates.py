"""The ways to run a step that `stage="auto"` chooses among, their order, and their limits.

A candidate is a stage, a number of micro-batches, a remat policy with the place of its saved
activations, and the state that is stored in host memory. Order: fewest elements sent, to other
devices or to host memory and back; then least recomputation, full saved activations before those
partitioned over the model axis, fewest micro-batches, and the higher stage, whose reductions
overlap with the backward pass. Stage 0 is never a candidate: stage 1 sends as much and holds less.
Nor is stage 1 with one micro-batch: it is stage 2.
"""

import dataclasses
import itertools
import os
from typing import Any

import jax
from jax.sharding import AbstractMesh

from zero_jax.engine.config import Config
from zero_jax.hlo.targets import Target
from zero_jax.hlo.targets import target as target_of
from zero_jax.offload.host import HOST, NONE, Offload, parse
from zero_jax.plan.model_states import elements_per_param
from zero_jax.plan.plans import Plan
from zero_jax.remat import policies
from zero_jax.sharding.mesh import MODEL, model_size
from zero_jax.sharding.named_dims import SEQUENCE

# Tiers of the optimizer state, fewest bytes in host memory first.
STATES = tuple(map(parse, ("none", "optimizer", "optimizer,params")))
# Fraction of device memory reserved for the runtime, its libraries and NCCL, which no plan shows.
RESERVE = 0.08
# Fraction of host memory to use; the rest is for the data, the system and the program.
HOST_SHARE = 0.8
# A process may see one device of a host, and the hosts of GPU clusters have eight.
_HOST_DEVICES = 8


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
        """Returns the sort key of a candidate; without a plan host transfers count as free.

        The first number is elements sent over Ψ / MP: those of the paper, and host transfers.

        Args:
          plan: The plan of this candidate.
          trained: Fraction of Ψ that is not frozen.
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
    """Returns the candidates in place of stage="auto".

    Args:
      config: Its offload, if set, and its remat with a place are kept.
      rows: Rows of the batch on one device.
      target: See `planning.of`.
      initialized: Parameters and optimizer state exist, and stay in their memory.
    """
    host = host_limit(config, target) > 0
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


def device_limit(config: Config, target: str | Target | None) -> float:
    """Returns the bytes per device that a step may use: `memory_limit`, or the device's memory.

    Raises:
      ValueError: The device does not report its memory.
    """
    if config.memory_limit is not None:
        return config.memory_limit
    size, name = 0, "a mesh without devices"
    if target is not None:
        aim = target_of(target)
        size, name = usable(aim), aim.name
    elif not isinstance(config.mesh, AbstractMesh):
        device = config.mesh.local_devices[0]
        # What JAX itself leaves to others is no part of the limit.
        size, name = (device.memory_stats() or {}).get("bytes_limit", 0), str(device)
    if not size:
        raise ValueError(
            f'{name} does not report its memory: set `memory_limit`, such as "16GB" per device '
            "(--memory-limit 16GB)"
        )
    return float(size)


def usable(target: Target) -> int:
    """Returns the bytes of a target's memory that a step may use; 0 if unknown."""
    return int(target.memory_bytes * (1 - RESERVE))


def host_limit(config: Config, target: str | Target | None) -> int:
    """Returns the bytes of host memory that a device may use; 0 if it is the device's own memory.

    A simulated CPU device has no memory but the host's, so a move there gains nothing.
    """
    if target is not None:
        aim = target_of(target)
        return int(aim.host_memory * HOST_SHARE) if aim.platform == "cuda" else 0
    if isinstance(config.mesh, AbstractMesh):
        return 0
    device = config.mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if device.platform == "cpu" or HOST not in kinds:
        return 0
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(whole * HOST_SHARE / max(_HOST_DEVICES, jax.local_device_count()))
