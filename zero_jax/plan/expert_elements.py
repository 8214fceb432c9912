"""Elements that expert parallelism sends, and the token count up to which they are fewer."""

import dataclasses
import math

from zero_jax.hlo import targets
from zero_jax.hlo.targets import Target
from zero_jax.models.decoder_config import DecoderConfig, layer_shapes
from zero_jax.models.families import Config
from zero_jax.remat import policies

# One interconnect of equal bandwidth for all devices.
ONE_WIRE = dataclasses.replace(
    targets.target("cpu"), host_devices=2**30, fast_wire=1.0, slow_wire=1.0
)


def even(
    config: DecoderConfig, groups: int, devices: int, remat: str, target: Target = ONE_WIRE
) -> float:
    """Returns the tokens per device above which gathering experts communicates for less time.

    At stage 3 experts are gathered twice and reduced once: all of them, or in a group of several
    devices its own. Expert parallelism sends rows of tokens there and back, forward, backward and
    in recomputation, or each token to all groups (`engine/expert_exchange.py`), whose sum is not
    recomputed. Between hosts a gather shares the links of all its members on a host; an all-to-all
    uses that of its device.

    Devices of a group are neighbours. The default target has one link for all, which compares
    elements sent.

    >>> from zero_jax.hlo import targets
    >>> from zero_jax.models.decoder import Mixture, preset
    >>> config = preset("mixtral-8x7b", mixture=Mixture(8, 2, capacity=1.0))
    >>> round(even(config, 8, 8, "block"))
    86016
    >>> round(even(config, 8, 64, "block", targets.target("h100")))
    10901
    """
    mixture = config.mixture
    assert mixture is not None
    runs = 2 if policies.parse(remat).kind == "none" else 3
    room = mixture.experts if mixture.capacity is None else mixture.capacity * mixture.chosen
    group, host = devices // groups, target.host_devices
    near = min(groups, max(1, host // group))  # groups with a device on the same host
    if room <= groups:
        apart = (near - 1) / target.fast_wire + (groups - near) / target.slow_wire
        token = 2 * runs * room * apart / groups
    else:
        token = (2 + runs) * groups * _ring(groups, near, target)
    experts = sum(math.prod(s) for s in layer_shapes(config).values() if len(s) == 3)
    gathered = _ring(devices, min(devices, host), target)
    own = _ring(group, min(group, host), target) / groups
    return 3 * experts * (gathered - own) / (token * config.width)


def _ring(members: int, near: int, target: Target) -> float:
    """Returns seconds per byte in a ring of `members` devices, `near` of them on each host."""
    return (1 - 1 / members) / target.ring_wire(members, near)


def groups(
    config: Config, devices: int, tokens: int, remat: str, target: Target | None = None
) -> int:
    """Returns the number of groups for `stage="auto"`, by the shortest communication time.

    It is 1, which gathers experts, or the largest number that divides experts and `devices`, over
    which parameters are partitioned. Tokens are those per device and micro-batch. For remat "none",
    "block" is assumed: it is only a lower bound.

    >>> from zero_jax.models.decoder import Mixture, preset
    >>> groups(preset("mixtral-8x7b", mixture=Mixture(8, 2, capacity=1.0)), 64, 4096, "block")
    8
    """
    if not isinstance(config, DecoderConfig) or config.mixture is None:
        return 1
    most = math.gcd(config.mixture.experts, devices)
    if most == 1:
        return 1
    policy = "block" if remat == "none" else remat
    return most if tokens < even(config, most, devices, policy, wires(target)) else 1


def wires(target: Target | None) -> Target:
    """Returns the target, or one with a single interconnect if its links are unknown."""
    known = target is not None and target.fast_wire > 0 and target.slow_wire > 0
    return target if target is not None and known else ONE_WIRE
