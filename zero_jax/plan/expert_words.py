"""What a step sends for experts that stay with their part of the devices: tokens, not them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from zero_jax.jaxpr import equations, reads
from zero_jax.models.decoder_config import DecoderConfig, layer_shapes
from zero_jax.remat import policies
from zero_jax.sharding.cuts import Split
from zero_jax.sharding.mesh import EXPERTS

_EXCHANGES = frozenset(("all_to_all", "all_gather", "reduce_scatter"))


def travelling(cuts: Sequence[Split], group: int) -> float:
    """The part of all parameters that travels: of experts those of a group, and none where a group
    is one device.

    Args:
      cuts: how each leaf is cut.
      group: how many devices share the experts of a group.

    >>> cuts = [Split((8, 6), None, 1, experts=-2, expert_shards=4), Split((4, 8), -2, 4)]
    >>> travelling(cuts, 1), travelling(cuts, 2)
    (0.4, 0.55)
    """
    sizes = [math.prod(cut.shape) for cut in cuts]
    sent = [
        0 if cut.expert_shards > 1 and group == 1 else size // cut.expert_shards
        for size, cut in zip(sizes, cuts, strict=True)
    ]
    return sum(sent) / max(sum(sizes), 1)


def even(config: DecoderConfig, groups: int, devices: int, remat: str) -> float:
    """Tokens of a device from which gathering experts at stage 3 sends less than tokens to them.

    Gathered twice and reduced once, all of them or, where a group is several devices, its own; or
    of each token rows there and back, forward, backward and in recomputation, or the token itself
    to all groups (`engine/tokens_gathered.py`), whose sum is not recomputed.

    Args:
      config: a decoder's, with experts.
      groups: how many groups of devices there are, with experts of their own.
      devices: in all.
      remat: the policy.

    >>> from zero_jax.models.decoder import Mixture, preset
    >>> round(even(preset("mixtral-8x7b", mixture=Mixture(8, 2, capacity=1.0)), 8, 64, "block"))
    75264
    """
    mixture = config.mixture
    assert mixture is not None
    runs = 2 if policies.parse(remat).kind == "none" else 3
    room = mixture.experts if mixture.capacity is None else mixture.capacity * mixture.chosen
    tokens = 2 * runs * room if room <= groups else (2 + runs) * groups
    experts = sum(math.prod(s) for s in layer_shapes(config).values() if len(s) == 3)
    away = 1 - (1 / groups if groups < devices else 0)
    return 3 * experts * away / (tokens * config.width)


def groups(config: Any, devices: int, tokens: int, remat: str | None) -> int:
    """How many groups of devices send the fewest words: 1, which gathers experts, or as many as
    divide both experts and devices.

    Args:
      config: of `models.families`; 1 where it has no experts.
      devices: that parameters are partitioned over.
      tokens: of a device and micro-batch.
      remat: the policy; None where it is not chosen yet.

    >>> from zero_jax.models.decoder import Mixture, preset
    >>> groups(preset("mixtral-8x7b", mixture=Mixture(8, 2, capacity=1.0)), 64, 4096, "block")
    8
    """
    mixture = getattr(config, "mixture", None)
    if mixture is None:
        return 1
    most = math.gcd(mixture.experts, devices)
    return most if tokens < even(config, most, devices, remat or "block") else 1


def tokens(jaxpr: jex.Jaxpr, wanted: Sequence[bool] | None = None) -> int:
    """Words that a device sends to experts and back in one run of a traced step.

    Args:
      jaxpr: the step, or a call within it.
      wanted: which of its results are read; what makes others does not run. All of them if None.
    """
    wanted = wanted or [True] * len(jaxpr.outvars)
    needed = reads.needed(jaxpr.eqns, itertools.compress(jaxpr.outvars, wanted))
    total = 0
    for eqn in jaxpr.eqns:
        made = [v in needed for v in eqn.outvars]
        if not any(made):
            continue
        times, is_call = eqn.params.get("length", 1), eqn.primitive.name in equations.CALLS
        for body in jex.jaxprs_in_params(eqn.params):
            total += times * tokens(body, made if is_call else None)
        if _axis(eqn) == (EXPERTS,):
            sides = eqn.outvars if eqn.primitive.name == "all_gather" else eqn.invars
            total += sum(math.prod(equations.shape_of(atom)) for atom in sides)
    return total


def _axis(eqn: jex.JaxprEqn) -> tuple[Any, ...]:
    name = eqn.params.get("axis_name") if eqn.primitive.name in _EXCHANGES else None
    return tuple(name) if isinstance(name, (tuple, list)) else (name,)
