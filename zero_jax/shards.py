"""Checks that a loss computes with full leaves only, never with this device's shard of one."""

from typing import Any

from zero_jax.collectives import TOUCHES
from zero_jax.jaxprs import LAYOUT, branches, is_in


def check_shards(jaxpr: Any, shards: dict[Any, str]) -> list[str | None]:
    """Raises if a shard reaches an operation that would take it for the full leaf.

    Returns for each output the path of the parameter that it is a shard of, or None.
    """
    shards = dict(shards)
    for eqn in jaxpr.eqns:
        used = [a for a in eqn.invars if is_in(a, shards)]
        touch = eqn.params.get("name") in TOUCHES
        if touch and eqn.outvars and not used:  # the transpose of a touch has its name
            raise ValueError(
                "the loss function differentiates with respect to parameters that it has not "
                "gathered, whose gradients are shards already summed over devices. Gather first: "
                "w = zero_jax.gather(params); jax.grad(f)(w)"
            )
        runs = branches(eqn)
        if touch or not (used or runs):
            continue
        if eqn.primitive.name in LAYOUT:
            shards.update((v, shards[used[0]]) for v in eqn.outvars)
            continue
        if not runs:
            raise ValueError(
                f"parameter {shards[used[0]]} is used by {eqn.primitive.name!r} while it is only "
                "this device's shard, which would give a wrong result. Open it first: "
                "w = zero_jax.gather(params), then use w (Flax modules do so by themselves)."
            )
        for inner, given in runs:
            pairs = zip(inner.jaxpr.invars, given, strict=True)
            inside = {v: shards[a] for v, a in pairs if is_in(a, shards)}
            outs = check_shards(inner.jaxpr, inside)
            made = zip(eqn.outvars, outs, strict=True)
            shards.update((var, name) for var, name in made if name is not None)
    return [shards[a] if is_in(a, shards) else None for a in jaxpr.outvars]
